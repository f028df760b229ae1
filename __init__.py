"""thermopile: contrastive pretraining in which every sample has its own temperature.

Public names are imported on first use, so `import thermopile` alone loads neither torch nor zarr.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .pipeline.augment import Recipe
    from .pipeline.dataset import Dataset
    from .pipeline.order import Order
    from .pipeline.sources import Sample, Source
    from .state_store import StateReader, StateStore, list_snapshots
    from .tools.inspection.opened_run import open_run
    from .trainer.loop import Trainer
    from .trainer.objectives import Objective, Outcome, Progress, Settings, create_objective
    from .trainer.objectives.base import TemperatureRate
    from .trainer.objectives.contrastive import Anchors, Rows
    from .trainer.objectives.isogclr import IndividualTemperature, RobustSettings
    from .trainer.objectives.sogclr import EstimatorSettings, GlobalContrastive
    from .trainer.run.run import Run
    from .trainer.world import joined_world

__all__ = [
    "Anchors",
    "Dataset",
    "EstimatorSettings",
    "GlobalContrastive",
    "IndividualTemperature",
    "Objective",
    "Order",
    "Outcome",
    "Progress",
    "Recipe",
    "RobustSettings",
    "Rows",
    "Run",
    "Sample",
    "Settings",
    "Source",
    "StateReader",
    "StateStore",
    "TemperatureRate",
    "Trainer",
    "__version__",
    "create_objective",
    "joined_world",
    "list_snapshots",
    "open_run",
]

_HOME = {
    "Anchors": "trainer.objectives.contrastive",
    "Dataset": "pipeline.dataset",
    "EstimatorSettings": "trainer.objectives.sogclr",
    "GlobalContrastive": "trainer.objectives.sogclr",
    "IndividualTemperature": "trainer.objectives.isogclr",
    "Objective": "trainer.objectives",
    "Order": "pipeline.order",
    "Outcome": "trainer.objectives",
    "Progress": "trainer.objectives",
    "Recipe": "pipeline.augment",
    "RobustSettings": "trainer.objectives.isogclr",
    "Rows": "trainer.objectives.contrastive",
    "Run": "trainer.run.run",
    "Sample": "pipeline.sources",
    "Settings": "trainer.objectives",
    "Source": "pipeline.sources",
    "StateReader": "state_store",
    "StateStore": "state_store",
    "TemperatureRate": "trainer.objectives.base",
    "Trainer": "trainer.loop",
    "create_objective": "trainer.objectives",
    "joined_world": "trainer.world",
    "list_snapshots": "state_store",
    "open_run": "tools.inspection.opened_run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
