"""The reproduction's results, a line for each, and the page that is made of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from thermopile.benchmarks.reproduce import main
from thermopile.benchmarks.reproduction import page as pages
from thermopile.benchmarks.reproduction.comparison import BASELINES
from thermopile.benchmarks.reproduction.plan import METHOD, baseline_run, is_drawn, is_searched_on
from thermopile.benchmarks.reproduction.results import Result, Results
from thermopile.benchmarks.reproduction.schedule import headline, parts, runs_of
from thermopile.benchmarks.reproduction.sets import bands_of
from thermopile.benchmarks.reproduction.sets import test_samples as number_of_test_samples

from support.made_results import CLAIM, PARTS, Made, result, right

CHECKOUT = Path(__file__).parents[3]
TEST_SAMPLES = number_of_test_samples("long-tailed")
RESULTS, PAGE = CHECKOUT / "benchmarks/reproduction/results.jsonl", CHECKOUT / "docs/reproduction.md"


def test_a_result_is_a_line_and_a_line_that_was_not_written_whole_is_no_result(tmp_path):
    file = tmp_path / "results.jsonl"
    first = result(headline(METHOD["bimodal", "isogclr"], Made().results, 0), 0.6, {"image": (0.9, -0.1, 0.2)})
    results = Results()
    results.append(first, right(0.6), file)
    results.append(result(baseline_run("bimodal", "long-tailed", "untrained"), None), {}, file)
    again = Results.read(file)
    assert [*again] == [*results]
    assert again.of(first.run) == first
    file.write_bytes(file.read_bytes()[:-1])
    assert [each.run for each in Results.read(file)] == [first.run]


def test_a_result_after_a_torn_line_is_read_again(tmp_path):
    file, results = tmp_path / "results.jsonl", Results()
    made = [result(baseline_run("bimodal", "long-tailed", name), 0.5) for name in BASELINES]
    results.append(made[0], {}, file)
    file.write_bytes(file.read_bytes() + made[1].line().encode()[:50])
    Results.read(file).append(made[1], {}, file)
    assert [*Results.read(file)] == made


def test_which_test_samples_are_right_is_kept_beside_the_lines(tmp_path):
    file, results = tmp_path / "results.jsonl", Results()
    one, failed, untold = (result(baseline_run("unimodal", "balanced", name), share)
                           for name, share in (("a", 0.3), ("b", None), ("c", 0.3)))  # fmt: skip
    samples = np.random.default_rng(0).random(TEST_SAMPLES) < 0.3
    results.append(one, {"probe": samples}, file)
    for made in (results, Results.read(file)):
        np.testing.assert_array_equal(made.right(one, "probe", TEST_SAMPLES), samples)
        assert made.right(one, "knn", TEST_SAMPLES) is None
        assert made.right(untold, "probe", TEST_SAMPLES) is None
        assert not made.right(failed, "probe", TEST_SAMPLES).any()


def reproduce(*words):
    return CliRunner().invoke(main, [*map(str, words), "--page-only"])


@pytest.mark.parametrize(
    ("text", "said"), [(None, "has no runs to make a page of"), ('{"run": {}}\n', "line 1, is not a result")]
)
def test_results_that_are_none_are_one_line_with_the_cure(text, said, tmp_path):
    file = tmp_path / "results.jsonl"
    if text is not None:
        file.write_text(text)
    done = reproduce(file, "--page", tmp_path / "page.md")
    assert done.exit_code == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "page.md").exists()


def test_runs_of_two_commits_are_not_mixed(tmp_path):
    file = tmp_path / "results.jsonl"
    for name, commit in zip(BASELINES, ("c0ffee", "decade"), strict=True):
        with file.open("a") as lines:
            lines.write(result(baseline_run("bimodal", "balanced", name), 0.5, commit=commit).line())
    done = reproduce(file, "--page", tmp_path / "page.md")
    assert done.exit_code == 1
    assert "line 2, is not a result (made by commit decade, those before it by c0ffee)" in done.stderr


def test_settings_are_taken_from_another_files_searches_and_nothing_else():
    made, own = Made().seeds("bimodal", "clip", [0.6]), Results()
    own.take_searches(made.results)
    run = headline(METHOD["bimodal", "clip"], own, 0)
    assert run == headline(METHOD["bimodal", "clip"], made.results, 0)
    assert own.of(run) is None
    assert own.of(baseline_run("bimodal", "long-tailed", "untrained")) is None
    assert len(own) == 0


def test_runs_are_not_added_to_those_of_another_commit(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text(result(baseline_run("bimodal", "balanced", "untrained"), 0.5).line())
    done = CliRunner().invoke(main, [str(file), "--page", str(tmp_path / "page.md"), "--work", str(tmp_path / "work")])
    assert done.exit_code == 1
    assert "holds runs of commit c0ffee, and this is " in done.stderr
    assert not (tmp_path / "work").exists()


def test_the_page_opens_with_its_verdicts_and_holds_every_claim(tmp_path):
    made = Made().seeds("unimodal", "simclr", [0.7]).seeds("unimodal", "isogclr", [0.72])
    text = pages.write_page(made.results, tmp_path / "page.md").read_text("utf-8")
    above = "iSogCLR is above SimCLR, images"
    opening = text.split("\n\n")[2].splitlines()
    assert opening == [f"- {above}: **shows**", f"- {len(CLAIM) - 1} claims: **not tested** yet"]
    for claim in CLAIM:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {claim} |")]
        assert line.endswith("**shows** |" if claim == above else "**not tested** |")
    assert "| +2.0 ± 0.2; in the tail +1.2 ± 0.3 |" in text
    assert "| `simclr` | tau 0.05, lr 0.004 | 16 | 70.0 | 70.0 | 68.8 |" in text
    assert "balanced classes (10 of 10)" in " ".join(text.split())
    assert "nothing trained" not in text
    assert (tmp_path / "page_methods.png").read_bytes().startswith(b"\x89PNG")


def test_the_words_of_the_committed_page_are_those_of_the_committed_results():
    pictures = {file.stem.removeprefix(f"{PAGE.stem}_"): file.name for file in PAGE.parent.glob(f"{PAGE.stem}_*.png")}
    assert pages.to_markdown(Results.read(RESULTS), pictures) == PAGE.read_text("utf-8")


@pytest.mark.wide
def test_the_committed_page_and_its_pictures_are_those_of_the_committed_results_byte_by_byte(tmp_path):
    assert reproduce(RESULTS, "--page", tmp_path / PAGE.name).exit_code == 0
    made = sorted(tmp_path.iterdir())
    assert [file.name for file in made] == sorted(file.name for file in PAGE.parent.glob("reproduction*"))
    for file in made:
        assert file.read_bytes() == (PAGE.parent / file.name).read_bytes(), file.name


def test_every_committed_line_belongs_to_the_plan_and_has_its_test_samples():
    """Nothing is left of another plan, and no score was added by hand to a run that is not compared."""
    results = Results.read(RESULTS)
    known = {run.key for run in runs_of(parts(full=True), results) if run}
    assert {each.run.key for each in results} <= known
    for line in RESULTS.read_text("utf-8").splitlines():
        assert set(json.loads(line)) == set(Result._fields)
    for each in results:
        for part in set(PARTS) & set(each.scores):
            samples = results.right(each, part, number_of_test_samples(each.run.data))
            assert (samples is None) == is_searched_on(each.run.data)
            if samples is not None:
                chosen = {"all": samples}
                if not is_drawn(each.run.data):
                    chosen["tail"] = samples[bands_of(each.run.data) == 2]
                shares = {band: round(float(right.mean()), 5) for band, right in chosen.items()}
                assert shares == {band: each.scores[part][band] for band in chosen}
