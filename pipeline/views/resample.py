"""Resize a crop with a triangle filter scaled to the reduction: antialiased bilinear.

The filter is Pillow's BILINEAR. Rows are combined first, in float32. Then the three channels of a pixel are packed
into one uint64 of 3 × 21 bits: a value in quarters of a level (10 bits) times a weight in 2048ths, summed over
non-negative weights that add up to 2048, stays below 2^21, so one multiplication serves all three.
"""

import numpy as np

from ...storage.arrays import Float32s, Int64s, Uint8s, Uint64s
from ...storage.kernels import kernel

_QUARTERS = 4
_WHOLE = 2048
_G, _B = np.uint64(21), np.uint64(42)
_LANE = np.uint64((1 << 21) - 1)


@kernel()
def resample_into(
    out: Float32s, picture: Uint8s, top: float, left: float, height: float, width: float, flip: bool
) -> None:
    """Resize a box of a picture, mirrored if flip is set.

    out: float32 [3, size, size], values 0 … 255. picture: uint8 [rows, columns, 3]. The box is in pixels and may start
    between two pixels. Filters use pixels beyond the box if the picture has them.
    """
    size = out.shape[1]
    rows, columns = picture.shape[0], picture.shape[1]
    first_row, row_weights = triangle_filter(top, height, rows, size)
    first_column, column_weights = triangle_filter(left, width, columns, size)
    if flip:
        first_column, column_weights = first_column[::-1].copy(), column_weights[:, ::-1].copy()
    start = min(first_column[0], first_column[-1])
    used = max(first_column[0], first_column[-1]) + len(column_weights) - start
    at = (first_column - start).astype(np.uint64)
    weights = _in_wholes(column_weights)
    lines = picture.reshape(rows, 3 * columns)[:, 3 * start : 3 * (start + used)]
    line, pixels, sums = np.empty(3 * used, np.float32), np.empty(used, np.uint64), np.empty(size, np.uint64)
    for y in range(size):
        _combine_rows(line, lines[first_row[y] : first_row[y] + len(row_weights)], row_weights[:, y])
        _pack(pixels, line)
        _combine_columns(sums, pixels, at, weights)
        _unpack(out[0, y], out[1, y], out[2, y], sums)


@kernel()
def triangle_filter(start: float, length: float, source: int, size: int) -> tuple[Int64s, Float32s]:
    """Return the source pixels and weights of each of `size` outputs along one axis.

    Returns first int64 [size] and weights float32 [taps, size]: output i is the sum over k of weights[k, i] times
    source pixel first[i] + k, all within the source. Weights are non-negative and add up to 1.
    """
    scale = length / size
    reach = max(scale, 1.0)
    taps = min(source, int(2 * reach) + 2)
    first, weights = np.empty(size, np.int64), np.zeros((taps, size), np.float32)
    most = 1
    for i in range(size):
        centre = start + (i + 0.5) * scale
        low, high = max(0, int(centre - reach + 0.5)), min(source, int(centre + reach + 0.5))
        first[i] = min(low, source - taps)
        total = 0.0
        for place in range(low, high):
            total += max(0.0, 1 - abs(place + 0.5 - centre) / reach)
        for place in range(low, high):
            weights[place - first[i], i] = max(0.0, 1 - abs(place + 0.5 - centre) / reach) / total
        most = max(most, high - first[i])
    return first, weights[:most]


@kernel()
def _in_wholes(weights: Float32s) -> Uint64s:
    """Convert weights to 2048ths, uint64 [taps, size]; the rounding error goes to each output's largest weight."""
    taps, size = weights.shape
    wholes = np.empty((taps, size), np.uint64)
    for i in range(size):
        left, largest = _WHOLE, 0
        for k in range(taps):
            whole = int(weights[k, i] * _WHOLE + 0.5)
            wholes[k, i] = np.uint64(whole)
            left -= whole
            if weights[k, i] > weights[largest, i]:
                largest = k
        wholes[largest, i] = np.uint64(np.int64(wholes[largest, i]) + left)
    return wholes


@kernel()
def _combine_rows(line: Float32s, rows: Uint8s, weights: Float32s) -> None:
    """line = Σ_k weights[k] · rows[k] in quarters of a level, plus a half, so that truncation rounds."""
    half = np.float32(0.5)
    if len(weights) == 1:
        weight, row = weights[0] * np.float32(_QUARTERS), rows[0]
        for j in range(len(line)):
            line[j] = weight * np.float32(row[j]) + half
        return
    weight, other_weight = weights[0] * np.float32(_QUARTERS), weights[1] * np.float32(_QUARTERS)
    row, other = rows[0], rows[1]
    for j in range(len(line)):
        line[j] = weight * np.float32(row[j]) + other_weight * np.float32(other[j]) + half
    for k in range(2, len(weights)):
        weight, row = weights[k] * np.float32(_QUARTERS), rows[k]
        for j in range(len(line)):
            line[j] += weight * np.float32(row[j])


@kernel()
def _pack(pixels: Uint64s, line: Float32s) -> None:
    for x in range(len(pixels)):
        red, green, blue = np.int32(line[3 * x]), np.int32(line[3 * x + 1]), np.int32(line[3 * x + 2])
        pixels[x] = np.uint64(red) | (np.uint64(green) << _G) | (np.uint64(blue) << _B)


@kernel()
def _combine_columns(sums: Uint64s, pixels: Uint64s, at: Uint64s, weights: Uint64s) -> None:
    # Tap by tap over all outputs, not output by output: otherwise the compiler uses no vector instructions.
    weight = weights[0]
    for x in range(len(sums)):
        sums[x] = pixels[at[x]] * weight[x]
    for k in range(1, len(weights)):
        weight = weights[k]
        for x in range(len(sums)):
            sums[x] += pixels[at[x] + np.uint64(k)] * weight[x]


@kernel()
def _unpack(red: Float32s, green: Float32s, blue: Float32s, sums: Uint64s) -> None:
    level = np.float32(1 / (_QUARTERS * _WHOLE))
    for x in range(len(sums)):
        red[x] = np.float32(np.int32(sums[x] & _LANE)) * level
    for x in range(len(sums)):
        green[x] = np.float32(np.int32((sums[x] >> _G) & _LANE)) * level
    for x in range(len(sums)):
        blue[x] = np.float32(np.int32(sums[x] >> _B)) * level
