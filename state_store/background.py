"""One background thread whose failures cannot go unnoticed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

from .errors import BackgroundError

P = ParamSpec("P")
T = TypeVar("T")


class BackgroundThread:
    """Does jobs one at a time in the order of `submit`; once a job has failed, every later one fails undone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"thermopile-{name}")
        self._failure: BaseException | None = None
        self._raised = False

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Return at once a future of the job's result; it cannot be cancelled."""
        # A cancelled snapshot would lose the rows that it was to write: they are marked as unchanged at its cut.
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._error()
                outcome.set_result(job(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 (handed on: to the future, and to the next `check`)
                self._failure = self._failure or error
                outcome.set_exception(error)

        self._executor.submit(run)
        return outcome

    def check(self) -> None:
        """Raise BackgroundError, with its cause, if a job has failed."""
        if self._failure is not None:
            self._raised = True
            raise self._error()

    def drain(self) -> None:
        """Wait until every job submitted so far is done or has failed."""
        wait([self.submit(lambda: None)])

    def close(self) -> None:
        """Do the jobs submitted so far and end the thread; raises BackgroundError for a failure not yet raised."""
        self._executor.shutdown(wait=True)
        if not self._raised:
            self.check()

    def _error(self) -> BackgroundError:
        error = BackgroundError(
            f"the state store's {self._name} thread failed: {self._failure!r}. Its rows can no longer be trusted; "
            "close the store and resume at the last snapshot"
        )
        error.__cause__ = self._failure
        return error
