"""Reuse memory for views once nothing refers to it: fresh pages would cost a tenth of the loader's time."""

import weakref
from collections import deque
from math import prod

import numpy as np
from numpy.typing import NDArray


class ViewMemory:
    """A pool of float32 arrays that keeps at most `spare` returned ones."""

    def __init__(self, spare: int) -> None:
        self._spare: deque[NDArray[np.float32]] = deque(maxlen=spare)

    def lend(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return an uninitialised array. Its memory returns to the pool once no view or tensor shares it."""
        try:
            owned = self._spare.pop()  # not a length check first: another thread could take the last one in between
        except IndexError:
            owned = np.empty(0, np.float32)
        if owned.size != prod(shape):
            owned = np.empty(prod(shape), np.float32)  # on huge pages, unlike torch.empty
        # Through a memoryview, so that numpy and torch refer to `lent` and not directly to `owned`.
        lent = np.frombuffer(owned.data, np.float32)
        weakref.finalize(lent, self._spare.append, owned)
        return lent.reshape(shape)
