"""The parts of a run that the settings ask for: which loader, which recipe, whose augmentation."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w
import torch

from thermopile.pipeline.views.recipes import RECIPES
from thermopile.trainer import precision
from thermopile.trainer.config import load_config, to_tree
from thermopile.trainer.config.layers import Layers
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import create_order, objective_of, open_loader, recipe_named, resolve
from thermopile.trainer.run.resume_settings import differences, settings_at
from thermopile.trainer.run.starting import compare, merge
from thermopile.trainer.run_directory import RunDirectory

from support.runs import SMALL_MODEL, small

CPU = torch.device("cpu")


def settings(dataset, device="cpu", objective="isogclr", **data):
    """Resolved settings of a short run."""
    data = {"path": str(dataset.path), "image_size": 32, "workers": 2} | data
    tree = {
        "epochs": 1, "batch_size": 256, "device": device, "data": data, "objective": {"name": objective},
        "model": SMALL_MODEL,
    }  # fmt: skip
    return resolve(load_config(tree), dataset)[0]


def first_batch(config, dataset):
    order = create_order(config, dataset, objective_of(config))
    with open_loader(config.data, dataset, order, config.objective.mode, CPU) as loader:
        return next(loader.epoch(0))


@pytest.fixture
def gpu(monkeypatch):
    """A context in which torch says that there is a GPU with bfloat16."""

    @contextmanager
    def found(bf16=True):
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_available", lambda: True)
            patched.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
            yield

    return found


# The loader


def test_a_run_has_ffcv_unless_it_asks_for_dali_also_on_a_gpu(pairs_dataset, gpu):
    assert settings(pairs_dataset).data.loader == "ffcv"
    assert settings(pairs_dataset, loader="dali").data.loader == "dali"
    with gpu():
        assert settings(pairs_dataset, device="auto").data.loader == "ffcv"
        assert settings(pairs_dataset, device="auto", loader="dali").data.loader == "dali"


def test_an_objectives_setting_that_there_is_not_is_named_also_where_it_is_none(pairs_dataset):
    tree = {"data": {"path": str(pairs_dataset.path)}, "objective": {"tau_stepp": "none"}}
    with pytest.raises(ConfigError, match=r"no setting 'tau_stepp' .did you mean 'tau_step'"):
        resolve(load_config(tree), pairs_dataset)[0]


def test_local_views_that_a_vits_patches_do_not_divide_are_refused_at_once(images_dataset, tmp_path):
    vit = {"name": "hf:vit-s", "config": {"hidden_size": 12, "num_hidden_layers": 1, "patch_size": 16}}
    data = {"path": str(images_dataset.path), "image_size": 32, "local_views": 1, "local_size": 24}
    tree = {"data": data, "model": {"image": vit}, "objective": {"name": "simclr"}, "batch_size": 64}
    with pytest.raises(ConfigError, match=r"local_size = 24 is no multiple of model.image.name's patch, 16 pixels"):
        Trainer.open(resolve(load_config(tree), images_dataset)[0], RunDirectory(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_an_objectives_setting_that_is_none_has_its_default_again(pairs_dataset):
    tree = {"data": {"path": str(pairs_dataset.path)}, "objective": {"tau_step": "none", "eta": 0.5}}
    found = resolve(load_config(tree), pairs_dataset)[0].objective.settings
    assert "tau_step" not in found
    assert found["eta"] == 0.5


@pytest.mark.parametrize(
    ("tree", "words"),
    [({"objective": {"name": "simclr"}, "model": {"momentum": 0.9}},
      "model.momentum = 0.9: objective 'simclr' takes no keys"),
     ({"model": {"momentum": 0.9}}, "objective 'isogclr' takes no keys .* in mode bimodal; unimodal: auc_cl"),
     ({"objective": {"name": "moco_v3"}}, r"model.momentum = 0 \(set 0.99, say\): objective 'moco_v3' needs the keys"),
     ({"objective": {"name": "sogclr", "mode": "unimodal"}, "data": {"local_views": 2}},
      "^data.local_views = 2: objective 'sogclr' takes no local views"),
     ({"objective": {"name": "auc_cl", "views": "all"}, "model": {"momentum": 0.9}}, "views")],
)  # fmt: skip
def test_a_frame_that_the_objective_does_not_take_is_refused_by_its_settings(pairs_dataset, tree, words):
    tree = tree | {"data": {"path": str(pairs_dataset.path), **tree.get("data", {})}}
    with pytest.raises(ConfigError, match=words) as refused:
        resolve(load_config(tree), pairs_dataset)[0]
    assert "\n" not in str(refused.value)


def test_a_run_keeps_its_loader_and_speed_settings_on_a_machine_of_another_kind(pairs_dataset, gpu):
    with gpu():
        begun = settings(pairs_dataset, device="auto", loader="dali")
    resumed = resolve(begun, pairs_dataset)[0]
    assert differences(begun, resumed) == []
    assert not first_batch(resumed, pairs_dataset).views[0].is_cuda


def test_a_run_trains_alike_with_either_loader(pairs_dataset, tmp_path):
    losses = []
    for loader in ("ffcv", "dali"):
        run = RunDirectory(tmp_path / loader)
        with Trainer.open(settings(pairs_dataset, loader=loader), run) as trainer:
            trainer.train(lambda report: losses.append(report.loss))
        assert run.config().data.loader == loader
    assert len(losses) == 2
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert losses[0] != losses[1]  # not the same loader twice


# Speed


def speed(config):
    return (
        config.precision,
        config.channels_last,
        config.objective.settings["similarity_budget"],
        config.objective.settings["precision"],
    )


def test_a_gpu_computes_fast_by_default_and_a_cpu_exactly(pairs_dataset, gpu):
    with gpu():
        assert speed(settings(pairs_dataset, device="auto")) == ("bf16", True, 2**32, "tf32")
    with gpu(bf16=False):
        assert speed(settings(pairs_dataset, device="auto")) == ("float32", True, 2**32, "float32")
    assert speed(settings(pairs_dataset)) == ("float32", False, 2**28, "float32")


def test_what_is_set_stays_on_a_gpu(pairs_dataset, gpu):
    tree = {
        "precision": "float32", "channels_last": False, "device": "cuda", "batch_size": 256,
        "data": {"path": str(pairs_dataset.path)}, "objective": {"similarity_budget": 2**20, "precision": "tf32"},
    }  # fmt: skip
    with gpu():
        assert speed(resolve(load_config(tree), pairs_dataset)[0]) == ("float32", False, 2**20, "tf32")


@pytest.mark.parametrize(("precision", "products"), [("tf32", "tf32"), ("fp16", "tf32"), ("float32", "float32")])
def test_an_objective_s_products_are_in_tf32_where_a_gpu_s_encoders_compute_below_float32(
    precision, products, pairs_dataset, gpu
):
    with gpu():
        begun = settings(pairs_dataset, device="cuda")
        encoders = begun.model_copy(update={"precision": precision, "objective": load_config({}).objective})
        assert speed(resolve(encoders, pairs_dataset)[0])[::3] == (precision, products)


def test_a_run_from_before_its_products_had_a_precision_keeps_float32(pairs_dataset, gpu, tmp_path):
    with gpu():
        tree = to_tree(settings(pairs_dataset, device="auto"))
        assert tree["objective"].pop("precision") == "tf32"
        (tmp_path / "config.toml").write_text(tomli_w.dumps(tree))
        for recorded in (RunDirectory(tmp_path).config(edited="accept"), settings_at(tmp_path, tree)):
            assert speed(resolve(recorded, pairs_dataset)[0]) == ("bf16", True, 2**32, "float32")


def test_a_gpu_s_similarities_are_weighed_in_compiled_code_where_torch_can_compile(pairs_dataset, gpu, monkeypatch):
    def is_compiled(**given):
        return settings(pairs_dataset, **given).objective.settings["compile"]

    assert not is_compiled()
    with gpu():
        monkeypatch.setattr(precision, "compile_for_each_shape", lambda operations: lambda values: values)
        monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.ones(shape))  # on the GPU that is not there
        assert is_compiled(device="cuda")
        monkeypatch.setattr(precision, "compile_for_each_shape", no_compiler)
        assert not is_compiled(device="cuda")


def no_compiler(operations):
    """Raise an error as torch does."""
    error = RuntimeError("backend='inductor' raised:\n...")
    error.inner_exception = RuntimeError("Cannot find a working triton installation.\nMore information: ...")
    raise error


def compiled(dataset):
    """A run's settings with an objective that is compiled."""
    config = settings(dataset)
    return config.model_copy(update={"objective": config.objective.model_copy(update={"compile": True})})


def test_an_objective_whose_batches_differ_in_size_is_not_compiled(pairs_dataset):
    config = compiled(pairs_dataset)
    with_holes = config.model_copy(update={"data": config.data.model_copy(update={"without": "/gone.parquet"})})
    assert objective_of(config).settings.compile
    assert not objective_of(with_holes).settings.compile


def test_compiled_code_is_kept_where_no_other_user_can_plant_some(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for chosen, expected in ((None, str(tmp_path / "thermopile" / "torch")), ("/mine", "/mine")):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if chosen:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
        precision.keep_compiled_code_at_home()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == expected


def test_a_run_whose_code_was_compiled_is_told_what_to_do_where_torch_cannot(pairs_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "compile_for_each_shape", no_compiler)
    with pytest.raises(
        ConfigError, match=r"^objective.compile: .* \(Cannot find a working triton installation.\); ins"
    ):
        Trainer.open(compiled(pairs_dataset), RunDirectory(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# The recipe


def test_every_recipe_may_be_named(pairs_dataset):
    for name in RECIPES:
        assert settings(pairs_dataset, recipe=name).data.recipe == name


def test_an_unknown_recipe_is_refused_with_those_there_are(pairs_dataset):
    with pytest.raises(ConfigError, match=r"data\.recipe = 'simcrl' is unknown; available: auto, clip, .*simclr, "):
        settings(pairs_dataset, recipe="simcrl")


def test_fields_of_a_recipe_may_be_changed_and_one_number_is_both(pairs_dataset):
    resolved = settings(pairs_dataset, recipe={"blur": 0.5, "flip": "none"})
    assert (resolved.data.recipe.name, resolved.data.recipe.fields) == ("clip", {"blur": 0.5})
    assert recipe_named(resolved.data.recipe) == RECIPES["clip"].model_copy(update={"blur": (0.5, 0.5)})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"blurr": 1}, r"data\.recipe has no field 'blurr' \(did you mean 'blur'\?\); it has scale, "),
        ({"blur": [0.1, 0.2, 0.3]}, r"data\.recipe\.blur: Tuple should have at most 2 items"),
        ({"scale": 2.0}, r"data\.recipe: scale \(2\.0, 2\.0\) is not 0 < from <= to <= 1"),
    ],
)
def test_a_field_of_a_recipe_that_there_is_not_or_out_of_range_is_refused(pairs_dataset, fields, said):
    with pytest.raises(ConfigError, match=said):
        settings(pairs_dataset, recipe=fields)


# An augmentation of one's own


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Importable as `own`."""
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "from numba import njit\n"
        "from thermopile.pipeline.rng import uniform\n\n"
        "@njit(nogil=True)\n"
        "def negative(pixels, key):\n"
        "    if uniform(key, np.uint64(1000)) < 0.5:\n"
        "        pixels[:] = 255 - pixels\n\n"
        "@njit\n"
        "def of_text(pixels, key):\n"
        "    pixels[:] = key.upper()\n\n"
        "@njit\n"
        "def of_three(pixels, key, strength):\n"
        "    pixels[:] = strength\n\n"
        "def plain(pixels, key):\n"
        "    pixels[:] = 0\n"
    )
    (tmp_path / "broken.py").write_text("raise ValueError('no blur')\n")
    (tmp_path / "hasty.py").write_text("import absent\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.wide
def test_an_augmentation_of_ones_own_changes_the_views_that_it_chooses(own_module, pairs_dataset):
    plain, own = (
        first_batch(settings(pairs_dataset, augmentation=name), pairs_dataset) for name in ("", "own:negative")
    )
    recipe = RECIPES["clip"]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (recipe.mean, recipe.std))
    negative = ((1 - (plain.views[0] * std + mean)) - mean) / std
    is_negative = (own.views[0] - negative).abs().amax((1, 2, 3)) < 1e-4
    is_plain = (own.views[0] - plain.views[0]).abs().amax((1, 2, 3)) < 1e-4
    assert (is_negative ^ is_plain).all()
    assert 0.3 < is_negative.double().mean() < 0.7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:negative", r"'nowhere:negative' cannot be imported: ModuleNotFoundError: .*PYTHONPATH"),
        ("own:positive", r"'own:positive' is not in .*own\.py, which has no 'positive'"),
        (
            "broken:plain",
            r"'broken:plain' cannot be used, since the module broken ends with an error: ValueError: no blur$",
        ),
        (
            "hasty:plain",
            r"'hasty:plain' cannot be used, since the module hasty .*No module named 'absent'$",
        ),
        ("own", r"'own' is not module:name\. Write module:name"),
        ("own:plain", r"'own:plain' is not compiled; decorate it with numba\.njit"),
        (
            "own:of_three",
            r"'own:of_three' does not compile for \(pixels float32 \[3, H, W\], key uint64\): .* takes 3 arguments",
        ),
        ("own:of_text", r"'own:of_text' does not compile for .*upper"),
    ],
)
def test_an_augmentation_that_cannot_be_used_is_refused_before_a_run_begins(
    own_module, pairs_dataset, tmp_path, name, message
):
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"(?s)data\.augmentation = " + message):
        Trainer.open(settings(pairs_dataset, augmentation=name), run)
    assert not run.path.exists()


@pytest.mark.parametrize("loader", ["dali", "synthetic"])
def test_another_loader_than_ffcv_with_an_augmentation_of_ones_own_is_refused(pairs_dataset, loader):
    with pytest.raises(ConfigError, match=rf"data: augmentation 'own:negative' .* '{loader}' cannot run; use loader"):
        settings(pairs_dataset, loader=loader, augmentation="own:negative")


# Local views


@pytest.mark.parametrize("loader", ["ffcv", "dali", "synthetic"])
def test_local_views_are_as_many_and_as_large_as_asked_for(images_dataset, loader):
    config = settings(images_dataset, objective="simclr", loader=loader, recipe="glyphs", local_views=3, local_size=16)
    batch = first_batch(config, images_dataset)
    assert [view.shape for view in batch.views] == [(256, 3, 32, 32)] * 2
    assert [view.shape for view in batch.to(CPU).local] == [(256, 3, 16, 16)] * 3
    assert first_batch(settings(images_dataset, loader=loader), images_dataset).local == ()


@pytest.mark.parametrize(("name", "value"), [("local_views", -1), ("local_views", 65), ("local_size", 7)])
def test_a_number_or_side_of_local_views_that_cannot_be_is_refused(images_dataset, name, value):
    with pytest.raises(ConfigError, match=rf"data\.{name}"):
        settings(images_dataset, **{name: value})


# The warm-up


@pytest.mark.parametrize(
    ("run", "steps"),
    [({"epochs": 2}, 1), ({"epochs": 30}, 21), ({"epochs": 30, "steps": 55}, 5), ({"epochs": 400}, 200),
     ({"epochs": 2, "optimizer": {"warmup": 200}}, 200), ({"epochs": 2, "optimizer": {"warmup": "1 epoch"}}, "1 epoch"),
     ({"epochs": 2, "optimizer": {"warmup": "none"}}, 1)],
)  # fmt: skip
def test_a_warm_up_that_is_not_set_takes_200_steps_or_a_tenth_of_the_run(pairs_dataset, run, steps):
    assert small(pairs_dataset, **run).optimizer.warmup == steps  # 7 steps an epoch


def test_a_resumed_run_keeps_the_warm_up_that_it_recorded(pairs_dataset):
    for recorded in (small(pairs_dataset, optimizer={"warmup": 200}), small(pairs_dataset)):
        layers = merge(recorded, Layers({"epochs": 300}, {"epochs": "settings"}), Path("config.toml"))
        longer, _ = resolve(load_config(layers.tree), pairs_dataset)
        changes = compare(Path("run"), recorded, longer, ["epochs"])
        assert [change.key for change in changes] == ["epochs"]


@pytest.mark.parametrize(("warmup", "is_told"), [({"warmup": 14}, True), ({"warmup": 13}, False),
                                                 ({"warmup": "2 epochs"}, True), ({}, False)])  # fmt: skip
def test_a_run_that_ends_within_its_warm_up_is_told_so(pairs_dataset, tmp_path, warmup, is_told):
    with Trainer.open(small(pairs_dataset, optimizer=warmup), RunDirectory(tmp_path / "run")) as trainer:
        said = [advice for advice in trainer.advice() if "within its warm-up of 14" in advice]
    assert bool(said) == is_told
