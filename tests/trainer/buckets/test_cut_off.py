"""A process that writes a run in a bucket is cut off in a request, which arrives late; another takes the run over."""

import json
import os
import time

import pytest

from thermopile.state_store.durable import list_snapshots
from thermopile.storage.bucket import SCRATCH
from thermopile.trainer.checkpoints.checkpoint_files import checkpoints_in
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.runs import SMALL, assert_same_state, assert_same_weights, losses

pytestmark = pytest.mark.wide

REQUESTS = {
    "settings": "^PUT .*/config.toml",
    "lock": "^PUT .*/state.lock",
    "rows": "^PUT .*/state/chunks/",
    "snapshot": "^PUT .*/state/snapshots/",
    "reference": "^PUT .*/state/refs/",
    "index": "^PUT .*/state/thermopile.json",
    "log": "^PUT .*/metrics/",
    "tensors": "^PUT .*/tensors.safetensors",
    "seal": "^PUT .*/checkpoint.json",
    "latest": "^PUT .*/checkpoints/latest",
    "listing": "^GET .*list-type=2.*checkpoints",
    "old checkpoints": r"^POST .*delete.*\n.*checkpoints/step",
    "old states": r"^POST .*delete.*\n.*state/",
}
"""What a writer asks of a bucket: expressions for the gateway."""

REFUSALS = ("another process has begun to write this state", "is being written by")
"""What ends the writer that was replaced or comes second."""
AT_THE_START = (*REFUSALS, "AWS_ENDPOINT_URL", "holds a run; continue it with --resume")
"""The start of a run gives up after 150 s without its store, and beside settings that arrived late."""

PATIENCE = """
from thermopile.storage import bucket
from thermopile.storage import bucket_lock
from thermopile.trainer.run import checkpoint_writer
bucket.PATIENCE_SECONDS, bucket.REQUEST_SECONDS, checkpoint_writer.RETRY_SECONDS = 150 / {0}, 30 / {0}, 60 / {0}
bucket_lock.BEAT_SECONDS, bucket_lock.LEASE_SECONDS, bucket_lock.SILENT_SECONDS = 10 / {0}, 25 / {0}, 60 / {0}
from thermopile.tools.cli import main
main()
"""
"""The program, with all times divided."""

REAL = [
    pytest.param(name, healed, 1, ranks, marks=pytest.mark.soak)
    for name in REQUESTS for healed in (30, 61, 140, 300) for ranks in (1, 2)
]  # fmt: skip
OFTEN = ("settings", "lock", "rows", "seal")
"""Whose answers differ most; the others are for `make soak`."""
SHORT = [
    # Who lets a lock go tries for 150 s: of a fifteenth, 140 would leave less than a busy machine may take.
    pytest.param(
        name, 140 if place % 2 and name != "lock" else 61, 15, 2 if name in ("rows", "seal") else 1,
        marks=[] if name in OFTEN else pytest.mark.soak,
    )
    for place, name in enumerate(REQUESTS)
]  # fmt: skip


def start(start_ranks, run, data, machine, endpoint, faster, ranks=1):
    """Start `ranks` processes that write a run, each as on the same machine."""
    settings = sets("checkpoint.every_steps=2", *SMALL)
    arguments = ["train", "--out", run.path, "--data", data.path, "--resume", *settings]
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    variables |= {"AWS_ENDPOINT_URL": endpoint, SCRATCH: str(machine)}
    code = f"os.environ |= {variables}\n{PATIENCE.format(faster)}"
    return start_ranks(ranks, *arguments, codes=[code] * ranks)


def ended(programs):
    """Rank 0's exit code, and what all ranks said; one that ends for another's wrong usage has failed itself."""
    ends = [program.end(within=1500) for program in programs]
    codes = [code for code, _, _ in ends]
    assert all(codes) or not any(codes), ends
    return codes[0], "".join(errors for _, _, errors in ends)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("request_", "healed", "faster", "ranks"), [*SHORT, *REAL])
def test_one_of_two_writers_ends_the_run_as_if_alone_and_the_other_ends_with_a_line(
    pairs_dataset, run, whole, start_ranks, tmp_path, s3, request_, healed, faster, ranks
):
    if ranks > 1:  # sums of floats over two ranks are others
        whole = RunDirectory(tmp_path / "whole")
        code, said = ended(start(start_ranks, whole, pairs_dataset, tmp_path, s3.url, faster, ranks))
        assert code == 0, said
    with s3.gateway() as gateway:
        gateway.cut_off(REQUESTS[request_], healed / faster, skip=0 if request_ == "settings" else 2)
        first = start(start_ranks, run, pairs_dataset, tmp_path / "first", gateway.url, faster, ranks)
        while first[0].is_running() and not gateway.stats()["outages"]:
            time.sleep(0.05)
        assert gateway.stats()["outages"], ended(first)
        second = start(start_ranks, run, pairs_dataset, tmp_path / "second", s3.url, faster, ranks)
        ends = [ended(second), ended(first)]
        time.sleep(0.5)  # the late request may be the last
    refused = [errors for code, errors in ends if code]
    if request_ == "settings" and len(refused) == 2:  # the second found the first one's settings, which arrived late
        assert ended(start(start_ranks, run, pairs_dataset, tmp_path / "third", s3.url, faster, ranks))[0] == 0
        assert "holds a run; continue it with --resume" in refused.pop(0)
    if request_ != "lock" or refused:  # a lock may be cut off as it is let go: then the run was whole
        (said,) = refused
        assert any(words in said for words in (AT_THE_START if request_ == "settings" else REFUSALS)), said
    assert log_of(run) == losses(whole)
    assert_same_weights(run, whole)
    assert_same_state(run, whole)
    # What seals a checkpoint may arrive after the run's last retention: then an old one is whole beside these.
    assert sorted(checkpoints_in(run.checkpoints))[-2:] == [12, 14]
    assert request_ == "seal" or len(checkpoints_in(run.checkpoints)) == 2
    steps = [snapshot.step for snapshot in list_snapshots(run.state)]
    assert steps[-2:] == [12, 14]
    # Of the early ones, a writer that waits for its store leaves some out, and the first after them are kept.
    assert steps[0] == 0
    assert len(steps) <= 7


AWAY = [
    pytest.param("index", 15, marks=pytest.mark.soak),
    *(pytest.param(name, 1, marks=pytest.mark.soak) for name in REQUESTS if name != "settings"),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("request_", "faster"), [("seal", 15), *AWAY])
def test_a_store_that_is_away_for_ten_minutes_ends_no_run(
    pairs_dataset, run, whole, start_ranks, tmp_path, s3, request_, faster
):
    with s3.gateway() as gateway:
        gateway.cut_off(REQUESTS[request_], 600 / faster, skip=2)
        code, errors = ended(start(start_ranks, run, pairs_dataset, tmp_path / "only", gateway.url, faster))
        assert gateway.stats()["outages"] == 1
    assert code == 0, errors
    assert log_of(run) == losses(whole)
    assert_same_weights(run, whole)
    assert_same_state(run, whole)


def log_of(run):
    """Losses by step, as a machine without local files reads them."""
    log = RunDirectory(run.path).metrics.opened()
    return {line["step"]: line["loss"] for line in map(json.loads, log.read(0, log.size).splitlines())}
