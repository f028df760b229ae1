"""Imported by the process that workers are forked from: what each of them would do before its first shard."""

import numpy as np
import pandas  # noqa: F401  pyarrow imports it with the first array that it makes

from ..stored_sample import checksum
from . import shard_writer as shard_writer

checksum(np.empty(0, np.uint8))  # numba reads most of its own modules with the first compiled function
