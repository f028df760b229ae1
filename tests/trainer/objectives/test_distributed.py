"""Two ranks, or three and four, that train under DDP, against one process that has the batches of all.

Both take the same steps of SGD from the same encoders, and pass on the state that they got back.
"""

from functools import cache

import pytest
import torch

from support.programs import ranks_training
from support.programs.ranks_training import CASES, KNOWN, OWN, WIDTH

pytestmark = pytest.mark.wide

RANK = """
import runpy, warnings
warnings.simplefilter("error")
runpy.run_module("support.programs.ranks_training", run_name="__main__")
"""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest max|x - reference| / max|reference|, by the features' dtype."""
BFLOAT16 = "fastclip_v2 bimodal, bfloat16"
EXACT = [name for name in CASES if name != BFLOAT16]


@pytest.fixture(
    scope="module",
    params=[2, 3, 4],
    ids=lambda world: f"{world} ranks",
)
def ranks(start_ranks, tmp_path_factory, request):
    """Return what each rank of some saw."""
    directory, world = tmp_path_factory.mktemp("ranks"), request.param
    ends = [rank.end() for rank in start_ranks(world, directory, codes=[RANK] * world)]
    if any(code for code, *_ in ends):
        pytest.fail("\n".join(errors for *_, errors in ends), pytrace=False)
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(world)]


@cache
def alone(name, samples):
    """What a single process sees with batches of this many samples."""
    return ranks_training.train_alone(CASES[name], samples)


def reference(name, ranks):
    """What one process sees that has the batches of all ranks."""
    return alone(name, CASES[name].samples(len(ranks)))


def of_steps(seen, part):
    """A part of every step of a training in one dict."""
    return {f"{path} of step {i}": value for i, step in enumerate(seen["steps"]) for path, value in step[part].items()}


def differences(name, given, expected, tolerance=None):
    """A line for every tensor that is off by more than the tolerance, if not given the case's; {path: tensor} both."""
    assert given.keys() == expected.keys(), name
    tolerance = TOLERANCE[CASES[name].dtype] if tolerance is None else tolerance
    lines = []
    for path in expected:
        here, there = given[path].double(), expected[path].double()
        assert here.shape == there.shape, (name, path)
        error = ((here - there).abs().max() / there.abs().max().clamp(min=1e-300)).item()
        if not error <= tolerance:
            lines.append(f"{name}: {path} is off by {error:.1e}")
    return lines


def differences_from_one_process(ranks, part):
    """In a part of any step, with any objective, on any rank."""
    return [
        line
        for name in EXACT
        for rank in ranks
        for line in differences(name, of_steps(rank["trained"][name], part), of_steps(reference(name, ranks), part))
    ]


def differences_between_ranks(ranks, part):
    """As above, of any rank from the first, and however small."""
    return [
        line
        for name in EXACT
        for first, *others in [[of_steps(rank["trained"][name], part) for rank in ranks]]
        for other in others
        for line in differences(name, other, first, tolerance=0.0)
    ]


def test_every_rank_reports_the_loss_of_the_whole_batch(ranks):
    assert differences_from_one_process(ranks, "loss") == []
    assert differences_between_ranks(ranks, "loss") == []


def test_the_encoders_gradients_under_ddp_are_those_of_the_whole_batch(ranks):
    assert differences_from_one_process(ranks, "encoders' gradients") == []


def test_the_objectives_own_parameters_have_the_whole_batchs_gradient_on_every_rank(ranks):
    assert differences_from_one_process(ranks, "objective's gradients") == []
    assert differences_between_ranks(ranks, "objective's gradients") == []


def test_metrics_are_of_the_whole_batch_and_the_same_on_every_rank(ranks):
    assert differences_from_one_process(ranks, "metrics") == []
    assert differences_between_ranks(ranks, "metrics") == []


def test_each_rank_gets_the_new_state_of_its_own_samples_alone(ranks):
    found = []
    for name in EXACT:
        of_ranks = [of_steps(rank["trained"][name], "state") for rank in ranks]
        for of_rank, rows in zip(of_ranks, CASES[name].shares(len(ranks)), strict=True):
            assert {values.shape for values in of_rank.values()} <= {(rows,)}, name
        together = {path: torch.cat([of_rank[path] for of_rank in of_ranks]) for path in of_ranks[0]}
        found += differences(name, together, of_steps(reference(name, ranks), "state"))
    assert found == []


def test_training_ends_with_the_same_parameters(ranks):
    found = []
    for name in EXACT:
        start, expected = dict(ranks_training.Encoders(CASES[name].mode).named_parameters()), reference(name, ranks)
        assert len(differences(name, expected["encoders"], start, tolerance=1e-3)) == len(start)  # all have moved
        for seen in (rank["trained"][name] for rank in ranks):
            found += differences(name, seen["encoders"], expected["encoders"])
            found += differences(name, seen["objective"], expected["objective"])
    assert found == []


def test_bfloat16_features_are_gathered_as_they_are(ranks):
    expected = reference(BFLOAT16, ranks)["steps"][0]
    steps = [rank["trained"][BFLOAT16]["steps"][0] for rank in ranks]
    state = {path: torch.cat([step["state"][path] for step in steps]) for path in expected["state"]}
    assert differences(BFLOAT16, state, expected["state"], tolerance=1e-5) == []
    for step in steps:
        assert differences(BFLOAT16, step["loss"], expected["loss"], tolerance=1e-5) == []
        # A feature's gradient is rounded to bfloat16, which keeps 8 bits, before DDP divides by the number of ranks.
        assert differences(BFLOAT16, step["encoders' gradients"], expected["encoders' gradients"], tolerance=2e-2) == []


def test_a_step_gathers_the_features_and_a_few_scalars_and_leaves_the_rest_to_ddp(ranks):
    for name, case in CASES.items():
        if case.name == OWN:
            continue  # its own loss exchanges more
        rows, scalar = max(case.shares(len(ranks))), max(case.dtype.itemsize, 4)
        for seen in (rank["trained"][name] for rank in ranks):
            (operations, sent), state = zip(*seen["traffic"], strict=True), seen["steps"][0]["state"]
            # Where local views pull at targets that are not keys, the ranks sum what all of them do.
            in_targets = ["allreduce_"] if case.local and not case.keys else []
            if case.name in ("barlow_twins", "vicreg"):  # what the second would gather follows from the features
                assert operations == ("allgather_", "allreduce_"), name
                sent = (sent[0], 0, sent[1])
            else:
                assert operations == ("allgather_", "allgather_", *in_targets, "allreduce_"), name
            assert sent[0] == 2 * rows * WIDTH * case.dtype.itemsize, name
            # Three sums of each of a sample's anchors; a fourth at a second temperature, or the positive, which other
            # ranks cannot compute from keys; the rate of its keys, its state and its weight.
            sums = 4 if case.name == "simco" or case.keys or case.local else 3
            others = (2 if case.settings.get("rate") == "momentum" else 0) + len(state) + case.weights
            assert sent[1] <= (2 * (1 + case.local) * sums + others) * rows * scalar, name
            assert all(each == 2 * case.samples(len(ranks)) * WIDTH * scalar for each in sent[2:-1]), name
            assert sent[-1] == sum(parameter.nbytes for parameter in seen["encoders"].values()), name
        assert reference(name, ranks)["traffic"] == []


def test_features_of_different_dtypes_are_refused_on_every_rank(ranks):
    for rank in ranks:
        assert "numbers of 4 bytes, " in rank["refused_dtype"]
        assert f"3 × {WIDTH} numbers of 2 bytes; all must hold the same" in rank["refused_dtype"]


def test_shares_of_different_sizes_are_refused_on_every_rank(ranks):
    held = ", ".join(f"{rows} × {WIDTH} numbers of 4 bytes" for rows in [3] * (len(ranks) - 1) + [4])
    for rank in ranks:
        assert rank["refused"].keys() == set(KNOWN)
        for message in rank["refused"].values():
            assert message.startswith(f"features: the ranks hold {held}; all must hold the same")
