"""On a GPU no step but the first waits for the device."""

import pytest
import torch

from thermopile.trainer.objectives import Progress

from support.objectives import make_features, make_objective, make_state, one_step
from support.waits import no_waits


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [1, 2**28])
def test_a_step_with_backward_and_metrics_waits_for_the_gpu_only_at_first(case, budget):
    objective = make_objective(*case, similarity_budget=budget).cuda()
    features = [side.detach().cuda().requires_grad_() for side in make_features(8, dtype=torch.float32)]
    state = {name: values.cuda() for name, values in make_state(make_objective(*case), 8, dtype=torch.float32).items()}
    one_step(objective, *features, state, Progress(0, 10)).loss.backward()
    with no_waits():
        outcome = one_step(objective, *features, state, Progress(1, 10))
        outcome.loss.backward()
    assert outcome.loss.isfinite()
