"""What a forward pass says about the samples that look stuck or like misfits, against plain loops."""

import re
import shutil
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from thermopile.pipeline.views.recipes import RECIPES
from thermopile.tools.inspection import silent
from thermopile.tools.inspection.features import confirmation as module
from thermopile.tools.inspection.features.confirmation import compared_ids, confirm, with_confirmed
from thermopile.tools.inspection.features.run_features import Asked
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.kinds import KIND_NAMES
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.trainer.run_directory import RunDirectory

from support.cli import answer, cli, succeed
from support.features import sample_features
from support.written_checkpoints import IMAGE_SIZE, save_encoders
from support.written_runs import write_state

inspect = partial(cli, "inspect")


def suspicious(sides, n, floor, bound):
    """Columns in which every third sample is stuck, and the others' log s is -2 to 12."""
    columns = {}
    for side in sides:
        rng = np.random.default_rng(len(side))
        stuck = np.arange(n) % 3 == 0
        columns[f"{side}/tau"] = np.where(stuck, floor, rng.uniform(0.1, 0.3, n))
        columns[f"{side}/log_s"] = np.where(stuck, rng.uniform(0.1, 40, n), rng.uniform(-2, 12, n))
        columns[f"{side}/u"] = np.where(stuck, bound, 0)
    return columns


def confirmed(run, suspects=10**6, on_progress=silent, asked=None):
    """What a forward pass says, the survey, and the notes."""
    inspection = read_run(run)
    found = survey(inspection, (), suspects=suspects)
    return confirm(inspection, found, on_progress, asked or Asked()), found, inspection.notes


@pytest.fixture(scope="module")
def pairs_run(hostile_dataset, tmp_path_factory):
    columns = suspicious(("image", "text"), hostile_dataset.n, 0.005, 5)
    path = tmp_path_factory.mktemp("pairs") / "run"
    run = write_state(path, hostile_dataset, columns, np.full(hostile_dataset.n, 6))
    return run, save_encoders(run, hostile_dataset)


@pytest.fixture(scope="module")
def images_run(images_dataset, tmp_path_factory):
    columns = suspicious(("sample",), images_dataset.n, 0.05, 3)
    path = tmp_path_factory.mktemp("images") / "run"
    run = write_state(path, images_dataset, columns, np.full(images_dataset.n, 6))
    return run, save_encoders(run, images_dataset)


def slowly_by_side(similarities, positive, own, tau):
    """log g, and the margin of the positive over the hardest negative, from an anchor's similarities to candidates."""
    h = [float(value) - positive for value, is_own in zip(similarities, own, strict=True) if not is_own]
    return np.log(np.mean(np.exp(np.array(h) / tau))), -max(h)


def check(found, state, sides, anchors_of):
    """Compare a confirmation with loops; anchors_of(place, side) yields (similarities, positive, own) per anchor."""
    kinds = set()
    for place, id in enumerate(found.sample_ids.tolist()):
        silent, margins = False, []
        for side in sides:
            row = {name: float(state[f"{side}/{name}"][id]) for name in ("tau", "log_s")}
            of_anchors = [slowly_by_side(*anchor, row["tau"]) for anchor in anchors_of(id, side)]
            log_g = np.log(np.mean(np.exp([log_g for log_g, _ in of_anchors])))
            silent |= np.exp(log_g - row["log_s"]) < 0.01
            margins.append(min(margin for _, margin in of_anchors))
        stuck = id % 3 == 0
        is_misfit = sum(state[f"{side}/log_s"][id] for side in sides) > 0
        expected = "stuck" if stuck and silent else "misfit" if is_misfit else None
        name = KIND_NAMES[found.kinds[place]]
        assert (name == expected) if expected else name in ("rare", "ordinary")
        assert (found.silent[place], found.misfit[place]) == (silent, is_misfit)
        assert found.margin[place] == pytest.approx(min(margins), abs=1e-5)
        kinds.add(name if stuck else f"not stuck, {name}")
    return kinds


def test_pairs_are_compared_with_the_other_side_of_the_negatives(pairs_run, hostile_dataset):
    run, encoders = pairs_run
    found, surveyed, notes = confirmed(run)
    suspects, negatives, *planted = compared_ids(surveyed, surveyed.kinds, read_run(run))
    assert [len(ids) for ids in planted] == [0, 0]
    assert found.below is None
    assert (found.sample_ids.tolist(), found.negatives, notes) == (suspects.tolist(), 66, [])
    view = (RECIPES[run.config().data.recipe], IMAGE_SIZE, torch.device("cpu"))
    pictures, captions = sample_features(encoders, hostile_dataset, np.arange(66), *view)
    inspection = read_run(run)

    def anchors_of(id, side):
        one, other = (pictures, captions) if side == "image" else (captions, pictures)
        return [(other[negatives] @ one[id], float(one[id] @ other[id]), negatives == id)]

    kinds = check(found, inspection.reader.rows(0, 66), ("image", "text"), anchors_of)
    assert {"stuck", "misfit", "not stuck, misfit"} <= kinds


def test_images_are_compared_in_two_views_as_training_draws_them(images_run, images_dataset):
    run, encoders = images_run
    found, surveyed, notes = confirmed(run, suspects=40)
    _, negatives, *_ = compared_ids(surveyed, surveyed.kinds, read_run(run))
    assert (len(found.sample_ids), found.negatives) == (40, 300)
    assert [note for note in notes if "forward pass" in note or "checkpoint" in note] == []
    view = (RECIPES[run.config().data.recipe], IMAGE_SIZE, torch.device("cpu"))
    first, second = sample_features(encoders, images_dataset, np.arange(300), *view, views=2)
    assert not torch.allclose(first, second)
    candidates, own = torch.cat([first[negatives], second[negatives]]), np.tile(negatives, 2)

    def anchors_of(id, side):
        return [(candidates @ one[id], float(first[id] @ second[id]), own == id) for one in (first, second)]

    check(found, read_run(run).reader.rows(0, 300), ("sample",), anchors_of)


def test_confirmed_kinds_replace_those_of_the_state_and_the_others_stay(pairs_run):
    found, surveyed, _ = confirmed(pairs_run[0], suspects=20)
    before, after = surveyed.kinds, with_confirmed(surveyed.kinds, found)
    assert sum(after.counts.values()) == sum(before.counts.values()) == 66
    assert after.confirmed == {
        name: int((found.kinds == code).sum()) for code, name in enumerate(KIND_NAMES) if (found.kinds == code).any()
    }
    for code in map(KIND_NAMES.index, ("stuck", "misfit")):
        own = found.sample_ids[found.kinds == code]
        by_margin = sorted(own.tolist(), key=lambda id: found.margins[id])
        sheet = after.sheets[KIND_NAMES[code]]
        others = [id for id in before.sheets[KIND_NAMES[code]] if id not in found.margins]
        assert sheet == (by_margin + others)[: module.KIND_SHEET_SAMPLES]


def test_negatives_are_drawn_alike_each_time_and_only_so_many(pairs_run, monkeypatch):
    monkeypatch.setattr(module, "MAX_NEGATIVES", 20)
    (one, surveyed, _), (again, *_) = confirmed(pairs_run[0]), confirmed(pairs_run[0])
    assert one.negatives == 20
    np.testing.assert_array_equal(one.margin, again.margin)
    assert len(set(compared_ids(surveyed, surveyed.kinds, read_run(pairs_run[0]))[1].tolist())) == 20


def test_without_a_temperature_per_sample_none_is_silent_but_misfits_are_told(hostile_dataset, tmp_path):
    columns = {f"{side}/log_s": np.where(np.arange(66) < 9, 3.0, -1.0) for side in ("image", "text")}
    run = write_state(tmp_path / "run", hostile_dataset, columns, np.full(66, 6), name="sogclr")
    save_encoders(run, hostile_dataset)
    found, surveyed, _ = confirmed(run)
    assert found.sample_ids.tolist() == list(range(9))
    assert not found.silent.any()
    assert {KIND_NAMES[code] for code in found.kinds} == {"misfit"}  # as nothing is planted
    assert set(with_confirmed(surveyed.kinds, found).counts) == {"too_few_visits", "misfit", "ordinary"}


def without_encoders(run):
    shutil.rmtree(run.checkpoints)


def moved(run):
    text = run.config_file.read_text().replace("/dataset", "/gone")
    run.config_file.write_text(text)


@pytest.mark.parametrize(("spoil", "words"), [(without_encoders, "no checkpoint"), (moved, "need the run's dataset")])
@pytest.mark.filterwarnings("ignore:.*config.toml")
def test_where_nothing_can_be_confirmed_a_note_says_why(pairs_run, tmp_path, spoil, words):
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(pairs_run[0].path, run.path)
    spoil(run)
    found, _, notes = confirmed(run)
    assert found is None
    assert notes[-1].startswith("No kind is confirmed by a forward pass: ")
    assert words in notes[-1]


@pytest.mark.parametrize(
    ("visits", "objective", "why"),
    [
        (5, "isogclr", "no sample looks stuck or like a misfit"),
        (4, "isogclr", "no sample has 5 visits, so none is judged; try later"),
        (5, "clip", "the objective clip keeps no log s, by which stuck samples and misfits are found"),
    ],
)
def test_where_no_sample_is_suspicious_or_none_was_judged_a_note_says_so(
    hostile_dataset, tmp_path, visits, objective, why
):
    n = hostile_dataset.n
    columns = {f"{side}/log_s": np.full(n, -1.0) for side in ("image", "text")} if objective == "isogclr" else {}
    found, _, notes = confirmed(
        write_state(tmp_path / "run", hostile_dataset, columns, np.full(n, visits), name=objective)
    )
    assert (found, notes[-1]) == (None, f"No kind is confirmed by a forward pass: {why}")


def test_a_checkpoint_of_another_snapshot_is_noted(pairs_run, hostile_dataset, tmp_path):
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(pairs_run[0].path, run.path)
    shutil.rmtree(run.checkpoints / "step-5")
    save_encoders(run, hostile_dataset, step=9, at="step-0")
    found, _, (note,) = confirmed(run)
    assert found.checkpoint == "step-9"
    assert note.startswith("No checkpoint belongs to the snapshot step-5: its temperatures are combined with the")


@pytest.mark.wide
def test_the_report_the_terminal_and_json_tell_who_decided(pairs_run, tmp_path):
    shown = succeed("inspect", pairs_run[0].path, "--confirm", 20, "--to", tmp_path)
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert any(re.fullmatch(r"misfit \d+ 66 [\d.]+% state, \d+ by a forward pass", line) for line in lines)
    assert any(line.startswith("forward pass 20 suspects compared with 66 random samples") for line in lines)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "by a forward pass: 20 suspects compared with 66 random samples" in page
    assert len(re.findall(r"log s [^<]*, margin [+-]0\.\d{3}</b>", page)) >= 10
    said = "This is an order; the number of wrong captions is unknown."
    assert said in page
    assert said in " ".join(shown.stdout.split())
    seen = answer("inspect", pairs_run[0].path, "--confirm", 20)
    assert seen["confirmation"]["suspects"] == 20
    assert (seen["confirmation"]["checkpoint"], seen["confirmation"]["weights"]) == ("step-5", "raw")
    assert sum(kind["confirmed"] for kind in seen["kinds"].values()) == 20
    assert sum(kind["samples"] for kind in seen["kinds"].values()) == 66


def test_an_export_has_the_confirmed_kinds_and_who_decided(pairs_run, tmp_path):
    succeed("inspect", pairs_run[0].path, "--confirm", 20, "--export", tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pydict()
    found, *_ = confirmed(pairs_run[0], suspects=20)
    of = dict(zip(found.sample_ids.tolist(), found.kinds.tolist(), strict=True))
    assert [id for id, level in enumerate(rows["kind_from"]) if level == "forward_pass"] == found.sample_ids.tolist()
    assert all(rows["kind"][id] == KIND_NAMES[code] for id, code in of.items())
    margin = dict(zip(found.sample_ids.tolist(), found.margin.tolist(), strict=True))
    assert rows["margin"] == [margin.get(id) for id in range(66)]
    assert inspect(pairs_run[0].path, "--export", tmp_path / "plain.parquet").exit_code == 0
    assert "margin" not in pq.read_schema(tmp_path / "plain.parquet").names


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--sample", "1", "--confirm"), "--confirm has no effect with --sample"),
        (("--export", "rows.csv", "--weights", "raw"), "--weights has no effect with --export that needs no encoders"),
        (("--confirm", "0"), "0 is not in the range x>=1"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(pairs_run, words, error):
    done = inspect(pairs_run[0].path, *words)
    assert done.exit_code == 2
    assert error in done.stderr
