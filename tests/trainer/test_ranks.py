"""Several ranks train one run: as one process does, killed or not, and with another number of them after each stop."""

import re
import shutil
import signal
import socket
import time
from datetime import timedelta
from functools import partial
from itertools import cycle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.state_store.reader import StateReader
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint
from thermopile.trainer.config import load_config
from thermopile.trainer.errors import ConfigError, RanksLostError
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory
from thermopile.trainer.world import World, joined_world

from support.cli import sets
from support.datasets import named_ids
from support.runs import MOMENTUM, OWN_CODE, PRACTICE, assert_same_run, finish, kill, lines, losses, wait_for

SETTINGS = (
    "batch_size=128", "log_every=1", "data.image_size=16", "model.dim=16", "model.image.config.width=4",
    "checkpoint.every_steps=5", "order.canonical_shards=4",
    "on_nan=skip",  # changes nothing where all is finite, and makes the ranks agree on that at every step
)  # fmt: skip


KEYS = ("model.momentum=0.9",)


@pytest.fixture(scope="module")
def start(start_ranks, pairs_dataset):
    """Return a function that starts each rank of a small run."""

    def start(run, world, epochs=2, last_rank=(), more_settings=(), data=pairs_dataset, code=None):
        settings = sets(*SETTINGS, f"epochs={epochs}", *more_settings)
        command = ("train", "--data", data.path, "--out", run.path, "--resume", *settings)
        return start_ranks(world, *command, last_rank=last_rank, codes=code and [code] * world)

    return start


def gradient_norms(run):
    return [line["gradient_norm"] for line in lines(run)]


@pytest.fixture(scope="module")
def alone(start, tmp_path_factory):
    run = RunDirectory(tmp_path_factory.mktemp("alone") / "run")
    finish(start(run, 1))
    return run


@pytest.fixture(scope="module")
def two_ranks(start, tmp_path_factory):
    run = RunDirectory(tmp_path_factory.mktemp("two") / "run")
    finish(start(run, 2))
    return run


def assert_close(given, expected, steps):
    assert [given[step] for step in steps] == pytest.approx([expected[step] for step in steps], rel=1e-4)


@pytest.mark.wide
def test_two_ranks_train_as_one_process_does(alone, two_ranks):
    assert losses(two_ranks).keys() == losses(alone).keys() == set(range(1, 31))
    assert_close(losses(two_ranks), losses(alone), range(1, 21))
    one, two = StateReader.open(alone.state), StateReader.open(two_ranks.state)
    np.testing.assert_array_equal(two.column("visits"), one.column("visits"))
    np.testing.assert_array_equal(two.column("last_step"), one.column("last_step"))
    np.testing.assert_allclose(two.column("image/tau"), one.column("image/tau"), rtol=1e-2)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("of_rank_1", "said"),
    [
        (("--set", "optimizer.lr=0.002", "--data", "{pairs}"),  # one more: a mixture
         ["the ranks differ: rank 1 has dataset fingerprint = ", "rank 1 has dataset samples = 4000, rank 0 2000",
          "rank 1 has optimizer.lr = 0.002, rank 0 0.001"]),
        (("--data", "{other}/nowhere"), ["Directory '{other}/nowhere' does not exist"]),
        (("--init-from", "{other}"), ["the ranks differ: rank 1 has init.run = '{other}', rank 0 ''"]),
    ],
)  # fmt: skip
def test_ranks_started_differently_end_before_a_step_and_say_which_and_how(
    start, tmp_path, images_dataset, pairs_dataset, of_rank_1, said
):
    run, other = RunDirectory(tmp_path / "run"), images_dataset.path
    ranks = start(run, 2, last_rank=[word.format(other=other, pairs=pairs_dataset.path) for word in of_rank_1])
    for code, _, errors in (rank.end(within=60) for rank in ranks):
        assert code == 2, errors
        for words in said:
            assert words.format(other=other) in errors.splitlines()[-1]
    assert not run.path.exists()


OPEN_A_RUN = """
import thermopile
with thermopile.joined_world() as world:
    thermopile.Run.from_settings("unused", sys.argv[1], {"init": {"run": sys.argv[2]}}, world=world)
"""


@pytest.mark.wide
def test_all_ranks_of_a_users_program_say_that_init_from_cannot_be_read(start_ranks, pairs_dataset, tmp_path):
    ranks = start_ranks(2, pairs_dataset.path, tmp_path, codes=[OPEN_A_RUN] * 2)
    for code, _, errors in (rank.end(within=60) for rank in ranks):
        assert code == 1, errors
        assert f"--init-from {tmp_path}: {tmp_path} is not a run" in errors.splitlines()[-1]


CORES_OF_A_RANK = """
import os
import thermopile
mask = {*range(12)} if sys.argv[1] == "free" else {2 * int(os.environ["RANK"]), 2 * int(os.environ["RANK"]) + 1}
os.sched_getaffinity = lambda process: mask
with thermopile.joined_world() as world:
    print(world.cores)
"""


@pytest.mark.wide
@pytest.mark.parametrize(("binding", "cores"), [("free", 6), ("bound", 2)])
def test_each_rank_has_its_share_of_the_cores_that_it_may_use(start_ranks, binding, cores):
    ranks = start_ranks(2, binding, codes=[CORES_OF_A_RANK] * 2)
    assert [rank.end(within=60)[:2] for rank in ranks] == [(0, f"{cores}\n")] * 2


IMPATIENT = """
from thermopile.tools.cli import main
from thermopile.storage import local
from thermopile.trainer import heartbeats
local.SEEN_WITHIN_SECONDS, heartbeats.SCAN_SECONDS = 0.5, 3.0
main()
"""
"""Waits less for what does not come."""


@pytest.mark.wide
@pytest.mark.parametrize("resumed", [False, True])
def test_ranks_that_do_not_share_the_run_directory_end_before_a_step_and_say_so(start, two_ranks, tmp_path, resumed):
    run, elsewhere = RunDirectory(tmp_path / "runs" / "run"), tmp_path / "elsewhere"
    if resumed:
        for folder in (run.path, elsewhere):
            shutil.copytree(two_ranks.path, folder)
    ranks = start(run, 2, last_rank=["--out", elsewhere], code=IMPATIENT)
    for code, _, errors in (rank.end(within=60) for rank in ranks):
        assert code == 2, errors
        assert re.search(
            r"^Error: rank 1 \(on .*\) cannot see files that rank 0 \(on .*\) writes in its run directory, .*: "
            "set --out to a directory on a disk that all machines share$",
            errors.splitlines()[-1],
        )
    assert resumed or list(tmp_path.iterdir()) == []
    assert not list(run.path.glob(".*"))


@pytest.mark.wide
def test_all_ranks_go_back_behind_a_snapshot_that_is_damaged_in_the_rows_of_one(two_ranks, start, tmp_path):
    run = RunDirectory(shutil.copytree(two_ranks.path, tmp_path / "run"))
    newest = max((run.state / "chunks").iterdir(), key=lambda chunk: chunk.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:10])
    (_, errors), _ = finish(start(run, 2))
    assert f"the state of {run.checkpoints / 'step-30'} is damaged" in errors
    assert "Resuming from step-25" in errors
    assert losses(run) == losses(two_ranks)


ONE_READER = """
import os
from thermopile.tools.cli import main
from thermopile.trainer.checkpoints import checkpoint_files
if os.environ["RANK"] != "0":
    checkpoint_files.load_checkpoint = None
main()
"""


@pytest.mark.wide
def test_one_rank_reads_the_checkpoint_for_all(two_ranks, start, tmp_path):
    run = RunDirectory(shutil.copytree(two_ranks.path, tmp_path / "run"))
    shutil.rmtree(run.checkpoints / "step-30")
    finish(start(run, 2, code=ONE_READER))
    assert_same_run(run, two_ranks)


COMMAND_LINE = """
from thermopile.tools.cli import main
main()
"""

LOOKED_FOR = """
import os
from thermopile.tools.cli import main
run, missed = os.path.abspath(sys.argv[sys.argv.index("--out") + 1]), []
def noting(call):
    def noted(path, *arguments, **named):
        try:
            return call(path, *arguments, **named)
        except FileNotFoundError:
            missed.append(os.path.abspath(path))
            raise
    return noted
os.stat, os.lstat, os.open = map(noting, (os.stat, os.lstat, os.open))
try:
    main()
finally:
    there = {name for name in [*missed] if name.startswith(run) and os.path.exists(name)}
    if os.environ["RANK"] != "0":
        print("looked for too early:", sorted(os.path.relpath(name, run) for name in there))
"""


@pytest.mark.wide
def test_no_rank_but_the_first_looks_for_a_file_of_a_new_run_before_it_is_there(start, tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()  # a network disk remembers that a file of a folder is missing, or that the folder is
    _, (said, _) = finish(start(run, 2, epochs=1, code=LOOKED_FOR))
    assert "looked for too early: []" in said


@pytest.mark.wide
def test_working_files_go_to_a_disk_of_each_machine_where_one_is_named(start, tmp_path):
    code = f"import os; os.environ['THERMOPILE_SCRATCH'] = {str(tmp_path / 'scratch')!r}" + COMMAND_LINE
    few, run = (
        ("order.blocks_per_shard=8", "order.window_blocks=2", "state.memory_budget=20KB"),
        RunDirectory(tmp_path / "run"),
    )
    ranks = start(run, 2, more_settings=few, code=code)
    wait_for(run, 3, ranks)
    assert {path.name for path in (tmp_path / "scratch").glob("run-*/state.working/*")} == {"rank-0", "rank-1"}
    assert not run.state_working.exists()
    finish(ranks)
    assert not list((tmp_path / "scratch").glob("run-*/state.working"))


SLOW_DISK = """
import time
from datetime import timedelta
from thermopile.tools.cli import main
from thermopile.trainer import world
from thermopile.trainer.run import checkpoint_writer
world.TIMEOUT, save = timedelta(seconds=20), checkpoint_writer.checkpoint_files.save_checkpoint
checkpoint_writer.checkpoint_files.save_checkpoint = lambda *arguments: (time.sleep(30), save(*arguments))
main()
"""


@pytest.mark.wide
def test_ranks_wait_for_a_disk_that_takes_longer_than_a_rank_may_be_silent(start, tmp_path):
    run = RunDirectory(tmp_path / "run")
    finish(start(run, 2, epochs=1, more_settings=("checkpoint.every_steps=0",), code=SLOW_DISK))
    assert latest_checkpoint(run.checkpoints).name == "step-15"


@pytest.mark.wide
def test_a_rank_that_dies_ends_the_run_by_name_and_it_resumes_with_the_same_losses(two_ranks, start, tmp_path):
    run = RunDirectory(tmp_path / "run")
    ranks = start(run, 2, code=IMPATIENT)
    wait_for(run, 12, ranks)
    ranks[1].kill()
    code, _, errors = ranks[0].end(within=30)
    assert code == 1
    last = errors.splitlines()[-1]
    assert "rank 1 (" in last
    assert f"process {ranks[1].pid}) at step" in last
    assert f"--resume continues from the last checkpoint, {latest_checkpoint(run.checkpoints)}" in last
    finish(start(run, 2))
    assert_same_run(run, two_ranks)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dataset", "epochs", "more"),
    [
        pytest.param("pairs_dataset", 2, MOMENTUM, id="momentum and crops"),
        pytest.param("pairs_dataset", 2, PRACTICE, id="clipped and locked", marks=pytest.mark.soak),
        pytest.param("pairs_dataset", 2, ("micro_batch=16",), id="pieces"),
        pytest.param("pairs_dataset", 2, OWN_CODE, id="own code", marks=pytest.mark.soak),
        # 4 steps an epoch: the checkpoint, of step 10, is within one.
        pytest.param("captions_dataset", 5, (), id="captions drawn", marks=pytest.mark.soak),
    ],
)
def test_two_ranks_killed_and_resumed_are_those_never_killed(start, tmp_path, request, dataset, epochs, more):
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    start = partial(start, world=2, epochs=epochs, more_settings=more, data=request.getfixturevalue(dataset))
    finish(start(whole))
    ranks = start(broken)
    wait_for(broken, 12, ranks)
    kill(ranks)
    finish(start(broken))
    assert_same_run(broken, whole)


IN_WINDOWS_AND_PIECES = ("order.blocks_per_shard=8", "order.window_blocks=2", "micro_batch=32")


def by_one_and_by_two_also_killed(start, folder, more, for_killed=()):
    """The run of one rank and that of two, which is also what two become that are killed and resumed."""
    one, two, broken = (RunDirectory(folder / name) for name in ("one", "two", "broken"))
    finish(start(one, 1, more_settings=more))
    finish(start(two, 2, more_settings=more))
    ranks = start(broken, 2, more_settings=(*more, *for_killed))
    wait_for(broken, 12, ranks)
    kill(ranks)
    finish(start(broken, 2, more_settings=(*more, *for_killed)))
    assert_same_run(broken, two)
    assert_close(losses(two), losses(one), range(1, 19))
    return one, two


@pytest.mark.wide
def test_ranks_on_selected_samples_with_few_rows_killed_and_resumed_lose_nothing(start, tmp_path):
    kept = np.concatenate([np.arange(3, 900), np.arange(900, 1_990, 3)])
    pq.write_table(pa.table({"sample_id": kept, "weight": kept % 5}), tmp_path / "kept.parquet")
    file = tmp_path / "kept.parquet"
    more = (f"data.select={file}", f"data.weights={file}", *IN_WINDOWS_AND_PIECES)
    for run in by_one_and_by_two_also_killed(start, tmp_path, more, ("state.memory_budget=15KB",)):
        visits = StateReader.open(run.state).column("visits")
        assert visits.sum() == 18 * 128
        assert set(np.flatnonzero(visits)) <= set(kept)


@pytest.mark.wide
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="pairs"),
        pytest.param((*KEYS, "objective.mode=unimodal", "data.loader=ffcv"), id="keys", marks=pytest.mark.soak),
    ],
)
def test_ranks_whose_shares_differ_by_holes_train_as_one_does_also_killed_and_resumed(
    start, pairs_dataset, tmp_path, more
):
    gone = np.random.default_rng(0).permutation(2_000)[:500]
    pq.write_table(named_ids(pairs_dataset, gone), tmp_path / "gone.parquet")
    more = (f"data.without={tmp_path / 'gone.parquet'}", *IN_WINDOWS_AND_PIECES, *more)
    for run in by_one_and_by_two_also_killed(start, tmp_path, more):
        visits = StateReader.open(run.state).stored("visits")[:]
        assert not visits[gone].any()
        assert visits.sum() > 0.7 * 30 * 128


@pytest.mark.wide
@pytest.mark.parametrize(
    "more",
    [
        (*KEYS, "objective.name=moco_v3", "data.local_views=1", "data.local_size=8"),
        (*KEYS, "objective.name=isogclr", "objective.mode=unimodal", "micro_batch=32"),
        OWN_CODE,
        ("model.text.locked=true", "model.text.unlocked_groups=1"),
    ],
)
def test_two_ranks_that_clip_gradients_train_as_one_process_does(start, tmp_path, more):
    one, two = RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "two")
    for run, world in ((one, 1), (two, 2)):
        finish(start(run, world, epochs=1, more_settings=(*more, "optimizer.grad_clip_norm=0.5")))
    assert_close(losses(two), losses(one), range(1, 16))
    assert gradient_norms(two) == pytest.approx(gradient_norms(one), rel=1e-3)


@pytest.mark.wide
@pytest.mark.parametrize(
    "stops", [pytest.param([(2, 12)], id="2 ranks", marks=pytest.mark.soak), pytest.param([(2, 7), (4, 18)], id="4")]
)
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_with_more_and_with_fewer(alone, start, tmp_path, stops):
    run = RunDirectory(tmp_path / "run")
    for world, steps in stops:
        ranks = start(run, world)
        wait_for(run, steps, ranks)
        ranks[-1].send(signal.SIGTERM)
        ends = [rank.end() for rank in ranks]
        assert [code for code, *_ in ends] == [75] * world, ends
        stopped_at = len(losses(run))
        assert f"stopped at step {stopped_at:,} by a signal to another rank, checkpoint written" in ends[0][1]
        assert_close(losses(run), losses(alone), range(1, stopped_at + 1))
    finish(start(run, 1))
    assert_close(losses(run), losses(alone), range(1, 31))


@pytest.mark.soak
def test_four_ranks_stopped_and_resumed_have_the_losses_of_a_run_never_stopped(start, tmp_path):
    # With two, any order of a sum gives the same bits.
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    finish(start(whole, 4))
    ranks = start(broken, 4)
    wait_for(broken, 12, ranks)
    ranks[0].send(signal.SIGTERM)
    assert [rank.end()[0] for rank in ranks] == [75] * 4
    finish(start(broken, 4))
    assert losses(broken) == losses(whole)


@pytest.mark.soak
def test_two_ranks_killed_60_times_with_all_or_few_rows_in_memory_lose_nothing(start, tmp_path):
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    order = ("order.blocks_per_shard=8", "order.window_blocks=2")
    budgets = cycle([(*order, "state.memory_budget=20KB"), order])
    finish(start(whole, 2, epochs=20, more_settings=order))
    draw, steps = np.random.default_rng(0), 0
    for _ in range(60):
        ranks = start(broken, 2, epochs=20, more_settings=next(budgets))
        steps += int(draw.integers(1, 5))
        wait_for(broken, steps, ranks)
        time.sleep(draw.uniform(0, 0.2))
        kill(draw.permutation(ranks))
    finish(start(broken, 2, epochs=20, more_settings=next(budgets)))
    assert losses(broken) == losses(whole)
    assert len(losses(whole)) == 300


def test_a_number_of_ranks_that_does_not_divide_the_orders_shards_is_refused(pairs_dataset):
    config = load_config({"batch_size": 128, "data": {"path": str(pairs_dataset.path), "image_size": 32}})
    with pytest.raises(ConfigError, match="world 3 does not divide canonical_shards 8"):
        resolve(config, pairs_dataset, World(rank=0, size=3))[0]


def test_a_memory_budget_is_a_ranks_own(pairs_dataset):
    tree = {"batch_size": 128, "data": {"path": str(pairs_dataset.path)}, "state": {"memory_budget": "40KB"}}
    alone, shared = (resolve(load_config(tree), pairs_dataset, World(size=size))[0] for size in (1, 2))
    assert (
        alone.order.window_blocks / alone.order.blocks_per_shard
        < shared.order.window_blocks / shared.order.blocks_per_shard
    )


def test_a_launcher_that_says_how_many_but_not_who_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but RANK, .* is not set; start the ranks with torchrun"):
        joined_world().__enter__()


@pytest.mark.wide
def test_a_rank_whose_others_never_come_says_how_many_came(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launched = {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("thermopile.trainer.world.MEETING_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(
        RanksLostError, match=rf"rank 0 could not join all .* 1/2 clients joined\. .* 127.0.0.1:{port}$"
    ):
        joined_world().__enter__()


def test_a_run_of_one_process_needs_no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_world() as world:
        assert (world.rank, world.size, world.is_first) == (0, 1, True)
        assert world.control.all_gather([3, 4]) == [[3, 4]]
