"""`thermopile` in this process, and what its end says."""

import json

from click.testing import CliRunner

from thermopile.tools.cli import main


def cli(*words):
    """Run `thermopile WORDS`; return how it ended and what it printed."""
    return CliRunner().invoke(main, [*map(str, words)])


def succeed(*words):
    done = cli(*words)
    assert done.exit_code == 0, done.output
    return done


def answer(*words):
    """What a command answers with --json."""
    return json.loads(succeed(*words, "--json").stdout)


def sets(*settings):
    """Settings as words of a command line."""
    return [part for setting in settings for part in ("--set", setting)]


def assert_one_line(done, exit_code, *words):
    """Assert that a command ended with this exit code, and its last words are one line that has all of these."""
    assert done.exit_code == exit_code, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert done.stderr.splitlines()[-1] == line
    for word in words:
        assert str(word) in line
    assert ("should not happen" in line) == ("should not happen" in words)
    assert "Traceback" not in done.output
