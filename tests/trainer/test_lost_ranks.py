"""A rank that is lost ends the others by name, also those that wait where nothing tells them."""

import signal
import socket
import time
from datetime import timedelta

import pytest

from thermopile.state_store.ranks import Ranks
from thermopile.trainer import heartbeats
from thermopile.trainer.checkpoint import latest_checkpoint
from thermopile.trainer.errors import RanksLostError
from thermopile.trainer.run_directory import RunDirectory

SHORTER_TIMES = """
from threading import Event
from thermopile.trainer import heartbeats
heartbeats.BEAT_SECONDS, heartbeats.SILENT_BEATS, heartbeats.GRACE_SECONDS = 0.1, 50, 2.0
heartbeats.SCAN_SECONDS, heartbeats.LINGER_SECONDS = 3.0, 1.0
"""
# Joins the ranks as `thermopile train` does.
JOINED = (
    SHORTER_TIMES
    + """
import time
from pathlib import Path
from thermopile.tools.training import _end, _ended_if_ranks_are_lost
from thermopile.trainer.world import joined_world
heartbeats.SILENT_BEATS, file = int(sys.argv[1]), Path(sys.argv[2])
with _ended_if_ranks_are_lost(), joined_world(end=_end) as world:
    print("joined", flush=True)
"""
)
WAIT_FOR_EVER = JOINED + "    Event().wait()"
TALK_FOR_EVER = JOINED + "    while True: world.any_rank(False)"
LEAVE = JOINED + "    pass"
FAIL = JOINED + "    raise ValueError('its own error')"
WAIT_FOR_FILE = JOINED + "    while not file.exists(): time.sleep(0.05)"
TRAIN_UNTIL_STEP_8 = (
    SHORTER_TIMES
    + """
from thermopile.trainer.loop import Trainer
make_step = Trainer.step
def step(self, batch):
    if self.steps_done == 7:
        print("waits", flush=True)
        Event().wait()
    make_step(self, batch)
Trainer.step = step
from thermopile.tools.cli import main
main()
"""
)


def wait_until_said(ranks, words):
    for rank in ranks:
        while not rank.has_said(words):
            assert rank.is_running(), rank.end()
            time.sleep(0.05)


@pytest.fixture
def start(start_ranks, tmp_path):
    """Return a function (codes, silent_beats) -> programs that have joined; a file `done` is the third argument."""

    def start(codes, silent_beats=50):
        ranks = start_ranks(len(codes), silent_beats, tmp_path / "done", codes=codes)
        wait_until_said(ranks, "joined")
        return ranks

    return start


def assert_ends_naming(rank, lost, pid):
    code, _, errors = rank.end()
    assert code == 1, errors
    assert errors.splitlines() == [f"Error: lost rank {lost} ({socket.gethostname()}, process {pid}); see its messages"]


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        pytest.param(signal.SIGKILL, 0, id="killed_holding_the_store"),
        pytest.param(signal.SIGKILL, 1, id="killed", marks=pytest.mark.soak),
        pytest.param(signal.SIGSTOP, 0, id="stopped_holding_the_store", marks=pytest.mark.soak),
        pytest.param(signal.SIGSTOP, 1, id="stopped"),
    ],
)
def test_ranks_that_wait_for_ever_end_by_the_name_of_one_that_is_killed_or_hangs(start, how, lost):
    ranks = start([WAIT_FOR_EVER] * 3)
    ranks[lost].send(how)
    for rank in (ranks[2], ranks[1 - lost]):
        assert_ends_naming(rank, lost, ranks[lost].pid)
    ranks[lost].end(within=0)


def test_ranks_that_notice_by_themselves_say_so_once(start):
    ranks = start([TALK_FOR_EVER] * 3)
    ranks[1].kill()
    for rank in (ranks[0], ranks[2]):
        assert_ends_naming(rank, 1, ranks[1].pid)


def test_a_rank_that_fails_ends_those_that_wait_for_it_and_reports_its_own_error(start):
    ranks = start([WAIT_FOR_EVER, FAIL])
    code, _, errors = ranks[1].end()
    assert code == 1
    assert errors.splitlines()[-1] == "ValueError: its own error"
    assert_ends_naming(ranks[0], 1, ranks[1].pid)


@pytest.mark.parametrize(
    ("stopped", "beats", "seconds"),
    [
        pytest.param([0], 300, 3, id="the_store_for_less_than_the_limit"),
        pytest.param([1], 300, 3, id="another_for_less_than_the_limit", marks=pytest.mark.soak),
        pytest.param([0, 1], 50, 9, id="all_for_longer"),
    ],
)
def test_a_pause_ends_nobody(start, tmp_path, stopped, beats, seconds):
    ranks = start([WAIT_FOR_FILE] * 2, beats)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in stopped:
            ranks[rank].send(number)
        time.sleep(seconds)
    (tmp_path / "done").touch()
    assert [rank.end()[::2] for rank in ranks] == [(0, "")] * 2


@pytest.mark.parametrize(
    "early", [pytest.param(0, id="holding_the_store"), pytest.param(1, id="another", marks=pytest.mark.soak)]
)
def test_a_rank_that_leaves_in_order_does_not_end_one_that_works_on(start, tmp_path, early):
    codes = [LEAVE, WAIT_FOR_FILE] if early == 0 else [WAIT_FOR_FILE, LEAVE]
    ranks = start(codes)
    time.sleep(12)  # twice the silence that is suspicious
    assert ranks[1 - early].is_running()
    (tmp_path / "done").touch()
    assert [rank.end()[::2] for rank in ranks] == [(0, "")] * 2


def test_a_rank_behind_one_that_left_in_order_is_still_listened_to(start):
    ranks = start([WAIT_FOR_EVER, LEAVE, WAIT_FOR_EVER])
    assert ranks[1].end()[0] == 0
    ranks[2].kill()
    assert_ends_naming(ranks[0], 2, ranks[2].pid)


def test_a_rank_that_is_done_does_not_wait_for_one_that_is_lost(start):
    ranks = start([LEAVE, WAIT_FOR_EVER])
    ranks[1].kill()
    assert_ends_naming(ranks[0], 1, ranks[1].pid)


def test_a_rank_that_cannot_reach_rank_0_says_where_it_tried(monkeypatch):
    class Second(Ranks):
        rank, world = 1, 2

        def broadcast(self, value):
            with socket.create_server(("127.0.0.1", 0)) as free:
                return free.getsockname()[1]

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(heartbeats, "CONNECT_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(RanksLostError, match=r"^rank 1 cannot reach rank 0 at 127.0.0.1:\d+: .*firewall"):
        heartbeats._store_of_rank_0(Second())


def train(start_ranks, codes, dataset, run, *settings):
    options = [part for setting in settings for part in ("--set", setting)]
    return start_ranks(2, "train", "--data", dataset.path, "--out", run.path, *options, codes=codes)


def test_training_that_waits_for_a_lost_rank_ends_by_its_name_with_the_step_and_the_checkpoint(
    start_ranks, pairs_dataset, tmp_path
):
    run, settings = RunDirectory(tmp_path / "run"), ("batch_size=128", "data.image_size=16", "checkpoint.every_steps=5")
    ranks = train(start_ranks, [TRAIN_UNTIL_STEP_8] * 2, pairs_dataset, run, *settings)
    wait_until_said(ranks, "waits")
    while latest_checkpoint(run.checkpoints) is None:
        time.sleep(0.05)
    ranks[1].kill()
    code, _, errors = ranks[0].end()
    assert code == 1, errors
    assert errors.count("lost rank") == 1
    assert errors.splitlines()[-1] == (
        f"Error: lost rank 1 ({socket.gethostname()}, process {ranks[1].pid}) at step 8; see its messages. "
        f"--resume continues from the last checkpoint, {run.checkpoints / 'step-5'}"
    )


@pytest.mark.gpu(count=2)
def test_a_rank_killed_while_it_trains_on_a_gpu_ends_the_other_within_two_minutes(start_ranks, pairs_dataset, tmp_path):
    run, settings = RunDirectory(tmp_path / "run"), ("batch_size=256", "data.image_size=32", "data.loader=ffcv")
    ranks = train(start_ranks, None, pairs_dataset, run, *settings, "epochs=1000", "log_every=1")
    while not run.metrics_file.exists() or run.metrics_file.read_bytes().count(b"\n") < 20:
        assert all(rank.is_running() for rank in ranks), [rank.end() for rank in ranks]
        time.sleep(0.1)
    ranks[1].kill()
    code, _, errors = ranks[0].end(within=120)
    assert code == 1, errors
    assert f"lost rank 1 ({socket.gethostname()}, process {ranks[1].pid}) at step " in errors.splitlines()[-1]
