"""The comparison on real data: its plan, its claims, and the page; and small runs of each kind."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.benchmarks import fashion
from thermopile.benchmarks.reproduction import running
from thermopile.benchmarks.reproduction.plan import Run, is_searched_on
from thermopile.benchmarks.reproduction.real import FURTHER_SEEDS, METHODS, PLAN, VARIANTS, compared, parts
from thermopile.benchmarks.reproduction.real_claims import GROUPS, Real, every_part
from thermopile.benchmarks.reproduction.real_page import to_markdown
from thermopile.benchmarks.reproduction.real_sets import HELD_OUT, described
from thermopile.benchmarks.reproduction.results import Results
from thermopile.benchmarks.reproduction.schedule import missing, runs_of
from thermopile.benchmarks.reproduction.search import search
from thermopile.benchmarks.reproduction.sets import make_sets, open_sets
from thermopile.pipeline.opening import Dataset

from support.made_results import MadeResults, result

COMMITTED = Path(__file__).parents[3] / "benchmarks/reproduction/results.jsonl"
CLAIMS = [claim for group in GROUPS for claim in group.claims]
TESTED = {"band": np.arange(20_000) % 4, "caption": np.arange(20_000) // 2}


@pytest.fixture(scope="module")
def searched():
    """Results of all searches, of which the lowest learning rate is the best, and what the test samples are."""
    results = MadeResults()
    results.take_searches(Results.read(COMMITTED))
    of_search = [part for part in parts() if part.name.startswith(("search", "nothing"))]
    while new := [run for run in missing(of_search, results) if run]:
        for run in new:
            results.add(result(run, 0.1 if "baseline" in run.settings else 0.9 - run.settings["optimizer.lr"]))
    return results


@pytest.fixture
def made(searched, tmp_path):
    """A function that returns results in which every run scores what a function of it and its name says."""

    def made(score, seeds=3):
        results = MadeResults(searched)
        results.take_searches(Results.read(COMMITTED))
        for data in ("icons", "fashion"):
            results.add_tests(
                data, TESTED | ({} if data == "icons" else {"band": np.arange(20_000) % 3}), tmp_path / "r.jsonl"
            )
        for name, variant in VARIANTS.items():
            for seed in variant.seeds[:seeds]:
                results.add(result(compared(name, results, seed), score(name, seed)))
        return results

    return made


def test_the_plan_is_within_18_hours_and_every_variant_is_made_once(searched):
    planned = every_part()
    assert sum(part.seconds * len(runs_of([part], searched)) for part in planned) < 18 * 3600
    assert len(runs_of(planned, searched)) == len(runs_of(planned, Results()))
    runs = [run.key for part in parts() for run in part.runs(searched)]
    assert len(runs) == len(set(runs))
    assert {compared(name, searched, seed).key for name, of in VARIANTS.items() for seed in of.seeds} <= {
        *runs, *(compared(f"glyphs {name}", searched, seed).key for name in ("isogclr",) for seed in range(3))
    }  # fmt: skip


def test_a_search_has_eight_trials_a_quarter_as_long_on_data_that_is_not_tested(searched):
    for name in PLAN["searched"]:
        runs = search(METHODS[name], searched).runs
        assert len({run.key for run in runs}) == 8, name
        long = compared(name, searched, 0)
        assert {run.settings["epochs"] for run in runs} == {long.settings["epochs"] // 4}
        assert {run.data for run in runs} == {METHODS[name].data[0]}
        assert is_searched_on(runs[0].data)
        assert not is_searched_on(long.data)


def test_pairs_of_gammas_schedule_differ_in_nothing_else(searched):
    for cosine in ("icons v1", "icons v3", "glyphs v1", "glyphs v2", "glyphs v3"):
        one, other = (compared(name, searched, 1).settings for name in (cosine, f"{cosine} constant"))
        assert {key for key in one | other if one.get(key) != other.get(key)} == {
            "objective.gamma_schedule", "objective.gamma"
        }  # fmt: skip


def test_a_variant_with_another_objective_has_only_settings_that_this_one_knows(searched):
    v0, solved = (compared(name, searched, 0).settings for name in ("icons v0", "icons power 0.5"))
    assert {key for key in v0 if key.startswith("objective.")} == {"objective.name", "objective.mode", "objective.tau"}
    assert solved["objective.tau_init"] == compared("icons sogclr", searched, 0).settings["objective.tau"]
    assert solved["objective.eta"] == 0


def test_there_are_forty_claims_with_a_check_and_a_reason_for_each_other():
    assert sum(callable(claim.check) for claim in CLAIMS) >= 40
    assert len({claim.claim for claim in CLAIMS}) == len(CLAIMS)
    assert all(claim.check for claim in CLAIMS)
    checks = [each["check"] for group in PLAN["group"] for each in group["claim"] if "check" in each]
    named = {
        name
        for check, *names in checks
        if check in ("above", "level")
        for name in names[: 9 if check == "level" else 2]
    }
    assert named | {name for choice in PLAN["choice"] for name in choice["among"]} <= VARIANTS.keys()


def test_a_claim_is_of_the_test_samples_that_it_names(made):
    results = made(lambda name, seed: 0.5)
    bits = np.zeros(20_000, np.bool_)
    better = [compared("icons isogclr", results, seed).key for seed in range(3)]
    own = results.right

    def right(of, part, samples):
        found = own(of, part, samples).copy()
        return found | (bits if of.run.key in better else False)

    results.right = right
    bits[TESTED["band"] == HELD_OUT] = True
    verdicts = {claim.claim: claim.judge(Real(results)).verdict for claim in CLAIMS}
    assert verdicts["iSogCLR is above CLIP, sets held out"] == "shows"
    assert verdicts["iSogCLR is above CLIP, icons"] == "equivalent"


def test_further_seeds_are_made_of_what_three_leave_undecided_alone(made):
    def noisy(name, seed):
        return 0.5 + 0.02 * seed * (name in ("icons isogclr",)) if name != "icons sogclr" else 0.5

    results = made(noisy)
    further = every_part()[-2]
    names = {name for name in VARIANTS for seed in FURTHER_SEEDS
             if compared(name, results, seed) in further.runs(results)}  # fmt: skip
    assert {"icons isogclr", "icons clip"} <= names
    assert "glyphs v3" not in names
    before = [run.key for run in further.runs(results)]
    for run in [*further.runs(results)]:
        results.add(result(run, 0.5))
    assert [run.key for run in further.runs(results)] == before  # the choice is that of the first three


@pytest.mark.wide
def test_the_page_says_what_to_choose_by_the_intervals(made):
    best = made(lambda name, seed: 0.6 if name in ("icons sogclr", "icons v1") else 0.5)
    page = " ".join(to_markdown(best).split())
    line = re.search(r"\*\*Pairs \(icons at random\)\*\*: (.*?) - \*\*", page)[1]
    assert line.startswith("`icons sogclr`, 60.0; not told apart: `icons v1`; it is above `icons clip` (+10.0 ± ")
    assert "icons clip fixed" in line
    nothing = " ".join(to_markdown(Results()).split())
    assert "**Pairs (icons at random)**: not tested yet" in nothing
    assert nothing.count("not run yet") > 60


# Small runs of each kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Icons and pictures of ten classes, all noise, some of them copies."""
    sources = tmp_path_factory.mktemp("real") / "sources"
    sources.mkdir()
    pictures = list(fashion.pngs(np.random.default_rng(0).integers(0, 256, (3_000, 8, 8), np.uint8)))
    pictures[::3] = pictures[:1] * 1_000
    words = [f"word{number % 50} thing{number % 7}" for number in range(3_000)]
    sets = [f"set {number * number % 211}" for number in range(3_000)]
    pq.write_table(pa.table({"image": pictures, "caption": words, "set": sets}), sources / "icons.parquet", 500)
    for name, count in (("train", 3_000), ("test", 200)):
        labels = [fashion.CLASSES[number % 10] for number in range(count)]
        pq.write_table(pa.table({"image": pictures[:count], "label": labels}), sources / f"{name}.parquet")
    return sources.parent


def short(name, searched):
    run = compared(name, searched, 0)
    return Run(run.data, run.settings | {"epochs": 2, "batch_size": 64, "order.canonical_shards": 4})


def test_test_samples_are_described_in_the_order_in_which_they_are_scored(folder):
    make_sets(folder, "icons")
    found, tests = described(folder, "icons"), open_sets(folder, "icons").tests
    captions = [np.array(test.column("caption").to_pylist())[np.argsort(test.shard(0).records()["source_index"])]
                for test in tests]  # fmt: skip
    assert (found["band"] == HELD_OUT).sum() == len(captions[1])
    texts = np.concatenate(captions)
    assert all((texts[found["caption"] == code] == texts[found["caption"] == code][0]).all() for code in range(10))
    assert len(set(found["caption"])) == len(set(texts))


def test_exchanged_captions_are_of_as_many_icons_as_the_name_of_the_data_says(folder):
    make_sets(folder, "icons@40")
    right, given = (Dataset(folder / data) for data in ("icons", "icons@40"))
    assert given.n == right.n
    assert sorted(given.column("caption").to_pylist()) == sorted(right.column("caption").to_pylist())
    altered = [told is not None for told in given.column("altered").to_pylist()]
    assert 0.3 < np.mean(altered) <= 0.4


@pytest.mark.wide
@pytest.mark.parametrize("name", ["icons isogclr", "icons power 1", "icons doubt 40", "icons v0", "fashion isogclr"])
def test_a_run_of_each_kind_is_trained_and_scored(name, folder, tmp_path, searched, monkeypatch):
    monkeypatch.setattr(fashion, "DEVELOPMENT", 100)
    run = short(name, searched)
    make_sets(folder, run.data)
    found, right = running.make(run, folder, tmp_path)
    assert found.failed == ""
    assert {len(bits) for bits in right.values()} == {len(described(folder, run.data.partition("@")[0])["band"])}
    for side in found.temperatures.values():
        assert (side.words is None) == (side.copies is None) == name.startswith("fashion")
    assert bool(found.temperatures) == (name != "icons v0")


@pytest.mark.wide
def test_solved_temperatures_replace_those_of_a_run_after_its_first_epoch(folder, tmp_path, searched):
    make_sets(folder, "icons")
    one, other = (
        running.make(short(name, searched), folder, tmp_path).result for name in ("icons power 1", "icons power -0.5")
    )
    spread = [side.deciles[-1] - side.deciles[0] for run in (one, other) for side in run.temperatures.values()]
    assert min(spread) > 0
    assert one.temperatures["image"].mean == pytest.approx(one.run.settings["objective.tau_init"], rel=0.2)
