"""Resolve a run's settings and build its parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from ...pipeline.loading import Loader
from ...pipeline.opening import Dataset, Mixture, usual_image_size
from ...pipeline.order.order import AnyOrder, Order, Pieces, Selected, Window
from ...pipeline.planted import Planting
from ...pipeline.views.recipes import RECIPES, Recipe
from ...state_store.schema import Schema
from ..config import DataConfig, OrderConfig, RecipeConfig, TrainConfig, nearest
from ..encoders import with_names
from ..errors import ConfigError
from ..objectives import Objective, create_objective, objective_class, tried
from ..plugins import PluginError, is_plugin, load_plugin
from ..precision import resolve_speed
from ..world import ALONE, World
from .dataset_cache import DatasetCache
from .order_of_mixture import lowest_shares, mixed_order
from .selection_files import SELECTING, pinned, rows_of, selects
from .settings_of_data import refuse_few_samples, refuse_unnamed_encoders, usual_batch_size
from .settings_of_models import with_settings_of_models

if TYPE_CHECKING:
    from ...pipeline.loading.ffcv_loader import Augmentation


def resolve(config: TrainConfig, dataset: Dataset, world: World = ALONE) -> TrainConfig:
    """Replace every `auto` that affects results by its value, and fill in the objective's settings.

    Raises ConfigError if the objective, its mode or settings, the recipe or the batch size does not fit.
    """
    pairs = dataset.index.mode == "pairs"
    mode = config.objective.mode
    if mode == "auto":  # the objective's only mode, or the mode that fits the data
        modes = _modes_of(config.objective.name)
        mode = "bimodal" if (pairs and "bimodal" in modes) or modes == {"bimodal"} else "unimodal"
    if mode == "bimodal" and not pairs:
        raise ConfigError(f"objective.mode = 'bimodal' needs captions, but {dataset.place} has only images")
    data = _resolve_data(config.data, dataset, mode)
    refuse_few_samples(dataset, _samples(data, dataset))
    device = device_named(config.device)
    refuse_unnamed_encoders(config.model, data.image_size, mode, dataset.index.tokenizer, device)
    resolved = config.model_copy(
        update={
            "batch_size": config.batch_size or usual_batch_size(_samples(data, dataset), lowest_shares(data)),
            "data": data,
            "objective": config.objective.model_copy(update={"mode": mode}),
            "model": with_names(config.model, mode),
        }
    )
    resolved = with_settings_of_models(config.model, resolved, type(objective_of(resolved).settings))
    objective = objective_of(resolved)
    _check_frame(objective, resolved.model.momentum, data, compiles=config.compile)
    order = create_order(resolved, dataset, objective, world)
    pieces_per_step(resolved.batch_size, config.micro_batch, world)
    settings = objective.settings.model_dump(exclude_none=True)
    settings["similarity_budget"] = objective.settings.budget_on(device)
    optimizer = config.optimizer
    if optimizer.warmup is None:
        steps = min(200, config.total_steps(order.steps_per_epoch) // 10)
        optimizer = optimizer.model_copy(update={"warmup": steps})
    return resolved.model_copy(
        update={
            **resolve_speed(config, device),
            "optimizer": optimizer,
            "objective": type(config.objective)(name=resolved.objective.name, mode=mode, **settings),
            "order": OrderConfig(**{name: getattr(order, name) for name in OrderConfig.model_fields}),
        }
    )


def _modes_of(objective: str) -> Set[str]:
    try:
        return objective_class(objective).settings_of_mode.keys()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_frame(objective: Objective, momentum: float, data: DataConfig, *, compiles: bool) -> None:
    """Raise ConfigError unless the objective supports the momentum network, local views and weights."""
    local = data.local_views
    if data.without and compiles:
        raise ConfigError("compile = true is for batches of one size, which data.without makes differ; leave one out")
    if data.weights:
        try:
            objective.check_weights()
        except ValueError as error:
            raise ConfigError(f"data.weights: {error}") from None
    try:
        objective.check_frame(momentum > 0, local)
    except ValueError as error:
        of_keys = f"model.momentum = {momentum:g}" if momentum else "model.momentum = 0 (set 0.99, say)"
        given = f"data.local_views = {local}" if local and "local views" in str(error) else of_keys
        raise ConfigError(f"{given}: {error}") from None


def _resolve_data(data: DataConfig, dataset: Dataset, mode: str) -> DataConfig:
    recipe, loader = data.recipe, data.loader
    usual = "clip" if mode == "bimodal" else "crop_flip"
    name, fields = (recipe, {}) if isinstance(recipe, str) else (recipe.name, recipe.fields)
    name = usual if name == "auto" else name
    recipe = RecipeConfig(name=name, **fields) if fields else name
    recipe_named(recipe)
    if loader == "auto":
        loader = "ffcv"  # on an H100 too, where it reached 99.4 % of synthetic data's speed; DALI has not run on one
    image_size = data.image_size or usual_image_size(dataset)
    update: dict[str, Any] = {"recipe": recipe, "loader": loader, "path": dataset.absolute, "image_size": image_size}
    if isinstance(dataset, Mixture):
        if selects(data):
            raise ConfigError("data.select, weights and without are for one dataset, not for a mixture; leave them out")
        parts = tuple(part.absolute for part in dataset.parts)
        update |= {"path": "", "parts": parts, "shares": data.shares or (1,) * len(parts)}
    update |= {option: pinned(getattr(data, option), option) for option in SELECTING}
    data = data.model_copy(update=update)
    return data.model_copy(update={"planted": _shares_planted(data, dataset, mode)})


def _shares_planted(data: DataConfig, dataset: Dataset, mode: str) -> float | tuple[float, ...]:
    """Return `data.planted` with numbers as shares of the samples that there are now: appended ones follow."""
    given, of_parts = np.atleast_1d(data.planted), isinstance(data.planted, tuple)
    sizes = [part.n for part in getattr(dataset, "parts", ())] if of_parts else [_samples(data, dataset)]
    shares = np.where(given >= 1, given / sizes, given) if len(given) == len(sizes) else given + 1
    if given.any() and (mode != "bimodal" or not ((shares >= 0) & (shares <= 0.5)).all()):
        what = "be a share up to 0.5, or a number up to half of the samples, or one for each part of a mixture"
        raise ConfigError(f"data.planted = {data.planted} should {what}; it is for pairs alone")
    return tuple(shares.tolist()) if of_parts else float(shares[0])


def recipe_named(asked: str | RecipeConfig) -> Recipe:
    """Return the views' recipe, which is no longer `auto`, with its changed fields.

    For `module:name` this runs that module. Raises ConfigError for an unknown name or field, or a value out of range.
    """
    name, fields = (asked, {}) if isinstance(asked, str) else (asked.name, asked.fields)
    if is_plugin(name):
        try:
            recipe = load_plugin(name)
        except PluginError as error:
            raise ConfigError(f"data.recipe = {name!r} {error}") from error
        if not isinstance(recipe, Recipe):
            raise ConfigError(
                f"data.recipe = {name!r} is a {type(recipe).__name__}; it must be a thermopile.Recipe, "
                "such as Recipe(blur=(0.5, 0.5))"
            )
    elif name in RECIPES:
        recipe = RECIPES[name]
    else:
        raise ConfigError(f"data.recipe = {name!r} is unknown; available: auto, {', '.join(RECIPES)}, module:name")
    for key in fields:
        if key not in Recipe.model_fields:
            near = nearest(key, Recipe.model_fields)
            raise ConfigError(f"data.recipe has no field {key!r}{near}; it has {', '.join(Recipe.model_fields)}")
    try:
        return Recipe(**(recipe.model_dump() | fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["data.recipe", *map(str, first["loc"][:1])])
        raise ConfigError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def windows_from(steps_done: int, order: Order, epochs: int, world: World = ALONE) -> Iterator[Window]:
    """Yield the windows of a rank's steps after `steps_done` to the end of the run, lazily.

    Steps are numbered as in `StateStore.put`: from 1, over all epochs.
    """
    for epoch in range(steps_done // order.steps_per_epoch, epochs):
        first_step = 1 + epoch * order.steps_per_epoch
        for window in order.windows(epoch, world.rank, world.size):
            if first_step + window.last_step > steps_done:
                yield Window(first_step + window.first_step, first_step + window.last_step, window.blocks)


def _samples(data: DataConfig, dataset: Dataset) -> int:
    return rows_of(data.select) if data.select else dataset.n


def create_order(config: TrainConfig, dataset: Dataset, objective: Objective, world: World = ALONE) -> Order:
    """Create the configured order, windowed if the settings leave that open and the memory budget requires it.

    A dataset in an object store that exceeds data.cache bytes also requires windows; the narrower window counts.
    Without that setting it must fit: an order must not depend on how full a disk is.
    With a selection, pinned by now, this is the order of the selected samples' positions.
    Raises ConfigError if batch size, memory budget or cache does not fit the dataset, or the number of ranks does not
    divide the order's shards.
    """
    row_bytes = 4 * Schema(objective.fields).row_words
    samples = _samples(config.data, dataset)
    if config.batch_size > samples:
        cure = f"lower it to {usual_batch_size(samples, lowest_shares(config.data)):,}, or add samples"
        raise ConfigError(f"batch_size {config.batch_size:,} exceeds {samples:,} samples; {cure}")
    budget = (config.state.memory_budget or samples * row_bytes) * world.size
    rows, shards = budget // row_bytes, config.order.canonical_shards or None
    blocks, window = config.order.blocks_per_shard or None, config.order.window_blocks or None
    cache, for_rows = (
        DatasetCache.of(config.data, dataset, world),
        partial(
            Order.for_memory, samples=samples, batch_size=config.batch_size, seed=config.seed, canonical_shards=shards
        ),
    )
    try:
        if isinstance(dataset, Mixture):
            order: Order = mixed_order(config, dataset, rows if config.state.memory_budget else 1 << 62, world)
        elif blocks or window:
            order = Order.create(samples, config.batch_size, config.seed, shards, blocks, window)
        elif cache is None or not cache.is_set:
            order = for_rows(rows)
        else:
            fitting = min(rows, cache.rows)
            order = for_rows(fitting)
            order.rank_ids(world.rank, world.size)
            order = for_rows(cache.narrowed(order, fitting))
        order.rank_ids(world.rank, world.size)
        if cache is not None:
            narrowest = order if blocks or window else for_rows(1, canonical_shards=order.canonical_shards)
            cache.check(order, narrowest)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.state.memory_budget and order.live_rows > rows:
        raise ConfigError(
            f"state.memory_budget = {budget // world.size:,} holds {rows:,} rows of {row_bytes} "
            f"bytes{f' on {world.size} ranks' if world.size > 1 else ''}, but the order needs "
            f"{order.live_rows:,} of {samples:,} at once: its {order.canonical_shards} shards have "
            f"windows of {order.window_blocks:,} of {order.blocks_per_shard:,} blocks of "
            f"{order.block_rows:,} rows. Set state.memory_budget to at least "
            f"{math.ceil(order.live_rows / world.size) * row_bytes:,}, or to none"
        )
    return order


def pieces_per_step(batch_size: int, micro_batch: int, world: World = ALONE) -> int:
    """Return the number of pieces in which a rank encodes its share of a batch: 1 if `micro_batch` is 0 or no smaller.

    Raises ConfigError if `micro_batch` does not divide the share.
    """
    share = batch_size // world.size
    if not 0 < micro_batch < share:
        return 1
    if share % micro_batch == 0:
        return share // micro_batch
    smaller = next(size for size in range(micro_batch, 0, -1) if share % size == 0)
    of_rank = f" that each of {world.size} ranks has of a batch" if world.size > 1 else " of a batch"
    raise ConfigError(
        f"micro_batch = {micro_batch:,} does not divide the {share:,} samples{of_rank}; "
        f"use {smaller:,}, or 0 to encode them at once"
    )


def objective_of(config: TrainConfig) -> Objective:
    """Create the objective, whose mode is no longer `auto`; its `width`, if it has one, is the features'.

    Raises ConfigError for an invalid setting.
    """
    objective = config.objective
    try:
        models = objective_class(objective.name).settings_of_mode
        known = models[objective.mode].model_fields if objective.mode in models else {}
        given = {"width": config.model.dim} if "width" in known else {}
        created = create_objective(objective.name, mode=objective.mode, **given | objective.settings)
        if config.data.without and is_plugin(objective.name):
            tried(objective.name, lambda: created, rows=3)  # its batches differ in size
        return created
    except ValueError as error:
        raise ConfigError(str(error)) from None


def refuse_thin_steps(order: Order, holes: NDArray[np.int64], first_step: int, total_steps: int, pieces: int) -> None:
    """As `Order.refuse_thin_steps`, with a ConfigError."""
    try:
        order.refuse_thin_steps(holes, first_step, total_steps, pieces)
    except ValueError as error:
        raise ConfigError(f"data.without: {error}") from None


def open_loader(
    config: DataConfig,
    dataset: Dataset,
    order: Order | Selected,
    mode: str,
    device: torch.device,
    world: World = ALONE,
    *,
    pieces: int = 1,
) -> Loader:
    """Open the loader for a rank's share of the dataset in this order: one view per sample if bimodal, else two.

    pieces: number of the loader's batches per step.

    Raises ConfigError if the loader's package is missing or the user's augmentation cannot be loaded.
    """
    served: AnyOrder = order if pieces == 1 else Pieces(order, pieces)
    shared: dict[str, Any] = {
        "image_size": config.image_size,
        "views": 1 if mode == "bimodal" else 2,
        "local_size": config.local_size,
        "local_views": config.local_views,
        "rank": world.rank,
        "world": world.size,
    }
    if config.loader == "synthetic":
        from ...pipeline.loading.synthetic_loader import SyntheticLoader

        return SyntheticLoader(dataset, served, **shared, device=device)
    shared |= {
        "recipe": recipe_named(config.recipe),
        "workers": config.workers or _workers_beside_others(config.loader, world),
        "ahead": config.ahead,
        "captions": config.captions,
        "device": device.type,
    }
    if config.planted:
        shared["planting"] = Planting(dataset, order.seed, config.planted, getattr(order, "selection", None))
    try:
        if config.loader == "dali":
            from ...pipeline.loading.dali_loader import DALILoader

            return DALILoader(dataset, served, **shared)
        from ...pipeline.loading.ffcv_loader import FFCVLoader
    except ImportError as error:
        raise ConfigError(
            f"data.loader = {config.loader!r} cannot be used here: {error}. Install it, or choose another loader"
        ) from error
    augment = _augmentation_named(config.augmentation) if config.augmentation else None
    if pieces > 1:
        shared["device"] = "cpu"  # where the pieces of a batch wait
    return FFCVLoader(dataset, served, **shared, augment=augment)


def _workers_beside_others(loader: str, world: World) -> int | None:
    """Return the number of threads for a rank that shares its machine; None lets the loader choose."""
    return None if world.cores is None else world.cores + (loader == "dali")


def _augmentation_named(name: str) -> Augmentation:
    """Import the compiled function `module:function`. Raises ConfigError if it is missing or does not fit."""
    from numba import float32, uint64
    from numba.core.dispatcher import Dispatcher
    from numba.core.errors import NumbaError

    try:
        augmentation = load_plugin(name)
    except PluginError as error:
        raise ConfigError(f"data.augmentation = {name!r} {error}") from error
    if not isinstance(augmentation, Dispatcher):
        raise ConfigError(f"data.augmentation = {name!r} is not compiled; decorate it with numba.njit")
    try:
        augmentation.compile((float32[:, :, ::1], uint64))
    except (NumbaError, TypeError) as error:  # TypeError: a wrong number of arguments
        raise ConfigError(
            f"data.augmentation = {name!r} does not compile for (pixels float32 [3, H, W], key uint64): {error}"
        ) from error
    compiled: Augmentation = augmentation
    return compiled


def device_named(name: str) -> torch.device:
    """Return the device `cpu` or `cuda`; `auto` prefers a GPU. Raises ConfigError if there is no GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch finds no GPU; use device = 'cpu' or 'auto'")
    return torch.device(name)
