"""The page's blocks for Lightning and Accelerate, with the losses of the steps in a file, also under torchrun.

python other_trainers.py NAME DATA FOLDER STEPS
"""

import functools
import itertools
import os
import re
import runpy
import sys
from pathlib import Path

import torch

import thermopile
from thermopile.pipeline.opening import open_dataset

from support import torchvision_operators  # noqa: F401

ROOT = Path(__file__).parents[3]
BATCH = 64
SETTINGS = {
    "epochs": 2, "batch_size": BATCH, "data": {"image_size": 32, "workers": 1}, "device": "cpu",
    "objective": {"name": "isogclr", "tau_init": 0.05},
}  # fmt: skip


def block(heading):
    page = (ROOT / "docs" / "keep_your_trainer.md").read_text("utf-8")
    return re.search(rf"## {heading}\n.*?```python\n(.*?)```", page, re.DOTALL)[1]


def train(name, data, folder, steps):
    """Train up to `steps` by Lightning, or `steps` more by Accelerate; go on from what is in the folder."""
    plain = runpy.run_path(str(ROOT / "examples" / "plain_loop.py"))
    names = {"torch": torch, "thermopile": thermopile, "Pair": plain["Pair"], "SETTINGS": SETTINGS, "data": data}
    names |= {"path": folder / "rows", "vocab_size": open_dataset(data).index.tokenizer.vocab_size}
    torch.manual_seed(0)
    {"Lightning": fit_by_lightning, "Accelerate": run_by_accelerate}[name](names, folder, steps)


def fit_by_lightning(names, folder, steps):
    import lightning

    exec(block("Lightning"), names := names | {"lightning": lightning})
    checkpoint = folder / "last.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), max_steps=steps, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, enable_checkpointing=False,
    )  # fmt: skip
    module = names["Pairs"]()
    trainer.fit(module, ckpt_path=checkpoint if checkpoint.exists() else None)
    trainer.save_checkpoint(checkpoint)
    module.rows.close()
    module.loader.close()


def run_by_accelerate(names, folder, steps):
    import accelerate

    exec(block("Accelerate"), names | {"accelerate": accelerate, "itertools": itertools, "folder": folder / "state",
                                       "steps": steps})  # fmt: skip


def note_losses(file):
    """Append `step loss` of each step to the file."""
    loss_of = thermopile.RowStore.loss

    @functools.wraps(loss_of)
    def loss(rows, *given):
        value = loss_of(rows, *given)
        with Path(file).open("a") as lines:
            lines.write(f"{rows.steps_done} {value.item()!r}\n")
        return value

    thermopile.RowStore.loss = loss


if __name__ == "__main__":
    _, name, data, folder, steps = sys.argv
    note_losses(Path(folder, f"losses-{os.environ.get('RANK', 0)}.txt"))
    train(name, data, Path(folder), int(steps))
