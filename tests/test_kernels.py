"""Kernels on an installation that nobody may write to."""

import os
import subprocess
import sys

import pytest

FUNCTION = "from thermopile.kernels import kernel\n\n\n@kernel({})\ndef add(a, b):\n    return a + b\n"


@pytest.fixture
def call(tmp_path):
    """Return a function that imports two modules of kernels, without a home, and gives the result and what was said."""
    (tmp_path / "eager.py").write_text(FUNCTION.format('"int64(int64, int64)"'))
    (tmp_path / "lazy.py").write_text(FUNCTION.format(""))

    def call(**environment):
        # A file in place of a directory cannot be written to, also by root.
        program = "import eager, lazy; print(eager.add(1, 2) + lazy.add(3, 4))"
        places = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        unwritable = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "PYTHONPATH": places}
        clean = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
        done = subprocess.run([sys.executable, "-B", "-c", program], env=clean | unwritable | environment,
                              capture_output=True, text=True, check=True, cwd=tmp_path)  # fmt: skip
        return int(done.stdout), done.stderr

    return call


def test_without_a_writable_directory_kernels_are_compiled_anew_with_one_line(call, tmp_path):
    (tmp_path / "__pycache__").touch()
    result, said = call()
    assert result == 10
    assert said.count("NUMBA_CACHE_DIR") == said.count("\n") == 1


def test_their_code_is_kept_beside_them_or_in_the_directory_that_is_named(call, tmp_path):
    assert call() == (10, "")
    assert len(list((tmp_path / "__pycache__").glob("*.nbc"))) == 2
    assert call(NUMBA_CACHE_DIR=str(tmp_path / "named")) == (10, "")
    assert len(list((tmp_path / "named").rglob("*.nbc"))) == 2
