"""The served page in a real browser: all texts of the run are hostile, and nothing that they hold runs."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from thermopile.tools.inspection.features.neighbours import find_neighbours

from support.browser import SCREENS, all_of, one, wait

pytestmark = pytest.mark.wide


@pytest.fixture(params=SCREENS.values(), ids=SCREENS)
def browser(request, open_page, server):
    browser = open_page(server.address, request.param)
    wait(browser, lambda: all_of(browser, ".card"))
    yield browser
    browser.execute_script("sessionStorage.clear()")


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
    wait(browser, lambda: "a valid number" in count(browser))
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
    one(browser, "#close").click()
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
    one(browser, "#around section:last-child .open").click()
    nearest = find_neighbours(features, lists[-1][0], 5, {}).nearest["pictures"]
    assert opened(browser, lists[-1][0])[0] == nearest.sample_ids.tolist()
    seen = "return [dialog.scrollTop, document.activeElement.textContent]"
    assert browser.execute_script(seen) == [0, "Close"]


def test_neighbours_stand_above_the_facts_in_a_place_that_is_kept_for_them(browser):
    facts = "return document.querySelector('#content dl')?.offsetTop"
    browser.execute_script("compared = new Promise((free) => { window.free = free; }); look(0);")
    before = wait(browser, lambda: browser.execute_script(facts))
    assert one(browser, "#around").text == "comparing with all samples…"
    browser.execute_script("free()")
    opened(browser, 0)
    assert browser.execute_script(facts) == before
    parts = "return [...document.querySelector('#content').children].map((part) => part.id || part.localName)"
    assert browser.execute_script(parts)[:3] == ["div", "around", "dl"]


def press(browser, *keys):
    for key in keys:
        ActionChains(browser).send_keys(key).perform()
        wait(browser, lambda: browser.execute_script("return stepping === null"))


def shown(browser):
    return browser.execute_script("return [document.querySelector('#title').textContent, start]")


def test_keys_go_on_to_the_samples_found_over_pages_and_stop_at_the_ends(browser, hostile_dataset):
    search(browser, sort="id")
    one(browser, ".card .open").click()
    opened(browser, 0)
    assert f"1 of {hostile_dataset.n} found; keys ← → or k j" in one(browser, "#place-found").text
    press(browser, Keys.ARROW_LEFT)
    assert (shown(browser), one(browser, "#place-found").text) == (["Sample 0", 0], "This is the first sample found.")
    press(browser, Keys.ARROW_RIGHT, "j", "j", "k", Keys.ARROW_LEFT)
    assert shown(browser) == ["Sample 1", 0]
    browser.execute_script("look(59)")
    opened(browser, 59)
    press(browser, Keys.ARROW_RIGHT)
    assert shown(browser) == ["Sample 60", 60]
    press(browser, Keys.ARROW_LEFT)
    assert shown(browser) == ["Sample 59", 0]
    press(browser, *["j"] * 7)
    assert (shown(browser), one(browser, "#place-found").text) == (["Sample 65", 60], "This is the last sample found.")
    one(browser, "#previous").click()
    opened(browser, 64)
    press(browser, Keys.ENTER)
    opened(browser, 63)  # the focus stays on the button
    one(browser, "#close").click()
    focused = "return document.activeElement.querySelector('img')?.alt"
    wait(browser, lambda: browser.execute_script(focused) == "sample 63")


def test_from_a_neighbour_keys_lead_back_to_the_samples_found(browser):
    search(browser, words="family", sort="id")
    first, second = browser.execute_script("return shown.map(({ id }) => id).slice(0, 2)")
    browser.execute_script("look(arguments[0])", first)
    opened(browser, first)
    other = browser.execute_script("return [...Array(66).keys()].find((id) => placeOf(id) < 0)")
    for key, id in ((Keys.ARROW_LEFT, first), (Keys.ARROW_RIGHT, second)):
        browser.execute_script("look(arguments[0])", other)
        opened(browser, other)
        press(browser, key)
        opened(browser, id)


def test_keys_with_others_in_fields_or_in_a_list_of_neighbours_open_no_sample(browser):
    one(browser, "[name=words]").send_keys("jk", Keys.ARROW_LEFT)
    assert one(browser, "[name=words]").get_property("value") == "jk"
    assert not all_of(browser, "dialog[open]")
    browser.execute_script("look(shown[1].id)")
    wait(browser, lambda: all_of(browser, "#around ol"))
    title = shown(browser)
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT).key_up(Keys.SHIFT).perform()
    browser.execute_script("document.querySelector('#around .open').focus()")
    press(browser, Keys.ARROW_RIGHT)
    assert shown(browser) == title


def test_cards_have_log_s_and_the_margin_and_can_be_ordered_by_it(browser):
    search(browser, sort="margin")
    margins = browser.execute_script("return shown.map(({ margin }) => margin)")
    assert margins == sorted(margins)
    figures = [line.text for line in all_of(browser, ".card:first-child > small")]
    assert figures[1:3] == ["log s image 0, text 0", f"margin {float(f'{margins[0]:.4g}'):g}"]
    titles = [line.get_attribute("title") for line in all_of(browser, ".card:first-child > small")]
    assert titles[1] == "above 0, the negatives outweigh the positive pair"
    assert titles[2] == "cosine of the pair minus that of the hardest of 66 random negatives"


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
    told = "return [fields.sort.options[3].textContent, fields.sort.options[3].disabled]"
    assert browser.execute_script(told) == ["lowest margin: needs --neighbours", True]


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
