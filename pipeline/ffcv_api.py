"""The parts of ffcv that thermopile uses, imported only here because the import has side effects.

Importing ffcv's compiler sets torch and numba to one thread for the whole process; both are restored.
"""

import numba
import torch

_torch_threads, _numba_threads = torch.get_num_threads(), numba.get_num_threads()

from ffcv.fields import IntField, NDArrayField, RGBImageField  # noqa: E402
from ffcv.libffcv import ctypes_imdecode as imdecode  # noqa: E402
from ffcv.libffcv import ctypes_resize as resize  # noqa: E402
from ffcv.memory_allocator import MemoryAllocator  # noqa: E402
from ffcv.types import FieldDescType, HeaderType  # noqa: E402
from ffcv.writer import DatasetWriter, handle_sample  # noqa: E402

torch.set_num_threads(_torch_threads)
numba.set_num_threads(_numba_threads)

__all__ = [
    "DatasetWriter",
    "FieldDescType",
    "HeaderType",
    "IntField",
    "MemoryAllocator",
    "NDArrayField",
    "RGBImageField",
    "handle_sample",
    "imdecode",
    "resize",
]
