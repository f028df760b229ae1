"""The page in a real browser, on a laptop's screen and on a phone's; texts of the run are hostile."""

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from thermopile.tools.inspection.findings import look
from thermopile.tools.report.page import write_report

from support.browser import SCREENS, all_of, one, press
from support.cli import cli
from support.written_runs import write_run

pytestmark = pytest.mark.wide

WIDE, PHONE = SCREENS.values()
SAMPLES, CLASSES, TEXTS = 66, 6, 7
ENDS = "[aria-labelledby=coldest-and-hottest]"
"""Of the hostile dataset; its texts take turns."""

SPARE_WIDTH = "return arguments[0].clientWidth - arguments[0].scrollWidth"
"""Of an element: below 0 where what it holds is wider than the element."""

CONTRASTS = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const ground = (element) => {
  const [r, g, b, a = 1] = channels(getComputedStyle(element).backgroundColor);
  return a === 1 ? [r, g, b] : ground(element.parentElement);
};
const found = {};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
  const colour = getComputedStyle(element)[element.ownerSVGElement ? "fill" : "color"];
  const [low, high] = [channels(colour), ground(element)].map(luminance).sort((a, b) => a - b);
  found[`${element.tagName} ${texts.currentNode.data.slice(0, 40)}`] = (high + 0.05) / (low + 0.05);
}
return found;
"""
"""WCAG's contrast of every text that is seen with the ground that it stands on."""

FOLLOW_FOCUS = """
window.reached = new Map();
window.nameOf = (control) => control.ariaLabel ?? (control.textContent.trim() || control.querySelector("img").alt);
window.controls = [...document.querySelectorAll("a, button, summary, .scroll")].filter((one) => one.checkVisibility());
addEventListener("focusin", ({ target }) => reached.set(target, getComputedStyle(target).outlineStyle));
return controls.map(nameOf);
"""
"""Takes note of what gets the focus, and how that is marked. Returns the names of all that a keyboard must reach."""


@pytest.fixture(scope="module")
def page(inspected, every_layout):
    """The report of a run whose name is written from right to left, and asks that what follows it is as well."""
    run, _ = inspected
    return write_report(look(run.path), run.report)


@pytest.fixture(params=SCREENS.values(), ids=SCREENS)
def browser(request, open_page, page):
    """The driver with the page open."""
    return open_page(page, request.param)


def click(element):
    """Click where a reader would, scrolled there so that nothing that sticks to the screen's edge is above it."""
    element.parent.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def focus(element):
    element.parent.execute_script("arguments[0].focus()", element)


def test_the_page_opens_without_an_error_and_loads_nothing_but_itself(browser, page):
    assert browser.current_url == page.as_uri()
    assert browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    assert browser.execute_script("return [...document.querySelectorAll('main img')].every((image) => image.alt)")
    assert all_of(browser, ".enlarge")  # the policy let the script run


def test_the_table_of_kinds_fits_a_phone(open_page, page):
    table = one(open_page(page, PHONE), "[aria-labelledby=kinds-of-samples] .scroll")
    assert table.parent.execute_script(SPARE_WIDTH, table) == 0


def test_a_page_without_tables_and_pictures_opens_as_well(open_page, hostile_dataset, tmp_path):
    run = write_run(tmp_path / "run", hostile_dataset, {}, objective="clip")
    assert cli("inspect", run.path).exit_code == 0
    browser = open_page(run.report / "report.html", PHONE)
    assert all_of(browser, "main")
    assert not all_of(browser, "table, .sheet, dialog")


def test_the_page_of_single_samples_shows_the_pixels_of_a_small_picture(open_page, page):
    run = page.parents[1]
    assert cli("inspect", run, "--sample", "7").exit_code == 0
    browser = open_page(page.with_name("samples.html"), PHONE)
    picture = one(browser, ".picture img")
    WebDriverWait(browser, 5).until(lambda _: "pixels" in picture.get_attribute("class"))
    assert picture.size["height"] > 5 * picture.get_property("naturalHeight")
    assert browser.execute_script(SPARE_WIDTH, one(browser, "html")) == 0


def test_the_first_figure_and_its_caption_are_on_the_first_screen(browser):
    top, bottom, height = browser.execute_script(
        "const [figure] = document.querySelectorAll('figure');"
        "return [figure.getBoundingClientRect().top, figure.lastChild.getBoundingClientRect().bottom, innerHeight]"
    )
    assert 0 < top < bottom <= height


def test_nothing_is_wider_than_the_screen_when_all_is_open(browser):
    root, dialog = one(browser, "html"), one(browser, "dialog")
    browser.execute_script("for (const card of document.querySelectorAll('details')) card.open = true")
    assert browser.execute_script(SPARE_WIDTH, root) == 0
    browser.execute_script("document.querySelector('.enlarge').click()")
    for _ in range(TEXTS):
        assert browser.execute_script(SPARE_WIDTH, dialog) == 0
        press(browser, Keys.ARROW_RIGHT)


def class_table(browser):
    found = [table for table in all_of(browser, "table") if len(column(table, 0)) == CLASSES]
    return next(table for table in found if "ordinary" not in column(table, 0))  # else of the kinds


def column(table, place):
    return table.parent.execute_script(
        "return [...arguments[0].tBodies[0].rows].map((row) => row.cells[arguments[1]].textContent)", table, place
    )


def heads(table):
    return table.find_elements(By.CSS_SELECTOR, "thead th")


def test_a_table_is_sorted_by_numbers_upward_and_then_downward(browser):
    table = class_table(browser)
    head = heads(table)[1]
    button = head.find_element(By.TAG_NAME, "button")
    assert head.get_attribute("aria-sort") is None
    click(button)
    assert column(table, 1) == ["1", "2", "4", "8", "16", "34"]
    assert head.get_attribute("aria-sort") == "ascending"
    click(button)
    assert column(table, 1) == ["34", "16", "8", "4", "2", "1"]
    assert head.get_attribute("aria-sort") == "descending"


def test_a_table_is_sorted_by_name_with_the_keyboard(open_page, page):
    browser = open_page(page, WIDE)
    table = class_table(browser)
    names = column(table, 0)
    by_size, by_name = heads(table)[1], heads(table)[0]
    press_on(by_size.find_element(By.TAG_NAME, "button"), Keys.ENTER)
    assert column(table, 0) == names[::-1]
    press_on(by_name.find_element(By.TAG_NAME, "button"), Keys.SPACE)
    assert [name[:7] for name in column(table, 0)] == [f"class {i}" for i in range(CLASSES)]
    assert [head.get_attribute("aria-sort") for head in heads(table)[:2]] == ["ascending", None]
    press(browser, Keys.SPACE)
    assert [name[:7] for name in column(table, 0)] == [f"class {i}" for i in reversed(range(CLASSES))]


def press_on(element, key):
    focus(element)
    press(element.parent, key)


def test_what_has_no_number_stands_last_whichever_way(open_page, page):
    browser = open_page(page, WIDE)
    table = class_table(browser)
    place = next(i for i, head in enumerate(heads(table)) if "95" in head.text)
    click(heads(table)[1].find_element(By.TAG_NAME, "button"))
    assert column(table, place).index("–") == 0, "the smallest class, of one sample, has no interval"
    for _ in range(2):
        click(heads(table)[place].find_element(By.TAG_NAME, "button"))
        assert column(table, place)[-1] == "–"


def shown(sheet):
    """The ids of the cards that are seen."""
    return sheet.parent.execute_script(
        "return [...arguments[0].children].filter((card) => card.checkVisibility())"
        ".map((card) => card.querySelector('.id').textContent)",
        sheet,
    )


def test_a_long_sheet_is_turned_page_by_page(browser):
    paged = one(browser, f"{ENDS} .paged")
    sheet = paged.find_element(By.CLASS_NAME, "sheet")
    back, on = paged.find_elements(By.CSS_SELECTOR, ".stepper button")
    where = paged.find_element(By.CSS_SELECTOR, "[role=status]")
    first = shown(sheet)
    assert (len(first), where.text, back.get_attribute("aria-disabled")) == (24, f"1–24 of {SAMPLES}", "true")
    click(back)
    assert shown(sheet) == first
    click(on)
    second = shown(sheet)
    assert (len(second), where.text, back.get_attribute("aria-disabled")) == (24, f"25–48 of {SAMPLES}", "false")
    press_on(on, Keys.ENTER)
    third = shown(sheet)
    assert (len(third), where.text, on.get_attribute("aria-disabled")) == (18, f"49–66 of {SAMPLES}", "true")
    assert len({*first, *second, *third}) == SAMPLES
    press(browser, Keys.ENTER)
    assert shown(sheet) == third
    click(back)
    assert shown(sheet) == second


def test_who_turns_the_page_from_further_down_reads_the_next_one_from_its_top(open_page, page):
    browser = open_page(page, PHONE)
    paged = one(browser, ".paged")
    on = paged.find_elements(By.CSS_SELECTOR, ".stepper button")[1]
    top = "return arguments[0].getBoundingClientRect().top"
    browser.execute_script("arguments[0].querySelectorAll('li')[20].scrollIntoView()", paged)
    assert browser.execute_script(top, paged) < 0 < browser.execute_script(top, on)
    on.click()
    assert abs(browser.execute_script(top, paged)) < 1


def is_open(browser):
    return one(browser, "dialog").get_property("open")


def test_a_picture_is_enlarged_with_all_that_is_known_of_its_sample(browser):
    opener = all_of(browser, ".enlarge")[3]
    card = opener.find_element(By.XPATH, "..")
    click(opener)
    dialog = one(browser, "dialog")
    assert is_open(browser)
    large = dialog.find_element(By.TAG_NAME, "img")
    WebDriverWait(browser, 5).until(lambda _: "pixels" in large.get_attribute("class"))  # it has 24 pixels
    assert large.size["width"] > opener.size["width"]
    picture = opener.find_element(By.TAG_NAME, "img")
    assert large.get_attribute("src") == picture.get_attribute("src")
    assert large.get_attribute("alt") == dialog.get_attribute("aria-label") == picture.get_attribute("alt")
    assert dialog.find_element(By.TAG_NAME, "b").text == card.find_element(By.TAG_NAME, "b").text
    assert dialog.find_element(By.TAG_NAME, "dl").text
    facts = [
        part.get_attribute("textContent") for part in (one(browser, "dialog dl"), card.find_element(By.TAG_NAME, "dl"))
    ]
    assert facts[0] == facts[1]
    click(one(browser, "dialog .close"))
    assert not is_open(browser)


def test_pictures_are_opened_turned_and_closed_with_the_keyboard(open_page, page):
    browser = open_page(page, WIDE)
    first, second = all_of(browser, f"{ENDS} .enlarge")[:2]
    alts = [opener.find_element(By.TAG_NAME, "img").get_attribute("alt") for opener in (first, second)]
    large, where = one(browser, "dialog img"), one(browser, "dialog [role=status]")

    def seen():
        return large.get_attribute("alt"), where.text

    press_on(first, Keys.ENTER)
    assert is_open(browser)
    assert seen() == (alts[0], f"1 of {SAMPLES}")
    press(browser, Keys.ARROW_LEFT)
    assert seen() == (alts[0], f"1 of {SAMPLES}")
    press(browser, Keys.ARROW_RIGHT)
    assert seen() == (alts[1], f"2 of {SAMPLES}")
    press(browser, *[Keys.ARROW_RIGHT] * 70)
    assert where.text == f"{SAMPLES} of {SAMPLES}"
    press_on(all_of(browser, "dialog button")[0], Keys.SPACE)
    assert where.text == f"65 of {SAMPLES}"
    press(browser, Keys.ESCAPE)
    assert not is_open(browser)
    assert browser.switch_to.active_element == first


def test_a_click_beside_the_enlarged_picture_closes_it_and_one_on_it_does_not(browser):
    click(one(browser, ".enlarge"))
    one(browser, "dialog img").click()
    assert is_open(browser)
    ActionChains(browser).move_by_offset(4, 4).click().perform()
    assert not is_open(browser)


def test_every_control_has_a_name_and_is_reached_with_the_tab_key_and_seen_to_be(open_page, page):
    browser = open_page(page, WIDE)
    controls = browser.execute_script(FOLLOW_FOCUS)
    assert all(controls), "each has a name"
    press(browser, *[Keys.TAB] * len(controls))
    assert browser.execute_script("return controls.filter((control) => !reached.has(control)).map(nameOf)") == []
    assert browser.execute_script("return [...new Set(reached.values())]") == ["solid"]


def test_hostile_texts_are_texts(open_page, page):
    browser = open_page(page, WIDE)
    assert len(all_of(browser, "script")) == 1
    assert all_of(browser, "[onerror], img:not([alt]), [src=x]") == []
    texts = one(browser, ".sheet").get_attribute("textContent")
    assert "<script>alert(1)</script>" in texts
    assert '"><img src=x onerror=alert(1)>' in texts
    assert "\0" not in one(browser, "body").get_attribute("textContent")
    browser.execute_script("document.querySelector('.enlarge').click()")
    for _ in range(TEXTS):
        assert all_of(browser, "dialog script, dialog [onerror]") == []
        assert len(all_of(browser, "dialog img")) == 1
        press(browser, Keys.ARROW_RIGHT)


def test_a_name_from_right_to_left_leaves_the_words_before_it_in_their_place(open_page, page):
    browser = open_page(page, WIDE)
    before, name = browser.execute_script(
        "return [...document.querySelector('h1').childNodes].map((node) => {"
        "  const range = document.createRange(); range.selectNodeContents(node);"
        "  const { left, right } = range.getBoundingClientRect(); return [left, right]; })"
    )
    assert before[0] < before[1] <= name[0] < name[1]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground_as_wcag_aa_asks(open_page, page, theme):
    browser = open_page(page, WIDE, theme=theme)
    browser.execute_script("for (const card of document.querySelectorAll('details')) card.open = true")
    browser.execute_script("document.querySelector('.enlarge').click()")
    contrasts = browser.execute_script(CONTRASTS)
    assert len(contrasts) > 100
    assert {text: ratio for text, ratio in contrasts.items() if ratio < 4.5} == {}


def test_without_scripts_every_row_and_every_card_is_there(open_page, page):
    browser = open_page(page, PHONE, script=False)
    assert all_of(browser, "button") == []
    parts = all_of(browser, "tr, .sheet li, .sheet img")
    assert browser.execute_script("return arguments[0].every((part) => part.checkVisibility())", parts)
    assert len(column(class_table(browser), 0)) == CLASSES
    assert len(one(browser, f"{ENDS} .sheet").find_elements(By.TAG_NAME, "li")) == SAMPLES
    one(browser, "summary").click()
    assert one(browser, "details dl").is_displayed()
