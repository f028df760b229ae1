"""Comparing the ranks of a run before it begins: model, dataset, directory and checkpoint must be the same."""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from .._version import __version__
from ..pipeline.dataset import Dataset
from ..pipeline.order import ORDER_VERSION
from ..state_store.ranks import agreement
from .checkpoint import CheckpointInfo
from .config import TrainConfig, flat, to_tree
from .errors import ConfigError, RunError
from .world import World

MAY_DIFFER = frozenset({"data.path", "data.workers", "evaluation.test", "evaluation.train"})
"""Settings that may differ between ranks: dataset paths, because fingerprints are compared and only rank 0 evaluates,
and the number of decoding cores. All others must be equal."""

MAX_NAMED = 10
SEEN_WITHIN_SECONDS = 5.0
"""Time within which a file written on one machine must be visible on the others."""


def refuse_differences(world: World, config: TrainConfig, dataset: Dataset, checkpoint: CheckpointInfo | None) -> None:
    """Raise ConfigError on every rank, naming rank and setting, if the ranks differ. Called by all ranks.

    config: resolved. checkpoint: the one to resume from.
    """
    own = facts(config, dataset, checkpoint)
    if found := differences(world.control.broadcast(world.control.gather(own))):
        more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise ConfigError(
            f"the ranks differ: {'; '.join(found[:MAX_NAMED])}{more}. "
            "Start them all with the same settings, the same dataset and the same thermopile"
        )


def refuse_separate_directories(world: World, folder: Path) -> None:
    """Raise ConfigError on every rank, naming ranks, unless all see the same directory. Called by all ranks.

    Each rank writes its rows of a snapshot there and reads those of the others. folder: exists on rank 0.
    Raises RunError or OSError if rank 0 cannot write to it.
    """
    if world.size == 1:
        return
    host, written = socket.gethostname(), None
    with ExitStack() as end:
        with agreement(world.control, RunError):
            if world.is_first:
                # A name that no copy of the directory contains, and that remove_leftovers removes after a kill.
                file = folder / f".ranks.{secrets.randbits(64)}.partial"
                file.touch(exist_ok=False)
                end.callback(file.unlink, missing_ok=True)
                written = file.name, host
        name, host_of_first = world.control.broadcast(written)
        separate = None if _is_seen(folder / name) else f"rank {world.rank} (on {host})"
        found = [rank for rank in world.control.broadcast(world.control.gather(separate)) if rank]
    if found:
        raise ConfigError(
            f"{' and '.join(found)} cannot see files that rank 0 (on {host_of_first}) writes in its run directory, "
            f"{folder}: set --out to a directory on a disk that all machines share"
        )


def _is_seen(file: Path) -> bool:
    end = time.monotonic() + SEEN_WITHIN_SECONDS
    while not (is_seen := file.exists()) and time.monotonic() < end:
        # A network disk caches that a file is missing, and refreshes this when a directory is listed.
        for folder in (file.parent.parent, file.parent):
            with suppress(OSError):
                os.listdir(folder)
        time.sleep(0.1)
    return is_seen


def facts(config: TrainConfig, dataset: Dataset, checkpoint: CheckpointInfo | None) -> dict[str, Any]:
    """Return everything that must be equal on all ranks, by name; small and picklable."""
    return {
        "thermopile": __version__,
        "order_version": ORDER_VERSION,
        "dataset fingerprint": dataset.index.fingerprint,
        "dataset samples": dataset.n,
        "checkpoint": checkpoint and f"step-{checkpoint.step} with snapshot {checkpoint.snapshot}",
        **{key: value for key, value in flat(to_tree(config)).items() if key not in MAY_DIFFER},
    }


def differences(of_ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Describe each difference from rank 0: which rank, which fact, both values."""
    first, *others = of_ranks
    return [
        f"rank {rank} has {key} = {_shown(own.get(key))}, rank 0 {_shown(first.get(key))}"
        for rank, own in enumerate(others, start=1)
        for key in (first | own)
        if own.get(key) != first.get(key)
    ]


def _shown(value: object) -> str:
    return "none" if value is None else repr(value)
