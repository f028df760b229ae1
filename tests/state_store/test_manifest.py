from contextlib import suppress

import icechunk
import numpy as np
import pytest
import zarr
from numcodecs.zstd import Zstd

from thermopile.state_store.manifest import chunk_refs


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """An icechunk repository with arrays of 7 chunks in files, of 3 in the manifest, and of none."""
    path = tmp_path_factory.mktemp("icechunk")
    session = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path))).writable_session("main")
    group = zarr.create_group(session.store)
    for name, rows, chunk, written in (("large", 7_000, 1_000, 7_000), ("small", 30, 10, 25), ("empty", 10, 10, 0)):
        array = group.create_array(name, shape=(rows,), chunks=(chunk,), dtype="float32", compressors=None)
        array[:written] = np.arange(1, written + 1)
    session.commit("seven and three")
    return path


def test_all_chunks_are_counted_and_those_that_are_files_are_named(repository):
    found = [chunk_refs(file.read_bytes()) for file in (repository / "manifests").iterdir()]
    assert sorted((total, len(files)) for total, files in found) == [(3, 0), (7, 7)]
    assert set.union(*(files for _, files in found)) == {file.name for file in (repository / "chunks").iterdir()}


def test_what_is_no_manifest_is_refused(repository):
    manifest = next((repository / "manifests").iterdir()).read_bytes()
    snapshot = next((repository / "snapshots").iterdir()).read_bytes()
    later_version = manifest[:36] + b"\x02" + manifest[37:]
    for data in (b"", b"ICE", snapshot, later_version, manifest[:39], manifest[:-4], manifest[:39] + b"no zstd"):
        with pytest.raises(ValueError, match="manifest"):
            chunk_refs(data)


def test_damage_behind_the_compression_never_reads_beyond_the_buffer(repository):
    random = np.random.default_rng(0)
    manifest = max((repository / "manifests").iterdir(), key=lambda file: file.stat().st_size).read_bytes()
    content = np.frombuffer(Zstd().decode(manifest[39:]), np.uint8)
    for _ in range(300):
        damaged = content.copy()
        damaged[random.integers(len(content))] ^= 1 << random.integers(8)
        with suppress(ValueError):
            chunk_refs(manifest[:39] + Zstd().encode(damaged))
