"""What can go wrong with a run, grouped by what a caller would do about it."""


class ConfigError(Exception):
    """A setting is unknown, out of range, or not what the run was started with: the user corrects it."""


class RunError(Exception):
    """A run directory cannot be started, resumed or read as asked."""


class RunExistsError(RunError):
    """The directory to start a run in is there already; nothing was touched."""


class DamagedCheckpointError(RunError):
    """A checkpoint is not what was written; an older one may be whole."""


class TrainingError(Exception):
    """Training cannot go on; the last checkpoint stands."""


class RanksLostError(TrainingError):
    """Other ranks are gone. The process must end without waiting for its threads, which may wait for them."""


class NotFiniteError(TrainingError):
    """The loss of a step is infinite or not a number."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the loss of step {step:,} is {loss}")
        self.step = step
