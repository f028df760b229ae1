"""A function run in a process of its own: its peak memory is its alone, and Ctrl-C ends it with us."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


class EndedWithoutAWordError(Exception):
    """The process died before it had a result."""


def run_isolated(function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, done in a fresh process; an exception of it is raised here.

    Both must be picklable. Whatever ends this call, the process has ended before it returns. It may start processes of
    its own, which must end with it: see end_with_parent_in_background.
    Raises EndedWithoutAWordError where the process was killed.
    """
    context = get_context("spawn")  # a fork would begin with this process's memory, and with locks of its threads
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sending, function, arguments))  # a daemon may have no children
    _start_deaf_to_interrupts(process)
    sending.close()
    try:
        outcome = receiving.recv()
    except EOFError:
        process.join()
        raise EndedWithoutAWordError(
            f"its process ended with exit code {process.exitcode} and without a word, as when memory runs out; "
            "free memory, or ask for less"
        ) from None
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
    if isinstance(outcome, Exception):
        raise outcome
    result: T = outcome
    return result


def _start_deaf_to_interrupts(process: Any) -> None:
    """A terminal sends Ctrl-C to the process as well, whose traceback nobody asked for; it is killed instead."""
    if threading.current_thread() is not threading.main_thread():
        process.start()  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)


def _work(sending: Connection, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    end_with_parent_in_background()
    try:
        outcome = function(*arguments)
    except Exception as error:  # noqa: BLE001 (handed on: raised by run_isolated)
        error.add_note(traceback.format_exc())
        outcome = error
    sending.send(outcome)


def end_with_parent_in_background() -> None:
    """Have this process end as soon as its parent does.

    A parent that is killed tells nobody; the measurement would go on for minutes.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
