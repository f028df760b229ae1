"""Other libraries' training loops with our batches, loss and rows: the losses of our trainer, also after a kill."""

import functools
import importlib.util
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import thermopile
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory

from support import torchvision_operators  # noqa: F401
from support.runs import losses

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "keep_your_trainer.md").read_text("utf-8")
BATCH, STEPS = 64, 60  # of 62 in two epochs
SETTINGS = {
    "epochs": 2, "batch_size": BATCH, "data": {"image_size": 32, "workers": 1},
    "objective": {"name": "isogclr", "tau_init": 0.05},
}  # fmt: skip


@pytest.fixture
def losses_of(monkeypatch):
    """The losses of the steps made in this process, by step; later ones replace earlier ones."""
    found, loss_of = {}, thermopile.RowStore.loss

    def loss(rows, *given):
        value = loss_of(rows, *given)
        found[rows.steps_done] = value.item()
        return value

    monkeypatch.setattr(thermopile.RowStore, "loss", loss)
    return found


@pytest.fixture
def plain():
    return runpy.run_path(str(ROOT / "examples" / "plain_loop.py"))


def run_plain(plain, dataset, path, epochs, **options):
    plain["main"].__globals__["SETTINGS"] = SETTINGS
    plain["main"](dataset.path, path, epochs, **options)


@pytest.mark.wide
def test_a_plain_loop_goes_on_after_a_stop_as_if_never_stopped(pairs_dataset, tmp_path, plain, losses_of):
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    run_plain(plain, pairs_dataset, tmp_path / "whole", 2)
    whole = dict(losses_of)
    losses_of.clear()
    for epochs in (1, 2):
        run_plain(plain, pairs_dataset, tmp_path / "stopped", epochs)
    assert losses_of == whole
    assert len(whole) == 62


@pytest.fixture(scope="module")
def open_clip():
    if importlib.util.find_spec("open_clip_train") is None:
        pytest.skip("open_clip_torch is not installed (make trainers)")
    import open_clip

    return open_clip


@pytest.fixture(scope="module")
def model(open_clip, pairs_dataset, tmp_path_factory):
    """A small model of open_clip in a folder, with its weights."""
    folder, tokens = tmp_path_factory.mktemp("model"), pairs_dataset.index.tokenizer
    config = open_clip.get_model_config("ViT-B-32")
    config |= {"embed_dim": 16, "quick_gelu": False}
    config["vision_cfg"] |= {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32}
    config["text_cfg"] |= {
        "layers": 2, "width": 32, "heads": 2, "vocab_size": tokens.vocab_size, "pool_type": "eos",
        "context_length": tokens.context_length, "eos_id": tokens.end_id,
    }  # fmt: skip
    torch.manual_seed(0)
    save_file(open_clip.CustomTextCLIP(**config).state_dict(), folder / "open_clip_model.safetensors")
    mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    whole = {"model_cfg": config | {"custom_text": True}, "preprocess_cfg": {"mean": mean, "std": std}}
    (folder / "open_clip_config.json").write_text(json.dumps(whole))
    return folder, config


OBJECTIVES = {
    "isogclr": {"name": "isogclr", "tau_init": 0.05},
    "fastclip_v3": {"name": "fastclip_v3", "eta": 1e-3},  # open_clip's rate
}


@pytest.fixture(scope="module", params=OBJECTIVES)
def ours(model, pairs_dataset, tmp_path_factory, request):
    """The objective, and step → loss of our trainer on the same towers, with the same optimiser."""
    (folder, config), run = model, tmp_path_factory.mktemp("ours") / "run"
    name = f"open_clip:ViT-B-32:{folder / 'open_clip_model.safetensors'}"
    towers = {
        side: {"name": name, "config": {"embed_dim": 16} | config[part]}
        for side, part in (("image", "vision_cfg"), ("text", "text_cfg"))
    }
    given = SETTINGS | {
        "objective": OBJECTIVES[request.param],
        "model": {"dim": 16, "head": "none", **towers}, "log_every": 1, "device": "cpu",
        "optimizer": {"lr": 1e-3, "lr_min": 1e-3, "warmup": 0, "weight_decay": 0, "betas": [0.9, 0.999], "eps": 1e-8},
    }  # fmt: skip
    with Trainer.from_settings(run, pairs_dataset.path, given) as trainer:
        trainer.train()
    return request.param, {step: loss for step, loss in losses(RunDirectory(run)).items() if step <= STEPS}


class Features(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, tokens):
        return self.model(images, tokens)[:2]


@pytest.mark.wide
@pytest.mark.parametrize("ours", ["isogclr"], indirect=True)
def test_a_plain_loop_has_the_losses_of_our_trainer(open_clip, model, ours, pairs_dataset, tmp_path, plain, losses_of):
    run_plain(
        plain, pairs_dataset, tmp_path, 2, make=lambda _: Features(open_clip.create_model(f"local-dir:{model[0]}"))
    )
    _, expected = ours
    assert {step: losses_of[step] for step in expected} == pytest.approx(expected, abs=1e-5)


def start_open_clip(dataset, folder, model, name, *options, objective="isogclr", ranks=1, kill_at=-1):
    """Run open_clip's script; return the losses of its steps, of the last time that each was made."""
    of_objective = "".join(f"{key} = {json.dumps(value)}\n" for key, value in OBJECTIVES[objective].items())
    (folder / "settings.toml").write_text(f"[data]\nworkers = 1\n[objective]\n{of_objective}")
    program = ROOT / "tests" / "support" / "programs" / "open_clip_task.py"
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "--"]
    command = [
        *start, program, folder / f"{name}.txt", dataset.path, folder / "settings.toml", "--model",
        f"local-dir:{model[0]}", "--batch-size", BATCH // ranks, "--epochs", 2, "--name", name, "--logs",
        folder / "logs", "--dataset-type", "synthetic", "--precision", "fp32", "--device", "cpu", "--lr", 1e-3,
        "--wd", 0, "--beta1", 0.9, "--beta2", 0.999, "--eps", 1e-8, "--warmup", 0, "--lr-scheduler", "const", *options,
    ]  # fmt: skip
    paths = [str(ROOT / "tests"), *filter(None, sys.path)]
    environment = os.environ | {"KILL_AT": str(kill_at), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    assert (done.returncode == 0) == (kill_at < 0), done.stderr
    lines = (folder / f"{name}.txt").read_text().splitlines()
    return {int(step): float(loss) for step, loss in map(str.split, lines)}


@pytest.mark.wide
def test_open_clips_script_has_the_losses_of_our_trainer_also_on_two_ranks_that_are_killed(
    model, ours, pairs_dataset, tmp_path
):
    objective, expected = ours
    start = functools.partial(start_open_clip, pairs_dataset, tmp_path, model, objective=objective)
    found = start("whole")
    assert {step: found[step] for step in expected} == pytest.approx(expected, abs=1e-5)
    start("killed", ranks=2, kill_at=40)
    (tmp_path / "killed.txt").unlink()
    again = start("killed", "--resume", "latest")
    assert min(again) == 32  # its checkpoints are at the ends of epochs
    later = {step: loss for step, loss in expected.items() if step >= 32}
    assert {step: again[step] for step in later} == pytest.approx(later, abs=1e-5)


@pytest.mark.wide
def test_open_clips_script_killed_between_rows_and_checkpoint_begins_again(model, pairs_dataset, tmp_path):
    start_open_clip(pairs_dataset, tmp_path, model, "killed", kill_at=31)
    (checkpoint,) = (tmp_path / "logs" / "killed" / "checkpoints").glob("*.pt")
    checkpoint.unlink()
    (tmp_path / "killed.txt").unlink()
    assert min(start_open_clip(pairs_dataset, tmp_path, model, "killed", "--resume", "latest")) == 1


def block(heading):
    return re.search(rf"## {heading}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore")  # Lightning's, which depend on the machine
def test_lightning_stopped_within_an_epoch_goes_on_as_if_never_stopped(pairs_dataset, tmp_path, plain, losses_of):
    lightning = pytest.importorskip("lightning")

    def fit(path, steps, **options):
        names = {"torch": torch, "thermopile": thermopile, "lightning": lightning, "Pair": plain["Pair"]}
        names |= {"SETTINGS": SETTINGS, "data": pairs_dataset.path, "path": path / "rows"}
        names["vocab_size"] = pairs_dataset.index.tokenizer.vocab_size
        exec(block("Lightning"), names)
        torch.manual_seed(0)
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=path, enable_checkpointing=False,
        )  # fmt: skip
        module = names["Pairs"]()
        trainer.fit(module, **options)
        trainer.save_checkpoint(path / "last.ckpt")
        module.rows.close()
        module.loader.close()

    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    fit(tmp_path / "whole", 45)
    whole = dict(losses_of)
    losses_of.clear()
    for steps, options in ((12, {}), (40, {"ckpt_path": "last.ckpt"}), (45, {"ckpt_path": "last.ckpt"})):
        given = {key: tmp_path / "stopped" / name for key, name in options.items()}
        fit(tmp_path / "stopped", steps, **given)
    assert losses_of == whole
    assert sorted(whole) == [*range(1, 46)]


@pytest.mark.wide
def test_accelerate_stopped_within_an_epoch_goes_on_as_if_never_stopped(pairs_dataset, tmp_path, plain, losses_of):
    accelerate = pytest.importorskip("accelerate")

    def run(path, steps):
        names = {"torch": torch, "thermopile": thermopile, "accelerate": accelerate, "itertools": itertools}
        names |= {"Pair": plain["Pair"], "SETTINGS": SETTINGS | {"device": "cpu"}, "data": pairs_dataset.path}
        names |= {"path": path / "rows", "folder": path / "state", "steps": steps}
        torch.manual_seed(0)
        exec(block("Accelerate"), names | {"vocab_size": pairs_dataset.index.tokenizer.vocab_size})

    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    run(tmp_path / "whole", 20)
    whole = dict(losses_of)
    losses_of.clear()
    for steps in (7, 5, 8):
        run(tmp_path / "stopped", steps)
    assert losses_of == whole
    assert sorted(whole) == [*range(1, 21)]
