"""Signals that request a stop: the run checkpoints at the next step boundary; a second signal ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Ctrl-C, and the signals that schedulers send some time before they kill."""
EXIT_CODE = 75
"""EX_TEMPFAIL in sysexits.h: try again later, with --resume."""


class StopRequest:
    """Records the first of SIGNALS during the `with` block. Main thread only.

    The first signal restores the default handlers, so that a second one ends the process even inside a blocking library
    call. That is safe: a half-written file never looks complete.
    """

    def __init__(self, on_request: Callable[[str], None] = lambda name: None) -> None:
        """on_request: called with the signal's name inside the handler, so it should do little."""
        self.name: str | None = None
        """Name of the signal received, such as `SIGTERM`, or None."""
        self._on_request = on_request
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Return whether to stop the run."""
        return self.name is not None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        self._woken = signal.set_wakeup_fd(-1)  # not `ending_on_signals`
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._woken)
        for number, before in self._before.items():
            signal.signal(number, before)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        repeats = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ  # by each of its threads
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN if repeats and each == number else signal.SIG_DFL)
        self.name = signal.Signals(number).name
        self._on_request(self.name)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """End the process with EXIT_CODE at the first of SIGNALS, except in a StopRequest. Main thread only.

    For the time without steps, when nothing can be lost. A thread ends the process, because the main thread runs no
    handler while it is inside a library, which may wait minutes for other ranks.
    """
    end, start = os.pipe()
    os.set_blocking(start, False)  # as set_wakeup_fd requires

    def wait() -> None:
        number = os.read(end, 1)
        while number and number[0] not in SIGNALS:  # another signal with a handler, perhaps of a plugin
            number = os.read(end, 1)
        if number:
            name = signal.Signals(number[0]).name
            os.write(2, f"\n{name}: stopped while no step was being made; continue with --resume\n".encode())
            os._exit(EXIT_CODE)

    thread = threading.Thread(target=wait, name="thermopile-signals", daemon=True)
    thread.start()
    signal.set_wakeup_fd(start)  # first: a handler alone would swallow the signal
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(start)
        thread.join()
        os.close(end)
