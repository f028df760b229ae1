"""Checkpoints of runs that no training made."""

import torch

from thermopile.tools.inspection.opening import read_run
from thermopile.trainer.checkpoints.checkpoint_files import CheckpointInfo, save_checkpoint
from thermopile.trainer.config import to_tree
from thermopile.trainer.encoders import Encoders

STEP = 5
IMAGE_SIZE = 16


def write_checkpoint(run, step, snapshot="none", *, dataset_fingerprint="f", settings=None, **training):
    info = CheckpointInfo(
        step=step, snapshot=snapshot, order_version=1, dataset_fingerprint=dataset_fingerprint, settings=settings or {}
    )
    save_checkpoint(run.checkpoints, info, training)


def save_encoders(run, dataset, step=STEP, change=lambda weights: None, ema=0.0, at="latest"):
    """Save random encoders of small pictures, `change`d, as a checkpoint of the run's snapshot `at`; return them.

    ema: with it, the checkpoint also has averaged weights, the opposite of the others.
    """
    config = run.config()
    update = {"data": {"image_size": IMAGE_SIZE}, "model": {"ema": ema}}
    update = {name: getattr(config, name).model_copy(update=more) for name, more in update.items()}
    config = config.model_copy(update=update)
    run.record(config)
    torch.manual_seed(0)
    encoders = Encoders.create(config.model, config.objective.mode, config.data.image_size, dataset.index.tokenizer)
    weights = encoders.state_dict()
    change(weights)
    averaged = {"averaged": {name: -value for name, value in weights.items()}} if ema else {}
    write_checkpoint(
        run, step, read_run(run, at=at).reader.snapshot.id, settings=to_tree(config), encoders=weights,
        dataset_fingerprint=dataset.index.fingerprint, **averaged,
    )  # fmt: skip
    return encoders.eval()
