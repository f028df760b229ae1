"""The served page in a real browser: all texts of the run are hostile, and nothing that they hold runs."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from thermopile.tools.inspection.neighbours import find_neighbours

pytestmark = pytest.mark.wide

SCREENS = {"wide": (1280, 800), "phone": (390, 844)}


@pytest.fixture(params=SCREENS.values(), ids=SCREENS.keys())
def browser(request, open_page, server):
    browser = open_page(server.address, request.param)
    wait(browser, lambda: all_of(browser, ".card"))
    yield browser
    browser.execute_script("sessionStorage.clear()")


def wait(browser, condition):
    return WebDriverWait(browser, 60).until(lambda _: condition())


def all_of(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def one(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def count(browser):
    return one(browser, "#count").text


def search(browser, finds=True, **values):
    for name, value in values.items():
        field = one(browser, f"[name={name}]")
        browser.execute_script("arguments[0].value = arguments[1]", field, value)
    old = all_of(browser, ".card")[:1]
    one(browser, "#query button").click()
    if old and finds:
        wait(browser, lambda: all_of(browser, ".card")[:1] != old)


def test_it_shows_the_run_and_fits_the_screen(browser, hostile_dataset):
    assert one(browser, "h1").text.startswith("hostile <b>run")
    assert f"{hostile_dataset.n} samples" in one(browser, "#facts").text
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    wait(browser, lambda: all_of(browser, ".card img.pixels"))


def test_one_can_search_page_on_and_come_back(browser, hostile_dataset):
    assert one(browser, "#earlier").get_property("disabled")
    one(browser, "#later").click()
    wait(browser, lambda: one(browser, "#place").text.startswith("61"))
    assert len(all_of(browser, ".card")) == hostile_dataset.n - 60
    browser.refresh()
    wait(browser, lambda: one(browser, "#place").text.startswith("61"))
    search(browser, words="family", sort="id")
    assert all("family" in card.text for card in all_of(browser, ".card"))
    assert count(browser) == f"{len(all_of(browser, '.card'))} samples"


@pytest.mark.parametrize("words", ["<img src=x onerror=alert(1)>", '"><script>alert(1)</script>', "' OR 1=1 --"])
def test_hostile_words_are_only_words(browser, words):
    search(browser, words=words)
    wait(browser, lambda: count(browser).endswith("samples"))
    assert one(browser, "[name=words]").get_property("value") == words
    assert all_of(browser, "main script, main iframe, main [onerror]") == []


def test_an_error_is_said_where_the_count_stands(browser):
    search(browser, finds=False, low="cold")
    wait(browser, lambda: "not a number" in count(browser))
    browser.get_log("browser")  # the refused request


def test_a_sample_opens_with_its_state_its_views_and_its_past(browser):
    search(browser, sort="id")
    one(browser, ".card .open").click()
    wait(browser, lambda: all_of(browser, "dialog[open] dl"))
    said = one(browser, "dialog").text
    for words in ("Sample 0", "image/tau", "visits", "<script>alert(1)</script>", "two views, epoch 0"):
        assert words in said
    wait(browser, lambda: one(browser, "[alt='two augmented views']").get_property("naturalWidth"))
    assert all_of(browser, "dialog svg polyline")
    one(browser, "dialog header button").click()
    wait(browser, lambda: not all_of(browser, "dialog[open]"))


def opened(browser, sample_id):
    """Wait until a sample is shown with its neighbours, and return their ids, list by list.

    Read in one go: the page replaces the elements.
    """
    titled = "return document.querySelector('#title')?.textContent"
    wait(browser, lambda: browser.execute_script(titled) == f"Sample {sample_id}")
    ids = "[...list.querySelectorAll('img')].map((image) => Number(image.alt.replace('sample ', '')))"
    read = f"return [...document.querySelectorAll('#around ol')].map((list) => {ids})"
    return wait(browser, lambda: browser.execute_script(read))


def test_a_sample_has_its_neighbours_and_a_click_leads_on_to_one(browser, features, tau_by_class_size):
    search(browser, sort="id")
    one(browser, ".card .open").click()
    found = find_neighbours(features, 0, 5, {"image": tau_by_class_size[0], "text": 0.15 - tau_by_class_size[0]})
    rankings = [*found.nearest.values(), *found.negatives.values()]
    lists = opened(browser, 0)
    assert lists == [ranking.sample_ids.tolist() for ranking in rankings]
    heads = "Nearest pictures", "Nearest captions", "captions for its picture", "pictures for its caption"
    assert all(head in shown.text for head, shown in zip(heads, all_of(browser, "#around h3"), strict=True))
    assert browser.execute_script("return dialog.scrollWidth <= dialog.clientWidth")
    one(browser, "#around ol:last-of-type .open").click()
    nearest = find_neighbours(features, lists[-1][0], 5, {}).nearest["pictures"]
    assert opened(browser, lists[-1][0])[0] == nearest.sample_ids.tolist()
    seen = "return [dialog.scrollTop, document.activeElement.textContent]"
    assert browser.execute_script(seen) == [0, "Close"]


def test_hostile_captions_of_neighbours_are_only_words(browser):
    browser.execute_script("look(1)")
    opened(browser, 1)
    read = "return [...document.querySelectorAll('#around bdi')].map((text) => text.textContent)"
    shown = browser.execute_script(read)
    for hostile in ("<script>alert(1)</script>", "<img src=x onerror=alert(1)>"):
        assert any(hostile in text for text in shown)
    assert all_of(browser, "dialog script, dialog iframe, dialog [onerror]") == []


def test_without_features_a_sample_says_how_to_get_neighbours(open_page, server_without_features):
    browser = open_page(server_without_features.address, SCREENS["wide"])
    wait(browser, lambda: all_of(browser, ".card"))
    one(browser, ".card .open").click()
    wait(browser, lambda: all_of(browser, "dialog[open] #around"))
    assert "start again with --serve --neighbours 12" in one(browser, "#around").text


def test_what_is_selected_stays_selected_with_its_tag(browser):
    search(browser, sort="id")
    for box in all_of(browser, ".card [type=checkbox]")[:2]:
        browser.execute_script("arguments[0].click()", box)
    assert one(browser, "#selected").text == "2"
    one(browser, "#later").click()
    wait(browser, lambda: one(browser, "#place").text.startswith("61"))
    browser.execute_script("arguments[0].click()", one(browser, "#whole"))
    assert one(browser, "#selected").text == "8"
    browser.refresh()
    wait(browser, lambda: one(browser, "#selected").text == "8")
    assert browser.execute_script("return [...selected.values()]") == ["checked"] * 8
    browser.execute_script("arguments[0].click()", one(browser, "#none"))
    assert one(browser, "#selected").text == "0"


def test_a_keyboard_reaches_every_control(browser):
    names = browser.execute_script(
        "return [...document.querySelectorAll('input, select, button, a')].filter((one) => one.checkVisibility())"
        ".filter((one) => one.tabIndex < 0).map((one) => one.outerHTML)"
    )
    assert names == []
    assert browser.execute_script(
        "return [...document.querySelectorAll('input, select')].every((one) => one.labels.length || one.ariaLabel)"
    )
