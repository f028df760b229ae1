"""A run of hostile samples, served."""

from threading import Thread

import pytest

from thermopile.tools.inspection.run import read_run
from thermopile.tools.serving.answers import Answers
from thermopile.tools.serving.catalogue import open_catalogue
from thermopile.tools.serving.server import PageServer


@pytest.fixture(scope="session")
def server(hostile_run, tmp_path_factory):
    inspection = read_run(hostile_run)
    catalogue = open_catalogue(inspection, tmp_path_factory.mktemp("report"), lambda *_: None)
    with PageServer(Answers(inspection, catalogue)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
