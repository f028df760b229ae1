"""Messages for runs that had to end: the cause, what is intact and the cure."""

from ...pipeline.order import AnyOrder
from ..checkpoints.checkpoint_files import latest_checkpoint
from ..errors import RanksLostError, TrainingError
from ..run_directory import RunDirectory

FIRST_IDS = 8
"""Number of samples of a bad batch to name."""


def not_finite(run: RunDirectory, order: AnyOrder, steps_done: int, why: str) -> TrainingError:
    """Return the error for values of the step after `steps_done` that are not finite."""
    last = latest_checkpoint(run.checkpoints)
    left = (
        f"The last checkpoint, {last}, is from before that step" if last else "There is no checkpoint before that step"
    )
    return TrainingError(
        f"{why}. {samples_after(steps_done, order)}: check whether they are damaged. {left}. "
        "If they are not, start a new run with a lower learning rate"
    )


def samples_after(steps_done: int, order: AnyOrder) -> str:
    """Describe the samples of the step after `steps_done`."""
    sample_ids = order.batch_ids(*divmod(steps_done, order.steps_per_epoch)).tolist()
    return f"The ids of its {len(sample_ids)} samples begin with {', '.join(map(str, sample_ids[:FIRST_IDS]))}"


def ranks_lost(run: RunDirectory, lost: str, step: int) -> RanksLostError:
    """Return the error for a step with missing ranks, described by `lost`; names the last checkpoint."""
    last = latest_checkpoint(run.checkpoints)
    left = f"--resume continues from the last checkpoint, {last}" if last else "There is no checkpoint yet"
    return RanksLostError(f"lost {lost} at step {step:,}; see its messages. {left}")
