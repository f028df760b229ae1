"""A run's settings: checked where they are read, and named exactly where they are wrong."""

import tomllib

import pytest

from thermopile.trainer.config import OPTIMIZERS, OptimizerConfig, TrainConfig, load_config, to_toml
from thermopile.trainer.config.layers import from_overrides, merge, read_preset, read_toml
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.run.resume_settings import differences


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"epoch": 3}, r"unknown setting 'epoch' \(did you mean 'epochs'"),
        ({"optimizer": {"lrr": 0.1}}, r"unknown setting 'optimizer\.lrr' \(did you mean 'optimizer\.lr'"),
        ({"data": {"imagesize": 32}}, r"did you mean 'data\.image_size'"),
        ({"epochs": 0}, "epochs = 0: .*greater than 0"),
        ({"device": "tpu"}, "device = 'tpu'"),
        ({"optimizer": {"lr": "fast"}}, r"optimizer\.lr = 'fast'"),
        (
            {"state": {"memory_budget": "2 apples"}},
            r"state\.memory_budget = '2 apples': is not a size; use a number of bytes",
        ),
        ({"state": {"memory_budget": 0}}, r"state\.memory_budget = 0: .*greater than 0"),
        ({"data": {"loader": "torch"}}, r"data\.loader = 'torch': .*'auto', 'ffcv', 'dali' or 'synthetic'"),
        ({"data": {"loader": "dali", "augmentation": "a:b"}}, r"data: augmentation 'a:b' .*use loader = 'ffcv'"),
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
    merge(tree, from_overrides([override]))
    assert tree["optimizer"][override.split("=")[0].split(".")[1]] == value


@pytest.mark.parametrize("overrides", [["optimizer.lr"], ["=3"], ["seed=1", "seed.deep=1"]])
def test_an_override_that_is_none_is_refused(overrides):
    with pytest.raises(ConfigError):
        from_overrides(overrides)


def test_an_override_of_a_value_by_a_table_is_named():
    tree = {"seed": 0}
    merge(tree, from_overrides(["seed.deep=1"]))
    with pytest.raises(ConfigError, match="seed: Input should be a valid integer"):
        load_config(tree)


def test_merging_replaces_values_and_keeps_the_rest_of_a_table():
    tree = {"optimizer": {"lr": 1, "eps": 2}, "seed": 0}
    merge(tree, {"optimizer": {"lr": 3}, "epochs": 4})
    assert tree == {"optimizer": {"lr": 3, "eps": 2}, "seed": 0, "epochs": 4}


def test_another_objective_or_encoder_starts_without_the_settings_of_the_old_one():
    tree = {
        "objective": {"name": "isogclr", "rho": 2.0},
        "model": {"dim": 5, "image": {"name": "hf:vit-b", "config": {}}},
    }
    merge(tree, from_overrides(["objective.tau=0.1", "objective.name=sogclr", "model.image.name=conv"]))
    assert tree == {"objective": {"name": "sogclr", "tau": 0.1}, "model": {"dim": 5, "image": {"name": "conv"}}}


def test_the_same_objective_named_again_keeps_its_settings():
    tree = {"objective": {"name": "isogclr", "rho": 2.0}}
    merge(tree, from_overrides(["objective.name=isogclr", "objective.eta=0.1"]))
    assert tree == {"objective": {"name": "isogclr", "rho": 2.0, "eta": 0.1}}


# The optimiser's settings


def own_settings(config):
    return {key for each in OPTIMIZERS.values() for key in each if getattr(config, key) is not None}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimisers_own_settings_are_filled_in_and_recorded(name):
    config = load_config({"optimizer": {"name": name}})
    assert own_settings(config.optimizer) == OPTIMIZERS[name].keys()
    recorded = tomllib.loads(to_toml(config))["optimizer"]
    assert (
        recorded.keys() == {"name", "lr", "lr_min", "cooldown", "weight_decay", "layer_decay"} | OPTIMIZERS[name].keys()
    )
    assert load_config({"optimizer": recorded}).optimizer == config.optimizer


def test_what_is_set_stays_beside_what_is_filled_in():
    config = OptimizerConfig(name="lion", betas=(0.5, 0.6), lr=1e-4)
    assert (config.betas, config.lr, config.eps) == ((0.5, 0.6), 1e-4, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "adam"},
            r"optimizer\.name = 'adam': .* \(did you mean 'adamw'\?\); available: adamw, sgd, lars, lamb, lion",
        ),
        ({"name": 3}, r"optimizer\.name = 3: Input should be a valid string"),
        ({"momentum": 0.9}, r"optimizer: adamw has no setting momentum; it has betas, eps"),
        (
            {"name": "sgd", "betas": [0.9, 0.98], "eps": 1e-6},
            r"sgd has no setting betas or eps; it has momentum.*--set optimizer\.betas=none --set optimizer\.eps=none",
        ),
        (
            {"warmup": "5 hours"},
            r"optimizer\.warmup = '5 hours': is neither a number of steps nor, for example, '2 epochs'",
        ),
        (
            {"warmup_epochs": 5},
            r"unknown setting 'optimizer\.warmup_epochs': it is now optimizer\.warmup, as in '2 epochs'",
        ),
        ({"lr": 0.1, "lr_min": 0.2}, r"optimizer: lr_min 0\.2 is above lr 0\.1"),
        ({"betas": [0.9, 1.0]}, r"optimizer\.betas\.1 = 1\.0"),
        ({"momentun": 1}, r"unknown setting 'optimizer\.momentun' \(did you mean 'optimizer\.momentum'"),
    ],
)
def test_settings_that_the_optimiser_has_not_are_named_with_the_cure(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config({"optimizer": settings})


def test_another_optimiser_than_a_presets_keeps_its_schedule():
    tree = {"optimizer": {"name": "adamw", "lr": 4e-4, "betas": [0.9, 0.98], "eps": 1e-6, "warmup": "3 epochs"}}
    other = ["optimizer.name=sgd", "optimizer.lr=1.0", "optimizer.betas=none", "optimizer.eps=none"]
    merge(tree, from_overrides(other))
    config = load_config(tree).optimizer
    assert (config.name, config.lr, config.warmup) == ("sgd", 1.0, "3 epochs")
    assert own_settings(config) == {"momentum"}


def test_the_warm_up_is_of_200_steps_where_nothing_is_said_of_it():
    assert OptimizerConfig().warmup is None  # until the run's steps are known


@pytest.mark.parametrize(
    ("given", "parts"),
    [(5, (5, 0)), ("5", (5, 0)), ("5 steps", (5, 0)), ("1 epoch", (0, 1)), ("2 epochs", (0, 2)), ("none", (0, 0))],
)
def test_a_warm_up_is_of_steps_or_of_epochs(given, parts):
    config = OptimizerConfig(warmup=given)
    assert config.warmup_parts == OptimizerConfig(**config.model_dump(exclude_none=True)).warmup_parts == parts


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
    with pytest.raises(
        ConfigError, match=r"unknown preset 'glyhps' \(did you mean 'glyphs'\?\); available: .*isogclr/cifar10"
    ):
        read_preset("glyhps")
    (tmp_path / "a.toml").write_text("epochs = = 3")
    with pytest.raises(ConfigError, match=r"a\.toml is not valid TOML"):
        read_toml(tmp_path / "a.toml")


def test_differences_name_what_would_change_results_and_nothing_else():
    run = TrainConfig()
    asked = load_config(
        {"seed": 1, "optimizer": {"lr": 0.5}, "log_every": 3, "checkpoint": {"every_steps": 5}}
        | {"data": {"workers": 2, "loader": "dali"}}
        | {"state": {"memory_budget": 5, "prefetch_steps": 3}, "order": {"window_blocks": 2}}
    )
    assert differences(run, run) == []
    assert list(map(str, differences(run, asked))) == [
        "data.loader: the run has 'auto', asked for 'dali'",
        "optimizer.lr: the run has 0.001, asked for 0.5",
        "order.window_blocks: the run has 0, asked for 2", "seed: the run has 0, asked for 1",
    ]  # fmt: skip


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().seed = 3
