"""The papers' settings by name: each loads, its objective and encoders exist, and one extends another as it says."""

import math
import re

import pytest
import torch

from thermopile.pipeline.augment import RECIPES
from thermopile.pipeline.dataset import TokenizerInfo
from thermopile.trainer import config as config_module
from thermopile.trainer.config import PRESETS, load_config, preset_names, read_preset
from thermopile.trainer.encoders import Encoders, with_names
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.optim import learning_rate

IMAGES = ("cifar10", "cifar100", "cifar10-lt", "cifar100-lt", "imagenet100", "inaturalist")
PAPERS = {
    *(f"{objective}/{data}" for objective in ("isogclr", "sogclr", "simclr") for data in IMAGES),
    "isogclr/cc3m", "sogclr/cc3m", "clip/cc3m",
    *(f"fastclip_{version}/{size}" for version in ("v0", "v1", "v2", "v3") for size in ("medium", "large")),
    "fastclip_v3/xlarge", "decl/cifar", "decl/openclip-cc3m", "auc_cl/cifar",
}  # fmt: skip
TOKENIZER = TokenizerInfo(vocab_size=1024, context_length=64, end_id=2)


def preset(name):
    return load_config(read_preset(name))


def test_there_is_a_preset_for_every_run_of_the_papers_and_for_the_example():
    assert set(preset_names()) == PAPERS | {"glyphs"}


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_a_preset_loads_makes_its_objective_and_has_rates_from_its_first_to_its_last_step(name):
    config = preset(name)
    objective = create_objective(config.objective.name, config.objective.mode, **config.objective.settings)
    assert name.split("/")[0] == config.objective.name
    steps_per_epoch = 1000
    total = config.epochs * steps_per_epoch
    rates = [learning_rate(config.optimizer, step, steps_per_epoch, total) for step in (0, total // 2, total - 1)]
    assert all(math.isfinite(rate) and 0 < rate <= config.optimizer.lr for rate in rates)
    assert objective.temperature_rate is None or math.isfinite(objective.temperature_rate.lr)


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_the_header_of_a_preset_tells_its_paper_its_command_and_what_to_expect(name):
    header = re.match(r"(#.*\n)+", (PRESETS / f"{name}.toml").read_text("utf-8"))[0]
    assert re.search(r"(ICML 2023|Wei et al\., 2024|NeurIPS 2022|ICLR 2024)\): .*(Table|section)", header)
    assert f"thermopile train --preset {name} " in header
    assert "\n# Expected: " in header


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_presets_on_images_have_simclrs_augmentation_without_blur_where_views_are_small(name):
    data = preset(name).data
    if preset(name).objective.mode == "bimodal":
        assert data.recipe == "auto"
    else:
        assert data.recipe == {224: "simclr", 32: "simclr_cifar"}[data.image_size]
    assert data.recipe in {"auto", *RECIPES}


@pytest.mark.parametrize("version", ["v0", "v1", "v2", "v3"])
@pytest.mark.parametrize("size", ["medium", "large"])
def test_a_preset_whose_rate_was_tuned_with_scaled_gradients_says_so(version, size):
    assert "halves the features' gradients" in (PRESETS / f"fastclip_{version}/{size}.toml").read_text("utf-8")


def test_every_optimiser_that_a_header_offers_loads_on_top_of_its_preset():
    for size in ("medium", "large"):
        text = (PRESETS / f"fastclip_v3/{size}.toml").read_text("utf-8").replace("\n#     --set", " --set")
        offers = [re.findall(r"--set (\S+)", line) for line in text.splitlines() if line.startswith("#   --set")]
        assert len(offers) == 3
        for offer in offers:
            tree = read_preset(f"fastclip_v3/{size}")
            config_module.apply_overrides(tree, offer)
            assert load_config(tree).optimizer.warmup_steps == 10000


def test_the_encoders_of_all_presets_can_be_built():
    models = {preset(name).model.model_dump_json(): preset(name) for name in PAPERS}
    for config in models.values():
        with torch.device("meta"):  # no weights: the large ones would take seconds
            Encoders.create(with_names(config.model), config.objective.mode, config.data.image_size, TOKENIZER)


# Extending


def test_a_preset_has_the_settings_of_the_one_that_it_extends_below_its_own():
    base, own = preset("isogclr/cifar10"), preset("isogclr/cifar100")
    assert own.objective.settings == base.objective.settings | {"rho": 0.4}
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
    monkeypatch.setattr(config_module, "PRESETS", tmp_path)
    return tmp_path


def test_presets_that_extend_one_another_in_a_circle_are_refused(own_presets):
    (own_presets / "one.toml").write_text('extends = "two"')
    (own_presets / "two.toml").write_text('extends = "one"')
    with pytest.raises(ConfigError, match=r"in a circle: one → two → one$"):
        read_preset("one")


def test_a_preset_that_extends_one_that_is_not_there_is_named(own_presets):
    (own_presets / "one.toml").write_text('extends = "too"')
    with pytest.raises(ConfigError, match="no preset 'too', which 'one' extends; there are: one"):
        read_preset("one")
