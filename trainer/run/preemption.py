"""Signals that request a stop: the run checkpoints at the next step boundary; a second signal ends it at once."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.name = signal.Signals(number).name
        self._on_request(self.name)
