"""The ranks of a run, compared before it begins: they must train one model on one dataset, from one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._version import __version__
from ..pipeline.dataset import Dataset
from ..pipeline.order import ORDER_VERSION
from .checkpoint import CheckpointInfo
from .config import TrainConfig, flat, to_tree
from .errors import ConfigError
from .world import World

MAY_DIFFER = frozenset({"data.path", "data.workers", "evaluation.test", "evaluation.train"})
"""Settings that say where a machine has a dataset (the run's has its fingerprint compared, and the first rank alone
evaluates), and how many of its cores decode. All others must be the same."""

MAX_NAMED = 10


def refuse_differences(world: World, config: TrainConfig, dataset: Dataset, checkpoint: CheckpointInfo | None) -> None:
    """Raise ConfigError on every rank, naming rank and setting, where they differ. All ranks call it.

    config: resolved. checkpoint: what the run goes on from.
    """
    own = facts(config, dataset, checkpoint)
    if found := differences(world.control.broadcast(world.control.gather(own))):
        more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise ConfigError(
            f"the ranks differ: {'; '.join(found[:MAX_NAMED])}{more}. "
            "Start them all with the same settings, the same dataset and the same thermopile"
        )


def facts(config: TrainConfig, dataset: Dataset, checkpoint: CheckpointInfo | None) -> dict[str, Any]:
    """Everything that the ranks must have in common, by name; small, and can be pickled."""
    return {
        "thermopile": __version__,
        "order_version": ORDER_VERSION,
        "dataset fingerprint": dataset.index.fingerprint,
        "dataset samples": dataset.n,
        "checkpoint": checkpoint and f"step-{checkpoint.step} with snapshot {checkpoint.snapshot}",
        **{key: value for key, value in flat(to_tree(config)).items() if key not in MAY_DIFFER},
    }


def differences(of_ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Say for every fact that a rank has otherwise than rank 0 which rank, which fact and what both have."""
    first, *others = of_ranks
    return [
        f"rank {rank} has {key} = {_shown(own.get(key))}, rank 0 {_shown(first.get(key))}"
        for rank, own in enumerate(others, start=1)
        for key in (first | own)
        if own.get(key) != first.get(key)
    ]


def _shown(value: object) -> str:
    return "none" if value is None else repr(value)
