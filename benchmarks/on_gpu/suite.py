"""The tests that need a GPU, counted one by one: if the process dies, the counts so far are kept."""

from pathlib import Path

import pytest

from .findings import Findings

TESTS = Path(__file__).parents[2] / "tests"
MARK = "pytest.mark.gpu"


def tests(found: Findings, which: str) -> None:
    """Run the tests that are marked for a GPU. which: an expression about their names, as pytest's -k."""
    # Only files that have some: the others import for a minute.
    files = sorted(str(file) for file in TESTS.rglob("test_*.py") if MARK in file.read_text("utf-8"))
    words = ["-q", "-p", "no:cacheprovider", "--rootdir", str(TESTS), "-m", "gpu", "-k", which,
             "--continue-on-collection-errors", "--basetemp", str(found.folder / "pytest")]  # fmt: skip
    ran = Ran(found)
    code = pytest.main([*words, *files], [ran])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest ended with exit code {code:d}")
    passed, failed = ran.counts["passed"], ran.counts["failed"]
    if passed or failed:
        found.check("tests that fail on the GPU", "0", f"{failed} of {passed + failed}", failed == 0)


class Ran:
    """A plugin of pytest that writes the counts after each test, and why one failed or was skipped."""

    def __init__(self, found: Findings) -> None:
        """found: where the counts and reasons go."""
        self._found, self.counts = found, dict.fromkeys(("passed", "failed", "skipped", "not run"), 0)
        self._write(again=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Count a test by its call. One that is not set up is not run, nor those of a file that is not imported."""
        if report.passed and report.when != "call":
            return
        how = "not run" if report.failed and report.when != "call" else report.outcome
        self.counts[how] += 1
        self._write(again=True)
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        reason = " ".join(text.removeprefix("Skipped: ").split())
        if how != "passed":
            about = f"{reason}." if how == "skipped" else f"`{report.nodeid}`: {reason[-200:]}"
            self._found.note(f"{how.capitalize()}: {about}")

    pytest_collectreport = pytest_runtest_logreport

    def _write(self, *, again: bool) -> None:
        self._found.row("Tests", {how: f"{tests:,}" for how, tests in self.counts.items()}, again=again)
