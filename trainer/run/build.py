"""Resolve a run's settings and build its parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from ...pipeline.loading import Loader
from ...pipeline.opening import Dataset, Mixture, usual_image_size
from ...pipeline.order.mixed_order import MixedOrder
from ...pipeline.order.order import FEW_SHARDS, MIN_ROWS_PER_STEP, AnyOrder, Order, Served, Window, usual_shards
from ...pipeline.planted import Planting
from ...pipeline.views.recipes import RECIPES, Recipe
from ...state_store.schema import Schema
from ..config import DataConfig, OrderConfig, RecipeConfig, TrainConfig, nearest
from ..encoders import with_names
from ..errors import ConfigError, refusing
from ..objectives import Objective, Settings, checked_settings, objective_class, objective_with, tried
from ..plugins import is_plugin, load_plugin
from ..precision import compiler_fault, resolve_speed
from ..world import ALONE, World
from .chosen_settings import refuse_few_samples, refuse_unnamed_encoders, usual_batch_size, with_settings_of_models
from .dataset_cache import DatasetCache
from .selection_files import SELECTING, pinned, rows_of, selects

if TYPE_CHECKING:
    from ...pipeline.loading.ffcv_loader import Augmentation


class Parts(NamedTuple):
    """What a run's settings were completed with, so that the run need not make it again."""

    dataset: Dataset
    objective: Objective
    order: Order


def parts_of(config: TrainConfig, dataset: Dataset, world: World = ALONE) -> Parts:
    """Make the parts, for settings whose mode and batch size are no longer `auto`.

    Raises ConfigError, also unless the objective supports the momentum network, local views and weights.
    """
    torch.manual_seed(config.seed)  # a user's objective may draw weights
    objective, momentum, local = objective_of(config), config.model.momentum, config.data.local_views
    if config.data.without and config.compile:
        raise ConfigError("compile = true is for batches of one size, which data.without makes differ; leave one out")
    if config.data.weights:
        with refusing("data.weights", ValueError):
            objective.check_weights()
    try:
        objective.check_frame(momentum > 0, local)
    except ValueError as error:
        of_keys = f"model.momentum = {momentum:g}" if momentum else "model.momentum = 0 (set 0.99, say)"
        given = f"data.local_views = {local}" if local and "local views" in str(error) else of_keys
        raise ConfigError(f"{given}: {error}") from None
    return Parts(dataset, objective, create_order(config, dataset, objective, world))


def resolve(config: TrainConfig, dataset: Dataset, world: World = ALONE) -> tuple[TrainConfig, Parts]:
    """Replace every `auto` that affects results by its value, and fill in the objective's settings.

    Raises ConfigError if the objective, its mode or settings, the recipe or the batch size does not fit.
    """
    pairs = dataset.index.mode == "pairs"
    name, mode = config.objective.name, config.objective.mode
    if mode == "auto":  # the objective's only mode, or the mode that fits the data
        with refusing("", ValueError):
            modes = objective_class(name).settings_of_mode.keys()
        mode = "bimodal" if (pairs and "bimodal" in modes) or modes == {"bimodal"} else "unimodal"
    if mode == "bimodal" and not pairs:
        raise ConfigError(f"objective.mode = 'bimodal' needs captions, but {dataset.place} has only images")
    data = _resolve_data(config.data, dataset, mode)
    refuse_few_samples(dataset, _samples(data, dataset))
    device = device_named(config.device)
    refuse_unnamed_encoders(config.model, data.image_size, mode)
    resolved = config.model_copy(
        update={
            "batch_size": config.batch_size or usual_batch_size(_samples(data, dataset), lowest_shares(data)),
            "data": data,
            "objective": config.objective.model_copy(update={"mode": mode}),
            "model": with_names(config.model, mode),
        }
    )
    resolved = with_settings_of_models(config.model, resolved, objective_settings(resolved))
    parts = parts_of(resolved, dataset, world)
    pieces_per_step(resolved.batch_size, config.micro_batch, world)
    settings = parts.objective.settings
    own = settings.model_dump(exclude_none=True) | {"similarity_budget": settings.budget_on(device)}
    speed = resolve_speed(config, device)
    if settings.precision == "auto":
        own["precision"] = "tf32" if device.type == "cuda" and speed["precision"] != "float32" else "float32"
    if settings.compile == "auto":
        own["compile"] = device.type == "cuda" and not compiler_fault(device)
    optimizer = config.optimizer
    if optimizer.warmup is None:
        steps = min(200, config.total_steps(parts.order.steps_per_epoch) // 10)
        optimizer = optimizer.model_copy(update={"warmup": steps})
    update = {
        **speed,
        "optimizer": optimizer,
        "objective": type(config.objective)(name=name, mode=mode, **own),
        "order": OrderConfig(**{field: getattr(parts.order, field) for field in OrderConfig.model_fields}),
    }
    return resolved.model_copy(update=update), parts


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
    # Numbers of planted samples become shares of the samples that there are now: appended ones follow.
    given, of_parts = np.atleast_1d(data.planted), isinstance(data.planted, tuple)
    sizes = [part.n for part in getattr(dataset, "parts", ())] if of_parts else [_samples(data, dataset)]
    shares = np.where(given >= 1, given / sizes, given) if len(given) == len(sizes) else given + 1
    if given.any() and (mode != "bimodal" or not ((shares >= 0) & (shares <= 0.5)).all()):
        what = "be a share up to 0.5, or a number up to half of the samples, or one for each part of a mixture"
        raise ConfigError(f"data.planted = {data.planted} should {what}; it is for pairs alone")
    return data.model_copy(update={"planted": tuple(shares.tolist()) if of_parts else float(shares[0])})


def recipe_named(asked: str | RecipeConfig) -> Recipe:
    """Return the views' recipe, which is no longer `auto`, with its changed fields.

    For `module:name` this runs that module. Raises ConfigError for an unknown name or field, or a value out of range.
    """
    name, fields = (asked, {}) if isinstance(asked, str) else (asked.name, asked.fields)
    if is_plugin(name):
        recipe = load_plugin(name, f"data.recipe = {name!r}")
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


def reading_ahead(
    config: DataConfig, dataset: Dataset, served: AnyOrder, windows: Iterator[Window], world: World
) -> AbstractContextManager[None]:
    """Return a context in which the windows' samples are fetched ahead; it does nothing for a dataset on disk."""
    cache = DatasetCache.of(config, dataset, world)
    if cache is None or config.loader == "synthetic":
        return nullcontext()
    return dataset.files.expect(windows, served, cache.limit)


def _samples(data: DataConfig, dataset: Dataset) -> int:
    return rows_of(data.select) if data.select else dataset.n


def create_order(config: TrainConfig, dataset: Dataset, objective: Objective, world: World = ALONE) -> Order:
    """Create the configured order, windowed if the settings leave that open and the memory budget requires it.

    A dataset in an object store that exceeds data.cache bytes also requires windows; the narrower window counts.
    Without that setting it must fit: an order must not depend on how full a disk is.
    With a selection, pinned by now, this is the order of the selected samples' positions.
    Raises ConfigError if batch size, memory budget or cache does not fit the dataset, or the ranks not the shards.
    """
    row_bytes = 4 * Schema(objective.fields).row_words
    samples = _samples(config.data, dataset)
    if config.batch_size > samples:
        cure = f"lower it to {usual_batch_size(samples, lowest_shares(config.data)):,}, or add samples"
        raise ConfigError(f"batch_size {config.batch_size:,} exceeds {samples:,} samples; {cure}")
    budget = (config.state.memory_budget or samples * row_bytes) * world.size
    rows, shards = budget // row_bytes, config.order.canonical_shards or None
    blocks, window = config.order.blocks_per_shard or None, config.order.window_blocks or None
    cache, batch_size, seed = DatasetCache.of(config.data, dataset, world), config.batch_size, config.seed
    for_rows = partial(Order.for_memory, samples=samples, batch_size=batch_size, seed=seed, canonical_shards=shards)
    with refusing("", ValueError):
        if isinstance(dataset, Mixture):
            order: Order = _mixed_order(config, dataset, rows if config.state.memory_budget else 1 << 62, world)
        elif blocks or window:
            order = Order.create(samples, batch_size, seed, shards, blocks, window)
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
    if config.state.memory_budget and order.live_rows > rows:
        raise ConfigError(
            f"state.memory_budget = {budget // world.size:,} holds {rows:,} rows of {row_bytes} "
            f"bytes{f' on {world.size} ranks' if world.size > 1 else ''}, but the order needs "
            f"{order.live_rows:,} of {samples:,} at once: its {order.canonical_shards} shards have "
            f"windows of {order.window_blocks:,} of {order.blocks_per_shard:,} blocks of "
            f"{order.block_rows:,} rows. Set state.memory_budget to at least "
            f"{math.ceil(order.live_rows / world.size) * row_bytes:,}, or to none"
        )
    return order.serving_all() if objective.is_frozen else order


def lowest_shares(data: DataConfig) -> list[int]:
    """Return the parts' smallest whole numbers of samples in their shares; of one dataset [1]."""
    shares = data.shares or (1,)
    return [share // math.gcd(*shares) for share in shares]


def _mixed_order(config: TrainConfig, mixture: Mixture, rows: int, world: World) -> MixedOrder:
    """Create the order for a memory of `rows` rows over all ranks; its parts have equally many canonical shards.

    Raises ConfigError unless batch size and number of ranks fit the shares, ValueError as `Order.create`.
    """
    shares, unit = config.data.shares or (), sum(lowest_shares(config.data)) * MIN_ROWS_PER_STEP
    batches = [config.batch_size * share / sum(shares) for share in shares]
    if min(batches) < MIN_ROWS_PER_STEP or not all(map(float.is_integer, batches)):
        fits = max(unit * min(shares), config.batch_size // unit * unit)
        raise ConfigError(
            f"batch_size = {config.batch_size:,} in shares of {' : '.join(map(str, shares))} does not give each part "
            f"whole samples, {MIN_ROWS_PER_STEP} or more; use {fits:,} or {fits + unit:,}, for example"
        )
    usual = [usual_shards(part.n, int(batch)) for part, batch in zip(mixture.parts, batches, strict=True)]
    most = FEW_SHARDS if config.state.memory_budget else min(usual)  # as Order.for_memory
    shards = config.order.canonical_shards or min(most, *usual)
    if shards % world.size:
        part = usual.index(min(usual))
        raise ConfigError(
            f"{world.size} ranks cannot share the {batches[part]:,.0f} samples of a batch that are of the part "
            f"{mixture.names[part]}, since order.canonical_shards is {shards}; use a number of ranks that divides it, "
            "or with state.memory_budget set more order.canonical_shards"
        )
    given = (mixture.n, config.batch_size, config.seed, shards)
    mix = partial(MixedOrder.of, samples=[part.n for part in mixture.parts], shares=shares)
    if config.order.blocks_per_shard or config.order.window_blocks:
        return mix(Order.create(*given, config.order.blocks_per_shard or None, config.order.window_blocks or None))
    # Windows in proportion take more memory than those of one dataset.
    for halvings in range(4):
        with suppress(ValueError):  # a part's blocks may be too small for its share of a step
            order = mix(Order.for_memory(rows >> halvings, *given))
            if order.live_rows <= rows:
                return order
    return mix(Order.for_memory(rows, *given))


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
    """Create the objective, whose mode is no longer `auto`. Raises ConfigError for an invalid setting."""
    name, settings = config.objective.name, objective_settings(config)
    with refusing("", ValueError):
        created = objective_with(name, config.objective.mode, settings)
        if config.data.without and is_plugin(name):
            tried(name, lambda: created, rows=3)  # its batches differ in size
        return created


def objective_settings(config: TrainConfig) -> Settings:
    """Return its settings, with defaults; `width`, if it has one, is the features'. Raises as `objective_of`."""
    objective = config.objective
    with refusing("", ValueError):
        known = objective_class(objective.name).settings_of_mode.get(objective.mode)
        width = {"width": config.model.dim} if known and "width" in known.model_fields else {}
        plain = {"compile": False} if config.data.without else {}  # batches of many sizes, each compiled for seconds
        return checked_settings(objective.name, objective.mode, width | objective.settings | plain)


def open_loader(
    config: DataConfig, dataset: Dataset, order: AnyOrder, mode: str, device: torch.device, world: World = ALONE
) -> Loader:
    """Open the loader for a rank's share of the dataset in this order: one view per sample if bimodal, else two.

    Raises ConfigError if the loader's package is missing or the user's augmentation cannot be loaded.
    """
    served = order if isinstance(order, Served) else Served(order, None, order.samples)
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
        # Of ranks that share a machine; None lets the loader choose.
        "workers": config.workers or (world.cores and world.cores + (config.loader == "dali")),
        "ahead": config.ahead,
        "captions": config.captions,
        "device": device.type,
    }
    if config.planted:
        shared["planting"] = Planting(dataset, served.seed, config.planted, served.selection)
    cure = ". Install it, or choose another loader"
    with refusing(f"data.loader = {config.loader!r} cannot be used here", ImportError, cure=cure):
        if config.loader == "dali":
            from ...pipeline.loading.dali_loader import DALILoader

            return DALILoader(dataset, served, **shared)
        from ...pipeline.loading.ffcv_loader import FFCVLoader
    augment = _augmentation_named(config.augmentation) if config.augmentation else None
    if served.pieces > 1:
        shared["device"] = "cpu"  # where the pieces of a batch wait
    return FFCVLoader(dataset, served, **shared, augment=augment)


def _augmentation_named(name: str) -> Augmentation:
    """Import the compiled function `module:function`. Raises ConfigError if it is missing or does not fit."""
    from numba import float32, uint64
    from numba.core.dispatcher import Dispatcher
    from numba.core.errors import NumbaError

    augmentation = load_plugin(name, f"data.augmentation = {name!r}")
    if not isinstance(augmentation, Dispatcher):
        raise ConfigError(f"data.augmentation = {name!r} is not compiled; decorate it with numba.njit")
    what = f"data.augmentation = {name!r} does not compile for (pixels float32 [3, H, W], key uint64)"
    with refusing(what, NumbaError, TypeError):  # TypeError: a wrong number of arguments
        augmentation.compile((float32[:, :, ::1], uint64))
    compiled: Augmentation = augmentation
    return compiled


def device_named(name: str) -> torch.device:
    """Return the device `cpu` or `cuda`; `auto` prefers a GPU. Raises ConfigError if there is no GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch finds no GPU; use device = 'cpu' or 'auto'")
    return torch.device(name)
