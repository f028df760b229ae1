"""A pass over the samples by encoders that stay as they are, for `thermopile score`."""

from collections.abc import Iterable

import torch

from ..pipeline.batch import Batch
from .encoders.locking import starts_trained
from .encoders.micro_batches import OnePiece, joined_features
from .errors import ConfigError
from .loop import Trainer
from .run.run import Run
from .run.settings_of_models import has_own_heads


class FrozenPass(Trainer):
    """Steps that write the samples' rows and change no weight, with encoders in evaluation mode."""

    def __init__(self, run: Run) -> None:
        """As Trainer. Raises ConfigError unless encoders and heads have trained weights."""
        model, heads = run.config.model, run.config.model.head == "none" or has_own_heads(run.config.model)
        if not (run.config.init.run or (heads and starts_trained(model.image) and starts_trained(model.text))):
            raise ConfigError(
                f"{model.image.name} and {model.text.name} would have random weights, or heads with such; score by "
                "a whole CLIP or SigLIP (--model hf:… or open_clip:ARCH:TAG), or by a run (--model RUN)"
            )
        super().__init__(run)

    def step(self, pieces: Iterable[Batch]) -> None:
        """Make one step: features, state in, what the objective says of the samples, state out."""
        run, found = self.run, []
        run.encoders.eval()
        with torch.no_grad():
            for piece in pieces:  # none is encoded a second time, so none is kept
                found.append(OnePiece.encode(self._encoder, [piece]))
            sample_ids = torch.cat([encoded.sample_ids for encoded in found])
            state = run.take(sample_ids)
            with run.clock.computing("forward_backward"):
                outcome = self._outcome(joined_features([encoded.features for encoded in found]), state, run.progress)
        if outcome is None:
            self._skip()
            return
        run.put(sample_ids, outcome.state)
        run.count_step({"loss": outcome.loss, **outcome.metrics})

    def advice(self) -> list[str]:
        """Return nothing: advice is on training."""
        return []
