"""Settings explained and listed; `--print-config`: each with its origin, as TOML that is settings again."""

import re
import tomllib
from pathlib import Path

import pytest

from thermopile.tools.settings import _of_objective, shown_settings
from thermopile.tools.train_options import ELSEWHERE
from thermopile.trainer.config import TrainConfig, flat, load_config
from thermopile.trainer.config.layers import Layers, preset_names
from thermopile.trainer.objectives import OBJECTIVES
from thermopile.trainer.run.build import resolve

from support.cli import cli, succeed


def layered(*, preset=None, **settings):
    layers = Layers()
    if preset:
        layers.add_preset(preset)
    layers.add(settings, "--set")
    return layers


def lines(text):
    """Key in full → (the setting as written, where it comes from)."""
    found, table = {}, ""
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif line:
            setting, _, origin = line.rpartition("  # ")
            found[table + setting.removeprefix("# ").split(" = ")[0]] = (setting.rstrip(), origin)
    return found


@pytest.mark.parametrize("name", preset_names())
def test_what_is_shown_is_toml_that_gives_the_same_settings(name):
    layers = layered(preset=name)
    config = load_config(tomllib.loads(shown_settings(load_config(layers.tree), layers)))
    asked = load_config(layers.tree)
    assert config.model_copy(update={"objective": None}) == asked.model_copy(update={"objective": None})
    given = asked.objective.settings
    assert {key: config.objective.settings[key] for key in given} == given


def test_every_setting_is_shown_with_where_it_comes_from():
    layers = layered(preset="isogclr/cifar100", epochs=3)
    shown = lines(shown_settings(load_config(layers.tree), layers))
    assert flat(TrainConfig().model_dump()).keys() <= shown.keys()
    assert shown["epochs"] == ("epochs = 3", "--set")
    assert shown["objective.rho"] == ("rho = 0.4", "preset isogclr/cifar100")
    assert shown["batch_size"] == ("batch_size = 128", "preset isogclr/cifar10")
    assert shown["log_every"] == ("log_every = 10", "default")
    assert shown["objective.grad_clip"] == ("grad_clip = 3.0", "default")
    assert shown["objective.gamma_decay_epochs"] == ("# gamma_decay_epochs = none", "default")
    assert shown["optimizer.trust_coefficient"] == ("trust_coefficient = 0.001", "default")


def test_what_was_open_says_what_it_was(pairs_dataset):
    layers = layered(order={"canonical_shards": 0}, data={"path": str(pairs_dataset.path)})
    shown = lines(shown_settings(resolve(load_config(layers.tree), pairs_dataset)[0], layers))
    assert shown["order.canonical_shards"] == ("canonical_shards = 8", "resolved from 0 (--set)")
    assert shown["objective.mode"] == ('mode = "bimodal"', "resolved from auto (default)")
    assert shown["data.recipe"] == ('recipe = "clip"', "resolved from auto (default)")
    assert shown["objective.rho"] == ("rho = 1.0", "default")


def test_without_a_dataset_what_is_open_stays_so():
    layers = layered()
    shown = lines(shown_settings(load_config(layers.tree), layers))
    assert shown["objective.mode"] == ('mode = "auto"', "default")
    assert "objective.rho" not in shown


def test_what_a_model_directory_says_is_from_there(images_dataset, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "resnet", "depths": [1, 1], "embedding_size": 4}')
    (tmp_path / "tiny" / "model.safetensors").touch()
    layers = layered(model={"image": {"name": f"hf:{tmp_path}/tiny", "config": {"embedding_size": 8}}})
    shown = lines(shown_settings(resolve(load_config(layers.tree), images_dataset)[0], layers))
    assert shown["model.image.config.model_type"] == ('model_type = "resnet"', "from tiny")
    assert shown["model.image.config.depths"] == ("depths = [1, 1]", "from tiny")
    assert shown["model.image.config.embedding_size"] == ("embedding_size = 8", "--set")
    assert shown["model.text.name"][1] == "resolved from auto (default)"


def test_no_setting_hides_or_reorders_what_the_terminal_shows():
    layers = layered(data={"path": "a\x1b[2J\u202eb\x85\x7f"}, model={"image": {"config": {"a\u202eb": [1, 2]}}})
    text = shown_settings(load_config(layers.tree), layers)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert load_config(tomllib.loads(text)).data.path == "a\x1b[2J\u202eb\x85\x7f"


# `thermopile settings`, `thermopile presets`


def test_every_setting_is_explained_and_the_documentation_is_what_the_command_prints():
    printed = cli("settings").stdout
    names = re.findall(r"^(\S+) = ", printed, re.MULTILINE)
    assert set(flat(TrainConfig().model_dump(mode="json"))) <= set(names)
    assert all(len(lines.splitlines()) > 1 for lines in printed.split("\n\n"))
    assert printed in (Path(__file__).parents[2] / "docs/all_settings.md").read_text("utf-8")


def test_a_table_s_settings_have_their_default_and_range():
    assert cli("settings", "data.local_views").stdout.startswith(
        "data.local_views = 0    # integer ≥ 0 ≤ 64\n    Number of"
    )
    names = re.findall(r"^(\S+) = ", cli("settings", "model.image").stdout, re.MULTILINE)
    assert names == [f"model.image.{key}" for key in ("name", "config", "locked", "unlocked_groups")]


@pytest.mark.parametrize("name", [*OBJECTIVES])
def test_every_setting_of_an_objective_is_explained(name):
    found = {each.name: each for each in _of_objective(name)}
    models = OBJECTIVES[name].settings_of_mode.values()
    assert found.keys() == {f"objective.{key}" for model in models for key in model.model_fields}
    assert all(each.sentence for each in found.values())


def test_a_setting_of_objectives_is_explained_for_each_that_has_it():
    said = [" ".join(part.split()) for part in succeed("settings", "objective.rho").stdout.split("\n\n")]
    assert all(part.startswith("objective.rho = ") for part in said)
    assert "0.1 to 0.4 in the paper. iSogCLR eq 7. For isogclr (unimodal)." in said[1]
    assert said[0].endswith("FastCLIP table 9. For isogclr (bimodal), fastclip_v2 (bimodal).")


def test_an_unknown_setting_names_the_nearest():
    unknown, objective = cli("settings", "data.image_sise"), cli("settings", "objective.isogcl")
    assert (unknown.exit_code, objective.exit_code) == (2, 2)
    assert unknown.stderr.endswith("no setting is called 'data.image_sise' (did you mean 'data.image_size'?)\n")
    assert "did you mean 'isogclr'?" in objective.stderr


def test_every_preset_is_listed_with_a_line_of_its_own():
    lines = cli("presets").stdout.splitlines()
    assert [line.split()[0] for line in lines] == preset_names()
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)


# Coming from elsewhere


def test_the_settings_named_for_flags_of_other_trainers_exist():
    page = (Path(__file__).parents[2] / "docs/coming_from.md").read_text("utf-8")
    words = [*re.findall(r"`([^`]*)`", page), *ELSEWHERE.values()]
    free = r"model\.(image|text)\.config\.\w+|data\.recipe\.\w+|objective\.(tau|tau_init)"
    known, named = set(flat(TrainConfig().model_dump(mode="json"))), set()
    for key in re.findall(r"\b((?:data|model|objective|optimizer|checkpoint|evaluation)\.[\w.]+\w)", " ".join(words)):
        if not re.fullmatch(rf"{free}|data\.(train_path|format)|optimizer\.batch_size|checkpoint\.frequency", key):
            named.add(key)
    assert len(named) > 20
    assert named <= known
    objectives = re.findall(r"objective\.name=(\w+)", " ".join(words))
    assert {*objectives} - {"NAME"} <= set(OBJECTIVES)


def test_a_flag_of_another_trainer_is_answered_with_the_setting_that_is_meant(tmp_path):
    done = cli("train", "--out", tmp_path / "run", "--model", "ViT-B-32")
    assert done.exit_code == 2
    assert "Did you mean --set model.image.name=hf:vit-b" in done.stderr
    assert "--set optimizer.weight_decay=VALUE" in cli("train", "--wd", "0.1").stderr
    assert "micro_batch" in cli("train", "--accum_freq", "4").stderr
