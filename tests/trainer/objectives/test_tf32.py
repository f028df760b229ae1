"""Products in TF32: how far a step's gradients are from float64's, and which products stay in float32.

A CPU stands for the GPU here: what the objective multiplies while TF32 is on is rounded to TF32's bits first, in either
way that a GPU may do it, and then multiplied in float32.
"""

import math

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from thermopile.trainer.objectives.pairs import rounded

from support.objectives import START, make_features, make_objective, make_state, run_step

MATMUL = torch.backends.cuda.matmul
PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.mm.out: 0, torch.ops.aten.addmm_.default: 1,
            torch.ops.aten.addmm.out: 1}  # fmt: skip
"""Product → where its first factor is among the arguments."""


def nearest(values):
    """Round to 10 bits after the leading one, half to even."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & -0x2000).view(torch.float32)


def cut(values):
    """Leave out all bits but 10 after the leading one."""
    return (values.contiguous().view(torch.int32) & -0x2000).view(torch.float32)


class Device(TorchDispatchMode):
    """What multiplies as a GPU does that reads its factors by `read`; counts the products in either precision."""

    def __init__(self, read):
        super().__init__()
        self.read, self.in_tf32, self.in_float32 = read, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS and MATMUL.fp32_precision == "tf32":
            self.in_tf32 += 1
            at = PRODUCTS[function]
            args = (*args[:at], *map(self.read, args[at : at + 2]), *args[at + 2 :])
        elif function in PRODUCTS:
            self.in_float32 += 1
        return function(*args, **(kwargs or {}))


def trained_features(pairs=256, columns=512, common=0.5):
    """Features as a trained model's: classes of eight, pairs alike, and a direction common to all."""
    random = torch.Generator().manual_seed(0)

    def draw(rows):
        return torch.randn(rows, columns, generator=random)

    of_pair = draw(pairs // 8).repeat_interleave(8, 0) + 0.7 * draw(pairs) + common * draw(1)
    return [normalize(of_pair + 0.6 * draw(pairs), dim=1) for _ in range(2)]


def at(name, tau):
    """The settings of an objective whose temperature is tau."""
    return {"isogclr": {"tau_init": tau}, "clip": {"log_logit_scale": math.log(1 / tau)}}.get(name, {"tau": tau})


def gradients(case, features, dtype, precision="float32", device="cpu", **settings):
    """The features' gradients, first visits, as float64 on the CPU."""
    objective = make_objective(*case, precision=precision, **settings).to(device)
    state = {name: torch.full((len(features[0]),), value, dtype=dtype) for name, value in objective.fields.items()}
    state |= {"visits": torch.zeros(len(features[0]))} if state else {}
    there = [side.to(device, dtype) for side in features], {name: of.to(device) for name, of in state.items()}
    return torch.stack(run_step(objective, *there)[1:3]).cpu().double()


def error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


@pytest.fixture
def on_device(monkeypatch):
    """Compute something on a device that the features seem to be on; returns its result and the device."""

    def compute(read, function, *arguments, **settings):
        with monkeypatch.context() as patched, Device(read) as device:
            patched.setattr(torch.Tensor, "is_cuda", True)
            return function(*arguments, **settings), device

    return compute


@pytest.mark.parametrize("tau", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("name", ["isogclr", "clip", "fastclip_v3"])
@pytest.mark.parametrize("common", [0.5, 4.0], ids=["spread", "narrow"])
def test_gradients_are_within_a_thousandth_of_float64_s_norm(name, tau, common, on_device):
    case, features = (name, "bimodal"), trained_features(common=common)
    exact = gradients(case, features, torch.float64, **at(name, tau))
    for read in (nearest, cut):
        found, device = on_device(read, gradients, case, features, torch.float32, "tf32", **at(name, tau))
        assert device.in_tf32 == 3
        assert error(found, exact) < 5e-4


@pytest.mark.parametrize("budget", [1, 2**28])
def test_every_objective_of_normalised_features_is_as_precise(case, budget, on_device):
    features = trained_features(pairs=64)
    exact = gradients(case, features, torch.float64, auxiliary="mean")
    settings = {"auxiliary": "mean", "similarity_budget": budget * 4 * 64 * 64}
    found, device = on_device(cut, gradients, case, features, torch.float32, "tf32", **settings)
    assert error(found, exact) < 1e-3
    assert (device.in_tf32 > 0) == make_objective(*case).unit_norm


def test_distances_and_float64_are_never_in_tf32(on_device):
    features, case = trained_features(pairs=64), ("simclr", "unimodal")
    of_any_norm = [2 * side for side in features]
    _, device = on_device(cut, gradients, case, of_any_norm, torch.float32, "tf32", similarity="distance")
    assert device.in_tf32 == 0 < device.in_float32
    _, device = on_device(cut, gradients, case, features, torch.float64, "tf32")
    assert device.in_tf32 == 0 < device.in_float32


def test_a_cpu_computes_the_same_in_tf32_and_float32(case):
    features = make_features(9, dtype=torch.float32)
    plain, fast = (make_objective(*case, precision=precision) for precision in ("float32", "tf32"))
    state = make_state(plain, 9, dtype=torch.float32)
    (outcome, *plain), (other, *fast) = (run_step(objective, features, state, START) for objective in (plain, fast))
    torch.testing.assert_close((other.loss, other.state, fast), (outcome.loss, outcome.state, plain), rtol=0, atol=0)


def test_rounding_is_to_the_nearest_number_of_tf32_and_what_is_not_finite_stays():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 10_000)
    assert torch.equal(rounded(values.clone()), nearest(values))
    assert torch.equal(cut(rounded(values.clone())), rounded(values.clone()))
    of_a_gpu, of_a_cpu = torch.tensor([0x7FFFFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert rounded(torch.stack([of_a_gpu, of_a_cpu])).isnan().all()
    assert not rounded(torch.tensor([math.inf])).isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("tau", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("name", ["isogclr", "clip", "fastclip_v3"])
@pytest.mark.parametrize("pairs", [256, 8192])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_gpu_in_tf32_is_as_precise_as_the_cpu_that_stands_for_it(name, tau, pairs, compiled):
    case, features = (name, "bimodal"), trained_features(pairs)
    exact = gradients(case, features, torch.float64, device="cuda", **at(name, tau))
    in_float32 = gradients(case, features, torch.float32, device="cuda", **at(name, tau))
    found = gradients(case, features, torch.float32, "tf32", device="cuda", compile=compiled, **at(name, tau))
    assert error(in_float32, exact) < error(found, exact) < 1e-3
