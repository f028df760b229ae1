"""A crowd of near-copies has a low temperature where rho leaves no room for it, and what is advised about misfits."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import normalize

from thermopile.tools.inspection.findings import look
from thermopile.trainer.objectives import Progress, create_objective

from support.cli import cli
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


def test_samples_at_tau_min_keep_their_weight(images_dataset, tmp_path):
    tau = np.where(np.arange(images_dataset.n) < 100, 0.05, np.linspace(0.1, 0.2, images_dataset.n))
    run = write_state(tmp_path / "run", images_dataset, {"sample/tau": tau}, np.full(len(tau), 9), rho=2)
    kept = tmp_path / "keep.parquet"
    done = cli("curate", run.path, "--keep", kept, "--tau-power", "-1")
    assert "Samples at tau_min keep the weight 1: 100." in done.stdout
    weight = pq.read_table(kept)["weight"].to_numpy()
    assert (weight == 1).sum() == 100
    assert weight.max() < 2


def test_misfits_are_told_where_all_temperatures_are_at_their_floor(images_dataset, tmp_path):
    n = images_dataset.n
    columns = {"sample/tau": np.full(n, 0.05), "sample/log_s": np.where(np.arange(n) % 60, -9.0, 1.0)}
    run = write_state(tmp_path / "run", images_dataset, columns, np.full(n, 9))
    found, kept = look(run.path), tmp_path / "keep.parquet"
    assert found.survey.kinds.counts["misfit"] == 5
    assert found.of_misfits == ["This is an order, not a verdict: there are no captions that could be wrong."]
    assert not any("hardly differ" in said for said in (*found.notes, *found.warnings))
    cli("curate", run.path, "--keep", kept, "--drop-misfits", 5)
    assert pq.read_metadata(kept).num_rows == n - 5


def test_that_negatives_outweigh_many_positives_is_no_warning_of_wrong_captions(pairs_dataset, tmp_path):
    columns = {f"{side}/tau": np.linspace(0.1, 0.2, N) for side in ("image", "text")}
    columns |= {f"{side}/log_s": np.where(np.arange(N) < 0.2 * N, 1.0, -3.0) for side in ("image", "text")}
    found = look(write_state(tmp_path / "run", pairs_dataset, columns, np.full(N, 9)).path)
    assert found.warnings == []
    assert found.of_misfits == ["This is an order; the number of wrong captions is unknown."]
