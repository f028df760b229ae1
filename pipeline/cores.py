"""The number of cores this process may use; a scheduler or `taskset` can restrict it."""

import os


def cores() -> int:
    """Return the number of cores in the process's affinity mask, at least 1."""
    return len(os.sched_getaffinity(0))
