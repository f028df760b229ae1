"""The report's section on the kinds of samples."""

import re

import numpy as np
import pytest

from thermopile.tools.inspection.findings import look
from thermopile.tools.report import page
from thermopile.tools.report.html import part

from support.written_runs import write_state

KINDS = ["too few visits", "stuck", "misfit", "ordinary"]
"""Those that the state tells, as readers see them."""


def section(findings):
    """The section alone: the page's figures are not drawn."""
    return page._sheets(findings, page.MAX_PAGE_BYTES)[1]


@pytest.fixture(scope="module")
def shown(hostile_dataset, tmp_path_factory):
    """The section of a run whose samples 30 to 36, with all of the hostile captions, are misfits."""
    ids = np.arange(hostile_dataset.n)
    columns = {f"{side}/tau": np.linspace(0.1, 0.2, len(ids)) for side in ("image", "text")}
    columns |= {f"{side}/log_s": np.where((ids >= 30) & (ids < 37), 37.0 - ids, -3.0) for side in ("image", "text")}
    for name, *of_9_and_12 in (("tau", 0.005, 0.05), ("log_s", 2, -1), ("u", 5, 0)):
        columns.setdefault(f"text/{name}", np.zeros(len(ids)))[[9, 12]] = of_9_and_12
    run = write_state(tmp_path_factory.mktemp("page") / "run", hostile_dataset, columns, np.where(ids == 20, 2, 5))
    findings = look(run.path)
    return section(findings), findings


@pytest.mark.parametrize(("least", "said"), [(5, "Fewer than 5 visits: "), (1, "Fewer than 1 visit: ")])
def test_too_few_visits_are_as_few_as_the_rules_of_the_run_say(least, said):
    assert part("sections.html", "meaning", "too_few_visits", (), least).startswith(said)


def test_every_kind_has_its_count_and_its_share(shown):
    cells = re.findall(
        r'<th scope="row"><bdi>([a-z ]+)</bdi></th><td>([\d,]+)</td><td>66</td><td>[\d.]+%</td><td>state</td>', shown[0]
    )
    counts = shown[1].survey.kinds.counts
    assert [(name, int(count)) for name, count in cells] == [(name, counts[name.replace(" ", "_")]) for name in KINDS]
    assert (counts["misfit"], counts["stuck"], counts["too_few_visits"]) == (7, 1, 1)


def test_every_kind_but_ordinary_has_a_sheet_with_what_it_means_and_the_figure_that_made_it(shown):
    titles = re.findall(r"<h3>([a-z ]+): (\d+) of ([\d,]+)</h3><p>(.*?)</p>", shown[0])
    assert [title[0] for title in titles] == KINDS[:-1]
    assert all(meaning[0].isupper() for *_, meaning in titles)
    assert "<b>log s +7.00 (image) and +7.00 (text)</b>" in shown[0]
    assert "<b>visits 2</b>" in shown[0]


def test_pictures_alone_are_not_said_to_have_wrong_captions(images_dataset, tmp_path):
    n = images_dataset.n
    columns = {"sample/tau": np.linspace(0.1, 0.2, n), "sample/log_s": np.where(np.arange(n) < 3, 1.0, -9.0)}
    findings = look(write_state(tmp_path / "run", images_dataset, columns, np.full(n, 5)).path)
    said = " ".join(section(findings).split())
    assert "the model has not matched the two views: a picture without detail, or one like many others. The" in said
    assert "rong caption" not in said


def test_hostile_captions_on_the_sheets_are_escaped(shown):
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown[0]
    assert "&#34;&gt;&lt;img src=x onerror=alert(1)&gt;" in shown[0]
    assert not re.search(r"<(script|img src=x|style)\b", shown[0])
    assert not re.search(r"[\x00-\x08\x1b\u202a-\u202e\u2066-\u2069]", shown[0])
    assert 'alt="picture of sample 30"' in shown[0]


@pytest.mark.wide
def test_a_run_that_doubts_pairs_has_their_share_and_how_many_came_back(hostile_dataset, tmp_path, shown):
    n = hostile_dataset.n
    columns = {f"{side}/{name}": np.full(n, value) for side in ("image", "text")
               for name, value in (("tau", 0.1), ("log_s", 1.0))}  # fmt: skip
    run = write_state(tmp_path / "run", hostile_dataset, columns, np.full(n, 5), doubt_after=1)
    findings = look(run.path)
    assert findings.survey.doubted.shares == {5: 1.0}
    assert "0 that were above 0 at an earlier snapshot came back since" in page._following(findings)["Doubted pairs"]
    assert "Doubted pairs" not in page._following(shown[1])


def test_a_run_whose_samples_have_too_few_visits_to_be_doubted_has_a_page(hostile_dataset, tmp_path):
    n = hostile_dataset.n
    run = write_state(tmp_path / "run", hostile_dataset, {"image/tau": np.full(n, 0.1)}, np.ones(n, int), doubt_after=1)
    assert "Doubted pairs" not in page._following(look(run.path))


def test_a_run_on_images_is_told_of_one_side_and_of_no_caption(images_dataset, tmp_path):
    n = images_dataset.n
    columns = {"sample/tau": np.linspace(0.1, 0.2, n), "sample/log_s": np.where(np.arange(n) == 4, 3.0, -1.0)}
    run = write_state(tmp_path / "run", images_dataset, columns, np.full(n, 5))
    found = section(look(run.path))
    assert "misfit: 1 of 1<" in found
    assert "<b>log s +3.00</b>" in found
    assert 'class="caption"' not in found


def test_kinds_that_the_objective_does_not_allow_are_named(hostile_dataset, tmp_path):
    columns = {f"{side}/log_s": np.full(hostile_dataset.n, -1.0) for side in ("image", "text")}
    run = write_state(tmp_path / "run", hostile_dataset, columns, np.full(hostile_dataset.n, 5), name="sogclr")
    findings = look(run.path)
    found = section(findings)
    assert "The objective keeps too little state to tell which samples are stuck." in findings.notes
    assert "ordinary" in found
