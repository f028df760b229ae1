"""Imports for the process from which workers are forked, so that no worker repeats them before its first shard."""

import numpy as np
import pandas  # noqa: F401  pyarrow imports it when it makes its first array

from ..dataset.stored_sample import checksum
from . import shard_writer as shard_writer

checksum(np.empty(0, np.uint8))  # numba reads most of its own modules with the first compiled function
