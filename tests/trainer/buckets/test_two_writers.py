"""A model of a writer that was cut off and of its successor: the first one's requests arrive at any later moment.

Both run the code that writes a run's index, settings, log and checkpoints, against a store in memory whose versions are
digests, as S3's are: an object that is written back has its old version again. The first writer ends at any of its
requests; that request, and a copy of any one before it, arrive before any request of the second that could notice.
"""

import dataclasses
import hashlib
from contextlib import suppress
from datetime import UTC, datetime
from itertools import product
from types import SimpleNamespace

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError

from thermopile.state_store import history
from thermopile.state_store.durable import Repository
from thermopile.state_store.errors import StoreLockedError
from thermopile.state_store.history import History, Snapshot
from thermopile.state_store.schema import Description, Schema
from thermopile.storage import bucket as addresses
from thermopile.storage.bucket import Address
from thermopile.storage.bucket_log import BucketLog, LogPart, PartsReader
from thermopile.trainer.checkpoints import checkpoint_files
from thermopile.trainer.checkpoints.checkpoint_files import CheckpointInfo, checkpoints_in, remove_checkpoints
from thermopile.trainer.checkpoints.checkpoint_files import save_checkpoint as save

RUN = Address("bucket", "run")
STEPS = 4
DESCRIPTION = Description(4, Schema({"tau": 0.1}), 4, "glyphs")


pytestmark = pytest.mark.wide


class CutOffError(Exception):
    """The first writer is cut off in this request."""


class Bucket:
    """Objects in memory, and the functions of obstore that read and write them."""

    def __init__(self):
        self.held = {}

    def head(self, store, key):
        if key not in self.held:
            raise FileNotFoundError(key)
        return {"path": key, "size": len(self.held[key]), "e_tag": hashlib.md5(self.held[key]).hexdigest()}

    def get(self, store, key, *, options=None):
        meta, data = self.head(store, key), self.held[key]
        start, end = (options or {}).get("range", (0, len(data)))
        return SimpleNamespace(meta=meta, bytes=lambda: data[start:end])

    def put(self, store, key, data, *, mode="overwrite", use_multipart=None):
        there = self.head(store, key)["e_tag"] if key in self.held else None
        if mode == "create" and there is not None:
            raise AlreadyExistsError(key)
        if isinstance(mode, dict) and there != mode["e_tag"]:
            raise PreconditionError(key)
        self.held[key] = bytes(data)
        return self.head(store, key)

    def delete(self, store, keys):
        for key in [keys] if isinstance(keys, str) else keys:
            self.held.pop(key, None)

    def list(self, store, prefix, *, offset, chunk_size):
        found = [self.head(store, key) for key in sorted(self.held) if key.startswith(prefix) and key > (offset or "")]
        return iter([found]) if found else iter([])


class Lease:
    """What a writer's requests are made under, in the order in which they are made."""

    def __init__(self, term, ends_at=None):
        self.term, self.requests, self._ends_at, self.late = term, [], ends_at, {}

    def confirm(self, seconds):
        if self._ends_at is not None and len(self.requests) > self._ends_at:
            raise StoreLockedError("another process has begun to write")

    def made(self, address, operation):
        """Count a request and answer it; what arrives late arrives before it."""
        number = len(self.requests)
        self.requests.append((address.key, operation))
        for late in self.late.get(number, ()):
            arrive(late)
        if number == self._ends_at:
            raise CutOffError
        return operation()

    def end(self):
        """Refuse all further requests."""
        self._ends_at = -1


def arrive(operation):
    with suppress(OSError, AlreadyExistsError, PreconditionError, StoreLockedError):  # nobody waits for the answer
        operation()


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    bucket = Bucket()
    for verb in ("head", "get", "put", "delete", "list"):
        monkeypatch.setattr(obstore, verb, getattr(bucket, verb))
    monkeypatch.setattr(addresses, "_store", lambda bucket, repeats=0: None)
    # Only those of a writer are counted; `_repeated` itself confirms the lease first.
    repeated = Address._repeated

    def counted(address, operation, *arguments):
        if address.lease is None:
            return operation()
        return repeated(address, lambda: address.lease.made(address, operation), *arguments)

    monkeypatch.setattr(Address, "_repeated", counted)

    def quick(building, info, training):
        """What checkpoint_files._write leaves on this machine, without flushing."""
        (building / "tensors.safetensors").write_bytes(b"tensors of step %d" % info.step)
        (building / "training.json").write_bytes(b"{}")
        (building / "checkpoint.json").write_bytes(info.model_dump_json().encode())

    monkeypatch.setattr(checkpoint_files, "_write", quick)
    return bucket


def snapshot(step, term):
    name = hashlib.sha256(f"{step}/{term}".encode()).hexdigest()[:20].upper()
    return Snapshot(name, step, 0, "", datetime(2026, 1, 1, tzinfo=UTC), "glyphs", 0, {f"snapshots/{name}": "0" * 64})


def replaced(state, term, change):
    """Replace the index's snapshots, as its writer."""
    before, _ = history.load(state)
    history.replace(
        state, dataclasses.replace(before, snapshots=tuple(change(before.snapshots)), writer=term.ljust(32, "0"))
    )


def train(lease, folder, steps=STEPS):
    """Begin where the newest checkpoint with a state is, and write what a run writes until it ends."""
    run, term = dataclasses.replace(RUN, lease=lease), lease.term
    state, folders = run / "state", run / "checkpoints"
    folder.mkdir(exist_ok=True)
    log = folder / "metrics.jsonl"
    if not state.holds(history.INDEX):
        history.replace(state, History(DESCRIPTION, (snapshot(0, ""),), term.ljust(32, "0")))
    repository = Repository(state, term.ljust(32, "0"))
    repository.repair()
    snapshots = {each.step: each for each in history.load(state)[0].snapshots}
    newest_first = sorted(checkpoints_in(folders).items(), reverse=True)
    start = next((step for step, path in newest_first if step in snapshots and info(path) == snapshots[step].id), 0)
    repository.undo_after(snapshots[start])
    parts = BucketLog(run / "metrics", log)
    parts.begin(resuming=True, exactly=True)
    if log.exists():
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[: 2 * start]))
    parts.settle()
    (run / "config.toml").rewrite(f"settings of {term}".encode())
    for step in range(start + 1, steps + 1):
        with log.open("ab") as lines:
            lines.write(b"first of step %d\nsecond of step %d\n" % (step, step))
        replaced(state, term, lambda before, step=step: [*before, snapshot(step, term)])
        parts.put()
        found = CheckpointInfo(step=step, snapshot=snapshot(step, term).id, order_version=1, dataset_fingerprint="",
                               settings={})  # fmt: skip
        save(folders, found, {})
        remove_checkpoints(folders, keep={step, max(1, step - 1)})
        replaced(state, term, lambda before, step=step: [each for each in before if each.step in (0, step - 1, step)])


def info(path):
    """The snapshot that a checkpoint names."""
    return CheckpointInfo.model_validate_json((path / "checkpoint.json").read_bytes()).snapshot


def seen(term):
    """What readers find, but for the terms in names."""
    log, found = PartsReader(RUN / "metrics"), checkpoints_in(RUN / "checkpoints")
    return {
        "log": log.read(0, log.size),
        "checkpoints": {step: (path / "tensors.safetensors").read_bytes() for step, path in found.items()},
        "states": {info(path) for path in found.values()} <= {
            each.id for each in history.load(RUN / "state")[0].snapshots
        },
        "writer": history.load(RUN / "state")[0].writer == term.ljust(32, "0"),
        "latest": (RUN / "checkpoints/latest").read_bytes().decode().strip() == found[max(found)].name,
        "settings": (RUN / "config.toml").read_bytes() == f"settings of {term}".encode(),
    }  # fmt: skip


def test_whatever_a_writer_that_was_cut_off_sent_its_successor_ends_as_if_alone(bucket, tmp_path):
    train(Lease("00000001"), tmp_path / "alone")
    alone = seen("00000001")
    assert alone == dict.fromkeys(alone, True) | {
        "log": b"".join(b"first of step %d\nsecond of step %d\n" % (step, step) for step in range(1, STEPS + 1)),
        "checkpoints": {step: b"tensors of step %d" % step for step in (STEPS - 1, STEPS)},
    }
    bucket.held.clear()
    train(whole := Lease("00000001"), tmp_path / "whole", STEPS - 1)
    tried = 0
    for ends_at in range(len(whole.requests)):
        bucket.held.clear()
        first = Lease("00000001", ends_at)
        with pytest.raises(CutOffError):
            train(first, fresh(tmp_path, f"first-{ends_at}"), STEPS - 1)
        with pytest.raises(StoreLockedError):
            (dataclasses.replace(RUN, lease=first) / "config.toml").read_bytes()
        left = dict(bucket.held)
        undisturbed = Lease("00000002")
        train(undisturbed, fresh(tmp_path, f"undisturbed-{ends_at}"))
        assert seen("00000002") == alone, f"cut off in request {ends_at}"
        for late in {ends_at, *range(max(0, ends_at - 2), ends_at)}:
            key, operation = first.requests[late]
            for before in moments(key, undisturbed):
                bucket.held.clear()
                bucket.held.update(left)
                second = Lease("00000002")
                second.late[before] = [operation]
                train(second, fresh(tmp_path, "second"))
                if before == len(undisturbed.requests):
                    arrive(operation)
                assert seen("00000002") == alone, f"request {late} of {ends_at} arrived before request {before}: {key}"
                tried += 1
    assert tried > 500


def fresh(tmp_path, name):
    for file in (tmp_path / name).glob("*") if (tmp_path / name).exists() else ():
        file.unlink()
    return tmp_path / name


def moments(key, lease):
    """The numbers of the requests before which one for this key makes a difference: those for it, and listings."""
    touching = [number for number, (other, _) in enumerate(lease.requests)
                if other == key or key.startswith(f"{other}/") or other.startswith(f"{key}/")]  # fmt: skip
    return [*touching, len(lease.requests)]


def point(run, file):
    (run / "latest").rewrite(run.lease.term.encode())


def record(run, file):
    (run / "config.toml").rewrite(f"settings of {run.lease.term}".encode())


def put(run, file):
    """Lines after one that both writers have; a part that is merged makes the one before it unneeded."""
    parts = BucketLog(run / "metrics", file)
    parts._parts, parts._unneeded = [LogPart(0, 4, "00000000-000000000000000-000000000000004.part")], []
    file.write_bytes(b"one\n" + f"two of {run.lease.term}\n".encode())
    parts.put()


def announce(run, file):
    replaced(run / "state", run.lease.term, lambda before: [before[0], snapshot(1, run.lease.term)])


def prune(run, file):
    remove_checkpoints(run / "checkpoints", keep={3})


SHORT = (point, record, put, announce, prune)
"""What takes at most three requests."""


def done(work, term):
    """Whether readers see what a writer of this term did."""
    seals = [name for name, _, _ in (RUN / "checkpoints").listing()]
    return {
        point: lambda: (RUN / "latest").read_bytes() == term.encode(),
        record: lambda: (RUN / "config.toml").read_bytes() == f"settings of {term}".encode(),
        put: lambda: PartsReader(RUN / "metrics").read(0, 99) == f"one\ntwo of {term}\n".encode(),
        announce: lambda: history.load(RUN / "state")[0].snapshots[-1].id == snapshot(1, term).id,
        prune: lambda: seals == [f"step-{step}.00000000/checkpoint.json" for step in (3, 9)],
    }[work]()


def begun(bucket, lease):
    """A run as the later writer finds it, with what it writes first: its name into the index."""
    run = dataclasses.replace(RUN, lease=lease)
    Repository(run / "state", lease.term.ljust(32, "0")).repair()
    return run


@pytest.mark.parametrize("later", SHORT)
@pytest.mark.parametrize("earlier", SHORT)
def test_the_requests_of_two_writers_in_every_order(bucket, tmp_path, earlier, later):
    for name, data in {
        "latest": b"step-0",
        "config.toml": b"first",
        "metrics/00000000-000000000000000-000000000000004.part": b"one\n",
    }.items():
        bucket.held[f"run/{name}"] = data
    for step in (2, 3, 9):
        bucket.held[f"run/checkpoints/step-{step}.00000000/checkpoint.json"] = b""
    history.replace(RUN / "state", History(DESCRIPTION, (snapshot(0, ""),), "0" * 32))
    begun(bucket, Lease("00000001"))
    start = dict(bucket.held)
    whole = Lease("00000001")
    earlier(dataclasses.replace(RUN, lease=whole), tmp_path / "earlier")
    assert 1 <= len(whole.requests) <= 4
    for ends_at in range(len(whole.requests) + 1):
        bucket.held = dict(start)
        first = Lease("00000001", ends_at)
        with suppress(CutOffError):
            earlier(dataclasses.replace(RUN, lease=first), tmp_path / "earlier")
        first.end()
        left, sent = dict(bucket.held), [operation for _, operation in first.requests]
        begun(bucket, Lease("00000002"))
        later(dataclasses.replace(RUN, lease=(alone := Lease("00000002"))), tmp_path / "later")
        assert done(later, "00000002")
        moments = [None, *range(len(alone.requests) + 1)]
        for arrivals in product(moments, repeat=len(sent)):
            bucket.held = dict(left)
            second = Lease("00000002")
            begun(bucket, Lease("00000002"))
            for number in sorted({each for each in arrivals if each is not None}):
                second.late[number] = [sent[place] for place, at in enumerate(arrivals) if at == number]
            later(dataclasses.replace(RUN, lease=second), tmp_path / "later")
            for operation in second.late.get(len(alone.requests), ()):
                arrive(operation)
            assert done(later, "00000002"), f"{ends_at}: {arrivals}"
