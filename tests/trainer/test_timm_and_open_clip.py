"""Encoders of timm and open_clip: trained, resumed, scored, and exported for their own library, which gives the same."""

import sys

import numpy as np
import pytest
import torch

from support import torchvision_operators  # noqa: F401, I001 - before timm
import open_clip
import timm
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from thermopile.trainer.config import load_config
from thermopile.trainer.dry_run import DryRun
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.encoders.locking import lock_advice
from thermopile.trainer.errors import ConfigError, RunError
from thermopile.trainer.evaluation.evaluate import tokenizer_of
from thermopile.trainer.evaluation.features import restore_encoders
from thermopile.trainer.export import export_encoders
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

from support.cli import cli, sets, succeed
from support.runs import OFTEN, assert_same_run, resumed, stopped, train

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
    tree = {"epochs": 1, "batch_size": 250, "log_every": 1, "data": {"path": str(dataset.path), "image_size": 32},
            "model": {"dim": 16} | model}  # fmt: skip
    return resolve(load_config(tree | more), dataset)


def restored(run):
    """The encoders of a run's last checkpoint."""
    checkpoint = latest_checkpoint(run.checkpoints)
    info, training = load_checkpoint(checkpoint)
    config = run.config()
    return restore_encoders(config, checkpoint, training, tokenizer_of(config.data.path, info)[1])


def tokens_of(dataset):
    return torch.from_numpy(dataset.shard(0).tokens(np.arange(20)))


@torch.no_grad()
def assert_timm_gives_the_features(run, folder):
    export_encoders(run, folder, "timm")
    model = timm.create_model(f"local-dir:{folder}/image", pretrained=True).eval()
    encoder, head = restored(run).image, load_file(folder / "image/head.safetensors")
    torch.testing.assert_close(model(PIXELS), encoder.backbone(PIXELS), atol=1e-5, rtol=0)
    torch.testing.assert_close(F.linear(model(PIXELS), head["weight"], head["bias"]), encoder(PIXELS), atol=1e-5, rtol=0)
    data, recipe = timm.data.resolve_model_data_config(model), run.config().data.recipe
    assert (data["input_size"], data["crop_pct"], recipe) == ((3, 32, 32), 1.0, "clip")
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
