"""Memory for views, lent again when nothing refers to it any more: fresh pages cost a tenth of the loader's time."""

from __future__ import annotations

import weakref
from collections import deque
from math import prod

import numpy as np
from numpy.typing import NDArray


class ViewMemory:
    """Lends float32 arrays, and keeps at most `spare` of those that came back."""

    def __init__(self, spare: int) -> None:
        self._spare: deque[NDArray[np.float32]] = deque(maxlen=spare)

    def lend(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array with any values. It comes back when it is gone, and every view and tensor that shares its memory."""
        try:
            owned = self._spare.pop()  # asked for its length before, another thread could take the last one meanwhile
        except IndexError:
            owned = np.empty(0, np.float32)
        if owned.size != prod(shape):
            owned = np.empty(prod(shape), np.float32)  # on huge pages, unlike torch.empty
        # Through a memoryview: numpy and torch then refer to `lent`, and not past it to `owned`.
        lent = np.frombuffer(owned.data, np.float32)
        weakref.finalize(lent, self._spare.append, owned)
        return lent.reshape(shape)
