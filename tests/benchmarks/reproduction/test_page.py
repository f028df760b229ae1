"""The reproduction's results, a line for each, and the page that is made of them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from made_results import CLAIM, Made, result
from reproduce import main
from reproduction import page as pages
from reproduction.comparison import BASELINES
from reproduction.plan import baseline_run
from reproduction.results import Result, Results
from reproduction.schedule import headline, parts, runs_of

CHECKOUT = Path(__file__).parents[3]
RESULTS, PAGE = CHECKOUT / "benchmarks/reproduction/results.jsonl", CHECKOUT / "docs/reproduction.md"


def test_a_result_is_a_line_and_a_line_that_was_not_written_whole_is_no_result(tmp_path):
    file = tmp_path / "results.jsonl"
    first = result(headline("bimodal", "isogclr", Made().results), 0.6, {"image": (0.9, -0.1, 0.2)})
    results = Results()
    results.append(first, file)
    results.append(result(baseline_run("bimodal", "long-tailed", "untrained"), None), file)
    again = Results.read(file)
    assert [*again] == [*results]
    assert again.of(first.run) == first
    file.write_bytes(file.read_bytes()[:-1])
    assert [each.run for each in Results.read(file)] == [first.run]


def test_a_result_after_a_torn_line_is_read_again(tmp_path):
    file, results = tmp_path / "results.jsonl", Results()
    made = [result(baseline_run("bimodal", "long-tailed", name), 0.5) for name in BASELINES]
    results.append(made[0], file)
    file.write_bytes(file.read_bytes() + made[1].line().encode()[:50])
    Results.read(file).append(made[1], file)
    assert [*Results.read(file)] == made


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


def test_the_page_holds_every_claim_with_a_verdict_and_says_what_was_not_run(tmp_path):
    made = Made().seeds("unimodal", "simclr", [0.7, 0.71, 0.72])
    text = pages.write_page(made.results, tmp_path / "page.md").read_text("utf-8")
    for claim in CLAIM:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {claim} |")]
        assert line.endswith("**not tested** |")
    assert "| `simclr` | tau 0.1, lr 0.001 | 8 | 71.0 | 71.0 ± " in text
    assert "balanced classes (9 of 9)" in text
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


def test_every_committed_line_belongs_to_the_plan():
    """Nothing is left of another plan, and no score was added by hand to a run that is not compared."""
    results = Results.read(RESULTS)
    planned = {run.key for run in runs_of(parts(full=True), results) if run}
    assert {each.run.key for each in results} <= planned
    for line in RESULTS.read_text("utf-8").splitlines():
        assert set(json.loads(line)) == set(Result._fields)
