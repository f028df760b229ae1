"""What a conversion of each source writes, byte by byte, however it is interrupted, divided or stored.

`tests/data/conversions.json` holds the sha256 of every file and the plan's digest; remove a case there, or the file, to
write it anew. Each way of converting must give what the case says, so the ways agree with each other too.

Left out is what depends on the machine: the paths of the sources, and how pyarrow writes a table, whose rows count in
place of its bytes. JPEGs count byte by byte. Pillow's libjpeg-turbo encodes them with integers, alike on every CPU, and
glyphs are drawn by its FreeType: another Pillow, numpy or tokenizers may need new digests.
"""

import hashlib
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import MemoryStore
from PIL import Image

from thermopile.pipeline.conversion.plan import Plan
from thermopile.storage import bucket
from thermopile.storage.bucket import SCRATCH, Address
from thermopile.storage.local import LocalPath
from thermopile.storage.sealed_json import unseal

from support.cli import cli, succeed
from support.conversions import in_this_process, many_shards
from support.pictures import as_bytes, draw
from support.tars import write_members

GOLDEN = Path(__file__).parents[2] / "data" / "conversions.json"
POOL = "thermopile.tools.convert.processes"
MOMENTS = [pytest.param(each, marks=pytest.mark.wide if each < 3 else pytest.mark.soak) for each in range(10)]
"""Interruptions of each case at random samples."""


# The sources, a few samples each. Every sixth picture is a JPEG on its side and every third a PNG, which are encoded
# again.


def picture(number):
    if number % 3 == 0:
        return "png", as_bytes(draw(number), "PNG")
    exif = Image.Exif()
    if number % 6 == 1:
        exif[0x0112] = 6
    return "jpg", as_bytes(draw(number), "JPEG", exif=exif)


def folder(root, numbers):
    for number in numbers:
        suffix, data = picture(number)
        path = root / f"class{number % 3}" / f"{number:02}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def csv(root, numbers, end="\n", more=""):
    root.mkdir(parents=True)
    rows = ["filepath,title,class"]
    for number in numbers:
        suffix, data = picture(number)
        (root / f"{number:02}.{suffix}").write_bytes(data)
        rows.append(f"{number:02}.{suffix},picture {number} of a few,class {number % 3}")
    (root / "list.csv").write_bytes((end.join(rows) + end + more).encode())


QUOTED = (
    '00.png,"quotes ""here"", a comma,\r\nand a second line",class 0\r\n\r\n01.jpg,5" pipe,\r\n02.jpg,"big" dog,class 9'
    "\r\ntoo,few\r\n03.png, ,class 1\r\ngone.jpg,nothing,class 1\r\n04.jpg,caf\u00e9,class 1\r\none,too,many,here\r\n"
)


def parquet(root, numbers):
    root.mkdir(parents=True)
    halves = np.array_split(np.array(numbers), 2)
    for part, half in enumerate(halves):
        rows = {
            "image": [{"bytes": picture(number)[1], "path": None} for number in half.tolist()],
            "caption": [[f"picture {number}", "a few words"][: 1 + number % 2] for number in half.tolist()],
            "label": [f"class {number % 3}" if number % 4 else None for number in half.tolist()],
        }
        pq.write_table(pa.table(rows), root / f"{part}.parquet", row_group_size=3, write_statistics=False)


def tars(root, numbers, cut=0):
    root.mkdir(parents=True)
    for tar, half in enumerate(np.array_split(np.array(numbers), 2)):
        members = []
        for number in half.tolist():
            suffix, data = picture(number)
            members += [(f"{number:02}.{suffix}", data), (f"{number:02}.txt", b"picture %d\nfew words" % number),
                        (f"{number:02}.cls", b"%d" % (number % 3))]  # fmt: skip
        path = write_members(root / f"{tar}-{members[0][0][:2]}.tar", *members)
        path.write_bytes(path.read_bytes()[: -cut or None])
        os.utime(path, (1e9, 1e9))


def karpathy(root):
    root.mkdir()
    images = []
    for number in range(24):
        suffix, data = picture(number)
        (root / "pictures").mkdir(exist_ok=True)
        (root / "pictures" / f"{number:02}.{suffix}").write_bytes(data)
        captions = [f"picture {number}", "a few words"][: 1 + number % 2]
        images.append({"filepath": "pictures", "filename": f"{number:02}.{suffix}",
                       "split": ("train", "val", "restval", "test")[number % 4],
                       "sentences": [{"raw": caption} for caption in captions]})  # fmt: skip
    (root / "dataset.json").write_text(json.dumps({"images": images}))


def arrays(root):
    root.mkdir()
    pixels = np.stack([np.asarray(draw(number)) for number in range(24)])
    np.savez(root / "pictures.npz", images=pixels, labels=np.arange(24) % 3)
    for half in range(2):
        np.save(root / f"images-{half}.npy", pixels[12 * half :][:12])
        np.save(root / f"labels-{half}.npy", np.arange(12) % 3)


def cifar(root):
    root.mkdir()
    (root / "batches.meta.txt").write_text("cat\ndog\ncow\n")
    for name in [*(f"data_batch_{tenth}.bin" for tenth in range(1, 6)), "test_batch.bin"]:
        pixels = np.random.default_rng(len(name)).integers(0, 256, (4, 3072), np.uint8)
        np.hstack([np.array([[0], [1], [2], [1]], np.uint8), pixels]).tofile(root / name)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    for make, name in ((folder, "folder"), (csv, "csv"), (parquet, "parquet"), (tars, "tars")):
        make(root / name, range(24))
        make(root / f"{name}-more", range(24, 32))
    shutil.copytree(root / "folder", root / "folder-bad")
    (root / "folder-bad" / "class1" / "empty.png").touch()
    (root / "folder-bad" / "none.jpg").write_bytes(b"no picture")
    csv(root / "csv-quotes", range(8), "\r\n", QUOTED)
    tars(root / "tars-bad", range(24), cut=3_000)
    for make in (cifar, karpathy, arrays):
        make(root / make.__name__)
    pq.write_table(pa.table({"sample_id": [id for id in range(24) if id % 3]}), root / "kept.parquet")
    return root


# The cases: the words of `thermopile convert`, of which OUT is left out; IN stands for the folder of the sources.

CSV, TARS, ALL = ("--group", "class"), ("--seed", "3"), ("--max-error-rate", "1")
CASES = {
    "folder": (["folder", "IN/folder"], []),
    "folder-holdout": (["folder", "IN/folder"], ["--holdout", "6", "--longtail", "2", "--seed", "5"]),
    "folder-bad": (["folder", "IN/folder-bad"], ["--max-size", "16", "--quality", "70", *ALL]),
    "csv": (["csv", "IN/csv/list.csv"], [*CSV]),
    "csv-images": (["csv", "IN/csv/list.csv"], ["--caption", ""]),
    "csv-holdout": (["csv", "IN/csv/list.csv"], [*CSV, "--holdout", "0.25"]),
    "csv-quotes": (["csv", "IN/csv-quotes/list.csv"], [*CSV, *ALL, "--vocab-size", "300", "--context-length", "8"]),
    "parquet": (["parquet", "IN/parquet"], []),
    "parquet-holdout": (["parquet", "IN/parquet"], ["--holdout", "6"]),
    "tars": (["webdataset", "IN/tars"], [*TARS]),
    "tars-images": (["webdataset", "IN/tars"], ["--caption", "", "--group", ""]),
    "tars-holdout": (["webdataset", "IN/tars"], ["--holdout", "6", "--longtail", "2"]),
    "tars-bad": (["webdataset", "IN/tars-bad"], [*ALL]),
    "tars-in-place": (["webdataset", "IN/tars"], ["--in-place"]),
    "cifar": (["cifar", "IN/cifar"], []),
    "karpathy": (["karpathy", "IN/karpathy/dataset.json"], []),
    "arrays": (["arrays", "IN/arrays/pictures.npz"], []),
    "arrays-holdout": (["arrays", "IN/arrays/images-0.npy", "IN/arrays/labels-0.npy"], ["--holdout", "3"]),
    "dataset": (["dataset", "IN/converted"], ["--select", "IN/kept.parquet"]),
    "glyphs": (["glyphs"], []),
    "glyphs-altered": (["glyphs"], ["--swap", "0.2", "--duplicate", "0.1", "--seed", "7"]),
    "own": (["own_source:Discs", "24"], ["--holdout", "6"]),
}
OFTEN = ("csv-quotes", "folder-holdout", "tars-in-place")
"""Cases that are converted in every way whenever tests are run, not only in wide ones."""
APPENDED = {
    "folder": [["folder", "IN/folder"], ["folder", "IN/folder-more"]],
    "csv": [["csv", "IN/csv/list.csv"], ["csv", "IN/csv-more/list.csv"]],
    "parquet": [["parquet", "IN/parquet"], ["parquet", "IN/parquet-more"]],
    "arrays": [["arrays", *(f"IN/arrays/{name}-{half}.npy" for name in ("images", "labels"))] for half in range(2)],
    "tars": [["webdataset", "IN/tars"], ["webdataset", "IN/tars-more"]],
    "tars-in-place": [["webdataset", "IN/tars/0-00.tar", "--in-place"],
                      ["webdataset", "IN/tars/1-12.tar", "--in-place"]],
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_and_anywhere(monkeypatch, sources):
    """Cut the sources into shards of five samples, write them here, and let digests be of /golden."""
    many_shards(monkeypatch, rows=5)
    monkeypatch.setattr(POOL, lambda workers: in_this_process)
    monkeypatch.setattr("thermopile.tools.convert.start_workers_early", lambda: None)
    monkeypatch.setattr("thermopile.pipeline.sources.glyphs.LARGEST_CLASS", 1)
    monkeypatch.setattr("thermopile.pipeline.sources.glyphs.IMBALANCE", 1)
    monkeypatch.setattr("thermopile.pipeline.sources.glyphs.TEST_PER_CLASS", 1)
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    digest = Plan.digest
    monkeypatch.setattr(
        Plan,
        "digest",
        lambda plan: digest(Plan.model_validate_json(plan.model_dump_json().replace(str(sources), "/golden"))),
    )


@pytest.fixture
def converted(sources):
    if not (sources / "converted").exists():
        convert(sources, CASES["parquet"], sources / "converted")
    return sources


def convert(sources, case, out, *last):
    succeed("convert", *words(sources, case, out), *last)


def words(sources, case, out):
    source, options = ([word.replace("IN/", f"{sources}/") for word in some] for some in case)
    return [*source, out, *options]


# What was written.


def written(out, sources):
    """The sha256 of each file of a dataset, and the digest of its plan, as golden conversions have them."""
    files = (
        {name: (out / name).read_bytes() for name, _, _ in out.listing()}
        if isinstance(out, Address)
        else {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    )
    files["errors.jsonl"] = files["errors.jsonl"].replace(str(sources).encode(), b"/golden")
    index = json.loads(json.dumps(unseal(files["dataset.json"])).replace(str(sources), "/golden"))
    for shard, digests in enumerate(index.pop("shard_digests")):
        name = index.get("shards", [f"{number:05}" for number in range(shard + 1)])[shard]
        assert digests == {suffix: sha256(files[f"shards/shard-{name}.{suffix}"]) for suffix in digests}
    del index["fingerprint"]
    kept = {name: sha256(data) for name, data in files.items() if not name.endswith((".parquet", "dataset.json"))}
    tables = {name: table_digest(data) for name, data in files.items() if name.endswith(".parquet")}
    return kept | tables | {"dataset.json": sha256(json.dumps(index).encode()), "plan": index["source"]["plan"]}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def table_digest(data):
    table = pq.read_table(io.BytesIO(data))
    return sha256(repr((str(table.schema), table.to_pylist())).encode())


def is_golden(name, sources, out):
    """Assert that a dataset, and its test set if it has one, are as the file of digests says."""
    found = {"out": written(out, sources)}
    if (out.with_name("out-test") / "dataset.json").is_present():
        found["out-test"] = written(out.with_name("out-test"), sources)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if name not in golden:
        GOLDEN.write_text(json.dumps(dict(sorted((golden | {name: found}).items())), indent=1, sort_keys=True) + "\n")
        pytest.fail(f"{name} was written anew; look at the difference")
    assert found == golden[name]


# The ways of converting.


@pytest.fixture
def out(request, tmp_path, monkeypatch):
    """OUT: a folder, or an address in a store that obstore keeps in memory."""
    if request.node.callspec.params.get("way") != "store":
        return LocalPath(tmp_path / "out")
    store = MemoryStore()
    monkeypatch.setattr(bucket, "_store", lambda bucket, repeats=0: store)
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    return Address("bucket", "golden/out")


def interrupt(sources, case, out, monkeypatch, seed):
    """Begin a conversion, and interrupt it at a sample."""
    left = int(np.random.default_rng(seed).integers(1, 16))

    def pool(job, parts, counted, on_progress):
        from thermopile.pipeline.conversion.shard_pool import writer_of
        from thermopile.pipeline.conversion.shard_writer import write_part

        def count(more):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

        for part, work in parts:
            write_part(part, work, writer_of(job, count))

    with monkeypatch.context() as patch:
        patch.setattr(POOL, lambda workers: pool)
        assert cli("convert", *words(sources, case, out)).exit_code == 1


PARTS = [["--part", "2/2"], ["--part", "1/2"], ["--finish"]]
WAYS = {"whole": [[]], "parts": PARTS, "store": PARTS, "resumed": [["--resume"]]}
"""The last words of the commands that convert."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if way == "whole" or name in OFTEN else pytest.mark.wide)
        for way in WAYS
        for name in CASES
    ],
)
def test_a_source_gives_the_golden_dataset_however_it_is_converted(name, way, converted, out, monkeypatch):
    if way == "resumed":
        interrupt(converted, CASES[name], out, monkeypatch, len(name))
    for last in WAYS[way]:
        convert(converted, CASES[name], out, *last)
    is_golden(name, converted, out)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_same_whenever_it_is_interrupted(name, moment, converted, out, monkeypatch):
    interrupt(converted, CASES[name], out, monkeypatch, 100 + moment)
    convert(converted, CASES[name], out, "--resume")
    is_golden(name, converted, out)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.wide) for name in APPENDED]
)
def test_samples_that_are_appended_give_the_golden_dataset(name, converted, out):
    for case in APPENDED[name]:
        convert(converted, (case, []), out, *(["--append"] if out.exists() else []))
    is_golden(f"{name}-append", converted, out)
