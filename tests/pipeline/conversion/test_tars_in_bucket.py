"""Tars in an object store: how much of them is read, and processes that begin at the same moment."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from thermopile.pipeline.conversion.conversion import ConvertSettings
from thermopile.pipeline.sources.splits import Drawn
from thermopile.pipeline.sources.webdataset import WebDatasetSource
from thermopile.storage.bucket import Address

from support.cli import succeed
from support.conversions import convert_part, digests, finish, in_this_process, many_shards
from support.tars import HeldSample, drawn, write_shard

pytestmark = pytest.mark.wide
SETTINGS = ConvertSettings(vocab_size=300, context_length=8)
TARS, SAMPLED = 8, 400_000


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    many_shards(monkeypatch, rows=10)
    monkeypatch.setattr("thermopile.pipeline.sources.webdataset.SAMPLED_BYTES", SAMPLED)
    monkeypatch.setattr("thermopile.pipeline.sources.webdataset.SAMPLED_TAR_BYTES", SAMPLED // 2)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Eighty samples in eight tars, five megabytes for the most part of members that nobody wants."""
    root = tmp_path_factory.mktemp("tars") / "in"
    root.mkdir()
    for tar in range(TARS):
        write_shard(root / f"{tar}.tar", drawn(range(10 * tar, 10 * tar + 10), bin=os.urandom(60_000)))
    return root


@pytest.fixture(scope="module")
def remote(s3, local):
    for path in local.iterdir():
        Address("bucket", f"tars/{path.name}").write(path)
    return Address("bucket", "tars")


@pytest.fixture(scope="module")
def size(local):
    return sum(path.stat().st_size for path in local.iterdir())


def part(tars, out, number, count, **options):
    source = WebDatasetSource([tars])
    return convert_part(source, out, SETTINGS, number, count, pool=in_this_process, **options)


def all_parts(tars, out, count, **options):
    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(part, tars, out, number, count, **options) for number in range(1, count + 1)]:
            done.result()
    return finish(WebDatasetSource([tars]), out, SETTINGS, selection=options.get("selection"))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("rule", "passes"), [(None, 1), (Drawn(None, 5, 0), 2)])
def test_tars_are_read_once_and_a_second_time_for_a_long_tail_by_however_many_parts(
    local, remote, size, tmp_path, s3, count, rule, passes
):
    with s3.gateway() as gateway:
        index = all_parts(remote, tmp_path / "far", count, selection=rule).index
        stats = gateway.stats()
    assert stats["bytes"] <= 1.02 * passes * size + SAMPLED + 100_000  # headers and listings
    assert stats["requests"] <= passes * 3 * TARS + 2 * (count + 1)
    assert index.n == 80 if rule is None else 20 < index.n < 80
    all_parts(local, tmp_path / "near", 1, selection=rule)
    shards = [{name: found for name, found in digests(tmp_path / out).items() if name.startswith("shards/")}
              for out in ("far", "near")]  # fmt: skip
    assert shards[0] == shards[1]


def test_parts_with_a_test_set_read_the_tars_three_times(remote, size, tmp_path, s3):
    with s3.gateway() as gateway:
        for last in (["--part", "1/2"], ["--part", "2/2"], ["--finish"]):
            succeed("convert", "webdataset", remote, tmp_path / "out", "--holdout", 16, *last, "--workers", 2)
        stats = gateway.stats()
    assert stats["bytes"] <= 1.02 * 3 * size + SAMPLED + 100_000
    assert stats["requests"] <= 3 * 3 * TARS + 6


@pytest.mark.parametrize("count", [1, 3])
def test_a_dataset_in_a_bucket_is_the_local_one_whoever_begins(local, remote, s3, tmp_path, request, count):
    out = Address("bucket", request.node.name) / "out"
    all_parts(local, tmp_path / "whole", 1)
    all_parts(remote, out, count)
    found = {name: (out / name).read_bytes() for name, _, _ in out.listing()}
    near = {str(path.relative_to(tmp_path / "whole")): path.read_bytes()
            for path in (tmp_path / "whole").rglob("*") if path.is_file()}  # fmt: skip
    assert found.keys() == near.keys()
    assert all(found[name] == near[name] for name in near if name != "dataset.json")  # which names the source's root


def test_a_part_waits_for_the_one_that_begins_and_reads_no_sample_itself(remote, s3, tmp_path, request, monkeypatch):
    out, held = Address("bucket", request.node.name) / "out", HeldSample(monkeypatch)
    monkeypatch.setattr("thermopile.storage.bucket_lock.BEAT_SECONDS", 1.0)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(part, remote, out, 1, 2, tell=held.tell)
        assert held.begun.wait(30)
        second = threads.submit(part, remote, out, 2, 2, tell=held.tell)
        assert max(first.result().shards_done, second.result().shards_done) == 8
    assert len(held.sampled) == len(set(held.sampled))
    assert held.was_awaited()
    assert finish(WebDatasetSource([remote]), out, SETTINGS).index.n == 80


def test_a_process_killed_while_it_began_does_not_keep_others_from_beginning(remote, s3, tmp_path, request):
    out = Address("bucket", request.node.name) / "out"
    (out / ".partial" / "begin.lock").write(b"free " + b"0" * 32 + b"\n")
    all_parts(remote, out, 1)
    assert (out / "dataset.json").exists()
    assert not (out / ".partial" / "begin.lock").exists()
