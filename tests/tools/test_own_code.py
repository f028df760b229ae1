"""Code of a user's own, from conversion to evaluation; and where it may run."""

import importlib.metadata
import json
import site
import sys

import pytest

from thermopile.pipeline.opening import Dataset
from thermopile.tools.inspection.features import embedding_map
from thermopile.tools.settings import list_objectives
from thermopile.trainer.config import load_config
from thermopile.trainer.encoders import create_encoder
from thermopile.trainer.encoders.own_backbone import OwnBackbone
from thermopile.trainer.objectives import OBJECTIVES, objective_class
from thermopile.trainer.plugins import CODE
from thermopile.trainer.run_directory import RunDirectory

from support.cli import answer, assert_one_line, cli, sets, succeed

OWN = {
    "model.image.name": "support.own_code:Tower", "model.image.config.width": 6,
    "model.text.name": "support.own_code:Words", "objective.name": "support.own_code:Weighted", "objective.tau": 0.3,
    "data.recipe": "support.own_code:SOFT", "data.recipe.blur": 0.2, "epochs": 2, "batch_size": 64, "log_every": 1,
    "data.image_size": 16, "model.dim": 8, "checkpoint.every_steps": 3, "order.canonical_shards": 2,
}  # fmt: skip
SET = sets(*(f"{key}={value}" for key, value in OWN.items()))
WITHOUT_OBJECTIVE = sets(*(f"{key}={value}" for key, value in OWN.items() if "objective" not in key))


@pytest.fixture(scope="module")
def dataset(picture_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("own") / "pictures"
    done = succeed(
        "convert", "support.own_code:Pictures", picture_folder, out, "--option", "suffix=png", "--workers", "1"
    )
    assert "imports the source = support.own_code:Pictures from " in done.stderr
    return Dataset(out)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    directory = RunDirectory(tmp_path_factory.mktemp("own") / "run")
    done = succeed("train", "--data", dataset.path, "--out", directory.path, *SET)
    for key in ("model.image.name", "model.text.name", "objective.name", "data.recipe.name"):
        assert f"imports {key} = {OWN.get(key, 'support.own_code:SOFT')} from " in done.stderr
    return directory


def test_a_source_of_ones_own_is_converted_with_its_options(dataset):
    assert (dataset.n, dataset.index.mode, dataset.index.source["kind"]) == (300, "pairs", "pictures")
    refused = cli(
        "convert", "support.own_code:Pictures", "x", dataset.path.with_name("other"), "--option", "colour=red"
    )
    assert refused.exit_code == 1
    assert (
        "support.own_code:Pictures cannot be created with SRC 'x' and options {'colour': 'red'}: TypeError"
        in refused.stderr
    )
    for name, said in (
        ("support.own_code:Tower", "derive it from thermopile.Source"),
        ("nowhere:X", "with the module's directory in PYTHON"),
    ):
        assert said in cli("convert", name, "x", dataset.path.with_name("other")).stderr


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages, installed for this user, where one says which parts it has."""
    info = tmp_path / "packages" / "parts-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    parts = {"objectives": ("weighted", "isogclr"), "encoders": ("tower", "conv"), "sources": ("pngs", "folder")}
    of = {"objectives": "Weighted", "encoders": "Tower", "sources": "Pictures"}
    lines = (f"[thermopile.{kind}]\n" + "".join(f"{name} = support.own_code:{of[kind]}\n" for name in names)
             for kind, names in parts.items())  # fmt: skip
    (info / "entry_points.txt").write_text("".join(lines))
    monkeypatch.setattr(site, "USER_SITE", str(tmp_path / "packages"))
    return tmp_path / "packages"


@pytest.mark.usefixtures("packages")
def test_parts_of_an_installed_package_are_known_by_name_and_need_no_permission(picture_folder, tmp_path):
    done = succeed("convert", "pngs", picture_folder, tmp_path / "data", "--option", "suffix=png", "--workers", "1")
    assert "imports the source = support.own_code:Pictures from " in done.stderr
    named = ("model.image.name=tower", "model.image.config.width=6", "objective.name=weighted", "objective.tau=0.3",
             "batch_size=64", "steps=1", "data.image_size=16", "model.dim=8")  # fmt: skip
    succeed("train", "--data", tmp_path / "data", "--out", tmp_path / "run", *sets(*named))
    config = RunDirectory(tmp_path / "run").config()
    assert (config.model.image.name, config.objective.name) == ("tower", "weighted")
    assert config.objective.settings["memory"] == 0.9
    test = ("--train", tmp_path / "data", "--test", tmp_path / "data")
    succeed("eval", tmp_path / "run", *test)
    again = sets("objective.name=weighted", "model.image.name=none", "batch_size=64", "data.image_size=16")
    refused = cli("train", "--data", tmp_path / "data", "--out", tmp_path / "other", *again)
    assert_one_line(refused, 2, "model.image.name = 'none': unknown encoder")


@pytest.mark.usefixtures("packages")
def test_objectives_of_an_installed_package_are_listed_without_importing_them():
    listed = list_objectives()
    assert listed["weighted"] == "support.own_code:Weighted"
    assert listed["isogclr"].startswith("iSogCLR")


@pytest.mark.usefixtures("packages")
def test_no_package_takes_the_place_of_a_part_that_is_built_in():
    assert objective_class("isogclr") is OBJECTIVES["isogclr"]
    model = load_config({"model": {"image": {"name": "conv"}}}).model
    assert not isinstance(create_encoder("image", model, 16).backbone, OwnBackbone)
    assert "a folder of pictures" in cli("convert", "folder", "--help").stdout


def test_a_folder_that_claims_to_be_a_package_in_the_working_directory_is_none(packages, tmp_path, monkeypatch):
    monkeypatch.setattr(site, "USER_SITE", str(tmp_path / "elsewhere"))
    monkeypatch.syspath_prepend(packages)
    monkeypatch.chdir(packages)
    assert "parts" in {each.name for each in importlib.metadata.distributions()}, "Python finds it, and we must not"
    with pytest.raises(ValueError, match="objective 'weighted' is unknown"):
        objective_class("weighted")
    assert_one_line(cli("convert", "pngs", "x", "y"), 2, "No such command 'pngs'")


def test_it_is_recorded_trained_inspected_evaluated_and_exported(trained, dataset, tmp_path):
    config = trained.config()
    assert config.objective.settings["memory"] == 0.9, "a default of the objective's own model is not recorded"
    assert (config.data.recipe.name, config.data.recipe.fields) == ("support.own_code:SOFT", {"blur": 0.2})
    assert "plain" in json.loads(trained.metrics_file.read_text().splitlines()[0])
    found = answer("inspect", trained.path)
    assert found["samples"] == 300
    scored = succeed("eval", trained.path, "--train", dataset.path, "--test", dataset.path, "--allow-code", "--json")
    assert 0 <= json.loads(scored.stdout)["scores"]["image_to_text"]["10"]["all"] <= 1
    succeed("export", trained.path, "--to", tmp_path / "out", "--format", "safetensors", "--allow-code")
    succeed("status", trained.path)


@pytest.mark.parametrize("command", ["resume", "eval", "export"])
def test_a_run_does_not_run_code_that_only_its_own_files_name(trained, dataset, tmp_path, command, monkeypatch):
    monkeypatch.setattr("thermopile.trainer.plugins.import_module", lambda name: pytest.fail(f"imported {name}"))
    arguments = {
        "resume": ("train", "--out", trained.path, "--resume"),
        "eval": ("eval", trained.path, "--train", dataset.path, "--test", dataset.path),
        "export": ("export", trained.path, "--to", tmp_path / "out", "--format", "safetensors"),
    }[command]
    done = cli(*arguments)
    assert done.exit_code == 2
    assert f"{trained.config_file} sets " in done.stderr
    assert "which imports that module and runs its code. If you trust it, add --allow-code" in done.stderr


@pytest.mark.wide
def test_a_map_of_a_run_with_code_of_its_own_needs_permission(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding_map, "MAX_SAMPLES", 16)
    monkeypatch.setattr(embedding_map, "MARKED", 0)
    path, tau = tmp_path / "run", ("--set", "objective.name=isogclr", "--set", "epochs=1")
    succeed("train", "--data", dataset.path, "--out", path, *WITHOUT_OBJECTIVE, *tau)
    allowed = answer("inspect", path, "--map", "--allow-code")
    assert allowed["map"]["checkpoint"] == "step-4"
    assert "There is no map" not in "".join(allowed["notes"])
    monkeypatch.setattr("thermopile.trainer.plugins.import_module", lambda name: pytest.fail(f"imported {name}"))
    seen = answer("inspect", path, "--map")
    assert seen["map"] is None
    (why,) = [note for note in seen["notes"] if note.startswith("There is no map of the embeddings: ")]
    assert "add --allow-code" in why


@pytest.mark.parametrize("key", CODE)
@pytest.mark.parametrize("name", ["sent_module:views", "sent_module", "hf:views"])
def test_no_setting_of_a_file_imports_code_unasked(dataset, tmp_path, monkeypatch, key, name):
    trace = tmp_path / "trace"
    for module in ("sent_module", "hf"):
        (tmp_path / f"{module}.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nviews = 1\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sent.toml").write_text(f"{key} = {json.dumps(name)}\n")
    line = ("train", "--data", dataset.path, "--out", tmp_path / "run", "--config", tmp_path / "sent.toml")
    assert cli(*line).exit_code == 2
    assert not trace.exists()
    if (key, name) == ("data.augmentation", "sent_module:views"):
        said = f"--config {tmp_path / 'sent.toml'} sets {key} = {name!r}"
        for words in ((), ("--print-config",)):
            assert_one_line(cli(*line, *words), 2, said, "add --allow-code")
        assert not trace.exists()
        for allowed in (["--allow-code"], ["--set", f"{key}={name}"]):
            assert f"{name!r} is not compiled" in cli(*line, *allowed).stderr
            assert trace.exists()


def test_a_run_whose_code_the_command_replaces_does_not_run_it(trained, monkeypatch):
    monkeypatch.setattr("thermopile.trainer.plugins.import_module", lambda name: pytest.fail(f"imported {name}"))
    others = ("model.image.name=conv", "model.text.name=mean_embedding", "objective.name=clip", "data.recipe=clip")
    done = cli("train", "--out", trained.path, "--resume", *sets(*others))
    assert done.exit_code == 2
    assert "the run sets data.recipe.name = 'support.own_code:SOFT', which imports that module" in done.stderr


def test_a_run_goes_on_where_its_code_is_allowed_or_named_again(trained):
    for words in (("--allow-code",), SET):
        assert "nothing to do" in succeed("train", "--out", trained.path, "--resume", *words).stdout


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "model.image.name=support.own_code:Nothing",
            "model.image.name = 'support.own_code:Nothing' is not in ",
        ),
        (
            "model.image.name=support.own_code:Weighted",
            "model.image.name = 'support.own_code:Weighted' cannot be created with",
        ),
        ("model.image.config.width=wide", "cannot be created with image_size, width"),
        ("objective.rho=1", "'support.own_code:Weighted' has no setting 'rho'"),
        ("objective.memory=long", "objective 'support.own_code:Weighted': memory = 'long'"),
        ("data.recipe.blurr=1", "data.recipe has no field 'blurr' (did you mean 'blur'?)"),
    ],
)
def test_what_is_wrong_with_it_is_one_line_before_the_run_begins(dataset, tmp_path, setting, said):
    done = cli("train", "--data", dataset.path, "--out", tmp_path / "run", *SET, "--set", setting)
    assert done.exit_code == 2
    assert said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
