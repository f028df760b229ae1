import base64
import dataclasses
import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from thermopile.tools.inspection import summary
from thermopile.tools.inspection.findings import look
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.correlation import Correlation
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.tools.report import page as page_module
from thermopile.tools.report.figures.by_group import draw_tau_by_group
from thermopile.tools.report.figures.svg import NARROW, VARIABLES, WIDE
from thermopile.tools.report.html import document, drawn, part
from thermopile.tools.report.page import write_report
from thermopile.trainer.run_directory import RunDirectory

from support.figures import svg, texts
from support.page import Page
from support.written_runs import write_run


def report_on(run):
    return write_report(look(run.path), run.report).read_text("utf-8")


@pytest.fixture(scope="module")
def html(hostile_report):
    return hostile_report.read_text("utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_a_command_in_a_note_is_shown_as_code_and_escaped():
    (note,) = re.findall("<li>(.*?)</li>", document("", "", "", "", ["Run `inspect <b>`; ` is <i>one</i>"], {}))
    assert note == "Run <code>inspect &lt;b&gt;</code>; ` is &lt;i&gt;one&lt;/i&gt;"


def test_nothing_in_a_page_but_its_own_script_can_run_and_nothing_can_load(page):
    assert {tag for tag, _ in page.elements} <= {
        "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3", "p", "b", "bdi", "code", "nav",
        "ul", "li", "a", "main", "section", "figure", "figcaption", "img", "dl", "div", "dt", "dd",
        "table", "caption", "thead", "tbody", "tr", "th", "td", "span", "details", "summary", "script",
        "svg", "g", "defs", "path", "use", "text", "clippath", "rect", "image",
    }  # fmt: skip
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert re.fullmatch(r"([a-z-]+: [-\w#.,() ]+(; )?)*", style := attributes.get("style", "")), tag
        assert "url" not in style
        assert attributes.get("src", "data:image/").startswith("data:image/"), tag
        assert attributes.get("href", "#").startswith("#")
        assert attributes.get("xlink:href", "#").startswith(("#", "data:image/png;base64,"))
    assert "url(" not in page.text("style")
    assert "@import" not in page.text("style")
    assert page.of("script") == [{}]
    assert [word for word in ("innerHTML", "eval", "fetch", "import") if word in page.text("script")] == []


def test_a_page_forbids_the_browser_to_load_anything_and_to_run_any_other_script(page):
    policies = [meta["content"] for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(page.text("script").encode()).digest()).decode()
    assert policies == [f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"]


def test_hostile_text_is_shown_as_text(page):
    cards = page.text("li")
    assert "<script>alert(1)</script>" in cards
    assert "\"><img src=x onerror=alert(1)> '&amp;'" in cards
    assert "</style></title>]]><!-- ${7*7} [bold]rich[/bold]" in cards
    assert "\U0001f468\u200d\U0001f469\u200d\U0001f467 and \u0645\u0631\u062d\u0628\u0627" in cards
    assert "class 0 <script>alert(1)</script>" in page.text("table")
    assert "مرحبا [U+202E]<b>" in page.text("h1")


def test_no_template_lets_a_value_through_unescaped():
    templates = list(Path(page_module.__file__).with_name("templates").glob("*.html"))
    assert templates
    assert [path for path in templates if re.search(r"\|\s*safe|autoescape", path.read_text("utf-8"))] == []


def test_control_and_bidi_characters_are_shown_as_their_codes(html, page):
    assert not re.findall(r"[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069]", html)
    assert "[U+202E]gnp.elif" in page.text("li")
    assert "NUL [U+0000], bell [U+0007], escape [U+001B][31m" in page.text("li")


def test_long_text_is_cut_and_its_rest_is_nowhere(html):
    assert "x" * 1500 in html
    assert "x" * 2001 not in html


def test_a_figure_refers_to_its_own_parts_alone(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len({*ids})
    wanted = [attributes["xlink:href"][1:] for attributes in page.of("use")]
    wanted += [attributes["clip-path"][5:-1] for _, attributes in page.elements if "clip-path" in attributes]
    assert len(wanted) > 20
    assert {*wanted} <= {*ids}


def test_every_picture_has_words_and_every_table_its_caption_and_scopes(page):
    pictures = page.of("img")
    assert all(picture["alt"] for picture in pictures)
    assert len(pictures) == 5 * 66 + 36  # all samples have too few visits
    figures = [div["aria-label"] for div in page.of("div") if div.get("role") == "img"]
    assert len(figures) == len(page.of("svg")) == 7
    assert all(figures)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("table") == tags.count("caption") == 5
    assert all(head["scope"] in ("col", "row") for head in page.of("th"))


def test_a_figure_has_a_layout_for_each_width_and_takes_its_colours_and_font_from_the_page(every_layout, html):
    def draw(figure):
        axes = figure.subplots()
        axes.scatter([1], [1], color="#0072b1", label="a side")
        axes.scatter([2], [2], color="#0072b2", label="a class")
        axes.legend()

    markup = drawn(draw)
    svgs = Page(markup).of("svg")
    assert [svg["class"] for svg in svgs] == ["wide", "narrow"]
    assert [svg["width"] for svg in svgs] == [f"{120 * width:.0f}" for width, _ in (WIDE, NARROW)]
    assert {*re.findall(": (#[0-9a-f]{6})", markup)} == {"#0072b2"}
    assert "font-family" not in markup
    assert markup.count("var(--side-1)") > 0
    for theme in re.findall(r":root \{(.*?)\}", html, re.DOTALL):
        assert all(f"--{name}: #" in theme for name in VARIABLES.values())


def test_the_correlation_and_its_control_come_first(page):
    words = r"very strong and likely: +1.00, p 0.003, by chance -0.\d\d to +0.\d\d (image) and "
    words += r"-1.00, p 0.003, by chance -0.\d\d to +0.\d\d (text)"
    words = re.escape(words).replace(r"\\d", r"\d")
    (lede,) = page.within("p")[:1]
    assert re.search(f"mean tau over 6 classes is {words}\\.$", lede)
    caption = page.within("figcaption")[0]
    assert "By chance: the lowest and the highest correlation with the samples’ labels permuted 20 times." in caption
    assert "Spearman" not in caption
    assert page.within("h2") == [
        "By class", "Kinds of samples", "Coldest and hottest", "Distribution", "Table by class", "Through time",
        "Moving averages", "Run",
    ]  # fmt: skip


def test_every_figure_says_how_many_samples_of_which_snapshot_with_which_settings(page):
    captions = page.within("figcaption")
    assert len(captions) == 7
    for caption in captions:
        assert "isogclr: rho 1, gamma 0.8, eta 0.005" in caption
        through_time = "at every snapshot with visited samples (1), step 5 to 5; 66 samples of each" in caption
        assert ("66 visited of 66 samples, step-5" in caption) != through_time


@pytest.mark.parametrize("is_in_lede", [True, False])
def test_the_figure_gives_the_correlation_unless_the_first_sentence_does(hostile_run, is_in_lede):
    inspection = read_run(hostile_run)
    found = survey(inspection, ("group", "uri"))
    shown = Page(part("groups.html", "tau_by_group", inspection, found, is_in_lede, found.groups[0]))
    (caption,), told = shown.within("figcaption"), summary.lede(found).partition(" is very strong")[2]
    assert (f"Spearman’s correlation: very strong{told}" in caption) != is_in_lede


@pytest.mark.parametrize(
    ("first", "second", "p_value", "words"),
    [
        (0.9, 0.6, 0.001, "Frequent classes have high temperatures, rare ones low"),
        (-0.9, -0.6, 0.001, "Frequent classes have low temperatures, rare ones high"),
        (0.9, -0.9, 0.001, "Temperatures do not clearly depend on the size of classes"),
        (0.9, 0.4, 0.001, "Frequent classes have somewhat higher temperatures than rare ones"),
        (0.9, 0.2999, 0.001, "Frequent classes have somewhat higher temperatures than rare ones"),
        (0.9, 0.25, 0.001, "Temperatures do not clearly depend on the size of classes"),
        (0.9, 0.4, 0.05, "Temperatures do not clearly depend on the size of classes"),
        (1.0, 1.0, 0.3, "Temperatures do not clearly depend on the size of classes"),
        (-0.9, -0.4, 0.001, "Frequent classes have somewhat lower temperatures than rare ones"),
    ],
)
def test_the_first_sentence_says_what_the_correlation_means_unless_by_chance(first, second, p_value, words):
    found = [Correlation(spearman, p_value, 0.0, (-0.2, 0.2)) for spearman in (first, second)]
    assert summary._relation(found, "classes") == words


def rows_of(table):
    """The cells of each row of a table's body, without the row's name."""
    page = Page(table)
    width = sum(scope["scope"] == "col" for scope in page.of("th")) - 1
    cells = page.within("td")
    return [cells[i : i + width] for i in range(0, len(cells), width)]


@pytest.fixture(scope="module")
def found(hostile_run):
    return survey(read_run(hostile_run))


def test_classes_are_listed_by_size_with_the_mean_tau_of_both_sides(found):
    rows = rows_of(part("groups.html", "group_table", found.sides, found.groups[0]))
    assert [row[0] for row in rows] == ["34", "16", "8", "4", "2", "1"]
    assert rows[0] == ["34", "34", "0.1000", "0.0000", "0.0%", "100.0%", "0.0500", "0.0000", "100.0%", "0.0%"]
    assert [row[3] for row in rows] == ["0.0000", "0.0000", "0.0000", "–", "–", "–"]


def test_a_table_says_which_classes_have_no_interval_and_why(found):
    assert "±95% needs 5 visited samples." in Page(
        part("groups.html", "group_table", found.sides, found.groups[0])
    ).text("caption")


def test_a_cell_brings_the_number_by_which_it_is_sorted(found):
    cells = Page(part("groups.html", "group_table", found.sides, found.groups[0])).of("td")
    assert [cell["data-value"] for cell in cells[:3]] == ["34", "34", "0.100000001"]
    assert cells[-3]["data-value"] == ""


def test_above_the_limit_only_the_largest_and_the_smallest_classes_are_listed(found, monkeypatch):
    monkeypatch.setattr(summary, "MAX_GROUP_ROWS", 4)
    table = part("groups.html", "group_table", found.sides, found.groups[0])
    assert [row[0] for row in rows_of(table)] == ["34", "16", "2", "1"]
    caption = Page(table).text("caption")
    assert "Mean tau by class, 6 in all" in caption
    assert "the 2 largest and the 2 smallest" in caption


def test_the_name_of_a_column_is_drawn_as_it_is(found):
    groups = dataclasses.replace(found.groups[0], column="$\\frac{1}$")
    assert "$\\frac{1}$ size (samples, log scale)" in texts(svg(draw_tau_by_group, found.sides, groups))


def test_head_medium_and_tail_are_a_row_each(found):
    rows = rows_of(part("groups.html", "band_table", found.sides, found.groups[0]))
    assert [row[:2] for row in rows] == [["2", "50"], ["2", "12"], ["2", "3"]]
    assert rows[0][3] == f"{(34 * 0.1 + 16 * (0.01 + 0.09 * 16 / 34)) / 50:.4f}"


def test_the_coldest_sample_of_each_side_stands_first_with_its_id_and_tau(page, tau_by_class_size):
    ids = page.within("span")
    coldest = int(np.argmin(tau_by_class_size))
    first = page.within("b").index(f"tau {tau_by_class_size.min():.4f}, log s +0.00")
    assert ids[first] == f"id {coldest}"
    assert page.within("b")[first] == f"tau {tau_by_class_size.min():.4f}, log s +0.00"  # all of a class are equal
    hottest_of_second = int(np.argmax(0.15 - tau_by_class_size.astype(np.float32)))
    assert ids[first + 3 * 66] == f"id {hottest_of_second}"


def test_nothing_half_written_stays_beside_the_page(hostile_report):
    assert {path.name for path in hostile_report.parent.iterdir()} - {"samples.html"} == {"report.html"}


def test_without_classes_the_first_sentence_gives_the_mean(flat_dataset, tmp_path):
    run = write_run(tmp_path / "run", flat_dataset, {"sample": np.linspace(0.1, 0.9, flat_dataset.n)})
    assert summary.lede(survey(read_run(run))) == "The mean temperature tau is 0.5000."


def test_a_page_without_any_temperature_says_why(hostile_dataset, tmp_path):
    run = write_run(tmp_path / "run", hostile_dataset, {}, objective="clip")
    page = Page(report_on(run))
    assert [path.name for path in run.report.iterdir()] == ["report.html"]
    assert "clip has no temperature per sample" in page.text("li")
    assert "There are no temperatures to show." in page.text("p")
    assert page.of("table") == []
    assert page.within("h2") == ["Run"]


def test_an_objective_without_temperatures_shows_its_moving_averages(hostile_dataset, tmp_path):
    page = Page(report_on(write_run(tmp_path / "run", hostile_dataset, {}, objective="sogclr")))
    assert page.within("h2") == ["Kinds of samples", "Moving averages", "Run"]
    assert "image log s; the lowest" in page.text("figcaption")


def test_a_dataset_whose_pixels_are_damaged_costs_the_pictures_alone(hostile_dataset, tau_by_class_size, tmp_path):
    shutil.copytree(hostile_dataset.path, tmp_path / "data")
    taus = {"image": tau_by_class_size, "text": tau_by_class_size}
    run = write_run(tmp_path / "run", type(hostile_dataset)(tmp_path / "data"), taus)
    (tmp_path / "data" / "shards" / "shard-00000.beton").write_bytes(b"cut short")
    findings = look(run.path)
    sheets = Page(page_module._sheets(findings, page_module.MAX_PAGE_BYTES)[0])
    assert "cannot be shown, nor those of 65 more: " in findings.notes[-1]
    assert sheets.of("img") == []
    assert "<script>alert(1)</script>" in sheets.text("li")


def test_a_run_with_a_name_that_is_not_utf_8_has_a_page(hostile_dataset, tmp_path):
    run = write_run(tmp_path / "run", hostile_dataset, {}, objective="clip")
    moved = RunDirectory(tmp_path / "caf\udce9")
    run.path.rename(moved.path)
    assert "caf[U+DCE9]" in report_on(moved)


@pytest.mark.wide
def test_texts_of_any_length_and_kind_leave_a_page_below_8_mb(hostile_run):
    findings = look(hostile_run.path)
    # Shown as [U+202E], each of these characters takes eight bytes.
    hostile = {"caption": "\u202e" * 5000, "uri": "<" * 5000}
    samples = {i: dataclasses.replace(one, table=one.table | hostile) for i, one in findings.samples.items()}
    ends, kinds, movers = page_module._sheets(
        dataclasses.replace(findings, samples=samples), page_module.MAX_PAGE_BYTES
    )
    assert len(ends.encode()) + len(kinds.encode()) < page_module.MAX_PAGE_BYTES
    assert (ends.count("<img"), kinds.count("<img")) == (5 * 66, 36)
    assert "[U+202E]" * 500 in ends
    assert "[U+202E]" * 501 not in ends
    assert movers == ""
