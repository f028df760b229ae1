"""The keyed bijections behind the order: map a place in a shard's shuffled sequence to its id and its window.

A bijection is a Feistel network (Luby and Rackoff, 1988) on the smallest power of two that holds the domain, walked
until it lands inside (Black and Rogaway, 2002). Hashes are uint64 and places int, which is int64 here: numba turns a
mixture into float64. `int` of a uint64 stays uint64, hence int(np.int64(…)).
"""

import numpy as np

from ...storage.arrays import Int64s
from ...storage.kernels import kernel
from ..rng import GOLDEN, fold, mix

# One round per half. 2 pairs are the minimum for a pseudorandom permutation (Luby and Rackoff); the rest is margin.
# Halves of one or two bits mix slowly: with 6 pairs the orders of 5 items were still 2 % off uniform.
_ROUND_PAIRS, _TINY_ROUND_PAIRS, _TINY_BITS = 4, 12, np.uint64(8)
_ZERO, _ONE = np.uint64(0), np.uint64(1)

# Values folded into a shard's key, one per use; window w uses _WINDOWS + w.
_SHORT_BLOCK, _BLOCKS, _WINDOWS = 0, 1, 2


@kernel()
def shard_key(seed: np.uint64, epoch: np.uint64, shard: np.uint64) -> np.uint64:
    return fold(fold(fold(GOLDEN, seed), epoch), shard)


@kernel()
def _walked(place: int, size: int, key: np.uint64, backwards: bool) -> int:
    """Map `place` with the bijection of 0 … size - 1 chosen by `key`, or its inverse; fewer than 2 walks on average."""
    right_bits, left_bits = _ZERO, _ZERO
    while (_ONE << (left_bits + right_bits)) < np.uint64(size):
        if left_bits > right_bits:
            right_bits += _ONE
        else:
            left_bits += _ONE
    left_mask, right_mask = (_ONE << left_bits) - _ONE, (_ONE << right_bits) - _ONE
    rounds = 2 * (_ROUND_PAIRS if left_bits + right_bits > _TINY_BITS else _TINY_ROUND_PAIRS)
    walker = np.uint64(place)
    while True:
        left, right = walker >> right_bits, walker & right_mask
        for done in range(rounds):
            number = rounds - 1 - done if backwards else done
            if number % 2 == 0:
                left ^= mix(key + np.uint64(number) * GOLDEN + right) & left_mask
            else:
                right ^= mix(key + np.uint64(number) * GOLDEN + left) & right_mask
        walker = (left << right_bits) | right
        if walker < np.uint64(size):
            return int(np.int64(walker))


@kernel()
def shuffled(place: int, size: int, key: np.uint64) -> int:
    """Map `place` with the bijection of 0 … size - 1 chosen by `key`."""
    return _walked(place, size, key, False)


@kernel()
def unshuffled(place: int, size: int, key: np.uint64) -> int:
    """Return what `shuffled` maps to `place`."""
    return _walked(place, size, key, True)


@kernel()
def _start_of(turn: int, block_rows: int, short_turn: int, missing: int) -> int:
    """Return the first place of the block at `turn`; the block at `short_turn` lacks `missing` rows."""
    return turn * block_rows - (missing if turn > short_turn else 0)


@kernel()
def _turn_at(place: int, block_rows: int, short_turn: int, missing: int) -> int:
    """Return the turn of the block that holds `place`: the inverse of `_start_of`."""
    if place < (short_turn + 1) * block_rows - missing:
        return place // block_rows
    return (place + missing) // block_rows


@kernel()
def _blocks_of(rows: int, block_rows: int, key: np.uint64) -> tuple[int, int, int, np.uint64]:
    """Return a shard's number of blocks, the rows that the last one lacks, its turn, and the others' key."""
    blocks = (rows + block_rows - 1) // block_rows
    short_turn = int(np.int64(fold(key, np.uint64(_SHORT_BLOCK)) % np.uint64(blocks)))
    return blocks, blocks * block_rows - rows, short_turn, fold(key, np.uint64(_BLOCKS))


@kernel()
def _block_at(turn: int, blocks: int, short_turn: int, blocks_key: np.uint64) -> int:
    """Return the shard's block at `turn`."""
    if turn == short_turn:
        return blocks - 1
    return shuffled(turn - (1 if turn > short_turn else 0), blocks - 1, blocks_key)


@kernel()
def _turn_of(block: int, blocks: int, short_turn: int, blocks_key: np.uint64) -> int:
    """Return the turn of a shard's block: the inverse of `_block_at`."""
    if block == blocks - 1:
        return short_turn
    turn = unshuffled(block, blocks - 1, blocks_key)
    return turn + (1 if turn >= short_turn else 0)


@kernel()
def _turns_of(number: int, window: int, lead: int, blocks: int) -> tuple[int, int]:
    """Return first and end of the turns in window `number`."""
    return max(number * window - lead, 0), min((number + 1) * window - lead, blocks)


@kernel()
def fill_places(
    out: Int64s, first_place: int, first_id: int, rows: int, block_rows: int, window: int, lead: int, key: np.uint64
) -> None:
    """Write the ids at places first_place, first_place + 1, … of one shard's shuffled sequence into `out`."""
    blocks, missing, short_turn, blocks_key = _blocks_of(rows, block_rows, key)
    for i in range(out.size):
        place = first_place + i
        number = (_turn_at(place, block_rows, short_turn, missing) + lead) // window
        first_turn, end_turn = _turns_of(number, window, lead, blocks)
        low = _start_of(first_turn, block_rows, short_turn, missing)
        high = _start_of(end_turn, block_rows, short_turn, missing)
        place = low + shuffled(place - low, high - low, fold(key, np.uint64(_WINDOWS + number)))
        turn = _turn_at(place, block_rows, short_turn, missing)
        block = _block_at(turn, blocks, short_turn, blocks_key)
        out[i] = first_id + block * block_rows + place - _start_of(turn, block_rows, short_turn, missing)


@kernel()
def find_places(out: Int64s, ids: Int64s, rows: int, block_rows: int, window: int, lead: int, key: np.uint64) -> None:
    """Write the places of ids in one shard's shuffled sequence into `out`: the inverse of `fill_places`.

    ids: relative to the shard's first, 0 … rows - 1.
    """
    blocks, missing, short_turn, blocks_key = _blocks_of(rows, block_rows, key)
    for i in range(out.size):
        turn = _turn_of(ids[i] // block_rows, blocks, short_turn, blocks_key)
        place = _start_of(turn, block_rows, short_turn, missing) + ids[i] % block_rows
        number = (turn + lead) // window
        first_turn, end_turn = _turns_of(number, window, lead, blocks)
        low = _start_of(first_turn, block_rows, short_turn, missing)
        high = _start_of(end_turn, block_rows, short_turn, missing)
        out[i] = low + unshuffled(place - low, high - low, fold(key, np.uint64(_WINDOWS + number)))


@kernel()
def window_at(
    number: int, rows: int, block_rows: int, window: int, lead: int, key: np.uint64
) -> tuple[int, int, Int64s]:
    """Return first and end of the places in one shard's window `number`, and its blocks within the shard."""
    blocks, missing, short_turn, blocks_key = _blocks_of(rows, block_rows, key)
    first_turn, end_turn = _turns_of(number, window, lead, blocks)
    members = np.empty(end_turn - first_turn, dtype=np.int64)
    for i in range(members.size):
        members[i] = _block_at(first_turn + i, blocks, short_turn, blocks_key)
    low = _start_of(first_turn, block_rows, short_turn, missing)
    return low, _start_of(end_turn, block_rows, short_turn, missing), members
