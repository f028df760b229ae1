"""A run's settings: checked where they are read, and named exactly where they are wrong."""

import tomllib

import pytest

from thermopile.trainer.config import (
    TrainConfig,
    apply_overrides,
    differences,
    load_config,
    merge,
    read_preset,
    read_toml,
    to_toml,
)
from thermopile.trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"epoch": 3}, "no setting 'epoch'; did you mean 'epochs'"),
        ({"optimizer": {"lrr": 0.1}}, r"no setting 'optimizer\.lrr'; did you mean 'optimizer\.lr'"),
        ({"data": {"imagesize": 32}}, r"did you mean 'data\.image_size'"),
        ({"epochs": 0}, "epochs = 0: .*greater than 0"),
        ({"device": "tpu"}, "device = 'tpu'"),
        ({"optimizer": {"lr": "fast"}}, r"optimizer\.lr = 'fast'"),
        ({"state": {"memory_budget": "2 apples"}}, r"state\.memory_budget = '2 apples': is no size; write bytes"),
        ({"state": {"memory_budget": 0}}, r"state\.memory_budget = 0: .*greater than 0"),
        ({"checkpoint": {"keep_last": 0}}, r"checkpoint\.keep_last = 0: .*greater than 0"),
    ],
)
def test_a_bad_setting_is_named_with_the_nearest_valid_one(tree, message):
    with pytest.raises(ConfigError, match=message):
        load_config(tree)


def test_every_bad_setting_is_named_at_once():
    with pytest.raises(ConfigError, match=r"epochs = 0.*'sed'"):
        load_config({"epochs": 0, "sed": 1})


@pytest.mark.parametrize(
    ("override", "value"),
    [("optimizer.lr=2e-4", 2e-4), ("optimizer.betas=[0.9, 0.98]", [0.9, 0.98]), ("optimizer.name=adamw", "adamw"),
     ("optimizer.name='adamw'", "adamw"), ("optimizer.note=a=b", "a=b"), ("optimizer.on=true", True)],
)  # fmt: skip
def test_an_override_is_toml_or_else_plain_text(override, value):
    tree = {"optimizer": {"lr": 1.0}}
    apply_overrides(tree, [override])
    assert tree["optimizer"][override.split("=")[0].split(".")[1]] == value


@pytest.mark.parametrize("override", ["optimizer.lr", "=3", "seed.deep=1"])
def test_an_override_that_is_none_is_refused(override):
    with pytest.raises(ConfigError):
        apply_overrides({"seed": 0}, [override])


def test_merging_replaces_values_and_keeps_the_rest_of_a_table():
    tree = {"optimizer": {"lr": 1, "eps": 2}, "seed": 0}
    merge(tree, {"optimizer": {"lr": 3}, "epochs": 4})
    assert tree == {"optimizer": {"lr": 3, "eps": 2}, "seed": 0, "epochs": 4}


def test_settings_written_out_and_read_back_are_the_same():
    config = load_config(read_preset("glyphs") | {"seed": 7})
    assert load_config(tomllib.loads(to_toml(config))) == config


def test_the_objective_keeps_settings_of_its_own():
    assert load_config({"objective": {"name": "isogclr", "rho": 2.0}}).objective.settings == {"rho": 2.0}


@pytest.mark.parametrize(
    ("size", "budget"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("512MB", 512_000_000),
        ("2GiB", 2 * 1024**3),
        ("1.5 kB", 1500),
        ("64k", 64_000),
        ("none", None),
    ],
)
def test_a_memory_budget_is_bytes_or_a_size_with_its_unit(size, budget):
    assert load_config({"state": {"memory_budget": size}}).state.memory_budget == budget


def test_an_unknown_preset_and_a_broken_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no preset 'glyhps'; there are: glyphs"):
        read_preset("glyhps")
    (tmp_path / "a.toml").write_text("epochs = = 3")
    with pytest.raises(ConfigError, match=r"a\.toml is no TOML"):
        read_toml(tmp_path / "a.toml")


def test_differences_name_what_would_change_results_and_nothing_else():
    run = TrainConfig()
    asked = load_config(
        {"seed": 1, "optimizer": {"lr": 0.5}, "log_every": 3, "data": {"workers": 2}, "checkpoint": {"every_steps": 5}}
        | {"state": {"memory_budget": 5, "prefetch_steps": 3}, "window_blocks": 2}
    )
    assert differences(run, run) == []
    assert differences(run, asked) == [
        "optimizer.lr: the run has 0.001, asked for 0.5", "seed: the run has 0, asked for 1",
        "window_blocks: the run has 0, asked for 2",
    ]  # fmt: skip


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().seed = 3
