"""How many captions are wrong, told by planted ones: against a truth that is made, and what commands say of a run."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.planted import Planting
from thermopile.tools.inspection.findings import look
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.summary import facts
from thermopile.tools.inspection.temperatures import misfits as module
from thermopile.tools.inspection.temperatures.misfits import LISTS, WIDER, wrong_captions
from thermopile.tools.inspection.temperatures.survey import survey

from support.cli import answer, assert_one_line, cli, succeed
from support.runs import small, train
from support.written_runs import write_state

OTHERS, SHARE, PLANTED = 20_000, 0.04, 400


def drawn(seed, share=SHARE, planted=PLANTED, others=OTHERS, apart=4.0):
    """Scores of planted samples, and of others of which a share is wrong, and which are: wrong ones score lower."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(others) < share
    scores = rng.normal(np.where(wrong, -apart, 0.0), np.where(wrong, 1.5, 1.0))
    order = np.argsort(scores)
    return rng.normal(-apart, 1.5, planted), scores[order], wrong[order]


def judged(planted, scores):
    return wrong_captions(np.searchsorted(scores, planted, "right"), len(scores))


@pytest.fixture
def all_lists_are_known(monkeypatch):
    monkeypatch.setattr(module, "is_known", lambda first, low, high: True)


def by_definition(planted, scores, first):
    """The share of wrong captions and the expected precision of a list, by every threshold with 8 % of the planted."""
    shares = [(scores <= at).mean() / (planted <= at).mean() for at in planted if (planted <= at).sum() >= 32]
    end = scores[first - 1]
    return min(shares), min(1.0, min(shares) * (planted <= end).mean() / (first / len(scores)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("all_lists_are_known")
def test_share_and_precision_are_those_of_the_definition(seed):
    planted, scores, _ = drawn(seed)
    found, precision = judged(planted, scores), judged(planted, scores).precision
    for first in (200, 500, 1_000, 5_000, OTHERS):
        share, expected = by_definition(planted, scores, first)
        assert found.share[0] == pytest.approx(share, rel=1e-3)
        assert precision[first - 1] == pytest.approx(expected, rel=1e-3)


@pytest.mark.wide
@pytest.mark.usefixtures("all_lists_are_known")
def test_what_is_said_of_lists_and_of_all_is_near_the_truth_and_rather_too_little():
    errors = []
    for seed in range(30):
        planted, scores, wrong = drawn(seed)
        found = judged(planted, scores)
        value, low, high = found.share
        assert low <= value <= high
        assert 0.4 * wrong.mean() < value < 1.2 * wrong.mean()
        for first, (value, low, high) in found.lists.items():
            assert 0 <= low <= value <= high <= first
            if first in (200, 500, 1_000, 2_000):
                errors.append((value - wrong[:first].sum()) / first)
    assert -0.15 < np.mean(errors) < 0
    assert np.max(errors) < 0.05


@pytest.mark.usefixtures("all_lists_are_known")
def test_an_interval_is_wider_than_the_bootstraps_but_no_number_is_below_0_or_above_the_list(monkeypatch):
    planted, scores, _ = drawn(2)
    found = judged(planted, scores)
    monkeypatch.setattr(module, "WIDER", 1.0)
    plain = judged(planted, scores)
    for first, (value, low, high) in plain.lists.items():
        wide = value, max(0, value - WIDER * (value - low)), min(first, value + WIDER * (high - value))
        assert found.lists[first] == pytest.approx(wide)
    assert any(high == first for first, (_, _, high) in found.lists.items())
    assert found.share[2] - found.share[0] == pytest.approx(WIDER * (plain.share[2] - plain.share[0]))


def test_without_wrong_captions_few_are_expected():
    for seed in range(5):
        found = judged(*drawn(seed, share=0.0)[:2])
        assert found.share[0] < 0.002
        assert found.longest(0.5) < 20


def test_fewer_than_200_planted_give_no_number():
    planted, scores, _ = drawn(0)
    assert judged(planted[:199], scores) is None
    assert judged(planted[:200], scores) is not None
    assert wrong_captions(np.zeros(300, int), 0) is None


@pytest.mark.usefixtures("all_lists_are_known")
def test_nothing_is_said_of_a_list_beyond_which_fewer_than_five_planted_lie():
    planted, scores, _ = drawn(1, share=0.2, planted=200, others=50_000)
    found = judged(planted, scores)
    fifth = int(np.searchsorted(scores, np.sort(planted)[4], "right"))
    assert 200 < fifth < 500
    assert np.isnan(found.precision[: fifth - 1]).all()
    assert np.isfinite(found.precision[fifth - 1 :]).all()
    assert set(found.lists) == {first for first in LISTS if fifth <= first < 50_000}


@pytest.mark.usefixtures("all_lists_are_known")
def test_the_longest_list_of_a_precision_is_the_last_that_has_it():
    planted, scores, wrong = drawn(2)
    found = judged(planted, scores)
    for precision in (0.8, 0.5, 0.2):
        length = found.longest(precision)
        assert (found.precision[length:] < precision).all()
        assert found.precision[length - 1] >= precision
        assert wrong[:length].mean() > precision - 0.05
    assert found.longest(1.1) == 0


def test_many_planted_samples_are_judged_in_bins_as_they_are_one_by_one():
    planted, scores, _ = drawn(3, planted=20_000, others=200_000)
    found, number = judged(planted, scores), np.arange(1, 20_001)
    ratios = (np.searchsorted(scores, np.sort(planted), "right") / 200_000) / (number / 20_000)
    assert found.share[0] == pytest.approx(ratios[1_599:].min(), rel=0.02)
    assert found.share[2] - found.share[1] < 0.015 * WIDER


def test_more_planted_samples_tell_more():
    """By the least ratio in a tail of 30, four thousand told as little as four hundred."""
    widths, errors = {}, []
    for planted in (400, 4_000):
        shares = [judged(*drawn(seed, planted=planted)[:2]).share for seed in range(5)]
        widths[planted] = np.mean([high - low for _, low, high in shares])
        errors.append(np.mean([abs(value - SHARE) for value, _, _ in shares]))
    assert widths[4_000] < 0.8 * widths[400]
    assert errors[1] < errors[0]


def test_nothing_is_said_of_a_list_whose_interval_says_little(monkeypatch):
    assert module.is_known(100, 0, 40)
    assert module.is_known(100, 33, 99)
    assert not module.is_known(100, 10, 100)
    planted, scores, _ = drawn(1, share=0.01)
    found = judged(planted, scores)
    monkeypatch.setattr(module, "is_known", lambda first, low, high: True)
    every = judged(planted, scores)
    assert min(every.lists) < min(found.lists)
    assert found.lists == {first: of for first, of in every.lists.items() if first in found.lists}
    vague = max(first for first in every.lists if first < min(found.lists))
    assert np.isnan(found.precision[:vague]).all()
    assert np.array_equal(found.precision[vague:], every.precision[vague:])


def test_equal_scores_say_that_nothing_is_known():
    found = wrong_captions(np.full(300, 1_000), 1_000)
    assert found.share[0] == 1
    assert found.lists == {}


# Of a run

N = 2_000


def log_s_of(dataset, planted, wrong=400):
    """Log s of every sample, the planted ids, and ids of others as badly matched as those: the wrong ones."""
    rng = np.random.default_rng(0)
    ids, _ = Planting(dataset, 0, planted).all()
    worst = np.sort(rng.permutation(np.setdiff1d(np.arange(N), ids))[:wrong])
    log_s = rng.normal(-3, 0.7, N)
    log_s[ids], log_s[worst] = rng.normal(2, 0.7, len(ids)), rng.normal(2, 0.7, wrong)
    return log_s, ids, worst


def written(dataset, place, log_s, planted, tau=None, **objective):
    fields = {f"{side}/{name}": values for side in ("image", "text") for name, values in (
        ("log_s", log_s / 2), ("tau", np.linspace(0.03, 0.3, N) if tau is None else tau),
    )}  # fmt: skip
    return write_state(place, dataset, fields, np.full(N, 9), planted=planted, **objective)


@pytest.fixture(scope="module")
def log_s(pairs_dataset):
    return log_s_of(pairs_dataset, 0.12)


@pytest.fixture(scope="module")
def run(pairs_dataset, log_s, tmp_path_factory):
    """A run of which 12 % are planted, and of the others 400 have the log s of planted ones."""
    return written(pairs_dataset, tmp_path_factory.mktemp("planted") / "run", log_s[0], 0.12)


@pytest.mark.wide
def test_a_report_says_how_many_captions_of_the_list_and_of_all_are_wrong(run, log_s, tmp_path):
    done = succeed("inspect", run.path, "--features", "none", "--to", tmp_path)
    lists = re.search(
        r"Wrong captions in the order of log s over the run: of the first 100, about (\d+) \((\d+) to (\d+)\);",
        done.stdout,
    )
    of_all = re.search(
        r"About ([\d.]+) \(([\d.]+) to ([\d.]+)\)% of captions are as wrong as another sample's", done.stdout
    )
    for found, true in ((lists, 100), (of_all, 100 * 400 / (N - len(log_s[1])))):
        value, low, high = map(float, found.groups())
        assert low <= value <= high
        assert 0.5 * true < value <= 1.05 * true
    assert lists.group() in (tmp_path / "report.html").read_text("utf-8")


def test_planted_samples_are_a_kind_of_their_own_and_of_no_list_or_figure(run, log_s, pairs_dataset):
    _, ids, worst = log_s
    found = answer("inspect", run.path, "--features", "none")
    assert found["samples"] == N - len(ids)
    inspection = read_run(run)
    said = dict(facts(inspection, survey(inspection)))["samples"]
    assert said.startswith(f"{N - len(ids):,} without the {len(ids)} planted, of which 100% visited")
    assert found["kinds"]["planted"]["samples"] == len(ids)
    assert found["kinds"]["misfit"]["samples"] == len(worst)
    assert set(found["kinds"]["misfit"]["first"]) <= set(worst.tolist())
    assert found["fields"]["image/log_s"]["count"] == N - len(ids)
    for side in found["sides"].values():
        assert not {*side["lowest"], *side["highest"]} & set(ids.tolist())
    (sample,) = answer("inspect", run.path, "--sample", ids[0])["samples"]
    assert sample["kind"] == "planted"
    assert found["wrong_captions"]["planted"] == len(ids)
    inspection = read_run(run)
    told = dict(facts(inspection, survey(inspection)))["samples"]
    assert told.startswith(f"{N - len(ids):,} without the {len(ids):,} planted, of which 100% visited")


def test_an_export_ranks_all_but_planted_samples_and_says_whose_caption_these_showed(
    run, log_s, pairs_dataset, tmp_path
):
    succeed("inspect", run.path, "--export", tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pandas().set_index("sample_id")
    ids, donors = Planting(pairs_dataset, 0, 0.12).all()
    assert (rows["kind"][ids] == "planted").all()
    assert rows["planted"].dropna().astype(int).to_dict() == dict(zip(ids, donors, strict=True))
    ranked = rows["misfit_rank"].dropna().sort_values()
    assert ranked.to_list() == [*range(1, N - len(ids) + 1)]
    assert rows["misfit_rank"][ids].isna().all()
    assert rows["expected_precision"][ids].isna().all()
    assert (np.diff(log_s[0][ranked.index]) < 0.01).all()  # in bins of 0.05 %
    assert set(ranked.index[:400]) == set(log_s[2])
    assert rows["expected_precision"][ranked.index[399]] == pytest.approx(0.75, abs=0.25)
    assert rows["expected_precision"][ranked.index[1_599]] == pytest.approx(0.2, abs=0.07)


@pytest.mark.parametrize("words", [("--drop-misfits",), ("--precision", 0.2), ("--precision", 0.9)])
def test_misfits_are_dropped_down_to_an_expected_precision(run, log_s, tmp_path, words):
    keep, asked = tmp_path / "keep.parquet", words[1] if words[1:] else 0.5
    succeed("curate", run.path, "--keep", keep, *words)
    dropped = pq.read_table(tmp_path / "keep.dropped.parquet")["sample_id"].to_pylist()
    succeed("inspect", run.path, "--export", tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pandas().set_index("sample_id").sort_values("misfit_rank")
    last = rows.index[len(dropped) - 1]
    assert set(dropped) == set(rows.index[: len(dropped)])
    assert rows["expected_precision"][last] >= asked
    assert (rows["expected_precision"].iloc[len(dropped) :].dropna() < asked + 1e-6).all()  # float32
    assert set(log_s[1]) <= set(pq.read_table(keep)["sample_id"].to_pylist())


def test_curate_says_that_it_drops_no_misfit_where_no_list_has_the_precision(pairs_dataset, tmp_path):
    log_s, _, _ = log_s_of(pairs_dataset, 0.12, wrong=0)
    clean = written(pairs_dataset, tmp_path / "run", log_s, 0.12).path
    found = answer("curate", clean, "--keep", tmp_path / "keep.parquet", "--drop-misfits")
    assert found["samples"]["misfit"] == 0
    assert "No misfit is dropped: no list of them is known to have 50% of wrong captions." in found["notes"]


def test_a_number_and_a_precision_both_limit_what_is_dropped(run, tmp_path):
    for words, dropped in ((("--drop-misfits", 7), 7), (("--drop-misfits", 7, "--precision", 0.5), 7)):
        found = answer("curate", run.path, "--keep", tmp_path / "k.parquet", "--overwrite", *words)
        assert found["samples"]["misfit"] == dropped


@pytest.mark.wide
@pytest.mark.parametrize(
    ("share", "said"),
    [
        (
            0.0,
            "the number of wrong captions is unknown. To measure it, train with --set data.planted=0.13.",
        ),
        (0.05, "are planted, 200 are needed. To measure it, train with --set data.planted=0.13."),
    ],
)
def test_a_run_with_too_few_planted_gives_an_order_and_says_what_it_takes(
    pairs_dataset, log_s, tmp_path, share, said, monkeypatch
):
    monkeypatch.setattr(module, "MAX_PLANTED", 0.2)
    place = written(pairs_dataset, tmp_path / "run", log_s[0], share).path
    done = succeed("inspect", place, "--features", "none", "--to", tmp_path / "report")
    assert said in done.stdout
    assert "about" not in said
    assert answer("inspect", place, "--features", "none")["wrong_captions"] is None
    refused = cli("curate", place, "--keep", tmp_path / "keep.parquet", "--drop-misfits")
    assert_one_line(refused, 2, said, "--drop-misfits N")
    succeed("curate", place, "--keep", tmp_path / "keep.parquet", "--drop-misfits", 10)


def test_where_most_temperatures_are_at_tau_min_no_number_is_given(pairs_dataset, log_s, tmp_path):
    tau = np.where(np.arange(N) < 0.6 * N, 0.005, 0.1)
    place = written(pairs_dataset, tmp_path / "run", log_s[0], 0.12, tau).path
    findings = look(place)
    why = "the number of wrong captions is unknown: most temperatures are at tau_min"
    assert why in findings.of_misfits[0]
    assert findings.wrong_captions is None
    keep = tmp_path / "keep.parquet"
    assert_one_line(cli("curate", place, "--keep", keep, "--drop-misfits"), 2, why, "--drop-misfits N")


@pytest.mark.wide
@pytest.mark.parametrize("share", [0.0, 0.05])
def test_too_few_pairs_to_plant_enough_are_told_no_share(pairs_dataset, log_s, tmp_path, share):
    place = written(pairs_dataset, tmp_path / "run", log_s[0], share).path
    said = succeed("inspect", place, "--features", "none", "--to", tmp_path / "report").stdout
    assert "This is an order; the number of wrong captions is unknown.\n" in said


def test_planted_samples_are_neither_doubted_nor_back(pairs_dataset, log_s, tmp_path):
    values, _, worst = log_s
    place = written(pairs_dataset, tmp_path / "run", values, 0.12, doubt_after=1).path
    doubted = answer("inspect", place, "--features", "none")["doubted"]
    others = N - len(log_s[1])
    assert doubted["shares"]["5"] == pytest.approx(len(worst) / others)


@pytest.fixture(scope="module")
def trained(pairs_dataset, tmp_path_factory):
    """A run of 20 epochs, 30 % planted."""
    data = {"path": str(pairs_dataset.path), "image_size": 16, "planted": 0.3}
    model = {"dim": 32, "image": {"config": {"width": 16}}, "text": {"config": {"width": 32}}}
    config = small(pairs_dataset, data=data, epochs=20, batch_size=128, model=model)
    return train(config, tmp_path_factory.mktemp("trained") / "run")


@pytest.mark.wide
def test_confirming_decides_by_the_margins_of_planted_samples_and_sorts_by_margin(trained, tmp_path):
    found = answer("inspect", trained.path, "--confirm", 300, "--features", "none")
    confirmation = found["confirmation"]
    assert confirmation, found["notes"]
    succeed("inspect", trained.path, "--confirm", 300, "--export", tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pandas()
    checked = rows[rows["kind_from"] == "forward_pass"]
    assert len(checked) == confirmation["suspects"] > 20
    misfit = checked[~checked["kind"].isin(["stuck"])]
    np.testing.assert_array_equal(misfit["kind"] == "misfit", misfit["margin"] <= confirmation["below"])
    first = [id for id in found["kinds"]["misfit"]["first"] if id in set(checked["sample_id"])]
    margins = checked.set_index("sample_id")["margin"][first]
    assert margins.is_monotonic_increasing
    assert not set(Planting(Dataset(trained.config().data.path), 0, 0.3).all()[0]) & set(checked["sample_id"])


def test_features_show_the_true_caption_of_a_planted_sample(pairs_dataset, tmp_path):
    data = {"path": str(pairs_dataset.path), "image_size": 16, "planted": 0.3}
    run = train(small(pairs_dataset, data=data, steps=1), tmp_path / "run")
    succeed("embed", run.path, pairs_dataset.path, tmp_path / "features.parquet")
    table = pq.read_table(tmp_path / "features.parquet").to_pydict()
    ids, donors = Planting(pairs_dataset, 0, 0.3).all()
    captions = pairs_dataset.column("caption").to_pylist()
    text = np.array(table["text"])
    same = {caption: id for id, caption in enumerate(captions)}
    for id, donor in zip(ids[:50].tolist(), donors[:50].tolist(), strict=True):
        np.testing.assert_allclose(text[id], text[same[captions[id]]], atol=1e-6)
        assert captions[id] != captions[donor]
