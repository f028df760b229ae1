"""metrics.jsonl: a line for every step, each with its checksum."""

import pytest
import torch

from thermopile.storage.files import NotRegularFileError
from thermopile.storage.sealed_json import unseal
from thermopile.trainer.errors import NotFiniteError
from thermopile.trainer.metrics.metrics_log import MetricsLog


def lines(path):
    return [unseal(line) for line in path.read_bytes().splitlines()]


def add(log, step, loss=1.0, **more):
    log.add({"step": step, "loss": torch.tensor(loss), **more})


def test_every_step_has_a_line_though_it_is_written_only_at_a_flush(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl", keep_steps=0) as log:
        add(log, 1, 0.5, seconds=0.25)
        add(log, 2, 0.125, seconds=0.5)
        assert lines(tmp_path / "m.jsonl") == []
        returned = log.flush()
    assert lines(tmp_path / "m.jsonl") == returned == [
        {"step": 1, "loss": 0.5, "seconds": 0.25}, {"step": 2, "loss": 0.125, "seconds": 0.5},
    ]  # fmt: skip


def test_a_float32_loss_is_written_with_every_bit(tmp_path):
    loss = torch.tensor(1.1)
    with MetricsLog(tmp_path / "m.jsonl", keep_steps=0) as log:
        log.add({"step": 1, "loss": loss})
        log.flush()
    assert torch.tensor(lines(tmp_path / "m.jsonl")[0]["loss"]) == loss


def test_resuming_drops_later_steps_and_goes_on_behind_the_one_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path, keep_steps=0) as log:
        for step in range(1, 9):
            add(log, step)
        log.flush()
    with MetricsLog(path, keep_steps=5) as log:
        add(log, 6, 2.0)
        log.flush()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(s, 1.0) for s in range(1, 6)] + [(6, 2.0)]


def test_a_log_knows_whether_the_step_that_it_is_opened_at_was_evaluated(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path, keep_steps=0) as log:
        for step in (1, 2, 3):
            add(log, step)
            log.flush()
            if step == 2:
                log.add_evaluation(step, {"knn": {"10": {"all": 0.5}}})
    found = []
    for step in (3, 2, 1, 0):
        with MetricsLog(path, keep_steps=step) as log:
            found.append(log.has_evaluation)
    assert found == [False, True, False, False]


def test_a_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "m.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(NotRegularFileError, match=r"m\.jsonl is a link"):
        MetricsLog(tmp_path / "m.jsonl", keep_steps=0)
    assert not (tmp_path / "other").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl", keep_steps=0) as log:
        add(log, 1)
        add(log, 2, float("nan"))
        with pytest.raises(NotFiniteError, match="the loss of step 2 is nan"):
            log.flush()


def test_other_metrics_that_are_not_finite_become_null(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl", keep_steps=0) as log:
        add(log, 1, gradient=torch.tensor(float("inf")))
        log.flush()
    assert lines(tmp_path / "m.jsonl")[0]["gradient"] is None


def test_lines_that_the_disk_has_no_room_for_are_written_later_and_durable_only_then(tmp_path, caplog, file_size_limit):
    with MetricsLog(tmp_path / "m.jsonl", keep_steps=0) as log:
        with file_size_limit(20):
            add(log, 1)
            log.flush()
            assert "cannot be written: [Errno 27]" in caplog.text
            log.flush()
            assert len(caplog.records) == 1
            with pytest.raises(OSError, match="too large"):
                log.sync()
        assert (tmp_path / "m.jsonl").stat().st_size == 20
        add(log, 2)
        log.flush()
        log.sync()
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 2]
