"""A crowd of near-copies is cold where rho leaves no room for it: what the objective does, and what is said of it."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import normalize

from thermopile.tools.inspection.findings import look
from thermopile.tools.inspection.reading.opening import read_run
from thermopile.tools.inspection.temperatures.kinds import KIND_NAMES, read_rules
from thermopile.trainer.objectives import Progress, create_objective

from support.cli import answer, cli
from support.written_runs import write_state

N, VISITS = 2000, 60
SETTINGS = {"tau_init": 0.05, "tau_min": 0.005, "eta": 0.02, "tau_step": 0.1}


def state_among(share, rho, visits):
    """Columns of the state after steps on features that stay: a crowd, whose pictures and captions are copies but for
    noise, and other pairs."""
    generator, crowd = torch.Generator().manual_seed(0), round(share * N)

    def noisy(features, size):
        return normalize(features + size / 4 * torch.randn(N, 16, generator=generator), dim=1)

    meant = normalize(torch.randn(N, 16, generator=generator), dim=1)
    meant[:crowd] = meant[0]
    noise = torch.where(torch.arange(N) < crowd, 0.01, 0.15)[:, None]
    image, text = noisy(meant, noise), noisy(meant, noise)
    objective = create_objective("isogclr", **SETTINGS, rho=rho)
    state = {name: torch.full((N,), value) for name, value in objective.fields.items()}
    for step in range(visits * N // 200):
        ids = torch.randperm(N, generator=generator)[:200]
        rows = {name: values[ids] for name, values in state.items()} | {"visits": torch.full((200,), 10)}
        made = objective(image[ids], text[ids], rows, Progress(step, N // 200))
        for name, values in state.items():
            values[ids] = made.state[name].detach()
    return {name: values.numpy() for name, values in state.items()}, crowd


@pytest.mark.parametrize(
    ("share", "rho", "tau"),
    [
        (0.19, 2.0, 0.005),  # above exp(-rho): at the floor
        pytest.param(0.19, 1.0, 1 / 3.1, marks=pytest.mark.wide),  # times the distance of the others
        pytest.param(0.08, 2.0, 1 / 4.7, marks=pytest.mark.wide),
    ],
)
def test_a_crowd_is_at_the_floor_where_its_share_is_above_exp_of_minus_rho(share, rho, tau):
    columns, crowd = state_among(share, rho, VISITS)
    for side in ("image", "text"):
        reached = np.median(columns[f"{side}/tau"][:crowd])
        assert reached == pytest.approx(tau, rel=0.15)


@pytest.mark.parametrize(
    ("share", "rho", "visits", "kind"),
    [
        (0.19, 2.0, VISITS, "crowded"),
        pytest.param(0.19, 2.0, 15, "crowded", marks=pytest.mark.wide),  # on their way to the floor
        pytest.param(0.08, 2.0, VISITS, "ordinary", marks=pytest.mark.wide),
        (0.08, 2.0, 15, "ordinary"),  # still among the coldest
        (0.03, 1.0, 15, "ordinary"),
    ],
)
def test_a_crowd_is_crowded_or_ordinary_and_never_rare(pairs_dataset, tmp_path, share, rho, visits, kind):
    columns, crowd = state_among(share, rho, visits)
    run = write_state(tmp_path / "run", pairs_dataset, columns, np.full(N, 9), name="isogclr", **SETTINGS, rho=rho)
    inspection = read_run(run)
    rules = read_rules(inspection)
    kinds = np.array(KIND_NAMES)[rules.kinds(inspection.reader.rows(0, N, rules.columns))]
    assert (kinds[:crowd] == kind).mean() > 0.95
    assert not (kinds[:crowd] == "rare").any()
    assert 50 < (kinds == "rare").sum() < 200


@pytest.fixture(scope="module")
def crowded_run(images_dataset, tmp_path_factory):
    """A run in which all dogs, a third of the samples, are at the floor with s of a third."""
    is_dog = np.array(images_dataset.column("group").to_pylist()) == "dogs"
    tau = np.where(is_dog, 0.05, np.linspace(0.1, 0.2, images_dataset.n))
    columns = {"sample/tau": tau, "sample/log_s": np.where(is_dog, math.log(1 / 3), -5.0)}
    return write_state(tmp_path_factory.mktemp("crowded") / "run", images_dataset, columns, np.full(len(tau), 9), rho=2)


def test_a_crowd_of_most_samples_is_crowded_once_it_is_at_the_floor(images_dataset, tmp_path):
    n = images_dataset.n
    of_crowd = np.arange(n) < 0.6 * n
    columns = {"sample/tau": np.where(of_crowd, 0.05, np.linspace(0.1, 0.2, n))}
    columns["sample/log_s"] = np.where(of_crowd, math.log(0.6), -5.0)
    run = write_state(tmp_path / "run", images_dataset, columns, np.full(n, 9), rho=2)
    counts = look(run.path).survey.kinds.counts
    assert (counts["crowded"], counts["rare"], counts["ordinary"]) == (180, 0, 120)


def test_a_crowd_and_what_its_samples_share_are_said_before_all_else(crowded_run, tmp_path):
    crowd = (
        "100 of 300 samples are crowded: more of the others than rho = 2 leaves room for (13.5%) are as close to them "
        "as their own positive, so they are cold without being rare."
    )
    shared = "Of the 72 coldest samples, 72 have the class “dogs”, of 72 random ones 2"
    done = cli("inspect", crowded_run.path, "--to", tmp_path)
    first, second, _ = done.stdout.split("\n", 2)
    assert first == f"coldest    {crowd}"
    assert shared in second
    assert crowd in (tmp_path / "report.html").read_text("utf-8").partition('class="lede">')[2][:400]
    found = answer("inspect", crowded_run.path)
    assert found["said_first"][0] == crowd
    assert found["kinds"]["crowded"]["samples"] == 100
    (warning,) = found["warnings"]
    assert "Some 33% of the negatives of crowded samples are near-copies" in warning
    assert "set objective.rho below log(1/share) = 1.10" in warning


def test_rare_samples_of_many_classes_have_nothing_in_common(pairs_dataset, tmp_path):
    columns = {f"{side}/tau": np.linspace(0.1, 0.2, N) for side in ("image", "text")}
    columns |= {f"{side}/log_s": np.full(N, -5.0) for side in ("image", "text")}
    assert not look(write_state(tmp_path / "run", pairs_dataset, columns, np.full(N, 9)).path).said_first


def test_crowded_samples_keep_their_weight_however_cold(crowded_run, tmp_path):
    kept = tmp_path / "keep.parquet"
    done = cli("curate", crowded_run.path, "--keep", kept, "--tau-power", "-1")
    assert "Crowded samples keep the weight 1: 100." in done.stdout
    weight = pq.read_table(kept)["weight"].to_numpy()
    assert (weight == 1).sum() == 100
    assert weight.max() < 2


def test_misfits_are_not_dropped_before_temperatures_differ(images_dataset, tmp_path):
    n = images_dataset.n
    columns = {"sample/tau": np.linspace(0.1, 0.105, n), "sample/log_s": np.where(np.arange(n) % 6, -1.0, 1.0)}
    run = write_state(tmp_path / "run", images_dataset, columns, np.full(n, 9))
    done = cli("curate", run.path, "--keep", tmp_path / "keep.parquet", "--drop-misfits")
    assert done.exit_code != 0
    assert "no misfits are told yet: the temperatures hardly differ; train longer" in done.stderr
    assert "No kinds of samples are told yet: the temperatures hardly differ; train longer." in look(run.path).notes[-1]


def test_misfits_are_told_where_all_temperatures_are_at_their_floor(images_dataset, tmp_path):
    n = images_dataset.n
    columns = {"sample/tau": np.full(n, 0.05), "sample/log_s": np.where(np.arange(n) % 60, -9.0, 1.0)}
    run = write_state(tmp_path / "run", images_dataset, columns, np.full(n, 9))
    found, kept = look(run.path), tmp_path / "keep.parquet"
    assert found.survey.kinds.counts["misfit"] == 5
    assert not any("hardly differ" in said for said in (*found.notes, *found.warnings))
    cli("curate", run.path, "--keep", kept, "--drop-misfits")
    assert pq.read_metadata(kept).num_rows == n - 5


def test_a_confirmed_export_says_once_that_no_kinds_are_told(images_dataset, tmp_path):
    n = images_dataset.n
    columns = {"sample/tau": np.linspace(0.1, 0.105, n), "sample/log_s": np.full(n, -1.0)}
    run = write_state(tmp_path / "run", images_dataset, columns, np.full(n, 9))
    done = cli("inspect", run.path, "--export", tmp_path / "rows.csv", "--confirm")
    assert done.output.count("No kinds of samples are told yet") == 1


def test_very_many_misfits_are_said_to_be_unlearnt_samples_perhaps(images_dataset, tmp_path):
    n = images_dataset.n
    columns = {"sample/tau": np.linspace(0.1, 0.2, n)}
    columns["sample/log_s"] = np.where(np.arange(n) < 0.05 * n, 1.0, -3.0)
    (warning,) = look(write_state(tmp_path / "run", images_dataset, columns, np.full(n, 9)).path).warnings
    assert warning.startswith("5% of the samples are misfits: they have no feature of their own, or the run has not")
    assert "caption" not in warning


@pytest.mark.parametrize(("settings", "is_advised"), [({}, True), ({"doubt_after": 3}, False)])
def test_doubt_is_advised_where_many_pairs_are_misfits_unless_they_are_doubted(
    pairs_dataset, tmp_path, settings, is_advised
):
    columns = {f"{side}/tau": np.linspace(0.1, 0.2, N) for side in ("image", "text")}
    columns |= {f"{side}/log_s": np.where(np.arange(N) < 0.2 * N, 1.0, -3.0) for side in ("image", "text")}
    run = write_state(tmp_path / "run", pairs_dataset, columns, np.full(N, 9), name="isogclr", **settings)
    (warning,) = look(run.path).warnings
    assert warning.startswith("20% of the samples are misfits: as many captions are wrong, or the run has not learnt")
    assert ("For wrong captions, objective.doubt_after = 4, for example, leaves" in warning) == is_advised
