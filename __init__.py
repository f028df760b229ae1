"""thermopile: contrastive pretraining in which every sample has its own temperature.

Public names are imported on first use, so `import thermopile` alone loads neither torch nor zarr.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .pipeline.conversion.conversion import Conversion as Conversion
    from .pipeline.conversion.conversion import ConvertSettings as ConvertSettings
    from .pipeline.errors import BadSampleError as BadSampleError
    from .pipeline.opening import Dataset as Dataset
    from .pipeline.order.order import Order as Order
    from .pipeline.order.sampler import OrderSampler as OrderSampler
    from .pipeline.sources import ClassGroups as ClassGroups
    from .pipeline.sources import Sample as Sample
    from .pipeline.sources import Source as Source
    from .pipeline.views.recipes import Recipe as Recipe
    from .state_store.durable import list_snapshots as list_snapshots
    from .state_store.reader import StateReader as StateReader
    from .state_store.store import StateStore as StateStore
    from .tools.convert import convert as convert
    from .tools.embed import embed as embed
    from .tools.eval import evaluate as evaluate
    from .tools.export import export as export
    from .tools.inspect import inspect as inspect
    from .tools.inspection.opened_run import open_run as open_run
    from .tools.settings import list_objectives as list_objectives
    from .tools.settings import list_presets as list_presets
    from .tools.train import train as train
    from .trainer.loop import Trainer as Trainer
    from .trainer.objectives import Objective as Objective
    from .trainer.objectives import Outcome as Outcome
    from .trainer.objectives import Progress as Progress
    from .trainer.objectives import Settings as Settings
    from .trainer.objectives import create_objective as create_objective
    from .trainer.objectives.base import TemperatureRate as TemperatureRate
    from .trainer.objectives.contrastive import Anchors as Anchors
    from .trainer.objectives.contrastive import Rows as Rows
    from .trainer.objectives.isogclr import IndividualTemperature as IndividualTemperature
    from .trainer.objectives.isogclr import RobustSettings as RobustSettings
    from .trainer.objectives.sogclr import EstimatorSettings as EstimatorSettings
    from .trainer.objectives.sogclr import GlobalContrastive as GlobalContrastive
    from .trainer.run.loader import Loader as Loader
    from .trainer.run.row_store import RowStore as RowStore
    from .trainer.run.run import Run as Run
    from .trainer.world import joined_world as joined_world

_NAMES = {
    "pipeline.views.recipes": "Recipe",
    "pipeline.conversion.conversion": "Conversion ConvertSettings",
    "pipeline.errors": "BadSampleError",
    "pipeline.opening": "Dataset",
    "pipeline.order.order": "Order",
    "pipeline.order.sampler": "OrderSampler",
    "pipeline.sources": "ClassGroups Sample Source",
    "state_store.durable": "list_snapshots",
    "state_store.reader": "StateReader",
    "state_store.store": "StateStore",
    "tools.convert": "convert",
    "tools.embed": "embed",
    "tools.eval": "evaluate",
    "tools.export": "export",
    "tools.inspect": "inspect",
    "tools.inspection.opened_run": "open_run",
    "tools.settings": "list_objectives list_presets",
    "tools.train": "train",
    "trainer.loop": "Trainer",
    "trainer.objectives": "Objective Outcome Progress Settings create_objective",
    "trainer.objectives.base": "TemperatureRate",
    "trainer.objectives.contrastive": "Anchors Rows",
    "trainer.objectives.isogclr": "IndividualTemperature RobustSettings",
    "trainer.objectives.sogclr": "EstimatorSettings GlobalContrastive",
    "trainer.run.loader": "Loader",
    "trainer.run.row_store": "RowStore",
    "trainer.run.run": "Run",
    "trainer.world": "joined_world",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
