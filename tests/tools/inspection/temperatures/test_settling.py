"""Where the update rule takes temperatures: against the objective itself, step by step."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from thermopile.tools.inspection.temperatures.settling import Rule, at_rest
from thermopile.trainer.objectives import Progress, create_objective

N, B, D = 512, 64, 12


@pytest.mark.parametrize("start", [0.1, pytest.param(0.5, marks=pytest.mark.wide)])
def test_temperatures_come_to_rest_where_the_objective_takes_them(start):
    random = np.random.default_rng(0)
    centres = np.repeat(random.normal(size=(32, D)), N // 32, axis=0)
    features = [normalize(torch.tensor(centres + 0.7 * random.normal(size=(N, D)), dtype=torch.float32)) for _ in "ab"]
    objective = create_objective("isogclr", rho=1.0, eta=0.01, tau_init=0.1, tau_step=0.1)
    state = {name: torch.full((N,), value) for name, value in objective.fields.items()}
    order = torch.Generator().manual_seed(0)
    ends = []
    for step in range(160 * N // B):
        ids = torch.randperm(N, generator=order)[:B]
        rows = {name: values[ids] for name, values in state.items()} | {"visits": torch.full((B,), 10)}
        made = objective(*(side[ids] for side in features), rows, Progress(step, N // B))
        for name, values in state.items():
            values[ids] = made.state[name].detach()
        if step > 100 * N // B and step % 8 == 0:
            ends.append(state["image/tau"].log().numpy().copy())
    image, text = (side.numpy() for side in features)
    h = image @ text.T - (image * text).sum(1, keepdims=True)
    h = h[~np.eye(N, dtype=bool)].reshape(N, N - 1)
    settings = objective.settings
    rule = Rule(1.0, settings.gamma, settings.grad_clip, B - 1, settings.tau_min, settings.tau_max)
    found = at_rest(h, np.full(N, start, np.float32), rule)
    ratio = np.log(found) - np.mean(ends, axis=0)
    assert abs(np.median(ratio)) < 0.05
    assert np.corrcoef(np.log(found), np.mean(ends, axis=0))[0, 1] > 0.95
