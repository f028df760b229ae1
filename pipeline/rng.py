"""Counter-based randomness: a number depends on its purpose, never on how many were drawn before it.

So shuffles and augmentation do not depend on batch size, ranks, threads or resuming.
Hashes are uint64 throughout: numba turns a mixture of signed and unsigned into float64.
"""

import math

import numpy as np

from ..storage.kernels import kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S11, _S27, _S30, _S31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)
_S16, _S32, _S48, _LOW_16 = np.uint64(16), np.uint64(32), np.uint64(48), np.uint64(0xFFFF)
_MEAN_OF_SUM, _DEVIATION_OF_SUM = 2.0 * 65535, math.sqrt((2.0**32 - 1) / 3)


@kernel()
def mix(x: np.uint64) -> np.uint64:
    """Mix 64 bits bijectively. Source: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


@kernel()
def fold(key: np.uint64, value: np.uint64) -> np.uint64:
    """Derive a key for `value`."""
    return mix(key ^ mix(value + GOLDEN))


@kernel()
def uniform(key: np.uint64, draw: np.uint64) -> float:
    """Return the draw-th number of a key, in [0, 1)."""
    return np.float64(fold(key, draw) >> _S11) * 2.0**-53


@kernel()
def nearly_normal(key: np.uint64, index: np.uint64) -> float:
    """Return the index-th number of a key's stream, of mean 0 and variance 1, within ±3.47.

    The sum of four uniform numbers of 16 bits, from one step of SplitMix64: cheap, and the same on every machine.
    """
    bits = mix(key + index * GOLDEN)
    total = (bits & _LOW_16) + (bits >> _S16 & _LOW_16) + (bits >> _S32 & _LOW_16) + (bits >> _S48)
    return (np.float64(total) - _MEAN_OF_SUM) / _DEVIATION_OF_SUM
