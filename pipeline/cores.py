"""How many cores this process may use, which a scheduler or `taskset` can make fewer than there are."""

import os


def cores() -> int:
    """Cores in the process's affinity mask, 1 or more."""
    return len(os.sched_getaffinity(0))
