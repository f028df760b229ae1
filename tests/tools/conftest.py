"""Small runs made with the real parts: a converted dataset, settings as `train` resolves them, a state store."""

import os
import shutil

import numpy as np
import pytest

from thermopile.pipeline.sources.folder import FolderSource
from thermopile.tools.report import html
from thermopile.trainer.run_directory import RunDirectory

from support.cli import succeed
from support.conversions import dataset_of
from support.pictures import draw
from support.sources import HostileSource
from support.written_runs import write_run

LAYOUTS = html.LAYOUTS
_QUIET = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
          "--disable-background-networking", "--disable-component-update")  # fmt: skip
_WATCH = """
window.seen = [];
window.alert = (words) => window.seen.push(`alert ${words}`);
document.addEventListener("securitypolicyviolation", (event) => window.seen.push(event.violatedDirective));
"""


@pytest.fixture(scope="session", autouse=True)
def one_layout():
    """Pages show each figure in its wide layout alone: drawing both would take most of a test's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "LAYOUTS", LAYOUTS[:1])
        yield


@pytest.fixture(scope="module")
def every_layout(one_layout):
    """Pages show each figure in both layouts, as a reader gets them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "LAYOUTS", LAYOUTS)
        yield


@pytest.fixture(scope="session")
def hostile_dataset(tmp_path_factory):
    """66 pairs whose texts are hostile, in six classes of 34 to 1, and one sample without class and caption."""
    out = tmp_path_factory.mktemp("hostile") / "dataset"
    return dataset_of(HostileSource(), out)


@pytest.fixture(scope="session")
def flat_dataset(tmp_path_factory):
    """16 pictures in no folder: no captions, no classes."""
    folder = tmp_path_factory.mktemp("flat")
    for i in range(16):
        draw(i).save(folder / f"{i}.png")
    out = folder.with_name("flat-dataset")
    return dataset_of(FolderSource(folder), out)


@pytest.fixture(scope="session")
def tau_by_class_size(hostile_dataset):
    """Temperatures that follow class size: 0.01 to 0.1; float64 [n]."""
    groups = hostile_dataset.column("group").to_pylist()
    return np.array([0.01 + 0.09 * groups.count(group) / 34 if group else 0.02 for group in groups])


@pytest.fixture(scope="session")
def hostile_run(hostile_dataset, tau_by_class_size, tmp_path_factory):
    """A run of the hostile dataset; its first side follows class size, its second side its reverse; copy to change."""
    taus = {"image": tau_by_class_size, "text": 0.15 - tau_by_class_size}
    return write_run(tmp_path_factory.mktemp("runs") / "hostile <b>run", hostile_dataset, taus)


@pytest.fixture(scope="session")
def inspected(hostile_run, tmp_path_factory):
    """A copy of that run whose name is written from right to left, and what `inspect` printed about it."""
    folder = tmp_path_factory.mktemp("named") / "مرحبا \u202e<b>"
    shutil.copytree(hostile_run.path, folder, ignore=shutil.ignore_patterns("report"))
    done = succeed("inspect", folder)
    return RunDirectory(folder), done


@pytest.fixture(scope="session")
def hostile_report(inspected):
    return inspected[0].report / "report.html"


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A real browser, one for all tests: Chromium without a window, driven by selenium; it needs no network."""
    from selenium import webdriver

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
    """Return a function that opens a file or an address in a window of this size and returns the driver.

    Nothing may go wrong there: when the test has ended, the console has no entry, no alert was seen, and the page's
    policy forbade nothing.
    """
    opened = []

    def open_one(page, size, *, theme="light", script=True):
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
        driver.get(page if isinstance(page, str) else page.as_uri())
        opened.append(page)
        return driver

    yield open_one
    if opened:
        assert driver.execute_script("return window.seen ?? []") == []
        assert driver.get_log("browser") == []
