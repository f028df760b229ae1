"""`hf://datasets/org/name`: its Parquet files are fetched once, and the dataset says at which revision."""

from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.errors import SourceError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.parquet import ParquetSource, fetched
from thermopile.storage.local import LocalPath
from thermopile.tools.convert_sources import kind_named

from support.hub import SHA, hub_of, run_with
from support.pictures import draw

ADDRESS = "hf://datasets/someone/pairs"


@pytest.fixture
def hub(tmp_path):
    """A data set of two splits, 20 and 3 pairs; each row's caption names its split."""
    folder = tmp_path / "published"
    for split, count in (("train", 20), ("test", 3)):
        pictures = []
        for number in range(count):
            file = BytesIO()
            draw(number).save(file, "JPEG")
            pictures.append(file.getvalue())
        (folder / "data").mkdir(parents=True, exist_ok=True)
        table = pa.table({"image": pictures, "caption": [f"picture {i} of {split}" for i in range(count)]})
        pq.write_table(table, folder / f"data/{split}-00000-of-00001.parquet")
    (folder / "pairs.py").write_text("raise SystemExit")
    with hub_of(folder, "datasets/someone/pairs", tmp_path / "cache") as server:
        yield server


@pytest.mark.wide
def test_the_files_of_a_path_are_fetched_once_and_the_dataset_names_their_revision(hub, tmp_path):
    done = run_with(hub, "convert", "parquet", f"{ADDRESS}/data/train-", tmp_path / "train")
    assert done.returncode == 0, done.stderr
    assert {name for name in hub.asked if "." in name} == {"train-00000-of-00001.parquet"}
    train = Dataset(tmp_path / "train")
    assert train.index.source["root"] == f"{ADDRESS}@{SHA}/data"
    assert sorted(train.column("caption").to_pylist()) == sorted(f"picture {i} of train" for i in range(20))

    done = run_with(hub, "convert", "parquet", f"{ADDRESS}@v1.0", tmp_path / "all")  # besides what the cache has now
    assert done.returncode == 0, done.stderr
    assert hub.revisions == ["main", "v1.0"]
    assert Dataset(tmp_path / "all").n == 23
    assert "pairs.py" not in hub.asked

    hub.asked.clear()
    again = "parquet", f"{train.index.source['root']}/train-*"
    done = run_with(hub, "convert", *again, tmp_path / "again", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert hub.asked == []
    assert Dataset(tmp_path / "again").index.fingerprint == train.index.fingerprint


@pytest.mark.wide
def test_what_the_hub_does_not_have_is_refused_in_one_line(hub, tmp_path):
    for address, said in ((f"{ADDRESS}/validation", "there are no parquet files to read"),
                          ("hf://datasets/someone/else", "someone/else cannot be fetched: ")):  # fmt: skip
        done = run_with(hub, "convert", "parquet", address, tmp_path / "out")
        assert done.returncode == 1
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "address", ["hf://datasets/pairs", "hf://datasets/a/b@", "hf://datasets/../b/c", "hf://datasets/"]
)
def test_an_address_that_is_none_says_how_one_is_written(address):
    with pytest.raises(SourceError, match=r"cannot be fetched: Invalid HF URI"):
        ParquetSource([address])


def test_a_file_in_hugging_faces_cache_is_known_by_its_address_however_it_was_named(tmp_path):
    table = pa.table({"image": [b"pixels"]})
    folder = tmp_path / f"hub/datasets--a--b/snapshots/{SHA}/default/train"
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "0000.parquet")
    assert fetched(LocalPath(folder)) == [folder]
    assert ParquetSource([folder]).describe()["root"] == f"hf://datasets/a/b@{SHA}/default/train"
    assert kind_named("", ADDRESS).name == "parquet"
