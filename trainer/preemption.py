"""Signals that ask a run to stop. It checkpoints at the next step boundary; a second signal ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What schedulers send some time before they kill, and Ctrl-C."""
EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: try again later, with --resume."""


class StopRequest:
    """While the `with` block runs, remembers the first of SIGNALS. Main thread only.

    The first one puts the signals' default actions back, so that the next ends the process even where it waits inside a
    library. That is safe: whatever is being written then does not look whole.
    """

    def __init__(self, on_request: Callable[[str], None] = lambda name: None) -> None:
        """on_request is told the signal's name, inside the handler: let it do little."""
        self.name: str | None = None
        """Of the signal that came, such as `SIGTERM`; None as long as none did."""
        self._on_request = on_request
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether the run shall stop."""
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
