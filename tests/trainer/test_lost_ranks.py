"""A rank that is lost ends the others by name, also those that wait where nothing tells them."""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest
from torch.distributed import HashStore

from thermopile.trainer import meeting
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint
from thermopile.trainer.errors import RanksLostError
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.runs import wait_for

SHORTER_TIMES = """
from threading import Event
from thermopile.trainer import heartbeats
heartbeats.BEAT_SECONDS, heartbeats.SILENT_BEATS, heartbeats.GRACE_SECONDS = 0.1, 50, 2.0
heartbeats.SCAN_SECONDS, heartbeats.LINGER_SECONDS = 3.0, 1.0
"""
# While ranks start, libraries that load or compile on a busy machine may hold the interpreter's lock for many beats.
# Joins the ranks as `thermopile train` does.
JOINED = (
    SHORTER_TIMES
    + """
import time
from pathlib import Path
from thermopile.tools.train import _end, _ended_if_ranks_are_lost
from thermopile.trainer.world import joined_world
heartbeats.SILENT_BEATS, file = 1000, Path(sys.argv[2])
with _ended_if_ranks_are_lost(), joined_world(end=_end) as world:
    heartbeats.SILENT_BEATS = int(sys.argv[1])
    print("joined", flush=True)
"""
)
WAIT_FOR_EVER = JOINED + "    Event().wait()"
FORK_AND_WAIT = (
    JOINED
    + """
    import os
    if not os.fork():
        os.closerange(0, 3)
        time.sleep(200)
        os._exit(0)
    Event().wait()
"""
)
TALK_FOR_EVER = JOINED + "    while True: world.any_rank(False)"
LEAVE = JOINED + "    pass"
FAIL = JOINED + "    raise ValueError('its own error')"
WAIT_FOR_FILE = JOINED + "    while not file.exists(): time.sleep(0.05)"
TRAIN_UNTIL_STEP_8 = (
    SHORTER_TIMES
    + """
from thermopile.trainer.loop import Trainer
make_step, (heartbeats.SILENT_BEATS, silent_beats) = Trainer.step, (1000, heartbeats.SILENT_BEATS)
def step(self, batch):
    if self.run.steps_done == 7:
        heartbeats.SILENT_BEATS = silent_beats
        print("waits", flush=True)
        Event().wait()
    make_step(self, batch)
Trainer.step = step
from thermopile.tools.cli import main
main()
"""
)
# Rank 0 still writes weights, or tells a tracker of the end, when the others have ended.
FAIL_BEHIND_A_SLOW_CHECKPOINT = (
    SHORTER_TIMES
    + """
import time
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run import checkpoint_writer
make_step, save = Trainer.step, checkpoint_writer.checkpoint_files.save_checkpoint
def step(self, batch):
    if self.run.steps_done == 7:
        print("fails", flush=True)
        raise ERROR
    make_step(self, batch)
def save_slowly(*arguments):
    time.sleep(12)
    save(*arguments)
Trainer.step, checkpoint_writer.checkpoint_files.save_checkpoint = step, save_slowly
from thermopile.tools.cli import main
main()
"""
)


@dataclass(frozen=True, eq=False)
class Scene:
    """Ranks, and what happens to them once they have joined."""

    codes: list[str]
    play: Callable = lambda ranks, folder: None
    """Called with the ranks and a folder of their own."""
    arguments: tuple[str, ...] = ("50", "{folder}/done")
    said: str = "joined"


def played(scene, ranks, folder):
    for rank in ranks:
        wait_until(lambda rank=rank: rank.has_said(scene.said), ranks)
    scene.play(ranks, folder)
    return ranks


def wait_until(condition, ranks):
    while not condition():
        # One may have left in order already, and one that failed ends the others.
        assert any(rank.is_running() for rank in ranks), [rank.end() for rank in ranks]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def scenes(request, start_ranks, pairs_dataset, tmp_path_factory):
    """The scenes of all tests that run, played at once: they spend their time waiting."""
    begun = {}
    for item in request.session.items:
        scene = item.path == request.path and getattr(item, "callspec", None) and item.callspec.params.get("ranks")
        if scene:
            folder = tmp_path_factory.mktemp("scene")
            arguments = [word.format(folder=folder, data=pairs_dataset.path) for word in scene.arguments]
            begun[scene] = start_ranks(len(scene.codes), *arguments, codes=scene.codes), folder
    with ThreadPoolExecutor(len(begun)) as threads:
        yield {scene: threads.submit(played, scene, *begun[scene]) for scene in begun}


@pytest.fixture
def ranks(request, scenes):
    """The ranks of a scene, to which all has happened."""
    return scenes[request.param].result()


def after(*scenes):
    """Give a test the ranks of each scene in turn."""
    return pytest.mark.parametrize("ranks", scenes, indirect=True)


def send(number, rank):
    return lambda ranks, folder: ranks[rank].send(number)


def pause(seconds, *paused):
    def play(ranks, folder):
        for number in (SIGSTOP, SIGCONT):
            for rank in paused:
                ranks[rank].send(number)
            time.sleep(seconds)
        (folder / "done").touch()

    return play


def assert_end_in_order(ranks):
    for code, _, errors in (rank.end() for rank in ranks):
        assert code == 0, errors
        assert "lost" not in errors  # torch says there how long it took to connect on a busy machine


def assert_ends_naming(rank, lost, pid):
    code, _, errors = rank.end()
    assert code == 1, errors
    assert errors.splitlines() == [f"Error: lost rank {lost} ({socket.gethostname()}, process {pid}); see its messages"]


@pytest.mark.parametrize(
    ("ranks", "lost"),
    [
        pytest.param(
            Scene([WAIT_FOR_EVER] * 3, send(SIGKILL, 0)), 0, id="killed_holding_the_store", marks=pytest.mark.wide
        ),
        pytest.param(
            Scene([WAIT_FOR_EVER, FORK_AND_WAIT, WAIT_FOR_EVER], send(SIGKILL, 1), ("1000000", "{folder}/done")),
            1,
            marks=pytest.mark.wide,
            id="killed_and_never_silent",  # nor missed on the network, where its child goes on
        ),
        pytest.param(
            Scene([WAIT_FOR_EVER] * 3, send(SIGSTOP, 0)), 0, id="stopped_holding_the_store", marks=pytest.mark.soak
        ),
        pytest.param(Scene([WAIT_FOR_EVER] * 3, send(SIGSTOP, 1)), 1, id="stopped", marks=pytest.mark.wide),
    ],
    indirect=["ranks"],
)
def test_ranks_that_wait_for_ever_end_by_the_name_of_one_that_is_killed_or_hangs(ranks, lost):
    for rank in (ranks[2], ranks[1 - lost]):
        assert_ends_naming(rank, lost, ranks[lost].pid)
    ranks[lost].end(within=0)


@after(Scene([TALK_FOR_EVER] * 3, send(SIGKILL, 1)))
def test_ranks_that_notice_by_themselves_say_so_once(ranks):
    for rank in (ranks[0], ranks[2]):
        assert_ends_naming(rank, 1, ranks[1].pid)


@after(Scene([WAIT_FOR_EVER, FAIL]))
def test_a_rank_that_fails_ends_those_that_wait_for_it_and_reports_its_own_error(ranks):
    code, _, errors = ranks[1].end()
    assert code == 1
    assert errors.splitlines()[-1] == "ValueError: its own error"
    assert_ends_naming(ranks[0], 1, ranks[1].pid)


PATIENT = ("300", "{folder}/done")


@after(
    pytest.param(Scene([WAIT_FOR_FILE] * 2, pause(3, 0), PATIENT), id="the_store_for_less_than_the_limit"),
    pytest.param(
        Scene([WAIT_FOR_FILE] * 2, pause(3, 1), PATIENT), id="another_for_less_than_the_limit", marks=pytest.mark.soak
    ),
    pytest.param(Scene([WAIT_FOR_FILE] * 2, pause(9, 0, 1)), id="all_for_longer", marks=pytest.mark.wide),
)
def test_a_pause_ends_nobody(ranks):
    assert_end_in_order(ranks)


def work_on(rank):
    def play(ranks, folder):
        time.sleep(12)  # twice the silence that is suspicious
        assert ranks[rank].is_running(), ranks[rank].end()
        (folder / "done").touch()

    return play


@after(
    pytest.param(Scene([LEAVE, WAIT_FOR_FILE], work_on(1)), id="holding_the_store"),
    pytest.param(Scene([WAIT_FOR_FILE, LEAVE], work_on(0)), id="another", marks=pytest.mark.wide),
)
def test_a_rank_that_leaves_in_order_does_not_end_one_that_works_on(ranks):
    assert_end_in_order(ranks)


def kill_2_once_1_has_left(ranks, folder):
    assert ranks[1].end()[0] == 0
    ranks[2].kill()


@after(Scene([WAIT_FOR_EVER, LEAVE, WAIT_FOR_EVER], kill_2_once_1_has_left))
def test_a_rank_behind_one_that_left_in_order_is_still_listened_to(ranks):
    assert_ends_naming(ranks[0], 2, ranks[2].pid)


@after(Scene([LEAVE, WAIT_FOR_EVER], send(SIGKILL, 1)))
def test_a_rank_that_is_done_does_not_wait_for_one_that_is_lost(ranks):
    assert_ends_naming(ranks[0], 1, ranks[1].pid)


def test_a_rank_that_cannot_reach_rank_0_says_where_it_tried(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    public = HashStore()
    public.set("thermopile", f"127.0.0.1 {port} secret")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(meeting, "MEETING_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(RanksLostError, match=rf"^rank 1 cannot reach rank 0 at 127.0.0.1:{port}: .*firewall"):
        meeting.meet(public, 1, 2)


def kill_1_behind_a_checkpoint(ranks, folder):
    wait_until(lambda: latest_checkpoint(folder / "run" / "checkpoints"), ranks)
    ranks[1].kill()


TRAIN = (
    "train", "--data", "{data}", "--out", "{folder}/run",
    "--set", "batch_size=128", "--set", "data.image_size=16", "--set", "checkpoint.every_steps=5",
)  # fmt: skip


@after(Scene([TRAIN_UNTIL_STEP_8] * 2, kill_1_behind_a_checkpoint, TRAIN, said="waits"))
def test_training_that_waits_for_a_lost_rank_ends_by_its_name_step_and_checkpoint(ranks):
    code, _, errors = ranks[0].end()
    assert code == 1, errors
    assert errors.count("lost rank") == 1
    last, checkpoint = errors.splitlines()[-1].split("--resume continues from the last checkpoint, ")
    assert last == (
        f"Error: lost rank 1 ({socket.gethostname()}, process {ranks[1].pid}) at step 8; see its messages. "
    )
    assert checkpoint.endswith("/run/checkpoints/step-5")
    assert Path(checkpoint).is_dir()


def fail_with(error):
    return Scene([FAIL_BEHIND_A_SLOW_CHECKPOINT.replace("ERROR", error)] * 2, arguments=TRAIN, said="fails")


@after(
    pytest.param(fail_with("OSError('on all ranks')"), id="and_closes", marks=pytest.mark.wide),
    pytest.param(fail_with("self.run.not_finite(7, 'on all ranks')"), id="and_names_the_samples"),
)
def test_a_rank_that_fails_as_the_others_do_writes_its_checkpoint_after_they_have_ended(ranks):
    for code, _, errors in (rank.end() for rank in ranks):
        assert code == 1, errors
        assert "on all ranks" in errors.splitlines()[-1]
        assert "lost" not in errors


@pytest.mark.gpu(count=2)
def test_a_rank_killed_while_it_trains_on_a_gpu_ends_the_other_within_two_minutes(start_ranks, pairs_dataset, tmp_path):
    run, settings = RunDirectory(tmp_path / "run"), ("batch_size=256", "data.image_size=32", "data.loader=ffcv")
    options = sets(*settings, "epochs=1000", "log_every=1")
    ranks = start_ranks(2, "train", "--data", pairs_dataset.path, "--out", run.path, *options)
    wait_for(run, 20, ranks)
    ranks[1].kill()
    code, _, errors = ranks[0].end(within=120)
    assert code == 1, errors
    assert f"lost rank 1 ({socket.gethostname()}, process {ranks[1].pid}) at step " in errors.splitlines()[-1]
