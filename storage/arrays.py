"""Names for the types of arrays; shapes are said where they are used."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]
Bools = NDArray[np.bool_]
Uint8s = NDArray[np.uint8]
Int32s = NDArray[np.int32]
Uint32s = NDArray[np.uint32]
Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Records = NDArray[np.void]
"""Arrays of records, whose fields are named."""
