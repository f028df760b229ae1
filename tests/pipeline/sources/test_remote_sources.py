"""Sources in an object store: their samples are those of the same files on disk."""

import pickle
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.errors import BadSampleError, SourceChangedError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.dataset_source import DatasetSource
from thermopile.pipeline.sources.source_file import SourceFile
from thermopile.pipeline.sources.webdataset import WebDatasetSource
from thermopile.storage import bucket
from thermopile.storage.bucket import Address
from thermopile.storage.bucket_errors import ObjectStoreError
from thermopile.tools.convert_sources import KINDS

from support.cli import succeed
from support.conversions import dataset_of
from support.kinds import OPEN, PICTURES, write
from support.pictures import as_bytes, draw
from support.tars import reads_of, samples_of

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pictures, and lists, archives and tables of them; beside it, a dataset of them."""
    root, jpegs = tmp_path_factory.mktemp("far") / "files", [as_bytes(draw(i), "JPEG") for i in range(PICTURES)]
    for make, _ in OPEN.values():
        for name, data in make(jpegs, "claws").items():
            write(root / name, data)
    dataset_of(CsvSource(root / "list.csv"), root.with_name("dataset"))
    return root


@pytest.fixture(scope="module")
def remote(s3, files):
    """The same files below an address, and the dataset beside it."""
    for path in files.parent.rglob("*"):
        if path.is_file():
            Address("bucket", str(path.relative_to(files.parent))).write(path)
    return Address("bucket", "files")


SOURCES = {kind: opened for kind, (_, opened) in OPEN.items()}
SOURCES["dataset"] = lambda root: DatasetSource(root.with_name("dataset"))


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind != "webdataset"])
def test_a_remote_source_has_the_samples_of_the_local_one(kind, files, remote):
    local, far = (SOURCES[kind](root) for root in (files, remote))
    assert len(far) == len(local) == PICTURES
    assert [far[i] for i in range(PICTURES)] == [local[i] for i in range(PICTURES)]
    assert far.describe() | {"root": 0, "file": 0} == local.describe() | {"root": 0, "file": 0}
    assert list(far.captions(np.arange(PICTURES))) == list(local.captions(np.arange(PICTURES)))


def test_remote_tars_have_the_samples_of_the_local_ones(files, remote):
    local, far = (SOURCES["webdataset"](root) for root in (files, remote))
    assert samples_of(far) == samples_of(local)
    assert reads_of(far) == reads_of(local)
    assert len(samples_of(far)) == PICTURES
    assert far.describe() | {"root": 0} == local.describe() | {"root": 0}
    assert far.sampled(0) == local.sampled(0)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_remote_source_is_converted_by_workers_to_the_same_pixels(kind, files, remote, tmp_path, s3):
    with s3.gateway(failing=0.05):
        convert(SOURCES[kind](remote), tmp_path / "far", ConvertSettings(), workers=2)
    dataset_of(SOURCES[kind](files), tmp_path / "near")
    for name in ("shard-00000.beton", "shard-00000.rows"):
        assert (tmp_path / "far" / "shards" / name).read_bytes() == (tmp_path / "near" / "shards" / name).read_bytes()


def test_files_below_an_address_are_found_by_their_suffix(remote):
    (parquet,) = (kind for kind in KINDS if kind.name == "parquet")
    (source,) = parquet.open([remote], image="image", caption="caption", group=None)
    assert source.files == (remote / "0.parquet", remote / "1.parquet")


def test_a_local_list_may_name_pictures_by_their_addresses(tmp_path, files, remote):
    (tmp_path / "list.csv").write_text(f"filepath,title\n{remote}/pictures/00.jpg,a cat\n")
    source = CsvSource(tmp_path / "list.csv")
    assert source[0].picture == (files / "pictures" / "00.jpg").read_bytes()


def test_a_missing_object_is_a_bad_sample_and_a_store_that_is_away_is_not(tmp_path, remote, s3, monkeypatch):
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 0.3)
    rows = [f"{remote}/none.jpg,x", "s3://bucket/../x,x", f"{remote}/list.csv,x"]
    (tmp_path / "list.csv").write_text("\n".join(["filepath,title", *rows]) + "\n")
    source = CsvSource(tmp_path / "list.csv")
    for index, reason in enumerate(["does not exist", "not the name of an object"]):
        with pytest.raises(BadSampleError, match=reason):
            source[index]
    with s3.gateway() as gateway:
        gateway.stop()
        with pytest.raises(ObjectStoreError):
            source[2]


@pytest.mark.parametrize("content", [b"other" * 200_000, b"short"])
def test_an_object_that_is_replaced_while_it_is_read_is_refused(remote, content):
    (remote / "replaced").write(b"whole" * 200_000)
    file = SourceFile(remote / "replaced")
    assert file.read(0, 5) == b"whole"
    elsewhere = pickle.loads(pickle.dumps(file))
    (remote / "replaced").write(content)
    for each, at in ((file, 900_000), (elsewhere, 0)):
        with pytest.raises(SourceChangedError, match=f"^{remote}/replaced was changed"):
            each.read(at, 5)


def test_some_samples_of_a_remote_dataset_become_a_local_one(files, remote, tmp_path):
    pq.write_table(pa.table({"sample_id": [3, 5, 8]}), tmp_path / "kept.parquet")
    arguments = ["convert", "dataset", "s3://bucket/dataset", tmp_path / "out", "--select", tmp_path / "kept.parquet"]
    succeed(*arguments)
    kept, whole = Dataset(tmp_path / "out"), Dataset(files.with_name("dataset"))
    assert {kept.jpeg(i) for i in range(3)} == {whole.jpeg(i) for i in (3, 5, 8)}


class _Denying(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(403)

    do_HEAD = do_GET  # noqa: N815  the name is http.server's

    def log_message(self, *arguments):
        pass


@pytest.fixture
def denying(monkeypatch):
    """An address in a store that refuses access, as once credentials have expired."""
    with HTTPServer(("127.0.0.1", 0), _Denying) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield Address("denying-bucket", "files")
        server.shutdown()


def test_a_store_that_refuses_access_makes_no_bad_samples(tmp_path, denying, remote):
    (tmp_path / "list.csv").write_text(f"filepath,title\n{denying}/pictures/00.jpg,a cat\n")
    with pytest.raises(PermissionError, match="access denied"):
        CsvSource(tmp_path / "list.csv")[0]
    with pytest.raises(PermissionError, match="access denied"):
        WebDatasetSource([denying / "0.tar"])
