"""The order of a mixture, and what its shares require of the batch size and of the number of ranks."""

import math
from contextlib import suppress
from functools import partial

from ...pipeline.opening import Mixture
from ...pipeline.order.mixed_order import MixedOrder
from ...pipeline.order.order import FEW_SHARDS, MIN_ROWS_PER_STEP, Order, usual_shards
from ..config import DataConfig, TrainConfig
from ..errors import ConfigError
from ..world import World


def lowest_shares(data: DataConfig) -> list[int]:
    """Return the parts' smallest whole numbers of samples in their shares; of one dataset [1]."""
    shares = data.shares or (1,)
    return [share // math.gcd(*shares) for share in shares]


def mixed_order(config: TrainConfig, mixture: Mixture, rows: int, world: World) -> MixedOrder:
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
