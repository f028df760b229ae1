"""Imported by the process that workers are forked from: what each of them would do before its first shard."""

import numba
import numpy as np
import pandas  # noqa: F401  pyarrow imports it with the first array that it makes

# FFCV starts numba's threads, which no worker needs; those of TBB may keep a process that was forked from for ever, and
# with it the pipe that a caller reads the conversion's output from.
numba.config.THREADING_LAYER = "workqueue"  # type: ignore[attr-defined]  # set when numba is imported

from ..stored_sample import checksum  # noqa: E402
from . import shard_writer as shard_writer  # noqa: E402

checksum(np.empty(0, np.uint8))  # numba reads most of its own modules with the first compiled function
