"""The papers' settings by name: the numbers of their tables, parts that exist, a run that trains."""

import json
import math
import re
from importlib.util import find_spec

import pytest
import torch

from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.trainer.config import layers, load_config
from thermopile.trainer.config.layers import (
    PRESETS,
    TABLE,
    from_overrides,
    merge,
    preset_chain,
    preset_names,
    read_preset,
    read_toml,
)
from thermopile.trainer.encoders import Encoders, with_names
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.optim import learning_rate
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

from support import torchvision_operators  # noqa: F401

IMAGES = ("cifar10", "cifar100", "cifar10-lt", "cifar100-lt", "imagenet100", "inaturalist")
RIVALS = [f"{objective}/cifar100" for objective in ("flatnce", "simco", "spectral", "barlow_twins", "vicreg")]
TOWERS = {
    f"{objective}/{size}-open_clip": (tower, dim, 224)
    for objective in ("fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3", "clip")
    for size, tower, dim in (("medium", "RN50", 1024), ("large", "ViT-B-32", 512), ("xlarge", "ViT-B-16", 512))
    if size != "xlarge" or objective in ("fastclip_v3", "clip")
} | {"decl/openclip-cc3m-open_clip": ("RN50x4", 640, 288)}
PAPERS = {
    *(f"{objective}/{data}" for objective in ("isogclr", "sogclr", "simclr") for data in IMAGES),
    "isogclr/cc3m", "sogclr/cc3m", "clip/cc3m",
    *(f"fastclip_{version}/{size}" for version in ("v0", "v1", "v2", "v3") for size in ("medium", "large")),
    "fastclip_v3/xlarge", "decl/cifar", "decl/openclip-cc3m", "decl/mocov3-imagenet",
    "auc_cl/cifar", "auc_cl/imagenet", "isogclr/cifar100-command", "isogclr/cc3m-command", "cyclip/cc3m",
    "moco_v3/imagenet", "clip/medium", "clip/large", "clip/xlarge", *RIVALS, *TOWERS,
}  # fmt: skip
TOKENIZER = TokenizerInfo(vocab_size=1024, context_length=64, end_id=2)


def preset(name):
    return load_config(read_preset(name))


def test_there_is_a_preset_for_every_run_of_the_papers_for_the_example_and_for_few_samples():
    assert set(preset_names()) == PAPERS | {"glyphs", "small"}


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_a_preset_loads_makes_its_objective_and_has_rates_at_every_step(name):
    config = preset(name)
    objective = create_objective(config.objective.name, config.objective.mode, **config.objective.settings)
    assert name.split("/")[0] == config.objective.name
    steps_per_epoch = 1000
    total = config.epochs * steps_per_epoch
    rates = [learning_rate(config.optimizer, step, steps_per_epoch, total) for step in (0, total // 2, total - 1)]
    assert all(math.isfinite(rate) and 0 < rate <= config.optimizer.lr for rate in rates)
    assert objective.temperature_rate is None or math.isfinite(objective.temperature_rate.lr)


IN_TABLE = read_toml(PRESETS / TABLE)
SOURCE = r"(ICML 2023|Wei et al\., 2024|NeurIPS 2022|ICLR 2024)(\):|;) .*(Table|section|unimodal_exps|bimodal_exps)"


@pytest.mark.parametrize("name", sorted(PAPERS - IN_TABLE.keys()))
def test_the_header_of_a_preset_tells_its_paper_its_command_and_what_to_expect(name):
    header = re.match(r"(#.*\n)+", (PRESETS / f"{name}.toml").read_text("utf-8"))[0]
    assert re.search(SOURCE, header)
    assert f"thermopile train --preset {name} " in header
    assert "\n# Expected: " in header


@pytest.mark.parametrize("name", sorted(IN_TABLE))
def test_a_preset_of_the_table_tells_its_paper_and_what_to_expect_unless_another_encoder_stands_in(name):
    title, _, rest = (PRESETS / TABLE).read_text("utf-8").partition(f'["{name}"] # ')[2].partition("\n")
    assert re.search(SOURCE, title)
    assert rest.startswith("# ") != (name in TOWERS)
    assert ("\n# Expected: " in "\n" + rest.partition("\nextends")[0]) != (name in TOWERS)


@pytest.mark.parametrize("name", sorted(TOWERS))
def test_a_preset_with_open_clips_towers_is_the_other_one_but_for_encoders_dimension_and_size(name):
    own, base = preset(name), preset(name.removesuffix("-open_clip"))
    model = own.model
    assert {model.image.name, model.text.name} == {f"open_clip:{TOWERS[name][0]}"}
    assert (model.dim, own.data.image_size, model.head) == (*TOWERS[name][1:], "none")
    assert own.model_copy(update={"model": base.model, "data": base.data}) == base


@pytest.mark.parametrize("name", sorted(name for name in PAPERS if not name.endswith("-command")))
def test_presets_on_images_have_simclrs_augmentation_and_blur_large_views_alone(name):
    data = preset(name).data
    if preset(name).objective.mode == "bimodal":
        assert data.recipe == "auto"
    else:
        of_size = {224: "simclr", 32: "simclr_cifar"}[data.image_size]
        assert data.recipe == ("moco_v3" if preset(name).model.momentum else of_size)
    assert data.recipe in {"auto", *RECIPES}


@pytest.mark.parametrize("version", ["v0", "v1", "v2", "v3"])
@pytest.mark.parametrize("size", ["medium", "large"])
def test_a_preset_whose_rate_was_tuned_with_scaled_gradients_says_so(version, size):
    assert "halves the features' gradients" in (PRESETS / f"fastclip_{version}/{size}.toml").read_text("utf-8")


def test_the_commands_of_isogclrs_authors_crop_and_change_colours_as_their_code_does():
    images, pairs = (preset(f"isogclr/{data}-command").data.recipe for data in ("cifar100", "cc3m"))
    assert (images.name, images.fields["scale"], images.fields["blur"]) == ("simclr_cifar", [0.2, 1.0], [0.5, 0.5])
    assert (pairs.name, pairs.fields) == ("clip", {"scale": [0.5, 1.0], "flip": 0.5})


# The papers' tables


class Between:
    """Equal to every number of a range that a paper tuned in, its ends included."""

    def __init__(self, low, high):
        self.low, self.high = low, high

    def __eq__(self, number):
        return self.low <= number <= self.high

    def __repr__(self):
        return f"{self.low} to {self.high}"


def presets(names, *data):
    return [f"{name}/{each}" for name in names.split() for each in data]


SMALL = presets("isogclr sogclr simclr", "cifar10", "cifar100", "cifar10-lt", "cifar100-lt")
LARGE = presets("isogclr sogclr simclr", "imagenet100", "inaturalist")
PAIRS = ["isogclr/cc3m", "sogclr/cc3m", "clip/cc3m", "cyclip/cc3m"]
FASTCLIP = "fastclip_v0 fastclip_v1 fastclip_v2 fastclip_v3"
LARS = {"name": "lars", "momentum": 0.9, "lr_min": 0, "warmup": "10 epochs", "weight_decay": 1e-4}
ADAMW = {"name": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "lr_min": 0}
ADAMW_OF_VIT = {"name": "adamw", "betas": (0.9, 0.98), "eps": 1e-6, "lr_min": 0}
CONSTANT = {"name": "adamw", "lr": 1e-3, "lr_min": 1e-3, "warmup": 0}


@pytest.mark.parametrize(
    ("names", "image_encoder", "batch_size", "epochs", "optimizer"),
    [
        (SMALL + RIVALS, "hf:resnet-18", 128, 400, LARS | {"lr": 0.8}),
        (["isogclr/cifar100-command"], "hf:resnet-18", 128, 400,
         LARS | {"lr": 0.8, "lr_min": 0.8 / 1000, "weight_decay": 5e-4}),
        (LARGE, "hf:resnet-50", 256, 400, LARS | {"lr": 1.2}),
        (PAIRS, "hf:resnet-50", 512, 30,
         {"name": "adamw", "lr": 2e-4, "lr_min": 1e-6, "warmup": 1000, "weight_decay": 0.02}),
        (["isogclr/cc3m-command"], "hf:resnet-50", 512, 30,
         {"name": "adamw", "lr": 2e-4, "lr_min": 1e-5, "warmup": 2000, "weight_decay": 0.02}),
        (presets(FASTCLIP + " clip", "medium"), "hf:resnet-50", 1024, 37,
         ADAMW | {"lr": 1e-3, "warmup": 10_000, "weight_decay": 0.1}),
        (presets(FASTCLIP + " clip", "large"), "hf:vit-b/32", 2048, 33,
         ADAMW_OF_VIT | {"lr": 4e-4, "warmup": 10_000, "weight_decay": 0.1}),
        (["fastclip_v3/xlarge", "clip/xlarge"], "hf:vit-b/16", 5120, 42,
         ADAMW_OF_VIT | {"lr": 2e-4, "warmup": 13_000, "weight_decay": 0.2}),
        (["decl/cifar"], "hf:resnet-50", Between(64, 512), Between(200, 500), CONSTANT | {"weight_decay": 1e-6}),
        (["decl/mocov3-imagenet", "moco_v3/imagenet"], "hf:resnet-50", 512, 100,
         {"name": "lars", "lr": 0.6 * 512 / 256, "lr_min": 0, "warmup": "10 epochs", "weight_decay": 1e-6}),
        (["decl/openclip-cc3m"], "hf:resnet-50", 1024, 30, {}),
        (["auc_cl/cifar"], "hf:resnet-18", 128, 500, CONSTANT | {"weight_decay": 1e-4}),
        (["auc_cl/imagenet"], "hf:resnet-50", 256, 100,
         {"name": "adamw", "lr": 1e-3 * 256 / 256, "lr_min": 0, "warmup": "40 epochs"}),
    ],
)  # fmt: skip
def test_a_preset_trains_as_its_paper_does(names, image_encoder, batch_size, epochs, optimizer):
    for name in names:
        config = preset(name)
        image = config.model.image
        patch = image.config.get("patch_size")
        assert (name, image.name + (f"/{patch}" if patch else "")) == (name, image_encoder)
        assert (name, config.batch_size, config.epochs) == (name, batch_size, epochs)
        assert {key: getattr(config.optimizer, key) for key in optimizer} == optimizer


@pytest.mark.parametrize(
    ("names", "text_encoder"),
    [([*PAIRS, "isogclr/cc3m-command"], "hf:distilbert"),
     ([*presets(FASTCLIP + " clip", "medium", "large"), *presets("fastclip_v3 clip", "xlarge"), "decl/openclip-cc3m"],
      "hf:clip-text")],
)  # fmt: skip
def test_a_preset_on_pairs_has_its_papers_text_encoder(names, text_encoder):
    assert {preset(name).model.text.name for name in names} == {text_encoder}


TUNED_TAU = Between(0.1, 0.7)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (SMALL[:4] + LARGE[:2], {"gamma": Between(0.7, 0.9), "rho": Between(0.1, 0.4), "tau_min": 0.05}),
        (["isogclr/cifar10"], {"tau_init": 0.5}),
        (presets("isogclr", "cifar100", "cifar10-lt"), {"tau_init": 0.3}),
        (presets("isogclr", "cifar100-lt", "imagenet100", "inaturalist"), {"tau_init": 0.7}),
        (SMALL[4:] + LARGE[2:], {"tau": TUNED_TAU}),
        (["isogclr/cc3m"], {"gamma": Between(0.7, 0.9), "rho": Between(5.8, 6.4), "tau_init": 0.01, "tau_min": 0.005,
                            "beta_u": 0.9, "eta": 0.01}),
        (["isogclr/cifar100-command"], {"gamma": 0.8, "rho": 0.4, "tau_init": 0.1, "tau_min": 0.05, "beta_u": 0.5,
                                        "eta": 0.03, "eta_decay_epochs": None, "grad_clip": 3.0}),
        (["isogclr/cc3m-command"], {"gamma": 0.8, "rho": 6.0, "tau_init": 0.01, "tau_min": 0.005, "beta_u": 0.9,
                                    "eta": 0.03, "eta_decay_epochs": None, "grad_clip": 5.0}),
        (["sogclr/cc3m"], {"gamma": 0.6, "tau": 0.03}),
        (["cyclip/cc3m"], {"in_modal": 0.25, "cross_modal": 0.25, "learn_scale": True}),
        (["flatnce/cifar100"], {"tau": TUNED_TAU}),
        (["simco/cifar100"], {"tau": 0.1, "tau_beta": 1.0}),
        (["spectral/cifar100"], {"mu": 1.0}),
        (["barlow_twins/cifar100"], {"redundancy": 0.0051}),
        (["vicreg/cifar100"], {"invariance": 25.0, "variance": 25.0, "covariance": 1.0}),
        (["moco_v3/imagenet"], {"tau": 1.0}),
        (presets("clip", "medium", "large", "xlarge"), {"log_logit_scale": math.log(1 / 0.07), "learn_scale": True}),
        (presets(FASTCLIP, "medium"), {"gamma_min": 0.2, "gamma_decay_epochs": 18, "eps": 1e-14}),
        (presets(FASTCLIP, "large"), {"gamma_min": 0.2, "gamma_decay_epochs": 16, "eps": 1e-14}),
        (["fastclip_v3/xlarge"], {"gamma_min": 0.8, "gamma_decay_epochs": 10, "eps": 1e-6}),
        (presets("fastclip_v0 fastclip_v1", "medium", "large"), {"tau": 0.03}),
        (["fastclip_v2/medium"], {"tau_init": 0.03, "eta": 1e-2, "rho": 7.0}),
        (["fastclip_v2/large"], {"tau_init": 0.03, "eta": 1e-4, "rho": 8.5}),
        (["fastclip_v3/medium"], {"tau": 0.07, "eta": 2e-4, "rho": 6.5}),
        (["fastclip_v3/large"], {"tau": 0.07, "eta": 1e-4, "rho": 8.5}),
        (["fastclip_v3/xlarge"], {"tau": 0.07, "eta": 5e-5, "rho": 16.0}),
        (["decl/cifar"], {"mixing": "loss1", "rate": "moving_average", "tau": 0.5}),
        (["decl/mocov3-imagenet"], {"mixing": "loss1", "rate": "momentum"}),
        (["decl/openclip-cc3m"], {"mixing": "alternate"}),
        (["auc_cl/cifar", "auc_cl/imagenet"], {"alpha": 0.5, "a": 1.0, "similarity": "cos"}),
    ],
)  # fmt: skip
def test_the_objective_of_a_preset_has_its_papers_settings(names, settings):
    for name in names:
        objective = preset(name).objective
        in_force = create_objective(objective.name, objective.mode, **objective.settings).settings
        assert {key: getattr(in_force, key) for key in settings} == settings, name


@pytest.mark.parametrize(
    ("size", "rates"),
    [("medium", {"sgd": (1.0 / 2, 2 * 3e-6), "lamb": (2e-3, 0.1), "lion": (2e-4, 0.3)}),
     ("large", {"sgd": (2.0 / 2, 2 * 3e-6), "lamb": (2e-3, 0.1), "lion": (1e-4, 0.3)})],
)  # fmt: skip
def test_the_other_optimisers_that_a_header_offers_load_on_top_of_its_preset(size, rates):
    text = (PRESETS / f"fastclip_v3/{size}.toml").read_text("utf-8").replace("\n#     --set", " --set")
    offered = {}
    for line in text.splitlines():
        if line.startswith("#   --set"):
            tree = read_preset(f"fastclip_v3/{size}")
            merge(tree, from_overrides(re.findall(r"--set (\S+)", line)))
            optimizer = load_config(tree).optimizer
            offered[optimizer.name] = (optimizer.lr, optimizer.weight_decay)
            assert optimizer.warmup == 10_000
    assert offered == rates


@pytest.mark.parametrize("name", ["decl/cifar", "auc_cl/cifar"])
def test_presets_after_the_simclr_code_have_its_head(name):
    model = preset(name).model
    assert (model.head, model.head_width, model.dim) == ("simclr_bn", 512, 128)


# Running


TINY = (
    "batch_size=16", "epochs=1", "steps=10", "data.image_size=16", "log_every=1", "model.dim=8", "model.head=linear",
    "model.head_width=0", "model.image.name=conv", "model.image.config.width=4", "model.text.name=mean_embedding",
)  # fmt: skip


KINDS = dict[tuple[str, str], str]()
"""A preset for each mode and optimiser."""
for name in preset_names():
    KINDS.setdefault((preset(name).objective.mode, preset(name).optimizer.name), name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS.values() else pytest.mark.wide) for name in preset_names()]
)
def test_a_preset_trains_on_data_of_its_kind(name, pairs_dataset, images_dataset, tmp_path):
    tree = read_preset(name)
    merge(tree, from_overrides(TINY))
    dataset = images_dataset if tree["objective"].get("mode") == "unimodal" else pairs_dataset
    config = resolve(load_config(tree | {"data": tree["data"] | {"path": str(dataset.path)}}), dataset)[0]
    with Trainer.open(config, RunDirectory(tmp_path / "run")) as trainer:
        trainer.train()
        losses = [json.loads(line)["loss"] for line in trainer.run.directory.metrics_file.read_text().splitlines()]
    assert len(losses) == 10
    assert all(map(math.isfinite, losses))


@pytest.mark.wide
def test_the_encoders_of_all_presets_can_be_built():
    names = PAPERS if find_spec("open_clip") else PAPERS - TOWERS.keys()
    models = {preset(name).model.model_dump_json(): preset(name) for name in names}
    for config in models.values():
        with torch.device("meta"):  # no weights: the large ones would take seconds
            Encoders.create(with_names(config.model), config.objective.mode, config.data.image_size, TOKENIZER)


# Extending


def test_a_preset_has_the_settings_of_the_one_that_it_extends_below_its_own():
    base, own = preset("isogclr/cifar10"), preset("isogclr/cifar100")
    assert own.objective.settings == base.objective.settings | {"rho": 0.4, "tau_init": 0.3}
    assert own.model_copy(update={"objective": base.objective}) == base


def test_a_preset_of_another_objective_keeps_everything_else():
    base, own = preset("fastclip_v3/large"), preset("fastclip_v1/large")
    assert own.objective.settings.keys() == {"gamma_min", "gamma_decay_epochs", "eps", "tau"}
    assert own.model_copy(update={"objective": base.objective}) == base


def test_presets_extend_over_several_steps():
    config = preset("fastclip_v3/xlarge")
    assert (config.batch_size, config.model.image.config, config.model.text.name) == (
        5120, {"patch_size": 16}, "hf:clip-text"
    )  # fmt: skip


@pytest.fixture
def own_presets(tmp_path, monkeypatch):
    """Presets written for a test, in the place of those of the package."""
    monkeypatch.setattr(layers, "PRESETS", tmp_path)
    (tmp_path / TABLE).touch()
    return tmp_path


def test_a_preset_of_the_table_extends_a_file_or_another_one_of_the_table(own_presets):
    (own_presets / "base.toml").write_text("epochs = 3\nseed = 3")
    (own_presets / TABLE).write_text('["a/one"]\nextends = "base"\nepochs = 4\n["two"]\nextends = "a/one"\nseed = 4')
    assert preset_names() == ["a/one", "base", "two"]
    assert [part for part, _ in preset_chain("two")] == ["base", "a/one", "two"]
    assert read_preset("two") == {"epochs": 4, "seed": 4}


def test_presets_that_extend_one_another_in_a_circle_are_refused(own_presets):
    (own_presets / "one.toml").write_text('extends = "two"')
    (own_presets / "two.toml").write_text('extends = "one"')
    with pytest.raises(ConfigError, match=r"in a cycle: one → two → one$"):
        read_preset("one")


def test_a_preset_that_extends_one_that_is_not_there_is_named(own_presets):
    (own_presets / "one.toml").write_text('extends = "too"')
    with pytest.raises(ConfigError, match="unknown preset 'too', which 'one' extends; available: one"):
        read_preset("one")
