"""A run of hostile samples, served."""

from contextlib import contextmanager
from threading import Thread

import numpy as np
import pytest

from thermopile.tools.inspection.opening import read_run
from thermopile.tools.serving.answers import Answers
from thermopile.tools.serving.catalogue import open_catalogue, with_margins
from thermopile.tools.serving.server import PageServer

from support.features import stored


@contextmanager
def serving(answers):
    with PageServer(answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="session")
def catalogued(hostile_run, folder):
    inspection = read_run(hostile_run)
    return inspection, open_catalogue(inspection, folder, lambda *_: None)


@pytest.fixture(scope="session")
def features(hostile_dataset, folder):
    """Features of all samples in no order, as a model would give that has learned nothing."""
    return stored(folder, np.random.default_rng(0).normal(size=(hostile_dataset.n, 2, 8)))


@pytest.fixture(scope="session")
def server(catalogued, features, folder):
    inspection, catalogue = catalogued
    catalogue = with_margins(catalogue, features, folder, lambda *_: None)
    with serving(Answers(inspection, catalogue, features, 5)) as server:
        yield server


@pytest.fixture(scope="session")
def server_without_features(catalogued):
    with serving(Answers(*catalogued, None, 5)) as server:
        yield server
