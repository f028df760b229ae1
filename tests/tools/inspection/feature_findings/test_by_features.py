"""What features say of a run: solved temperatures, what they go with, kinds with evidence, and the columns exported."""

import math
import re
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.optimize import brentq
from scipy.special import logsumexp

from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.tools.inspection import silent
from thermopile.tools.inspection.feature_findings.by_features import by_features
from thermopile.tools.inspection.features import run_features as drawn_module
from thermopile.tools.inspection.features.features_file import FeaturesFile, write_features
from thermopile.tools.inspection.features.run_features import (
    DRAWN,
    DRAWS,
    Asked,
    drawn_features,
    keep_features,
    visited_features,
    wanted_features,
)
from thermopile.tools.inspection.features.solving import solved_temperatures
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.summary import first_sentences
from thermopile.tools.inspection.temperatures.associations import Association
from thermopile.tools.inspection.temperatures.survey import survey

from support.cli import answer, cli, succeed
from support.conversions import dataset_of
from support.pictures import draw
from support.written_checkpoints import save_encoders
from support.written_runs import write_state

HEAP, APART = 100, 15
"""Samples of a heap, a fifth of all and so more than exp(-2), and of samples that lie alone."""


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def run_of(dataset, path, **objective):
    sides = ("image", "text") if dataset.index.mode == "pairs" else ("sample",)
    columns = {f"{side}/log_s": np.full(dataset.n, -4.0) for side in sides}
    if objective.get("name") != "sogclr":
        columns |= {f"{side}/tau": np.linspace(0.05, 0.2, dataset.n) for side in sides}
    run = write_state(path, dataset, columns, np.full(dataset.n, 6), **objective)
    save_encoders(run, dataset)
    return run


def keep(run, features, ids=None):
    """Keep features, [m, sides, d], of chosen samples as if a run's encoders had made them."""
    inspection = read_run(run)
    *_, of = wanted_features(inspection, Asked())
    run.report.mkdir(exist_ok=True)
    write_features(run.report / DRAWN, of, [features.astype(np.float32)], ids)


@pytest.fixture(scope="module")
def pairs(pairs_dataset, tmp_path_factory):
    """500 pairs, five of each of 100 classes."""
    out, tokenizer = tmp_path_factory.mktemp("pairs") / "glyphs", pairs_dataset.path / "tokenizer.json"
    return dataset_of(GlyphSource(0, test=True), out, np.arange(0, pairs_dataset.n, 4), tokenizer)


@pytest.fixture(scope="module")
def planted(pairs):
    """Features of pairs: a heap, samples that lie alone, and others in twelve groups; float32 [n, 2, d]."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(12, 24))[np.arange(pairs.n) % 12]
    pictures = centres + 0.9 * random.normal(size=centres.shape)
    order = random.permutation(len(pictures))
    pictures[order[:HEAP]] = random.normal(size=24) + 0.01 * random.normal(size=(HEAP, 24))
    pictures[order[HEAP : HEAP + APART]] = 3 * random.normal(size=(APART, 24))
    return np.stack([unit(pictures), unit(pictures + 0.002 * random.normal(size=pictures.shape))], 1), order


@pytest.fixture(scope="module")
def run(pairs, planted, tmp_path_factory):
    made = run_of(pairs, tmp_path_factory.mktemp("pairs") / "run", rho=2.0)
    keep(made, planted[0])
    return made


@pytest.fixture(scope="module")
def found(run):
    inspection = read_run(run)
    told = by_features(inspection, survey(inspection), run.report, Asked(0), None, lambda *work: None)
    assert told, inspection.notes
    return told


def test_an_export_at_a_rho_says_so_where_no_features_are_kept(pairs, tmp_path):
    run = run_of(pairs, tmp_path / "run")
    assert "no features are kept" in succeed("inspect", run.path, "--export", tmp_path / "r.csv", "--rho", 3).stdout
    assert "no features are kept" not in succeed("inspect", run.path, "--export", tmp_path / "s.csv").stdout


def divergence(h, tau):
    log_q = h / tau - logsumexp(h / tau)
    return float((np.exp(log_q) * (log_q + math.log(len(h)))).sum())


def test_temperatures_are_those_at_which_the_divergence_is_rho_and_a_heap_has_none(found, planted):
    features, order = planted
    is_heap = np.isin(np.arange(len(order)), order[:HEAP])
    for side, (own, other) in {"image": (0, 1), "text": (1, 0)}.items():
        tau = found.solved.sides[side].tau
        assert (tau[is_heap] == 0).all()
        assert (tau[~is_heap] > 0).all()
        for i in np.flatnonzero(~is_heap)[::50]:
            h = np.delete(features[:, other] @ features[i, own], i).astype(np.float64)
            at = brentq(lambda log_tau, h=h: divergence(h, math.exp(log_tau)) - 2, math.log(0.005), 0)
            assert tau[i] == pytest.approx(math.exp(at), rel=2e-3)  # features are stored as float16


def test_of_drawn_samples_the_others_have_no_solved_temperature_in_an_export(run, planted, tmp_path):
    ids = np.sort(planted[1][:225])
    keep(run, planted[0][ids], ids)
    try:
        succeed("inspect", run.path, "--export", tmp_path / "rows.parquet")
    finally:
        keep(run, planted[0])
    rows = pq.read_table(tmp_path / "rows.parquet")
    solved = rows["image/tau_solved"].to_pandas()
    assert np.flatnonzero(solved.notna()).tolist() == ids.tolist()
    assert (solved[np.sort(planted[1][:HEAP])] == 0).all()
    told = np.array(rows["kind_from"].to_pylist()) == "features"
    assert set(np.array(rows["kind"].to_pylist())[told]) >= {"crowded"}
    assert not told[np.setdiff1d(np.arange(len(told)), ids)].any()


def test_the_heap_is_crowded_as_the_evidence_says(found, planted):
    order, kinds = planted[1], found.kinds
    assert kinds.counts["crowded"] == HEAP
    first = kinds.sheets["crowded"][0]
    assert first in order[:HEAP]
    assert kinds.evidence[first].words == f"{HEAP - 1} of 500 are near"
    assert kinds.evidence[first].nearest.endswith(", cosine 1.00, 1.00, 1.00")


@pytest.mark.wide
def test_samples_that_lie_alone_are_rare_where_that_goes_with_the_temperatures(pairs_dataset, tmp_path):
    random = np.random.default_rng(1)
    group = np.sort((20 * random.random(pairs_dataset.n) ** 2).astype(int))
    pictures = random.normal(size=(20, 24))[group] + 0.5 * random.normal(size=(len(group), 24))
    alone = random.permutation(len(group))[:60]
    pictures[alone] = random.normal(size=(60, 24))
    made = run_of(pairs_dataset, tmp_path / "run", rho=1.0)
    features = np.stack([unit(pictures), unit(pictures + 0.1 * random.normal(size=pictures.shape))], 1)
    keep(made, features)
    inspection = read_run(made)
    kinds = by_features(inspection, survey(inspection), made.report, Asked(0), None, lambda *work: None).kinds
    side = ("near_pictures", "near_captions").index(kinds.rare_by)
    near = (features[:, side] @ features[:, side].T > 0.7).sum(1) - 1
    rare = kinds.sheets["rare"]
    assert len(rare) >= 20
    assert (near[rare] <= np.quantile(near, 0.1)).all()
    assert np.isin(rare, alone).mean() > 0.9
    assert kinds.evidence[rare[0]].words == f"{near[rare[0]]} of 2,000 are near"


def test_near_samples_are_said_last_and_what_holds_for_none_is_not_said(run, found):
    said = answer("inspect", run.path, "--features", "none")["first_sentences"]
    assert any("temperatures go with" in sentence for sentence in said)
    for sentence in said:
        assert "class" not in sentence  # all are of the same size
        assert "contrast" not in sentence


def test_sentences_give_their_figure_first_and_say_so_where_the_learned_temperatures_are_others(found):
    crowd = Association("lowest", "contrast", 0.22, 0.15, 0.29, within=0.56)
    told = replace(found, moves={"sample": 1.1}, associations={"sample": [crowd]})
    said = (
        "temperatures go with pictures of little contrast (in 78% of comparisons with the rest, 71 to 85%), which the "
        "model places close together: among samples placed so it hardly shows."
    )
    assert first_sentences(told) == [f"Low {said}"]
    sentence, unsettled = first_sentences(replace(told, moves={"sample": 1.17}))
    assert sentence == f"Once settled, low {said}"
    assert unsettled.startswith("The temperatures have not settled: ")
    doubt = Association("highest", "doubt", 0.92, 0.9, 0.95, within=None)  # by log s of this snapshot, not of the run's
    assert first_sentences(replace(told, associations={"image": [doubt]})) == [
        "High image temperatures go with samples that the model tells badly from others "
        "(in 92% of comparisons with the rest, 90 to 95%)."
    ]


def test_the_tables_of_what_temperatures_go_with_have_the_same_titles_on_the_page_and_the_terminal(run):
    printed = succeed("inspect", run.path).stdout
    page = (run.report / "report.html").read_text("utf-8")
    section = page[page.index('aria-labelledby="what-temperatures-go-with"') :].partition("</section>")[0]
    titles = re.findall(r'<th scope="col">(.*?)<', section)
    assert titles == [*2 * ["area under the curve of", "lowest 2%", "highest 2%"], titles[-3], "image", "text"]
    assert titles[-3].startswith("tau where KL is rho = 2, of 500 samples")
    assert re.search(r"image: area under the curve of +lowest 2% +highest 2%", printed)


def test_a_run_without_features_is_told_by_its_state_alone_and_why(pairs_dataset, tmp_path):
    made = run_of(pairs_dataset, tmp_path / "run")
    seen = answer("inspect", made.path, "--features", "none")
    assert seen["by_features"] is None
    assert any("no features are kept of this snapshot, and none are to be made" in note for note in seen["notes"])
    assert not (made.report / DRAWN).exists()


def test_features_are_made_of_as_many_as_asked_for_kept_and_taken_again(pairs_dataset, tmp_path, monkeypatch):
    made = run_of(pairs_dataset, tmp_path / "run")
    inspection = read_run(made)
    first = drawn_features(inspection, made.report, Asked(300))
    assert (first.samples, first.sides) == (300, 2)
    before = (made.report / DRAWN).read_bytes()
    assert drawn_features(inspection, made.report, Asked(200)).samples == 300
    assert (made.report / DRAWN).read_bytes() == before
    assert drawn_features(inspection, tmp_path / "elsewhere", Asked(200)).samples == 300
    assert not (tmp_path / "elsewhere").exists()
    monkeypatch.setattr(drawn_module, "LEAST_DRAWN", 500)
    monkeypatch.setattr(drawn_module, "SECONDS", 0)
    assert 500 <= drawn_features(inspection, made.report, Asked()).samples < 500 + 256
    everything = drawn_features(inspection, made.report, Asked(10**9))
    assert (everything.samples, everything.drawn) == (pairs_dataset.n, None)
    np.testing.assert_allclose(everything.rows(first.drawn), first.rows(np.arange(300)), atol=1e-3)


def test_training_ends_with_features_of_a_run_that_is_not_small(pairs_dataset, tmp_path, monkeypatch):
    made = run_of(pairs_dataset, tmp_path / "run")
    keep_features(made)
    assert not made.report.exists()
    monkeypatch.setattr(drawn_module, "LEAST_DRAWN", 1000)
    monkeypatch.setattr(drawn_module, "MOST_AT_END", 1200)
    keep_features(made)
    assert FeaturesFile(made.report / DRAWN).samples == 1200


@pytest.mark.wide
def test_images_are_solved_by_views_as_the_loss_pools_them_and_the_mean_over_draws(images_dataset, tmp_path):
    made = run_of(images_dataset, tmp_path / "run", rho=0.3)
    inspection = read_run(made)
    features = drawn_features(inspection, made.report, Asked(10**9))
    assert features.sides == 1 + 2 * DRAWS
    visited = visited_features(features, inspection.reader)
    tau = solved_temperatures(inspection, visited, 0.3, None, silent).sides["sample"].tau
    rows = features.rows(np.arange(images_dataset.n)).astype(np.float64)
    for i in (0, 77, 250):
        expected = []
        for number in range(DRAWS):
            views = rows[:, 1 + 2 * number : 3 + 2 * number]
            others = np.delete(views, i, 0).reshape(-1, rows.shape[2])
            h = np.concatenate([others @ views[i, 0], others @ views[i, 1]])
            if divergence(h, 0.05) < 0.3:
                expected.append(math.log(0.05))
            else:
                solve = lambda log_tau, h=h: divergence(h, math.exp(log_tau)) - 0.3  # noqa: E731
                expected.append(brentq(solve, math.log(0.05), 0))
        assert tau[i] == pytest.approx(math.exp(np.mean(expected)), rel=2e-3) or tau[i] == 0


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """60 pictures, of which thirteen are the same."""
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(60):
        draw(max(i, 12)).save(folder / f"{i}.png")
    return dataset_of(FolderSource(folder), tmp_path_factory.mktemp("copies") / "out")


def test_copies_are_counted_and_the_cure_is_offered_where_there_are_some(copies, tmp_path):
    seen = answer("inspect", run_of(copies, tmp_path / "run").path, "--features", "all")
    assert seen["by_features"]["kinds"]["counts"]["copied"] == 13
    assert any("13 of 60 samples looked at have near-copies" in said for said in seen["warnings"])


def test_copies_that_are_of_another_kind_first_have_near_copies_all_the_same(copies, tmp_path):
    columns = {"sample/tau": np.linspace(0.05, 0.2, 60), "sample/log_s": np.where(np.arange(60) < 30, 1.0, -4.0)}
    made = write_state(tmp_path / "run", copies, columns, np.full(60, 6))
    save_encoders(made, copies)
    seen = answer("inspect", made.path, "--features", "all")
    assert 0 < seen["by_features"]["kinds"]["counts"]["copied"] < 13  # the others are misfits
    assert any("13 of 60 samples looked at have near-copies" in said for said in seen["warnings"])
    succeed("inspect", made.path)
    page = (made.report / "report.html").read_text("utf-8")
    # All are looked at, none at random; the row of ordinary samples has the copies too.
    assert "counted among 60 samples, and are ordinary by their state." in " ".join(page.split())


def test_another_rho_can_be_asked_for_and_one_of_nothing_is_refused(pairs_dataset, tmp_path):
    made = run_of(pairs_dataset, tmp_path / "run", name="sogclr")
    seen = answer("inspect", made.path)
    assert seen["by_features"] is None
    assert any("missing: the objective sogclr has no rho; choose one with --rho" in note for note in seen["notes"])
    assert answer("inspect", made.path, "--rho", "1.5", "--features", "100")["by_features"]["solved"]["rho"] == 1.5
    refused = cli("inspect", made.path, "--rho", "0")
    assert refused.exit_code == 2
    assert cli("inspect", made.path, "--features", "some").exit_code == 2
