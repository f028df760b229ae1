"""A page in a browser: its elements, and keys."""

from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

SCREENS = {"wide": (1280, 800), "phone": (390, 844)}
"""CSS pixels: the screen of a small laptop, and of a phone."""


def all_of(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def one(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def press(browser, *keys):
    ActionChains(browser).send_keys(*keys).perform()


def wait(browser, condition):
    return WebDriverWait(browser, 60).until(lambda _: condition())
