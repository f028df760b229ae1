"""Imports for the process from which workers are forked, so that no worker repeats them before its first shard."""

import numba
import numpy as np
import pandas  # noqa: F401  pyarrow imports it when it makes its first array

# FFCV starts numba's threads, which no worker needs. TBB's threads may keep the fork server alive for ever, and with it
# the pipe from which a caller reads the conversion's output.
numba.config.THREADING_LAYER = "workqueue"  # set when numba is imported

from ..dataset.stored_sample import checksum  # noqa: E402
from . import shard_writer as shard_writer  # noqa: E402

checksum(np.empty(0, np.uint8))  # numba reads most of its own modules with the first compiled function
