"""The cache's room: the size of each block of samples, the blocks in use, and which block to evict."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from threading import Condition, RLock

from ..errors import DatasetError
from .plan import in_pages
from .schedule import NEVER, Schedule


class CacheTooSmallError(DatasetError):
    """The samples in use at once take more than data.cache."""


class Room:
    """Bytes on disk within a limit. Blocks in use stay; of the others, the block needed last is evicted first.

    A block grows by what is appended to its file, or is paid for as a whole beforehand.

    All methods but `leave_later` take the lock, and notify `changed` when room may have become free.
    """

    def __init__(self, lock: RLock, limit: int, drop: Callable[[int], None], schedule: Schedule | None = None) -> None:
        """drop: frees a block; called under the lock.

        schedule: knows when blocks are needed; then nothing exceeds the limit. None: evict the least recently used
        block; blocks in use may exceed the limit.
        """
        self.changed, self.limit, self._drop, self._firm = Condition(lock), limit, drop, schedule is not None
        self._next_use = schedule.next_use if schedule else lambda block: -self._last_use.get(block, 0)
        self._schedule = schedule
        self._last_use: dict[int, int] = {}
        self._paid: Counter[int] = Counter()
        self._sizes: Counter[int | None] = Counter()
        """Bytes of each block's file: never more than `_paid`, which is whole pages."""
        self._in_use: Counter[int] = Counter()
        self._left: deque[tuple[int, ...]] = deque()
        self.bytes = self.peak_bytes = self._uses = self._callers = self._waiting = self._reading_ahead = 0

    def enter(self, blocks: Iterable[int], *, ahead: bool = False) -> None:
        """Keep these blocks until `leave`. ahead: for the read-ahead threads, which leave by themselves."""
        with self.changed:
            self._in_use.update(blocks)
            self._uses += 1
            if not self._firm:
                self._last_use |= dict.fromkeys(blocks, self._uses)
            self._callers += not ahead
            self._reading_ahead += ahead

    def leave(self, blocks: Iterable[int], *, ahead: bool = False) -> None:
        """End `enter`."""
        with self.changed:
            self._in_use -= Counter(blocks)
            self._callers -= not ahead
            self._reading_ahead -= ahead
            self.changed.notify_all()

    def leave_later(self, blocks: tuple[int, ...]) -> None:
        """End `enter` at the next call of `take`; the garbage collector may call it anywhere, so it takes no lock."""
        self._left.append(blocks)

    def take(self, block: int | None, size: int) -> int:
        """Append to a block for a caller who needs it now; return the offset. block: None for bytes never dropped.

        Takes no room that `take_ahead` has taken. Waits if only other callers can make room. Raises CacheTooSmallError
        if nobody can.
        """
        with self.changed:
            self._waiting += 1
            try:
                while not self._make_room(more := self._more(block, self._sizes[block] + size), -NEVER) and self._firm:
                    if self._waiting >= self._callers and not self._reading_ahead:
                        raise CacheTooSmallError(
                            f"data.cache = {self.limit:,} is too small: the samples in use at once take "
                            f"{self.bytes + more:,} bytes. Set it to at least {(self.bytes + more) * 9 // 8:,}"
                        )
                    self.changed.wait()
            finally:
                self._waiting -= 1
            self._pay(block, more)
            at = self._sizes[block]
            if block is not None:
                self._sizes[block] += size
            return at

    def take_ahead(self, block: int | None, size: int, first_step: int) -> bool:
        """Take room for a block of `size` bytes, needed by a window from `first_step` on, if later ones can make room.

        block: None for bytes that are never dropped.
        """
        with self.changed:
            more = self._more(block, size)
            if not self._make_room(more, later_than=first_step):
                return False
            self._pay(block, more)
            return True

    def _more(self, block: int | None, size: int) -> int:
        """Return the bytes to pay until a block has `size`."""
        return size if block is None else max(0, in_pages(size) - self._paid[block])

    def _pay(self, block: int | None, size: int) -> None:
        if block is not None:
            self._paid[block] += size
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _make_room(self, size: int, later_than: int) -> bool:
        while self._left:
            self._in_use -= Counter(self._left.popleft())
            self._callers -= 1
        while self.bytes + size > self.limit:
            droppable = [block for block, paid in self._paid.items() if paid and not self._in_use[block]]
            last = max(droppable, key=self._next_use, default=None)
            if last is None or self._next_use(last) <= later_than:
                return False
            self._drop(last)
            if self._schedule is not None:
                self._schedule.dropped(last)
            self.bytes -= self._paid.pop(last)
            self._sizes.pop(last, None)
        return True
