"""What TensorBoard sees of a run."""

import logging
import sys
import threading
import time
from contextlib import closing

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from thermopile.trainer.errors import ConfigError
from thermopile.trainer.metrics.metrics_log import TensorBoardLog


def lines(first, last, loss):
    return [{"step": step, "loss": loss, "image/tau_mean": step / 8} for step in range(first, last + 1)]


def seen(path):
    events = EventAccumulator(str(path))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_number_of_a_line_is_a_scalar_of_its_step(tmp_path):
    with closing(TensorBoardLog(tmp_path / "tensorboard", keep_steps=0)) as log:
        log.add(lines(1, 2, loss=0.5))
        log.add(
            [{"step": 3, "loss": None, "skipped": True}, {"step": 3, "evaluation": {"knn": {"10": 0.75}, "of": "t"}}]
        )
    assert seen(tmp_path / "tensorboard") == {
        "loss": [(1, 0.5), (2, 0.5)], "image/tau_mean": [(1, 0.125), (2, 0.25)], "evaluation/knn/10": [(3, 0.75)],
    }  # fmt: skip


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path):
    with closing(TensorBoardLog(tmp_path, keep_steps=0)) as log:
        log.add(lines(1, 5, loss=1.0))
    with closing(TensorBoardLog(tmp_path, keep_steps=3)) as log:
        log.add(lines(4, 6, loss=2.0))
    assert seen(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]


def test_without_the_package_the_setting_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'thermopile\[tensorboard\]'"):
        TensorBoardLog(tmp_path, keep_steps=0)
    assert list(tmp_path.iterdir()) == []


# tensorboard's thread ends with the error, which Python prints.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_directory_that_cannot_be_written_ends_the_log_alone_with_one_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    path = tmp_path / "tensorboard"
    others = set(threading.enumerate())
    with closing(TensorBoardLog(path, keep_steps=0)) as log:
        path.rename(tmp_path / "away")  # at once: the writer may be adding a file
        deadline = time.monotonic() + 120
        while not caplog.records and time.monotonic() < deadline:
            log.add(lines(1, 500, loss=1.0))
        log.add(lines(1, 2, loss=1.0))
    for thread in set(threading.enumerate()) - others:
        thread.join(120)
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()
    assert "metrics.jsonl" in record.getMessage()
