"""Other libraries' training loops with our batches, loss and rows: the losses of our trainer, also after a kill."""

import functools
import importlib.util
import json
import os
import runpy
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import thermopile
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory

from support import torchvision_operators  # noqa: F401
from support.programs import other_trainers
from support.programs.other_trainers import BATCH, ROOT, SETTINGS
from support.runs import losses

STEPS = 60  # of 62 in two epochs


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


def start_trainer(name, dataset, folder, steps, ranks=1):
    """Run the page's block for another library, on ranks; return the losses of the first rank's steps so far."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "--"]
    program = ROOT / "tests" / "support" / "programs" / "other_trainers.py"
    paths = os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true"}
    command = [*start, program, name, dataset.path, folder, steps]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(map(str.split, (folder / "losses-0.txt").read_text().splitlines()))


@pytest.mark.wide
@pytest.mark.parametrize("name", ["Lightning", "Accelerate"])
def test_lightning_and_accelerate_go_on_with_fewer_ranks_as_if_never_stopped(name, pairs_dataset, tmp_path):
    pytest.importorskip(name.lower())
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    whole = start_trainer(name, pairs_dataset, tmp_path / "whole", 20)
    start_trainer(name, pairs_dataset, tmp_path / "stopped", 12, ranks=2)
    (tmp_path / "stopped" / "losses-0.txt").unlink()
    again = start_trainer(name, pairs_dataset, tmp_path / "stopped", 20 if name == "Lightning" else 8)
    assert [int(step) for step in again] == [*range(13, 21)]
    for step, loss in again.items():
        assert float(loss) == pytest.approx(float(whole[step]), abs=1e-5)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore")  # Lightning's, which depend on the machine
@pytest.mark.parametrize(("name", "steps", "stops"), [("Lightning", 45, (12, 40, 45)), ("Accelerate", 20, (7, 5, 8))])
def test_lightning_and_accelerate_stopped_within_an_epoch_go_on_as_if_never_stopped(
    name, steps, stops, pairs_dataset, tmp_path, losses_of
):
    pytest.importorskip(name.lower())
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    other_trainers.train(name, pairs_dataset.path, tmp_path / "whole", steps)
    whole = dict(losses_of)
    losses_of.clear()
    for some in stops:
        other_trainers.train(name, pairs_dataset.path, tmp_path / "stopped", some)
    assert losses_of == whole
    assert sorted(whole) == [*range(1, steps + 1)]
