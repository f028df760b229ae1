"""Tiny encoders that are trained with every objective, by ranks under DDP or by one process alone.

test_distributed starts this as the program of each rank; rank k writes what it saw to k.pt. What one process sees,
test_distributed finds out by itself.
"""

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from thermopile.trainer.objectives import OBJECTIVES, Progress, create_objective, objective_class

SAMPLES, STEPS, INPUTS, WIDTH = 12, 3, 8, 6
SHIFT = 0.3
UNSEEN = 5
"""One sample in this many has not been seen before."""
PATIENCE = timedelta(seconds=60)
"""After which a rank that waits for another gives up."""
MODERATE = {"tau": 0.2, "tau_init": 0.2, "eta": 0.02, "mu": 0.5, "tau_max": 0.5}
"""Temperatures at which a wrong candidate moves the results, and does not drown in one that dominates; a ball that some
features are in and some are not."""


@dataclass(frozen=True)
class Case:
    """What the ranks train with."""

    name: str
    mode: str
    settings: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    """Dtype of the features and the state; the encoders compute in float64."""
    one_each: bool = False
    """A single sample on every rank, in place of SAMPLES in all."""
    uneven: bool = False
    """Fewest samples on the last rank, and most on the one before it, as holes may leave them."""
    keys: bool = False
    """With the keys of encoders that stay as they start, of views shifted by SHIFT."""
    local: int = 0
    """Local views: the second view, shifted by SHIFT and multiples of it."""
    weights: bool = False
    """With weights of the samples, of which the first is 0."""

    def samples(self, world):
        """Return the number of samples in the global batch."""
        return world if self.one_each else SAMPLES

    def shares(self, world):
        """Return the number of samples of each rank."""
        cuts = [round(self.samples(world) * (rank / world) ** (1.3 if self.uneven else 1)) for rank in range(world + 1)]
        shares = [end - start for start, end in pairwise(cuts)]
        return (*shares[1:], *shares[:1]) if self.uneven else (*shares,)

    def objective(self):
        known = objective_class(self.name).settings_of_mode[self.mode].model_fields
        moderate = {name: value for name, value in MODERATE.items() if name in known}
        return create_objective(self.name, self.mode, **moderate | self.settings).double()


sys.path.append(str(Path(__file__).parents[3] / "examples"))
PREDICTED = "predicted_temperature:Predicted"
OWN = "support.own_code:Weighted"
"""A loss that autograd differentiates."""
KNOWN = [
    (name, mode)
    for name, objective in OBJECTIVES.items()
    for mode in objective.settings_of_mode
    if objective.keys != "always"
]
TAKE_KEYS = [name for name, objective in OBJECTIVES.items() if objective.keys != "never"]
TAKE_LOCAL = [name for name, objective in OBJECTIVES.items() if objective.has_local and objective.keys != "always"]
TAKE_BOTH = [name for name in TAKE_KEYS if OBJECTIVES[name].has_local]
OF_EACH_KIND = [(name, "unimodal") for name in ("sogclr", "auc_cl", "spectral", "barlow_twins", "vicreg")]
OF_EACH_KIND += [("isogclr", "bimodal"), ("siglip", "bimodal"), ("cyclip", "bimodal")]
CASES = {f"{name} {mode}": Case(name, mode) for name, mode in KNOWN}
CASES |= {f"{name} {mode}, in chunks": Case(name, mode, {"similarity_budget": 200}) for name, mode in OF_EACH_KIND}
CASES |= {f"{name} {mode}, uneven": Case(name, mode, uneven=True) for name, mode in KNOWN}
CASES |= {f"{name}, keys, uneven": Case(name, "unimodal", keys=True, uneven=True) for name in TAKE_KEYS}
CASES |= {f"{name}, local, uneven": Case(name, "unimodal", local=3, uneven=True) for name in TAKE_LOCAL}
CASES |= {f"{name} {mode}, one sample each": Case(name, mode, one_each=True) for name, mode in OF_EACH_KIND}
CASES |= {f"{name}, keys": Case(name, "unimodal", keys=True) for name in TAKE_KEYS}
CASES |= {f"{name}, local": Case(name, "unimodal", local=3) for name in TAKE_LOCAL}
CASES |= {f"{name}, keys, local": Case(name, "unimodal", keys=True, local=3) for name in TAKE_BOTH}
CASES |= {
    "simclr, local, in chunks": Case("simclr", "unimodal", {"similarity_budget": 200}, local=3),
    "simclr, local, one sample each": Case("simclr", "unimodal", one_each=True, local=2),
    "moco_v3, keys, local, in chunks": Case("moco_v3", "unimodal", {"similarity_budget": 200}, keys=True, local=3),
    "moco_v3, keys, one sample each": Case("moco_v3", "unimodal", one_each=True, keys=True),
    "decl, keys, of the momentum encoder": Case("decl", "unimodal", {"rate": "momentum"}, keys=True),
    "auc_cl, keys, weighted": Case("auc_cl", "unimodal", {"negatives": "weighted"}, keys=True, local=1),
    "auc_cl unimodal, all views": Case(
        "auc_cl", "unimodal", {"views": "all", "negatives": "weighted", "similarity": "shifted", "a": 10.0}
    ),
    "auc_cl unimodal, b fixed": Case("auc_cl", "unimodal", {"learn_b": False}),
    "auc_cl unimodal, min-max": Case("auc_cl", "unimodal", {"learn_a": True, "learn_alpha": True}),
    "decl unimodal, geometric": Case("decl", "unimodal", {"mixing": "geometric", "auxiliary": "mean"}),
    "simclr unimodal, distance": Case("simclr", "unimodal", {"similarity": "distance"}),
    "decl bimodal, distance": Case("decl", "bimodal", {"similarity": "distance", "mixing": "decay"}),
    "decl unimodal, distance in chunks": Case("decl", "unimodal", {"similarity": "distance", "similarity_budget": 200}),
    "decl bimodal, in turn": Case("decl", "bimodal", {"mixing": "alternate"}),
    "decl unimodal, both": Case("decl", "unimodal", {"mixing": "decay", "t0": 2.0}),
    "isogclr bimodal, doubt, weights, uneven": Case(
        "isogclr", "bimodal", {"doubt_after": 1}, weights=True, uneven=True
    ),
    "clip bimodal, doubt, uneven": Case("clip", "bimodal", {"doubt_after": 1}, uneven=True),
    "simclr, local, weights, uneven": Case("simclr", "unimodal", local=3, weights=True, uneven=True),
    "moco_v3, keys, local, weights, uneven": Case("moco_v3", "unimodal", keys=True, local=3, weights=True, uneven=True),
    "own loss": Case(OWN, "bimodal"),
    "predicted temperatures": Case(PREDICTED, "bimodal", {"width": WIDTH, "hidden": 3}),
    "predicted temperatures, uneven": Case(PREDICTED, "unimodal", {"width": WIDTH, "hidden": 3}, uneven=True),
    "own loss, uneven": Case(OWN, "unimodal", uneven=True),
    "fastclip_v2 bimodal, float32": Case("fastclip_v2", "bimodal", dtype=torch.float32),
    "fastclip_v2 bimodal, bfloat16": Case("fastclip_v2", "bimodal", dtype=torch.bfloat16),
}


TAKE_WEIGHTS = [(name, mode) for name, mode in KNOWN if OBJECTIVES[name].takes_weights]
CASES |= {f"{name} {mode}, weights": Case(name, mode, weights=True) for name, mode in TAKE_WEIGHTS}
CASES |= {
    "moco_v3, keys, local, weights": Case("moco_v3", "unimodal", keys=True, local=3, weights=True),
    "isogclr, keys, weights": Case("isogclr", "unimodal", keys=True, weights=True),
    "simclr, local, weights": Case("simclr", "unimodal", local=3, weights=True),
    "clip bimodal, doubt": Case("clip", "bimodal", {"doubt_after": 1}),
    "isogclr bimodal, doubt, weights": Case("isogclr", "bimodal", {"doubt_after": 1}, weights=True),
}


class Encoders(nn.Module):
    """Inputs [n, INPUTS] of both sides, and of further views -> features [n, WIDTH] of each; unimodal, one encoder has
    both sides."""

    def __init__(self, mode, *, unit_norm=True):
        super().__init__()
        self.unit_norm = unit_norm
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(INPUTS, WIDTH, dtype=torch.float64)
            self.second = nn.Linear(INPUTS, WIDTH, dtype=torch.float64) if mode == "bimodal" else self.first

    def forward(self, first, second, *local):
        features = self.first(first), self.second(second), *(self.second(view) for view in local)
        # Where a shift changes nothing, the biases have a gradient only through something that is not linear.
        return [F.normalize(each, dim=1) if self.unit_norm else each.tanh() for each in features]


class Traffic(TorchDispatchMode):
    """Notes what torch.distributed is asked to do, by DDP too: the operation and the bytes that this rank sends."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            # A gather has what it fills first, and then what it sends; the rest has one for both. Some take lists.
            sent = args[1] if "gather" in function.__name__ else args[0]
            sent = sent if isinstance(sent, (list, tuple)) else [sent]
            self.calls.append((function.__name__.split(".")[0], sum(part.nbytes for part in sent)))
        return function(*args, **kwargs or {})


def make_inputs(samples):
    """[STEPS, 2, samples, INPUTS]: the two sides of a sample are alike, and from step to step it changes a little."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(samples, INPUTS, generator=generator, dtype=torch.float64)
    return common + 0.5 * torch.randn(STEPS, 2, *common.shape, generator=generator, dtype=torch.float64)


def make_state(objective, samples, dtype):
    """Rows of samples that were seen a few times, but for every UNSEENth; {} for an objective without fields."""
    generator = torch.Generator().manual_seed(2)
    unseen = torch.arange(samples) % UNSEEN == 0
    state = {}
    for path, initial in objective.fields.items():
        # Logarithms in [-1, 0]; the rest in [0.1, 0.6], for temperatures and second moments are above 0.
        seen = torch.rand(samples, generator=generator, dtype=torch.float64)
        seen = seen - 1.0 if path.endswith(("log_s", "log_g", "log_rate")) else 0.1 + seen / 2
        state[path] = torch.where(unseen, initial, seen).to(dtype)
    if state:
        state["visits"] = torch.where(unseen, 0, torch.arange(samples)).to(torch.uint32)
    return state


def train(case, rank, world):
    """What `rank` of `world` sees in STEPS steps of SGD with its share of every batch."""
    shares = case.shares(world)
    own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    return _train(case, case.samples(world), own, DistributedDataParallel, shares if case.uneven else None)


def train_alone(case, samples):
    """What one process sees that has all samples of every batch."""
    return _train(case, samples, slice(None), lambda encoders: encoders)


def _train(case, samples, own, wrap, shares=None):
    objective = case.objective()
    objective.shares = shares
    encoders, momentum_encoders = (Encoders(case.mode, unit_norm=objective.unit_norm) for _ in range(2))
    model, parameters = wrap(encoders), list(objective.parameters())
    groups = [{"params": encoders.parameters(), "lr": 0.1}, {"params": parameters, "lr": 1e-3}]
    optimizer = torch.optim.SGD(groups if parameters else groups[:1])
    state = {path: rows[own] for path, rows in make_state(objective, samples, case.dtype).items()}
    steps = []
    for number, inputs in enumerate(make_inputs(samples)[:, :, own]):
        optimizer.zero_grad()
        # In its first two steps DDP arranges itself, which is no business of the objective's.
        with (traffic := Traffic()) if number == STEPS - 1 else nullcontext():
            views = [*inputs, *(inputs[1] + SHIFT * (place + 1) for place in range(case.local))]
            first, second, *local = (view.to(case.dtype) for view in model(*views))
            with torch.no_grad():
                keys = momentum_encoders(*(inputs + SHIFT)) if case.keys else None
            progress = Progress(step=number, steps_per_epoch=2)
            weights = {"weight": torch.arange(samples)[own] / (samples - 1) * 2} if case.weights else {}
            outcome = objective(first, second, state | weights, progress, keys=keys, local=local)
            outcome.loss.backward()
        state = outcome.state
        steps.append(
            {
                "loss": {"loss": outcome.loss.detach()},
                "state": state,
                "metrics": outcome.metrics,
                "encoders' gradients": {name: of.grad.clone() for name, of in encoders.named_parameters()},
                "objective's gradients": {name: of.grad.clone() for name, of in objective.named_parameters()},
            }
        )
        optimizer.step()
    return {
        "steps": steps,
        "traffic": traffic.calls,
        "encoders": {name: of.detach() for name, of in encoders.named_parameters()},
        "objective": {name: of.detach() for name, of in objective.named_parameters()},
    }


def refusal(name, mode, rows, dtype=torch.float32):
    """What the objective says to `rows` rows on this rank."""
    objective = Case(name, mode).objective()
    features, state = F.normalize(torch.ones(rows, WIDTH), dim=1).to(dtype), make_state(objective, rows, torch.float32)
    try:
        objective(features, features, state, Progress(step=0, steps_per_epoch=2))
    except ValueError as error:
        return str(error)
    return "nothing"


def run_rank(rank, world, directory):
    torch.set_num_threads(1)
    meeting_point = f"file://{directory}/meeting_point"
    init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=world, timeout=PATIENCE)
    seen = {
        "refused": {known: refusal(*known, rows=3 + (rank == world - 1)) for known in KNOWN},
        "refused_dtype": refusal("isogclr", "bimodal", 3, torch.bfloat16 if rank == world - 1 else torch.float32),
        "trained": {name: train(case, rank, world) for name, case in CASES.items()},
    }
    torch.save(seen, directory / f"{rank}.pt")
    destroy_process_group()


if __name__ == "__main__":
    run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]))
