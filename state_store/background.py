"""Background threads whose failures are not lost."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

from .errors import BackgroundError

P = ParamSpec("P")
T = TypeVar("T")


class WatchedFuture(Future[T]):
    """A future that records whether its result or exception has been read."""

    asked = False

    def result(self, timeout: float | None = None) -> T:
        self.asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.asked = True
        return super().exception(timeout)


class BackgroundThread:
    """Runs jobs one at a time, in the order of `submit`.

    After a job fails, all later jobs fail without running, and `check` raises. With `goes_on`, later jobs still run,
    and `check` raises each failure once, unless somebody has read it from the job's future.
    """

    def __init__(self, name: str, *, goes_on: bool = False) -> None:
        self._name, self._goes_on = name, goes_on
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"thermopile-{name}")
        self._failure: BaseException | None = None
        self._raised = False
        self._failed: list[WatchedFuture[Any]] = []

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> WatchedFuture[T]:
        """Return a future of the job's result, at once; it cannot be cancelled."""
        # A cancelled snapshot would lose its rows, because its cut has marked them unchanged.
        outcome: WatchedFuture[T] = WatchedFuture()
        outcome.set_running_or_notify_cancel()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._error()
                outcome.set_result(job(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 (passed to the future and to the next `check`)
                if self._goes_on:
                    self._failed.append(outcome)
                else:
                    self._failure = self._failure or error
                outcome.set_exception(error)

        self._executor.submit(run)
        return outcome

    def check(self) -> None:
        """Raise BackgroundError, with its cause, if a job has failed; with `goes_on`, only for an unread failure."""
        if self._failure is not None:
            self._raised = True
            raise self._error()
        while self._failed:
            if not (outcome := self._failed.pop(0)).asked:
                outcome.result()

    def drain(self) -> None:
        """Wait until every submitted job has finished or failed."""
        wait([self.submit(lambda: None)])

    def close(self) -> None:
        """Finish the submitted jobs and end the thread; raise like `check` if a failure has not been raised yet."""
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
