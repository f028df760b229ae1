"""Which threads call a function, and ranks that are threads."""

import queue
import threading


def watch(monkeypatch, functions):
    """Watch (owner, name) each. Returns name -> the threads that called it, filled as they do."""
    threads = {}

    def watched(name, work):
        def call(*given, **options):
            threads.setdefault(name, set()).add(threading.current_thread())
            return work(*given, **options)

        return call

    for owner, name in functions:
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    return threads


class ThreadRank:
    """Ranks that are threads of one process: a queue to each rank, and one to the first."""

    def __init__(self, rank, to_rank, to_first):
        self.rank, self.world, self._to_rank, self._to_first = rank, len(to_rank), to_rank, to_first

    @classmethod
    def both(cls):
        queues = [queue.Queue() for _ in range(2)], [queue.Queue() for _ in range(2)]
        return [cls(rank, *queues) for rank in range(2)]

    def broadcast(self, value):
        if self.rank == 0:
            for other in self._to_rank[1:]:
                other.put(value)
            return value
        return self._to_rank[self.rank].get(timeout=60)

    def gather(self, value):
        self._to_first[self.rank].put(value)
        return [sender.get(timeout=60) for sender in self._to_first] if self.rank == 0 else []
