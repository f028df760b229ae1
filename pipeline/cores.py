"""The number of cores this process may use; a scheduler or `taskset` can restrict it."""

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence


def cores() -> int:
    """Return the number of cores in the process's affinity mask, at least 1."""
    return len(os.sched_getaffinity(0))


def divided_cores(processes: Sequence[tuple[str, Collection[int]]]) -> list[int]:
    """Return each process's number of cores, at least 1, such that every core is counted once.

    processes: each process's machine and affinity mask. Processes that may use the same cores divide these.
    """
    users = defaultdict(list)
    for process, (machine, mask) in enumerate(processes):
        for core in mask:
            users[machine, core].append(process)
    numbers = [0] * len(processes)
    for together, shared in Counter(map(tuple, users.values())).items():
        for place, process in enumerate(together):
            numbers[process] += shared // len(together) + (place < shared % len(together))
    return [max(1, number) for number in numbers]
