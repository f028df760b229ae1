import pyarrow as pa
import pytest

from thermopile.tools.inspection.temperatures import groups as groups_module
from thermopile.tools.inspection.temperatures.groups import check_columns, codes_of
from thermopile.trainer.errors import ConfigError

from support.datasets import write_dataset

URIS = ["cats/a.png", "cats/b.png", "dogs/young/c.png", "d.png", "data.tar#1"]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(groups_module, "STATE_ROWS_AT_ONCE", 3)
    groups = ["cat", "cat", "dog", None, None]
    table = pa.table({
        "uri": URIS, "group": pa.array(groups, pa.string()), "width": pa.array([8, 8, 9, 8, 7], pa.int32()),
    })  # fmt: skip
    return write_dataset(tmp_path / "data", [table.slice(0, 2), table.slice(2, 3)])


def labels(dataset, column):
    codes, names = codes_of(dataset, column)
    return [None if code < 0 else names[code] for code in codes]


def test_labels_are_those_of_the_samples_across_pieces_and_shards(dataset):
    assert labels(dataset, "group") == ["cat", "cat", "dog", None, None]
    assert codes_of(dataset, "group")[1] == ["cat", "dog"]


def test_numbers_are_labels_as_well(dataset):
    assert labels(dataset, "width") == ["8", "8", "9", "8", "7"]


def test_the_folder_is_the_uri_up_to_its_last_slash(dataset):
    assert labels(dataset, "folder") == ["cats", "cats", "dogs/young", "", ""]


def test_an_unknown_column_is_refused_with_the_list_of_columns(dataset):
    check_columns(dataset, ["group", "folder"])
    with pytest.raises(
        ConfigError, match=r"cannot be grouped by 'row', 'colour': .* has the columns uri, group, width, folder"
    ):
        check_columns(dataset, ["row", "colour", "group"])
