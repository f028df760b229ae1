"""A run that tests read."""

import pytest

from support.runs import small, train


@pytest.fixture(scope="session")
def finished(pairs_dataset, tmp_path_factory):
    """A run that was never stopped: 2 epochs of 7 steps. Tests read it and change copies."""
    return train(small(pairs_dataset), tmp_path_factory.mktemp("finished") / "run")
