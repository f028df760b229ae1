"""Read a shard with FFCV's own Loader, then compile a function that calls another, compiled before."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numba
import numpy as np
from pipeline.conversion.test_beton import open_ffcv, test_ffcv_itself_reads_the_shard

from thermopile.benchmarks.ffcv_types import leave_shared_types


@numba.njit  # not kept on disk: the type of a function that is loaded is another object
def length(data):
    return len(data)


@numba.njit
def twice_the_length(data):
    return 2 * length(data)


data = np.zeros(5, np.uint8)
length(data)
leave_shared_types()
test_ffcv_itself_reads_the_shard(Path(sys.argv[1]), open_ffcv)
assert twice_the_length(data) == 10
