"""Files of samples that come back from other programs: each names the samples that were meant, or is refused."""

import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.opening import Dataset
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.rows_export import export_rows
from thermopile.trainer.config import DataConfig
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.run import selection_files
from thermopile.trainer.run.selection_files import pinned, selected_ids, write_selection

from support.cli import assert_one_line, cli, succeed
from support.datasets import named_ids, write_dataset
from support.pictures import draw
from support.written_runs import write_run

COUNT = 60
GONE = np.random.default_rng(1).permutation(COUNT)[:20]
"""Pictures that are withdrawn."""
FINGERPRINT = "dataset_fingerprint"
TEXT = dict.fromkeys(["key", "uri", FINGERPRINT], str)


def dataset_of(path, pictures, kind, of="a"):
    """Write a dataset of pictures by number, which `group` holds. kind: of its keys, those of a folder or of tars."""
    keys = [f"{of}/{i:03d}.jpg" if kind == "paths" else f"{i:06d}" for i in pictures]
    uris = keys if kind == "paths" else [f"{of}-0.tar/{key}" for key in keys]
    table = pa.table({"key": keys, "uri": uris, "caption": keys, "group": [f"{of}{i}" for i in pictures]})
    table = table.append_column("width", pa.array([32] * len(keys))).append_column("height", pa.array([32] * len(keys)))
    return write_dataset(path, [table[:20], table[20:]])


@pytest.fixture(scope="module", params=["paths", "numbers"])
def datasets(request, tmp_path_factory):
    """The dataset that the rows are of, one with the same pictures and more under other ids, one of other pictures
    under the same ids, and if the keys are numbers the same keys."""
    folder, rng = tmp_path_factory.mktemp(request.param), np.random.default_rng(0)
    order = rng.permutation(COUNT)
    return {
        "own": dataset_of(folder / "own", order, request.param),
        "moved": dataset_of(folder / "moved", rng.permutation(COUNT + 40), request.param),
        "other": dataset_of(folder / "other", [*order, COUNT], request.param, of="b"),
    }


@pytest.fixture(scope="module")
def exported(datasets, tmp_path_factory):
    """A folder with all rows of a run as rows.parquet and rows.csv."""
    folder = tmp_path_factory.mktemp("rows")
    run = write_run(folder / "run", datasets["own"], {"sample": np.full(COUNT, 0.1)})
    for name in ("rows.parquet", "rows.csv"):
        export_rows(read_run(run), folder / name)
    return folder


def of_gone(rows):
    return rows[rows["group"].isin([f"a{i}" for i in GONE])]


def ids_and(*columns):
    return lambda rows: rows[["sample_id", *columns]]


def without_metadata(change):
    """A rewrite that keeps columns and types alone, as DuckDB's does."""

    def written(rows, file):
        table = pa.Table.from_pandas(rows, preserve_index=False).replace_schema_metadata(None)
        pq.write_table(change(table), file)

    return written


def by_csv(change=lambda rows: rows, *, dtype=None, **options):
    """A spreadsheet saved as CSV, which pandas reads with types of its own choice unless `dtype` has them."""

    def written(rows, file):
        rows.to_csv(file.with_suffix(".csv"), **{"index": False} | options)
        change(pd.read_csv(file.with_suffix(".csv"), dtype=dtype)).to_parquet(file)

    return written


def cast(**types):
    return lambda table: table.cast(
        pa.schema([field.with_type(types.get(field.name, field.type)) for field in table.schema])
    )


SAME = None
"""The samples that were meant."""
UNNAMED = "does not say which dataset"
PANDAS = {
    "filtered": (lambda rows: rows, SAME),
    "ids and fingerprint": (ids_and(FINGERPRINT), SAME),
    "ids and uri": (ids_and("uri"), SAME),
    "ids alone": (ids_and(), UNNAMED),
    "ids and another column": (ids_and("sample/tau"), UNNAMED),
    "key and uri": (lambda rows: rows[["key", "uri"]], SAME),
    "uri": (lambda rows: rows[["uri"]], SAME),
    "key and fingerprint": (lambda rows: rows[["key", FINGERPRINT]], SAME),
    "ids as index": (lambda rows: rows.set_index("sample_id"), SAME),
    "index dropped": (lambda rows: rows.set_index("sample_id").reset_index(drop=True), SAME),
    "index kept": (lambda rows: rows.reset_index(), SAME),
    "shuffled": (lambda rows: rows.sample(frac=1, random_state=0), SAME),
    "sorted by key, backwards": (lambda rows: rows.sort_values("key", ascending=False), SAME),
    "rows twice": (lambda rows: pd.concat([rows, rows]), "more than once; remove repeated rows"),
    "names twice": (lambda rows: pd.concat([rows, rows])[["uri", FINGERPRINT]], "more than once; remove repeated rows"),
    "joined by key": (lambda rows: rows.merge(rows[["key"]], on="key"), SAME),
    "joined with a suffix": (lambda rows: rows.merge(rows[["key", "uri"]], on="key", suffixes=("", "_2")), SAME),
    "categories": (lambda rows: rows.astype({"key": "category", "uri": "category", FINGERPRINT: "category"}), SAME),
    "small ids": (lambda rows: rows.astype({"sample_id": "uint8"}), SAME),
    "nullable ids": (lambda rows: rows.astype({"sample_id": "Int64"}), SAME),
    "ids as floats": (lambda rows: rows.astype({"sample_id": float}), "is double; it must hold whole numbers"),
    "ids as text": (lambda rows: rows.astype({"sample_id": str}), "it must hold whole numbers"),
    "ids counted anew": (lambda rows: rows.assign(sample_id=range(len(rows))), "name different samples: "),
    "ids counted anew, alone": (lambda rows: pd.DataFrame({"sample_id": range(len(rows))}), UNNAMED),
    "ids moved by one row": (lambda rows: rows.assign(sample_id=np.roll(rows["sample_id"], 1)), "different samples"),
    "uris moved by one row": (lambda rows: rows.assign(uri=np.roll(rows["uri"], 1)), "name different samples"),
    "a row without a key": (lambda rows: rows.assign(key=[None, *rows["key"][1:]]), r"without a key \(null\)"),
    "unknown uris": (
        lambda rows: pd.DataFrame({"uri": [*rows["uri"], "no.jpg", "no", "none", "never"]}),
        r"4 rows do not name one sample of .* by uri: 'no.jpg' \(0 samples\), 'no' \(0 samples\), ",
    ),
    "rows without fingerprint": (
        lambda rows: pd.concat([rows, rows.head(1).drop(columns=FINGERPRINT)]), "names samples of several datasets",
    ),
    "rows of two datasets": (
        lambda rows: rows.assign(**{FINGERPRINT: ["f" * 64, *rows[FINGERPRINT][1:]]}), "samples of several datasets, ",
    ),
    "no fingerprint in any row": (lambda rows: rows.assign(**{FINGERPRINT: ""})[["sample_id", FINGERPRINT]], UNNAMED),
}  # fmt: skip
REWRITTEN = {
    "columns alone": (without_metadata(lambda table: table), SAME),
    "ids and fingerprint alone": (without_metadata(lambda table: table.select(["sample_id", FINGERPRINT])), SAME),
    "ids": (without_metadata(lambda table: table.select(["sample_id"])), UNNAMED),
    "ids named otherwise": (without_metadata(lambda table: table.select(["sample_id"]).rename_columns(["id"])),
                            "has no column 'sample_id'; it has id"),
    "views of text": (without_metadata(cast(key=pa.string_view(), uri=pa.large_string())), SAME),
    "wide ids": (without_metadata(cast(sample_id=pa.uint64())), SAME),
    "decimal ids": (without_metadata(cast(sample_id=pa.decimal128(20))), "it must hold whole numbers"),
    "two keys": (without_metadata(lambda table: table.append_column("key", table["uri"])), "has 2 columns 'key'"),
    "lists as keys": (without_metadata(lambda table: table.set_column(1, "key", pa.array([["a"]] * 20))), "damaged: "),
}  # fmt: skip
SPREADSHEETS = {
    "saved": (by_csv(dtype=TEXT), SAME),
    "saved with an index": (by_csv(dtype=TEXT, index=True), SAME),
    "ids in an unnamed column": (
        by_csv(lambda rows: rows.drop(columns="sample_id"), dtype=TEXT, index=True), SAME),
    "without keys": (by_csv(lambda rows: rows.drop(columns=["key"])), SAME),
    "ids as floats": (by_csv(lambda rows: rows.astype({"sample_id": float}), dtype=TEXT), "must hold whole numbers"),
    "ids with thousands": (by_csv(lambda rows: rows.assign(sample_id="1,0"), dtype=TEXT), "must hold whole numbers"),
    "a row of sums": (by_csv(lambda rows: pd.concat([rows, pd.DataFrame({"sample_id": [9]})])), "(null)|several"),
    "spaces about the uri": (by_csv(lambda rows: rows.assign(uri=" " + rows["uri"]), dtype=TEXT), "different samples"),
    "zeros lost": (by_csv(), {"paths": SAME, "numbers": "sample_id and key and uri name different samples"}),
    "zeros lost, no ids": (by_csv(lambda rows: rows[["key", FINGERPRINT]]),
                           {"paths": SAME, "numbers": "'key' is int64; it must hold text, with its zeros"}),
    "zeros lost, then text": (by_csv(lambda rows: rows[["key", FINGERPRINT]].astype({"key": str})),
                              {"paths": SAME, "numbers": "20 rows do not name one sample of"}),
    "ids and keys that lost zeros": (by_csv(lambda rows: rows[["sample_id", "key"]]),
                                     {"paths": SAME, "numbers": UNNAMED}),
    "ids and keys": (by_csv(lambda rows: rows[["sample_id", "key"]], dtype=TEXT),
                     {"paths": SAME, "numbers": UNNAMED}),
    "keys": (by_csv(lambda rows: rows[["key"]], dtype=TEXT), {"paths": SAME, "numbers": UNNAMED}),
}  # fmt: skip
CHANGES = {
    **{f"pandas: {name}": (lambda rows, file, change=change: change(rows).to_parquet(file), said)
       for name, (change, said) in PANDAS.items()},
    **{f"rewritten: {name}": change for name, change in REWRITTEN.items()},
    **{f"spreadsheet: {name}": change for name, change in SPREADSHEETS.items()},
}  # fmt: skip


def withdrawn(file, dataset):
    return set(dataset.take(selected_ids(file, dataset, "without"), ["group"])["group"].to_pylist())


@pytest.mark.parametrize("name", CHANGES)
def test_a_withdrawal_is_of_the_samples_that_were_meant_or_refused(name, datasets, exported, request, tmp_path):
    write, said = CHANGES[name]
    said = said[request.node.callspec.params["datasets"]] if isinstance(said, dict) else said
    file = tmp_path / "gone.parquet"
    write(of_gone(pd.read_parquet(exported / "rows.parquet")), file)
    if said is SAME:
        assert withdrawn(file, datasets["own"]) == {f"a{i}" for i in GONE}
    else:
        with pytest.raises(ConfigError, match=said) as refused:
            withdrawn(file, datasets["own"])
        assert "\n" not in str(refused.value)
    for dataset in (datasets["moved"], datasets["other"]):
        try:
            assert withdrawn(file, dataset) == {f"a{i}" for i in GONE}, "applied to other samples"
        except ConfigError as error:
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("columns", [["uri"], ["key", "uri"]])
def test_names_find_the_samples_in_a_dataset_that_has_them_under_other_ids(datasets, exported, columns, tmp_path):
    file = tmp_path / "gone.parquet"
    of_gone(pd.read_parquet(exported / "rows.parquet"))[columns].to_parquet(file)
    assert withdrawn(file, datasets["moved"]) == {f"a{i}" for i in GONE}
    with pytest.raises(ConfigError, match=r"20 rows do not name one sample of .*correct or remove them"):
        withdrawn(file, datasets["other"])


def test_a_long_file_is_checked_in_pieces_against_the_names(datasets, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(selection_files, "MAX_UNSORTED", 10)
    monkeypatch.setattr(selection_files, "ROWS_AT_ONCE", 8)
    rows, file = of_gone(pd.read_parquet(exported / "rows.parquet")), tmp_path / "gone.parquet"
    rows.to_parquet(file)
    assert withdrawn(file, datasets["own"]) == {f"a{i}" for i in GONE}
    rows[["uri"]].to_parquet(file)  # in the order of the ids
    assert withdrawn(file, datasets["own"]) == {f"a{i}" for i in GONE}
    rows.iloc[-1, rows.columns.get_loc("uri")] = "elsewhere"
    rows.to_parquet(file)
    with pytest.raises(ConfigError, match=r"name different samples: .* is '.*' here, not '.*elsewhere'"):
        withdrawn(file, datasets["own"])


# Other uses of such a file


def test_other_files_that_do_not_say_whose_ids_they_hold_are_warned_of_once(datasets, tmp_path, caplog):
    file, dataset = tmp_path / "all.parquet", datasets["own"]
    pq.write_table(pa.table({"sample_id": np.arange(COUNT), "weight": np.ones(COUNT)}), file)
    for option in ("select", "weights"):
        caplog.clear()
        data = DataConfig(path=str(dataset.path), **{option: pinned(str(file), option)})
        write_selection(data, dataset, tmp_path / option)
        (said,) = caplog.messages
        assert said.startswith(f"--{option} {file} {UNNAMED}")
        assert said.endswith(". They are taken for this dataset's")
    caplog.clear()
    pq.write_table(named_ids(dataset, np.arange(COUNT)), file)
    selected_ids(file, dataset, "drop")
    assert not caplog.messages


# Files of a dataset that grew


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """A dataset of a csv before and after an append of another one; the keys of both begin with 0."""
    folder = tmp_path_factory.mktemp("stages")
    for name, numbers in (("first", range(40)), ("second", range(40, 60))):
        for i in numbers:
            draw(i).save(folder / f"{i}.png")
        lines = [f"{i}.png,picture number {i}" for i in numbers]
        (folder / f"{name}.csv").write_text("\n".join(["filepath,title", *lines]))
    succeed("convert", "csv", folder / "first.csv", folder / "data")
    shutil.copytree(folder / "data", folder / "before")
    succeed("convert", "csv", folder / "second.csv", folder / "data", "--append")
    return Dataset(folder / "before"), Dataset(folder / "data")


def test_what_curate_keeps_stays_right_when_the_dataset_has_grown(stages, tmp_path):
    before, grown = stages
    run = write_run(tmp_path / "run", before, {"image": np.full(40, 0.1), "text": np.full(40, 0.1)})
    pq.write_table(named_ids(before, [3, 5]), tmp_path / "drop.parquet")
    succeed("curate", run.path, "--keep", tmp_path / "k.parquet", "--drop", tmp_path / "drop.parquet")
    kept = pd.read_parquet(tmp_path / "k.parquet")
    kept.to_parquet(tmp_path / "by-pandas.parquet")
    for name, ids in (("k", set(range(40)) - {3, 5}), ("by-pandas", set(range(40)) - {3, 5}), ("k.dropped", {3, 5})):
        for dataset in stages:
            assert set(selected_ids(tmp_path / f"{name}.parquet", dataset)) == ids
    few = succeed("convert", "dataset", grown.path, tmp_path / "few", "--select", tmp_path / "k.parquet")
    assert "few: 38 samples in " in few.stdout
    assert UNNAMED not in few.stderr
    kept.assign(sample_id=kept["sample_id"] + 10).to_parquet(tmp_path / "k.parquet")
    with pytest.raises(ConfigError, match="has sample 49, but the dataset has the ids 0 … 39"):
        selected_ids(tmp_path / "k.parquet", grown)


def test_a_file_of_the_grown_dataset_is_refused_by_the_earlier_one(stages, tmp_path):
    before, grown = stages
    pq.write_table(named_ids(grown, [3, 5]), tmp_path / "ids.parquet")
    assert selected_ids(tmp_path / "ids.parquet", grown).tolist() == [3, 5]
    with pytest.raises(ConfigError, match=f"another dataset, whose fingerprint is {grown.index.fingerprint[:12]}…"):
        selected_ids(tmp_path / "ids.parquet", before)


def test_a_key_that_an_append_repeats_is_that_of_the_file_s_stage_or_refused(stages, tmp_path):
    before, grown = stages
    keys = before.take(np.array([3, 5]), ["key"]).append_column(FINGERPRINT, pa.array([before.index.fingerprint] * 2))
    keys = keys.set_column(0, "key", pa.array(["0", "1"]))
    pq.write_table(keys, tmp_path / "keys.parquet")
    found = selected_ids(tmp_path / "keys.parquet", grown)
    assert set(before.take(found, ["key"])["key"].to_pylist()) == {"0", "1"}
    pq.write_table(keys.set_column(1, FINGERPRINT, pa.array([grown.index.fingerprint] * 2)), tmp_path / "keys.parquet")
    with pytest.raises(ConfigError, match=r"by key: '0' \(2 samples\), '1' \(2 samples\); .* column sample_id too"):
        selected_ids(tmp_path / "keys.parquet", grown)


# The commands


def test_the_commands_warn_of_ids_without_a_dataset_and_fork_refuses_them(stages, tmp_path):
    dataset, _ = stages
    run = write_run(tmp_path / "run", dataset, {"image": np.full(40, 0.1), "text": np.full(40, 0.1)})
    pq.write_table(pa.table({"sample_id": [7, 3]}), file := tmp_path / "ids.parquet")
    warning = f"{file} {UNNAMED}'s samples it names. Keep the column dataset_fingerprint, key or uri of the file"
    for words in (
        ("curate", run.path, "--keep", tmp_path / "keep.parquet", "--drop", file),
        ("convert", "dataset", dataset.path, tmp_path / "few", "--select", file),
    ):
        (said,) = [line for line in succeed(*words).stderr.splitlines() if UNNAMED in line]
        assert said.startswith(f"Warning: {words[-2]} {warning}")
    refused = cli("fork", run.path, "--out", tmp_path / "fork", "--without", file)
    assert_one_line(refused, 2, f"--without {warning}", "the `fingerprint` in dataset.json")
