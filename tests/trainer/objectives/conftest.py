"""What the tests of objectives share: every objective in every mode and frame, features, rows of state, one step."""

import math

import pytest
import torch
import torch.nn.functional as F

from thermopile.trainer.objectives import OBJECTIVES, Progress, create_objective

from support.objective_frames import FRAMED, PLAIN, keys_of, local_of


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For tensors as small as here a second thread costs more than it saves, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=FRAMED, ids=lambda case: f"{case[0]}-{case[1]}{case[2]}", scope="session")
def case(request):
    """Name, mode and frame, of every objective in turn."""
    return request.param


@pytest.fixture(scope="session")
def make_objective():
    def make(name, mode, frame=PLAIN, **settings):
        """The objective with those of `settings` that it knows; `step` calls it with this frame."""
        known = OBJECTIVES[name].settings_of_mode[mode].model_fields
        # Rows of norm 1 are on the edge of the ball of mu = 1, where the gradient jumps.
        settings = {"mu": 0.9, "width": 16, "prototypes": 5} | settings
        objective = create_objective(name, mode, **{key: value for key, value in settings.items() if key in known})
        objective.frame = frame
        return objective.double()

    return make


@pytest.fixture(scope="session")
def make_features():
    def make(samples, seed=0, dtype=torch.float64):
        """Unit-norm rows of two sides, [samples, 16], of which pairs are alike."""
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(samples, 16, generator=generator, dtype=torch.float64)
        second = first + torch.randn(samples, 16, generator=generator, dtype=torch.float64)
        return [F.normalize(side, dim=1).to(dtype).requires_grad_() for side in (first, second)]

    return make


@pytest.fixture(scope="session")
def make_state():
    def make(objective, samples, seed=0, dtype=torch.float64, tau=(0.05, 0.3), unseen=0.5):
        """Rows of samples of which about the share `unseen` was never seen, with temperatures within `tau`."""
        generator = torch.Generator().manual_seed(seed)

        def uniform(low, high):
            return low + (high - low) * torch.rand(samples, generator=generator, dtype=torch.float64)

        new = uniform(0, 1) < unseen
        of_seen = dict.fromkeys(("log_s", "log_g", "log_rate"), (-3, 1))
        of_seen |= {"tau": tau, "u": (-1, 1), "m": (-1, 1), "v": (0.5, 1)}
        state = {}
        for path, initial in objective.fields.items():
            field = path.split("/")[1]
            values = uniform(*of_seen[field])
            state[path] = (values if field == "tau" else torch.where(new, initial, values)).to(dtype)
        return state | ({"visits": torch.where(new, 0.0, 3.0).to(dtype)} if state else {})

    return make


@pytest.fixture(scope="session")
def step():
    def call(objective, first, second, state, progress=Progress(step=0, steps_per_epoch=10)):  # noqa: B008
        """One step in the objective's frame."""
        frame = getattr(objective, "frame", PLAIN)
        keys, local = keys_of(frame, first, second), local_of(frame, first, second)
        return objective(first, second, state, progress, keys=keys, local=local)

    return call


@pytest.fixture(scope="session")
def run(step):
    def run_step(objective, features, state, progress=Progress(step=0, steps_per_epoch=10)):  # noqa: B008
        """One step: its outcome, then the gradients of the two features and of the objective's own parameters."""
        first, second = (side.detach().clone().requires_grad_() for side in features)
        objective.zero_grad()
        outcome = step(objective, first, second, state, progress)
        outcome.loss.backward()
        return outcome, first.grad, second.grad, *(parameter.grad for parameter in objective.parameters())

    return run_step


@pytest.fixture(scope="session")
def log_mean():
    def pooled(first, second, tau, mode):
        """log g of every anchor, [2, b]: the mean over its negatives of exp((S_ij - S_ii) / tau_i), all written out.

        tau broadcasts to [2, b]. Unimodal negatives are both views of the other samples.
        """
        itself = torch.eye(len(first), dtype=torch.bool)
        if mode == "bimodal":
            similarities = torch.stack([first @ second.T, second @ first.T])
        else:
            views = torch.cat([first, second])
            similarities, itself = (views @ views.T).unflatten(0, (2, -1)), torch.cat([itself, itself], dim=1)
        positive = (first * second).sum(1)
        exponents = (similarities - positive[:, None]) / tau.expand(2, len(first))[:, :, None]
        negatives = (~itself[0]).sum().item()
        return exponents.masked_fill(itself, -math.inf).logsumexp(2) - math.log(negatives)

    return pooled
