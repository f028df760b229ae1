"""Errors of a run, grouped by what a caller can do about them."""

from collections.abc import Iterator
from contextlib import contextmanager


def one_line(error: Exception) -> str:
    """Return an error's text as one line, or its kind if it has none."""
    return " ".join(str(error).split())[:1000] or type(error).__name__


class ConfigError(Exception):
    """A setting is unknown, out of range, or differs from the run's: the user corrects it."""


@contextmanager
def refusing(what: str, *kinds: type[Exception], cure: str = "") -> Iterator[None]:
    """Raise ConfigError in place of another error: `what` fails, the error's text in one line, and the cure.

    what: empty if the text says it. kinds: the errors; by default all, since most libraries have no common class for
    invalid settings.
    """
    kinds = kinds or (Exception,)
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{what}{': ' if what else ''}{one_line(error)}{cure}") from error


class RunError(Exception):
    """A run directory cannot be started, resumed or read as requested."""


class RunExistsError(RunError):
    """The directory for a new run already exists; nothing was changed."""


class DamagedCheckpointError(RunError):
    """A checkpoint fails verification; an older one may be intact."""


class TrainingError(Exception):
    """Training cannot continue; the last checkpoint is intact."""


class RanksLostError(TrainingError):
    """Other ranks are gone. The process must exit without joining its threads, which may wait for those ranks."""


class NotFiniteError(TrainingError):
    """The loss of a step is infinite or NaN."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the loss of step {step:,} is {loss}")
        self.step = step
