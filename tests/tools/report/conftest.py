"""A real browser, one for all tests: Chromium without a window, driven by selenium."""

import os
import shutil

import pytest
from selenium import webdriver

_QUIET = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
          "--disable-background-networking", "--disable-component-update")  # fmt: skip
_WATCH = """
window.seen = [];
window.alert = (words) => window.seen.push(`alert ${words}`);
document.addEventListener("securitypolicyviolation", (event) => window.seen.push(event.violatedDirective));
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """selenium's driver of the browser, which keeps its files among the tests' own and needs no network."""
    binaries = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in binaries.items() if path is None]:
        pytest.skip(f"{' and '.join(missing)} not installed (on Debian: apt-get install chromium chromium-driver)")
    home = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = binaries["chromium"]
    for argument in (*_QUIET, f"--user-data-dir={home / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(binaries["chromedriver"], env={**os.environ, "HOME": str(home)})
    driver = webdriver.Chrome(options, service)
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
    yield driver
    driver.quit()


@pytest.fixture
def open_page(driver):
    """Return a function that opens a file in a window of this size and returns the driver. Nothing may go wrong there.

    What is seen is asked for when the test has ended: entries of the console, alerts, what the page's policy forbade.
    """
    opened = []

    def open_file(path, size, *, theme="light", script=True):
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
        driver.get(path.as_uri())
        opened.append(path)
        return driver

    yield open_file
    if opened:
        assert driver.execute_script("return window.seen ?? []") == []
        assert driver.get_log("browser") == []
