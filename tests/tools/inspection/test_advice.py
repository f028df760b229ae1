import re
from html import unescape

import numpy as np
import pytest

from thermopile.tools.inspection.findings import Findings
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.survey import survey

from support.cli import answer, cli
from support.written_runs import write_run, write_state


@pytest.fixture
def warned(hostile_dataset, tmp_path):
    """What is said of a run whose first side has these temperatures; its second side's are well spread."""

    def of(tau, visits=5, **how):
        spread = np.linspace(0.1, 0.5, hostile_dataset.n)
        tau = np.broadcast_to(tau, spread.shape)
        taus = {"image": tau, "text": spread}
        inspection = read_run(write_run(tmp_path / "run", hostile_dataset, taus, visits=visits, **how))
        return Findings(inspection, survey(inspection)).warnings

    return of


def test_well_spread_temperatures_need_no_advice(warned):
    assert warned(np.linspace(0.2, 0.4, 66)) == []


def test_temperatures_at_their_floor_mean_that_rho_never_binds(warned):
    (said,) = warned(np.where(np.arange(66) < 40, 0.005, 0.3))
    assert said.startswith(
        "rho = 1 seems never to bind: 61% of the image temperatures are at their floor, tau_min = 0.005"
    )
    assert "Lower rho" in said


@pytest.mark.parametrize("tau", [0.005, 0.2, 1.0])
def test_temperatures_that_cannot_have_settled_are_no_reason_to_change_a_setting(warned, tau):
    assert warned(tau, visits=4) == []


def test_a_third_at_the_floor_is_no_reason_to_warn(warned):
    assert warned(np.where(np.arange(66) < 22, 0.005, 0.3)) == []


def test_temperatures_at_their_ceiling_are_saturated(warned):
    (said,) = warned(np.where(np.arange(66) < 10, 1.0, 0.3))
    assert said.startswith("15% of the image temperatures are at their ceiling, tau_max = 1")
    assert "Raise rho" in said


def test_temperatures_that_are_all_alike_tell_nothing_apart(warned):
    (said,) = warned(np.linspace(0.2, 0.201, 66))
    assert said.startswith("The image temperatures hardly differ: 90% lie between 0.2000 and 0.2009")


def test_few_visited_samples_are_said_to_be_few(warned):
    (said,) = warned(np.linspace(0.2, 0.4, 66), visited=np.arange(66) % 3 == 0)
    assert said.startswith("Only 22 of the 66 samples have been visited")


def test_temperatures_that_are_all_at_their_ceiling_get_one_advice(warned):
    (said,) = warned(1.0)
    assert said.startswith("100% of the image temperatures are at their ceiling")


@pytest.mark.parametrize(
    ("objective", "cure"),
    [
        ({}, "set `objective.tau_step` to 0.1."),
        ({"tau_step": 0.1}, "lower `objective.eta`, to 0.0025 for example."),
    ],
)
def test_no_cure_of_stuck_samples_is_named_that_the_run_has_taken(hostile_dataset, tmp_path, objective, cure):
    n = hostile_dataset.n
    stuck = np.arange(n) < 7
    columns = {"image/tau": np.where(stuck, 0.005, np.linspace(0.1, 0.3, n)), "image/log_s": np.where(stuck, 2, -2),
               "image/u": np.where(stuck, 5, 0), "text/tau": np.linspace(0.1, 0.3, n),
               "text/log_s": np.full(n, -2)}  # fmt: skip
    inspection = read_run(write_state(tmp_path / "run", hostile_dataset, columns, np.full(n, 5), **objective))
    (said,) = Findings(inspection, survey(inspection)).warnings
    assert said.startswith("10.6% of the samples are stuck at tau_min")
    assert said.endswith(f"tau moved too fast. In the next run, {cure}")


def test_the_terminal_the_page_and_the_json_give_the_same_advice_and_notes(hostile_dataset, tmp_path):
    n, third = hostile_dataset.n, np.arange(hostile_dataset.n) % 3 == 0
    taus = {"image": np.full(n, 0.005), "text": np.full(n, 1.0)}
    run = write_run(tmp_path / "run", hostile_dataset, taus, visited=third, visits=5)
    asked = ["inspect", str(run.path), "--by", "width"]
    seen = answer(*asked)
    assert [said.split()[0] for said in seen["warnings"]] == ["Only", "rho", "100%"]
    assert [said.split()[0] for said in seen["notes"]] == ["All"]
    lines = cli(*asked).stdout.splitlines()
    for label in ("warning", "note"):
        shown = [line.removeprefix(label).strip() for line in lines if line.startswith(f"{label} ")]
        assert shown == seen[f"{label}s"]
    page = (run.report / "report.html").read_text("utf-8")
    (listed,) = re.findall(r'<ul class="notes">(.*?)</ul>', page)
    assert [unescape(said) for said in re.findall("<li>(.*?)</li>", listed)] == [*seen["warnings"], *seen["notes"]]
