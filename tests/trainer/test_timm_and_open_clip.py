"""Encoders of timm and open_clip: trained, resumed, scored, and exported for their library, which gives the same."""

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from thermopile.pipeline.dataset.tokenizer import encode, load_tokenizer
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.config import load_config
from thermopile.trainer.config.layers import merge, preset_names, read_preset
from thermopile.trainer.dry_run import dry_run
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.encoders.locking import lock_advice
from thermopile.trainer.encoders.synced_batch_norm import SyncedBatchNorm, synchronise_batch_norms
from thermopile.trainer.errors import ConfigError, RunError
from thermopile.trainer.evaluation.evaluate import tokenizer_of
from thermopile.trainer.evaluation.features import restore_encoders
from thermopile.trainer.export import export_encoders
from thermopile.trainer.plugins import code_in
from thermopile.trainer.run.build import recipe_named, resolve
from thermopile.trainer.run.chosen_settings import choices_of
from thermopile.trainer.run_directory import RunDirectory

from support import torchvision_operators  # noqa: F401
from support.cli import cli, sets, succeed
from support.runs import OFTEN, assert_same_run, resumed, stopped, train

open_clip, timm = pytest.importorskip("open_clip"), pytest.importorskip("timm")

VIT = {"name": "timm:vit_small_patch16_224", "config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8,
                                                        "attn_drop_rate": 0.1}}  # fmt: skip
CONVNEXT = {"name": "timm:convnext_atto", "config": {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]}}
RESNET = {"name": "timm:resnet18", "config": {"channels": [4, 4, 8, 8], "layers": [1, 1, 1, 1], "stem_width": 4}}
VISUAL = {"name": "open_clip:ViT-B-32", "config": {"embed_dim": 16, "layers": 2, "width": 32, "head_width": 16,
                                                   "patch_size": 8}}  # fmt: skip
WORDS = {"name": "open_clip:ViT-B-32", "config": {"embed_dim": 16, "layers": 2, "width": 32, "heads": 2}}
MEAN = {"name": "mean_embedding", "config": {"width": 8}}
PAIR = {"dim": 16, "head": "none", "image": VISUAL, "text": WORDS}
PIXELS = torch.linspace(-2, 2, 4 * 3 * 32 * 32).view(4, 3, 32, 32)


def settings(dataset, model, **more):
    tree = {} if "steps" in more else {"epochs": 1}
    tree |= {"batch_size": 250, "log_every": 1, "data": {"path": str(dataset.path), "image_size": 32},
            "model": {"dim": 16} | model}  # fmt: skip
    return resolve(load_config(tree | more), dataset)[0]


def restored(run):
    """The encoders of a run's last checkpoint."""
    checkpoint = latest_checkpoint(run.checkpoints)
    _, training = load_checkpoint(checkpoint)
    config = run.config()
    sizes = tokenizer_of(run)[1] if config.objective.mode == "bimodal" else None
    return restore_encoders(config, checkpoint, training, sizes)


def tokens_of(dataset):
    return torch.from_numpy(dataset.shard(0).tokens(np.arange(20)))


@torch.no_grad()
def assert_timm_gives_the_features(run, folder):
    export_encoders(run, folder, "timm")
    model = timm.create_model(f"local-dir:{folder}/image", pretrained=True).eval()
    encoder, head = restored(run).image, load_file(folder / "image/head.safetensors")
    torch.testing.assert_close(model(PIXELS), encoder.backbone(PIXELS), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        F.linear(model(PIXELS), head["weight"], head["bias"]), encoder(PIXELS), atol=1e-5, rtol=0
    )
    data, recipe = timm.data.resolve_model_data_config(model), run.config().data.recipe
    assert (tuple(data["input_size"]), data["crop_pct"], recipe) == ((3, 32, 32), 1.0, "clip")
    assert tuple(data["mean"]) == open_clip.OPENAI_DATASET_MEAN


@torch.no_grad()
def assert_open_clip_gives_the_features(run, dataset, folder):
    export_encoders(run, folder, "open_clip")
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    tokens, encoders = tokens_of(dataset), restored(run)
    for theirs, ours in ((model.encode_image(PIXELS), encoders.image(PIXELS)),
                         (model.encode_text(tokens), encoders.text(tokens))):  # fmt: skip
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    captions = dataset.column("caption").to_pylist()[:20]
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{folder}")(captions), tokens.long())


def test_a_vit_of_timm_resumes_bit_for_bit_and_timm_loads_its_export(pairs_dataset, tmp_path):
    config = settings(pairs_dataset, {"image": VIT, "text": MEAN}, checkpoint=OFTEN["checkpoint"])
    whole = train(config, tmp_path / "whole")
    assert_same_run(resumed(config, stopped(config, tmp_path / "run", 5), from_step=4), whole)
    assert_timm_gives_the_features(whole, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"image", "text.safetensors", "tokenizer.json"}


@pytest.mark.wide
@pytest.mark.parametrize("image", [CONVNEXT, RESNET], ids=["convnext", "resnet"])
def test_convolutions_of_timm_resume_bit_for_bit_and_timm_loads_their_export(image, pairs_dataset, tmp_path):
    model = {"image": image, "text": MEAN, "activation_checkpointing": True}
    config = settings(pairs_dataset, model, checkpoint=OFTEN["checkpoint"])
    whole = train(config, tmp_path / "whole")
    assert_same_run(resumed(config, stopped(config, tmp_path / "run", 5), from_step=4), whole)
    assert_timm_gives_the_features(whole, tmp_path / "out")


@pytest.mark.wide
@pytest.mark.parametrize("recompute", [False, True])
def test_the_towers_of_open_clip_resume_bit_for_bit_and_open_clip_loads_their_export(
    recompute, pairs_dataset, tmp_path
):
    config = settings(pairs_dataset, PAIR | {"activation_checkpointing": recompute}, checkpoint=OFTEN["checkpoint"])
    whole = train(config, tmp_path / "whole")
    assert_same_run(resumed(config, stopped(config, tmp_path / "run", 5), from_step=4), whole)
    assert_open_clip_gives_the_features(whole, pairs_dataset, tmp_path / "out")


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in preset_names() if name.endswith("-open_clip")])
def test_a_preset_with_open_clips_towers_has_their_dimension_and_its_export_loads_as_datacomps_evaluator_does(
    name, pairs_dataset, tmp_path
):
    tree = read_preset(name)
    tower = tree["model"]["image"]["name"].removeprefix("open_clip:")
    architecture = open_clip.get_model_config(tower)
    assert (tree["model"]["dim"], tree["data"]["image_size"]) == (
        architecture["embed_dim"], architecture["vision_cfg"]["image_size"]
    )  # fmt: skip
    smaller = {"layers": [1, 1, 1, 1], "width": 8} if "RN" in tower else {"layers": 2, "width": 32, "head_width": 16}
    model = {"dim": 16, "image": {"config": {"embed_dim": 16} | smaller}, "text": {"config": WORDS["config"]}}
    merge(tree, {"batch_size": 16, "steps": 10, "data": {"image_size": 32}, "model": model})
    merge(tree, {"data": {"path": str(pairs_dataset.path)}})
    run = train(resolve(load_config(tree), pairs_dataset)[0], tmp_path / "run")
    assert_open_clip_gives_the_features(run, pairs_dataset, tmp_path / "out")
    # eval_utils/wds_eval.py gives the weights' path beside the architecture, scale_config.model.
    weights, place = tmp_path / "out/open_clip_model.safetensors", f"local-dir:{tmp_path / 'out'}"
    model, _, _ = open_clip.create_model_and_transforms(place, pretrained=str(weights))
    assert torch.equal(model.state_dict()["text.text_projection"], load_file(weights)["text.text_projection"])


@pytest.mark.wide
def test_from_the_command_line_to_scores_and_files(pairs_dataset, tmp_path):
    words = sets("epochs=1", "batch_size=500", "data.image_size=32", "model.dim=16", "model.head=none",
                 *(f"model.image.{key}" for key in ("name=open_clip:ViT-B-32", "config.embed_dim=16", "config.layers=1",
                                                    "config.width=32", "config.head_width=16", "config.patch_size=8")),
                 *(f"model.text.{key}" for key in ("name=open_clip:ViT-B-32", "config.embed_dim=16", "config.layers=1",
                                                   "config.width=32", "config.heads=2")))  # fmt: skip
    run = tmp_path / "run"
    dry = succeed("train", "--data", pairs_dataset.path, "--out", run, *words, "--dry-run").stdout
    assert "open_clip or safetensors" in dry
    assert "open_clip:ViT-B-32" in succeed("train", "--data", pairs_dataset.path, *words, "--print-config").stdout
    said = succeed("train", "--data", pairs_dataset.path, "--out", run, *words)  # not code: no --allow-code
    assert "imports" not in said.stderr
    scores = succeed("eval", run, "--train", pairs_dataset.path, "--test", pairs_dataset.path, "--json")
    assert "image_to_text" in scores.stdout
    files = succeed("export", run, "--to", tmp_path / "out", "--format", "open_clip").stdout.split()
    assert [path.rpartition("/")[2] for path in files] == [
        "README.md", "open_clip_config.json", "open_clip_model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    refused = cli("export", run, "--to", tmp_path / "other", "--format", "timm")
    assert (refused.exit_code, "which timm does not have; export it with --format safetensors" in refused.stderr) == (
        2,
        True,
    )


def create(image, text=None, *, pretrained=True, dataset=None, **model):
    config = load_config({"model": {"dim": 16, "image": image} | ({"text": text} if text else {}) | model}).model
    tokenizer = dataset and dataset.index.tokenizer
    return Encoders.create(config, "bimodal" if text else "unimodal", 32, tokenizer, pretrained=pretrained)


@pytest.mark.parametrize(
    ("image", "said"),
    [({"name": "timm:no_such"}, "timm has no such model"),
     ({"name": "timm:hf-hub:someone/else"}, "timm has no such model"),
     ({"name": "timm:local-dir:/tmp"}, "timm has no such model"),
     ({"name": "timm:resnet18", "config": {"checkpoint_path": "x.pt"}}, "config.checkpoint_path is not for a run"),
     ({"name": "timm:resnet18", "config": {"no": 1}}, "cannot be created: .*unexpected keyword argument 'no'"),
     ({"name": "open_clip:hf-hub:someone/else"}, "open_clip has no such pair"),
     ({"name": "open_clip:coca_ViT-B-32"}, "open_clip has no such pair"),
     ({"name": "open_clip:ViT-B-32", "config": {"timm_model_name": "x"}}, "config.timm_model_name is not for a run"),
     ({"name": "open_clip:ViT-B-32:model.pt"}, r"are a .safetensors file \(others may run code\) or one of: openai"),
     ({"name": "open_clip:ViTamin-S:datacomp1b"}, r"are a .safetensors file \(.*\) or one of: none"),
     (VISUAL | {"name": "open_clip:ViT-B-32:./no.safetensors"}, "cannot be created: No such file"),
     (VISUAL | {"name": "open_clip:ViT-B-32"}, r"head = 'none' keeps the image encoder's features; set model.dim=16$"),
     ({"name": "timm:test_vit.r160_in1k", "config": {"pretrained": True}}, "cannot be created: .*on the Hub")],
)  # fmt: skip
def test_what_cannot_be_used_is_told_in_one_line(image, said):
    with pytest.raises(ConfigError, match=said) as refused:
        create(image, dim=20, head="none")
    assert "\n" not in str(refused.value)


def test_only_encoders_names_are_of_the_libraries_and_others_are_a_users_code():
    for name in ("timm:resnet18", "open_clip:ViT-B-32"):
        tree = {
            "data": {"augmentation": name, "recipe": name},
            "model": {"image": {"name": name}, "text": {"name": name}},
        }
        assert code_in(load_config(tree)) == {"data.augmentation": name, "data.recipe": name}


def test_timm_has_no_text_encoders(pairs_dataset):
    with pytest.raises(ConfigError, match=r"model.text.name = 'timm:create_model': unknown encoder; available: mean"):
        create(RESNET, {"name": "timm:create_model"}, dataset=pairs_dataset)


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    for package, image in (("timm", VIT), ("open_clip", VISUAL)):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=rf"import of {package} halted.*; pip install 'thermopile\[{package}\]'"):
            create(image)


def test_a_tower_reads_a_text_up_to_its_first_end_token(pairs_dataset):
    text, end = (
        create(VISUAL, WORDS, dataset=pairs_dataset, head="none").text.eval(),
        pairs_dataset.index.tokenizer.end_id,
    )
    tokens = tokens_of(pairs_dataset)
    place = (tokens == end).int().argmax(1)[:, None]
    after = torch.arange(tokens.shape[1]) > place
    assert after.any()
    torch.testing.assert_close(text(tokens.where(~after, 7)), text(tokens))
    assert not torch.allclose(text(tokens.where(torch.arange(tokens.shape[1]) >= place, 7)), text(tokens), atol=1e-3)


@pytest.mark.parametrize("side", ["image", "text"])
def test_groups_are_layers_from_the_stem_to_the_projection(side, pairs_dataset):
    encoders = create(VISUAL, WORDS, dataset=pairs_dataset, head="none")
    encoder = getattr(encoders, side)
    stem, _, last_block, projection = encoder.groups()
    ends = {
        "image": ("class_embedding", "ln_post", "proj"),
        "text": ("positional_embedding", "ln_final", "text_projection"),
    }
    for group, name in zip((stem, last_block, projection), ends[side], strict=True):
        weights = [*encoder.backbone.body.get_submodule(name).parameters()] if name.startswith("ln") else [
            getattr(encoder.backbone.body, name)]  # fmt: skip
        assert {id(each) for each in weights} <= {id(each) for each in group.parameters()}
    assert sum(len([*group.parameters()]) for group in encoder.groups()) == len([*encoder.parameters()])
    encoder.lock(1)
    assert [weights.requires_grad for weights in encoder.parameters()].count(True) == 1


def test_a_locked_timm_model_keeps_dropout_off_and_its_statistics():
    encoder = create(RESNET).image
    encoder.lock(2)  # the head, and the last stage
    assert len(encoder.groups()) == 6
    before = {name: values.clone() for name, values in encoder.named_buffers()}
    encoder.train()(PIXELS)
    changed = {name.split(".")[2] for name, values in encoder.named_buffers() if not values.equal(before[name])}
    assert changed == {"layer4"}
    vit = create(VIT).image
    vit.lock(2)
    assert [block.attn.training for block in vit.backbone.body.blocks] == [False, True]


def test_local_views_of_a_size_that_the_model_does_not_take_are_refused():
    with pytest.raises(ConfigError, match=r"fails on float32 \[2, 3, 24, 24\]: .*doesn't match model"):
        create(VIT).image.backbone.check_side(24)
    create(VIT | {"config": VIT["config"] | {"dynamic_img_size": True}}).image.backbone.check_side(24)


def published(monkeypatch, folder, repository, name, tensors):
    """Put a file into the hub's cache, as if it had been fetched from the repository."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    snapshot = folder / f"models--{repository.replace('/', '--')}" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    save_file(tensors, snapshot / name)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("main")


def test_timms_weights_are_those_of_the_hubs_safetensors_and_only_a_new_run_fetches_them(
    images_dataset, tmp_path, monkeypatch
):
    weights = timm.create_model("test_vit", img_size=32, num_classes=0).state_dict()
    published(monkeypatch, tmp_path / "hub", "timm/test_vit.r160_in1k", "model.safetensors", weights)
    image = {"name": "timm:test_vit.r160_in1k", "config": {"pretrained": True}}
    assert torch.equal(create(image).image.backbone.body.norm.weight, weights["norm.weight"])
    first = create(image).image.backbone.body.blocks[0].attn.qkv.weight
    assert torch.equal(first, weights["blocks.0.attn.qkv.weight"])
    assert not torch.equal(create(image, pretrained=False).image.backbone.body.blocks[0].attn.qkv.weight, first)
    config = settings(images_dataset, {"image": image}, batch_size=50, checkpoint={"every_steps": 2})
    with dry_run(config, RunDirectory(tmp_path / "run")) as dry:
        assert all(each.is_meta for each in dry.run.encoders.parameters())
    run = stopped(config, tmp_path / "run", 3)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    resumed(config, run, from_step=2)  # from the checkpoint
    for checkpoint in run.checkpoints.iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    with pytest.raises(RunError, match=r"would fetch timm:test_vit.r160_in1k; begin .* --set model.image.name=timm:"):
        train(config, run, resume=True)


def test_open_clips_weights_come_from_a_file_or_the_hub_whatever_the_size_of_the_pictures(
    pairs_dataset, tmp_path, monkeypatch
):
    tokenizer = pairs_dataset.index.tokenizer
    sizes = {"vocab_size": tokenizer.vocab_size, "context_length": tokenizer.context_length}
    pair = open_clip.get_model_config("ViT-B-32")
    pair["embed_dim"] = 16
    pair["vision_cfg"] |= VISUAL["config"] | {"image_size": 64}
    pair["vision_cfg"].pop("embed_dim")
    pair["text_cfg"] |= {key: value for key, value in WORDS["config"].items() if key != "embed_dim"} | sizes
    model = open_clip.CLIP(**pair)
    file = tmp_path / "pair.safetensors"
    weights = {name: values.contiguous() for name, values in model.state_dict().items()}
    save_file(weights, file)
    published(
        monkeypatch, tmp_path / "hub", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "open_clip_model.safetensors", weights
    )
    for source in (str(file), "laion2b_s34b_b79k"):
        image, text = (VISUAL | {"name": f"open_clip:ViT-B-32:{source}"},
                       WORDS | {"name": f"open_clip:ViT-B-32:{source}", "config": WORDS["config"] | sizes})  # fmt: skip
        encoders = create(image, text, dataset=pairs_dataset, head="none").eval()
        assert torch.equal(encoders.image.backbone.body.proj, model.visual.proj)
        assert encoders.image(PIXELS).shape == (4, 16)  # of 32 pixels: its positions are interpolated
        assert torch.equal(encoders.text.backbone.body.token_embedding.weight, model.token_embedding.weight)
    said = (r"has 49,408 tokens and captions of 77, the dataset [\d,]+ and \d+: convert it with --tokenizer "
            r".*clip-vit-base-patch32\) and --context-length 77")  # fmt: skip
    with pytest.raises(ConfigError, match=said):
        create(VISUAL, WORDS | {"name": f"open_clip:ViT-B-32:{file}"}, dataset=pairs_dataset, head="none")


def test_published_weights_get_pixels_normalised_as_they_were_trained(images_dataset, pairs_dataset):
    def normalisation(dataset, name, **config):
        recipe = recipe_named(settings(dataset, {"image": {"name": name, "config": config}}).data.recipe)
        return (*recipe.mean, *recipe.std)

    assert normalisation(images_dataset, "timm:vit_base_patch16_224", pretrained=True) == (0.5,) * 6
    assert normalisation(pairs_dataset, "open_clip:ViT-B-16-SigLIP:webli") == (0.5,) * 6
    assert normalisation(pairs_dataset, "open_clip:MobileCLIP-B:datacompdr") == (0, 0, 0, 1, 1, 1)
    fresh = normalisation(images_dataset, "timm:vit_base_patch16_224")
    assert fresh == normalisation(images_dataset, "timm:no_such.tag", pretrained=True) != (0.5,) * 6


def test_a_locked_encoder_with_fetched_weights_is_not_warned_of(images_dataset):
    def advice(name, **config):
        locked = {"name": name, "config": config, "locked": True, "unlocked_groups": 1}
        return lock_advice(load_config({"model": {"image": locked}, "objective": {"mode": "unimodal"}}))

    assert advice("open_clip:ViT-B-32:openai") == advice("timm:resnet18", pretrained=True) == []
    assert advice("timm:resnet18:/anywhere/model.safetensors") == []
    for name in ("open_clip:ViT-B-32", "timm:resnet18"):
        assert "at random weights" in advice(name)[0]


def test_norms_over_all_ranks_keep_the_activations_of_timms_norms():
    encoder = create({"name": "timm:test_efficientnet"}).image.eval()
    expected = encoder(PIXELS)
    synchronise_batch_norms(encoder)
    assert all(isinstance(each, SyncedBatchNorm) for each in encoder.modules() if isinstance(each, _BatchNorm))
    torch.testing.assert_close(encoder(PIXELS), expected)


def words_of(dataset, **more):
    """WORDS with the tokens of a dataset, as a file's tower must have them."""
    tokenizer = dataset.index.tokenizer
    return WORDS["config"] | {"vocab_size": tokenizer.vocab_size, "context_length": tokenizer.context_length} | more


def saved_pair(dataset, folder, **learned):
    """Write a pair as open_clip saves it, with a learned scale and perhaps a bias; return settings of its towers."""
    pair = open_clip.get_model_config("ViT-B-32") | {"embed_dim": 16}
    pair["vision_cfg"] |= {"image_size": 32} | {
        key: value for key, value in VISUAL["config"].items() if key != "embed_dim"
    }
    pair["text_cfg"] |= {key: value for key, value in words_of(dataset).items() if key != "embed_dim"}
    bias = {"init_logit_bias": learned["logit_bias"]} if "logit_bias" in learned else {}
    model = open_clip.CLIP(**pair, init_logit_scale=learned["logit_scale"], **bias)
    open_clip.model.set_model_preprocess_cfg(model, asdict(open_clip.transform.PreprocessCfg(size=32)))
    sys.modules["open_clip.push_to_hf_hub"].save_for_hf(
        model, SimpleNamespace(save_pretrained=str), pair | bias, folder, safe_serialization=True
    )
    name = f"open_clip:ViT-B-32:{folder}/open_clip_model.safetensors"
    return {"dim": 16, "head": "none", "image": VISUAL | {"name": name},
            "text": {"name": name, "config": words_of(dataset)}}  # fmt: skip


@torch.no_grad()
def assert_open_clip_gives_the_probabilities(run, dataset, folder):
    """open_clip alone reads picture files and texts; the run's own features and temperature give the others."""
    export_encoders(run, folder, "open_clip")
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    encoders, tokens = restored(run), tokens_of(dataset)
    image, text, scale, *bias = model.eval()(PIXELS, tokens)
    learned = load_checkpoint(latest_checkpoint(run.checkpoints))[1].get("objective", {})
    ours = F.normalize(encoders.image(PIXELS)) @ F.normalize(encoders.text(tokens)).T
    settings = run.config().objective.settings
    tau = learned.get("tau", settings.get("tau_init", settings.get("tau")))
    if "log_tau" in learned:
        tau = learned["log_tau"].exp()
    ours = ours * (learned["log_logit_scale"].exp() if "log_logit_scale" in learned else 1 / tau)
    theirs = scale * image @ text.T
    if bias:
        theirs, ours = theirs + bias[0], ours + learned.get("logit_bias", bias[0])
    torch.testing.assert_close(theirs.softmax(1), ours.softmax(1), atol=1e-4, rtol=0)
    torch.testing.assert_close(theirs.sigmoid(), ours.sigmoid(), atol=1e-4, rtol=0)
    recipe = recipe_named(run.config().data.recipe)
    assert (tuple(preprocess.transforms[-1].mean), tuple(preprocess.transforms[-1].std)) == (recipe.mean, recipe.std)
    return model


@pytest.mark.parametrize(
    ("objective", "setting", "begins"),
    [("clip", "log_logit_scale", 4.6), ("siglip", "log_logit_scale", 4.6), ("isogclr", "tau_init", 0.01005),
     pytest.param("fastclip_v3", "tau", 0.01005, marks=pytest.mark.wide),
     pytest.param("fastclip_v0", "tau", 0.01005, marks=pytest.mark.wide),
     pytest.param("fastclip_v2", "tau_init", 0.01005, marks=pytest.mark.wide)],
)  # fmt: skip
def test_a_pair_of_open_clip_begins_at_its_temperature_and_is_exported_with_the_runs(
    objective, setting, begins, pairs_dataset, tmp_path
):
    learned = {"logit_scale": 4.6} | ({"logit_bias": -3.0} if objective == "siglip" else {})
    model = saved_pair(pairs_dataset, tmp_path / "model", **learned)
    lowest = {"tau_min": 0.001} if "tau" in setting else {}
    more = {"steps": 2, "objective": {"name": objective} | lowest}
    config = settings(pairs_dataset, model, **more)
    assert config.objective.settings[setting] == pytest.approx(begins, abs=1e-5)
    assert config.objective.settings.get("logit_bias") == learned.get("logit_bias")
    said = choices_of(load_config(more | {"model": model}), config, pairs_dataset)
    assert any(line.startswith(f"objective.{setting} = ") and "as the model had learned it" in line for line in said)
    run = train(config, tmp_path / "run")
    exported = assert_open_clip_gives_the_probabilities(run, pairs_dataset, tmp_path / "out")
    assert (exported.logit_bias is None) == (objective != "siglip")
    resumed_settings = run.config().objective.settings  # are not read from the file again
    (tmp_path / "model").rename(tmp_path / "gone")
    again = settings(pairs_dataset, model, **more | {"objective": {"name": objective} | resumed_settings})
    assert again.objective.settings[setting] == resumed_settings[setting]


def test_a_pair_of_open_clip_scores_pairs_at_its_own_temperature(pairs_dataset, tmp_path):
    model = saved_pair(pairs_dataset, tmp_path / "model", logit_scale=3.0)
    chosen = [f"model.{side}.config.{key}={json.dumps(value)}"
              for side in ("image", "text") for key, value in model[side]["config"].items()]  # fmt: skip
    succeed("score", pairs_dataset.path, "--model", model["image"]["name"], "--out", tmp_path / "run", "--batches", 2,
            *sets("model.dim=16", "data.image_size=32", *chosen))  # fmt: skip
    run = RunDirectory(tmp_path / "run")
    assert run.config().objective.settings["tau"] == pytest.approx(np.exp(-3.0))
    assert_open_clip_gives_the_features(run, pairs_dataset, tmp_path / "out")


def test_a_bias_that_the_objective_does_not_learn_stays_that_of_the_file(pairs_dataset, tmp_path):
    model = saved_pair(pairs_dataset, tmp_path / "model", logit_scale=2.0, logit_bias=-3.0)
    config = settings(pairs_dataset, model, steps=1, objective={"name": "clip"})
    assert assert_open_clip_gives_the_probabilities(
        train(config, tmp_path / "run"), pairs_dataset, tmp_path / "out"
    ).logit_bias.item() == -3.0  # fmt: skip


def test_without_its_file_or_the_hubs_cache_a_pair_has_no_temperature_and_says_so(pairs_dataset, tmp_path, monkeypatch):
    model = saved_pair(pairs_dataset, tmp_path / "model", logit_scale=4.6)
    (tmp_path / "model").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"there is no file .*open_clip_model.safetensors, in which"):
        settings(pairs_dataset, model)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    name = {"name": "open_clip:ViT-B-32:laion2b_s34b_b79k"}
    with pytest.raises(ConfigError, match="is not in Hugging Face's cache; a new run fetches it by --set"):
        settings(pairs_dataset, model | {"image": name, "text": name})


def test_open_clip_gives_the_runs_tokens_once_it_leaves_texts_as_they_are(pairs_dataset, tmp_path):
    run = train(settings(pairs_dataset, PAIR, steps=1), tmp_path / "run")
    export_encoders(run, tmp_path / "out", "open_clip")
    tokenizer, own = open_clip.get_tokenizer(f"local-dir:{tmp_path}/out"), load_tokenizer(
        pairs_dataset.tokenizer_path, context_length=pairs_dataset.index.tokenizer.context_length
    )  # fmt: skip
    texts = ["the “letter” a’s", "a &amp; b", "two  blanks", "plain"]
    tokens = torch.from_numpy(encode(own, texts).tokens).long()
    assert [a.equal(b) for a, b in zip(tokenizer(texts), tokens, strict=True)] == [False, False, False, True]
    tokenizer.clean_fn = str
    assert torch.equal(tokenizer(texts), tokens)


def exported_by_timm(image, images_dataset, folder):
    """Export a short run for timm; return its image encoder, and the settings of one from the file."""
    config = settings(images_dataset, {"image": image}, batch_size=50, steps=2,
                      data={"path": str(images_dataset.path), "image_size": 32,
                            "recipe": {"name": "crop_flip", "mean": [0.1, 0.2, 0.3]}})  # fmt: skip
    run = train(config, folder / "run")
    export_encoders(run, folder / "out", "timm")
    return restored(run).image, image | {"name": f"{image['name']}:{folder}/out/image/model.safetensors"}


@pytest.mark.parametrize(
    "image", [VIT, pytest.param(CONVNEXT, marks=pytest.mark.wide), pytest.param(RESNET, marks=pytest.mark.wide)],
    ids=["vit", "convnext", "resnet"],
)  # fmt: skip
def test_timms_file_is_trained_on_with_its_weights_and_normalisation(image, images_dataset, tmp_path, caplog):
    before, from_file = exported_by_timm(image, images_dataset, tmp_path)
    after = create(from_file).image.eval()
    torch.testing.assert_close(after.backbone(PIXELS), before.backbone(PIXELS))
    theirs = timm.create_model(f"local-dir:{tmp_path}/out/image", pretrained=True).eval()
    torch.testing.assert_close(after.backbone(PIXELS), theirs(PIXELS))
    config = settings(images_dataset, {"image": from_file}, batch_size=50, steps=1)
    data = timm.data.resolve_model_data_config(theirs)
    recipe = recipe_named(config.data.recipe)
    assert ([*recipe.mean], [*recipe.std]) == ([*data["mean"]], [*data["std"]]) == ([0.1, 0.2, 0.3], [*recipe.std])
    caplog.clear()
    settings(images_dataset, {"image": from_file}, data={"path": str(images_dataset.path), "image_size": 48})
    assert "an image processor for pictures of 32 pixels (bilinear); here they have 48" in caplog.text
    run = train(config, tmp_path / "again")
    (tmp_path / "out").rename(tmp_path / "gone")
    assert restored(run)  # the file is not needed again


def test_a_file_without_its_configuration_is_said_and_one_of_another_model_refused(images_dataset, tmp_path, caplog):
    _, from_file = exported_by_timm(VIT, images_dataset, tmp_path)
    (tmp_path / "out/image/config.json").unlink()
    assert settings(images_dataset, {"image": from_file}).data.recipe == "crop_flip"
    assert "tells no mean and std of pictures, so those of the recipe are taken" in caplog.text
    deeper = from_file | {"config": from_file["config"] | {"depth": 3}}
    with pytest.raises(ConfigError, match=r"cannot be created: .*Missing key\(s\) in state_dict: \"blocks.2"):
        create(deeper)
    published_too = timm.create_model("resnet18", num_classes=7, **RESNET["config"])  # with a classifier
    save_file(published_too.state_dict(), tmp_path / "with_head.safetensors")
    encoder = create(RESNET | {"name": f"timm:resnet18:{tmp_path}/with_head.safetensors"}).image
    assert torch.equal(encoder.backbone.body.conv1.weight, published_too.conv1.weight)


@pytest.mark.parametrize(
    ("stored", "said"),
    [({"pretrained_cfg": {"mean": [0.5] * 3, "std": [0, 1, 1]}}, "no model is meant for the mean"),
     ({"pretrained_cfg": {"mean": "x"}}, "mean: "), ({"pretrained_cfg": [1]}, "settings: "), ([], "is not a JSON obj")],
)  # fmt: skip
def test_a_configuration_that_cannot_be_meant_is_refused(stored, said, images_dataset, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=said):
        settings(images_dataset, {"image": {"name": f"timm:resnet18:{tmp_path}/model.safetensors"}})


@pytest.mark.parametrize(
    ("image", "said"),
    [({"name": "timm:resnet18", "config": {"pretrained": "/a/model.safetensors"}},
      "pretrained is true or false; weights of a file are model.image.name = 'timm:resnet18:FILE.safetensors'"),
     ({"name": "timm:resnet18:model.pt"}, r"'timm:resnet18:FILE.safetensors' \(others may run code\)"),
     ({"name": "timm:vit_small_patch16_224", "config": {"depth": 10**12}}, "a setting of 1,000,000,000,000"),
     ({"name": "timm:vit_small_patch16_224", "config": {"depth": 10**6}}, "it has more than 30,000 parts"),
     ({"name": "timm:vit_small_patch16_224", "config": {"embed_dim": 6_000_000}}, "weights do not fit into memory"),
     (VISUAL | {"name": "open_clip:ViT-B-32", "config": {"width": 10**12}}, "a setting of 1,000,000,000,000"),
     (VISUAL | {"name": "open_clip:ViT-B-32", "config": {"layers": 10**6}}, "it has more than 30,000 parts"),
     (VISUAL | {"name": "open_clip:ViT-B-32", "config": {"width": 6_000_000}}, "weights do not fit into memory")],
)  # fmt: skip
def test_what_no_model_has_is_refused_before_anything_is_built(image, said):
    with pytest.raises(ConfigError, match=said):
        create(image, head="none")


def test_open_clips_normalisation_is_that_beside_its_file(pairs_dataset, tmp_path, caplog):
    model = saved_pair(pairs_dataset, tmp_path / "model", logit_scale=2.0)
    file = tmp_path / "model" / "open_clip_config.json"
    stored = json.loads(file.read_text())
    stored["preprocess_cfg"] |= {"mean": [0.1, 0.2, 0.3], "size": 64, "interpolation": "bicubic"}
    file.write_text(json.dumps(stored))
    assert recipe_named(settings(pairs_dataset, model).data.recipe).mean == (0.1, 0.2, 0.3)
    assert "for pictures of 64 pixels (bicubic); here they have 32 (bilinear)" in caplog.text
