"""Analyse the temperatures of a run from its state and its dataset, one block of rows at a time.

Nothing here prints or draws progress: what takes long calls a function that the command passes.
"""

from collections.abc import Callable

OnDone = Callable[[int, int], None]
"""Called with how many are done, and of how many."""
OnTask = Callable[[str, int, int], None]
"""Called with the name of a task, how many are done, and of how many; with 0 before a task whose first part is long."""
