import threading

import pytest

from thermopile.state_store.background import BackgroundThread
from thermopile.state_store.errors import BackgroundError


def fail():
    raise OSError("disk full")


@pytest.fixture
def thread():
    thread = BackgroundThread("rows")
    yield thread
    thread._executor.shutdown()


def test_jobs_are_done_one_at_a_time_in_the_order_of_submission(thread):
    done = []
    for number in range(50):
        thread.submit(done.append, number)
    thread.drain()
    assert done == list(range(50))


def test_a_failure_reaches_the_future_as_it_is_and_the_next_check_as_the_cause(thread):
    with pytest.raises(OSError, match="disk full"):
        thread.submit(fail).result()
    with pytest.raises(BackgroundError, match=r"rows thread failed.*disk full") as raised:
        thread.check()
    assert isinstance(raised.value.__cause__, OSError)


def test_no_job_is_done_after_one_that_failed(thread):
    done = []
    thread.submit(fail)
    with pytest.raises(BackgroundError):
        thread.submit(done.append, 1).result()
    assert done == []


def test_a_job_cannot_be_cancelled(thread):
    release = threading.Event()
    thread.submit(release.wait)
    waiting = thread.submit(lambda: "done")
    cancelled = waiting.cancel()
    release.set()
    assert not cancelled
    assert waiting.result() == "done"


def test_close_finishes_the_jobs_and_raises_a_failure_that_nobody_has_seen():
    thread, done = BackgroundThread("rows"), []
    thread.submit(done.append, 1)
    thread.submit(fail)
    with pytest.raises(BackgroundError):
        thread.close()
    assert done == [1]


def test_close_is_silent_about_a_failure_already_raised():
    thread = BackgroundThread("rows")
    thread.submit(fail)
    thread.drain()
    with pytest.raises(BackgroundError):
        thread.check()
    thread.close()
