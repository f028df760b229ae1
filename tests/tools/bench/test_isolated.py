import os

import pytest

from thermopile.tools.bench.isolated import EndedWithoutAWordError, run_isolated


def test_the_function_runs_in_another_process_and_its_result_comes_back():
    assert run_isolated(os.getpid) != os.getpid()


def test_an_error_there_is_raised_here_and_says_where_it_arose():
    with pytest.raises(ValueError, match="invalid literal") as raised:
        run_isolated(int, "one")
    assert "Traceback" in raised.value.__notes__[0]


def test_a_process_that_dies_is_an_error_and_not_an_endless_wait():
    with pytest.raises(EndedWithoutAWordError, match="exit code 7"):
        run_isolated(os._exit, 7)
