"""A list in Karpathy's json."""

import json

import numpy as np
import pytest

from thermopile.pipeline.errors import BadSampleError, SourceError
from thermopile.pipeline.sources.karpathy import KarpathySource


def picture(name, split, *captions, **more):
    sentences = [{"tokens": caption.split(), "raw": caption, "imgid": 0} for caption in captions]
    return {"filename": name, "split": split, "sentences": sentences, "imgid": 0} | more


PICTURES = [
    picture("a.jpg", "train", "a dog", " a brown dog \n", filepath="val2014"),
    picture("b.jpg", "test", "a cat"),
    picture("c.jpg", "val", "a cow"),
    picture("d.jpg", "restval", "ein Hünd", "", "two\0dogs"),
    picture("e.jpg", "train"),
]


@pytest.fixture
def listed(tmp_path):
    """Writes a list beside its pictures, and opens it."""
    (tmp_path / "val2014").mkdir()
    for path in ("val2014/a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg"):
        (tmp_path / path).write_bytes(path.encode())

    def write(content=PICTURES, *, test=False, **options):
        data = content if isinstance(content, bytes) else json.dumps({"dataset": "x", "images": content}).encode()
        (tmp_path / "list.json").write_bytes(data)
        return KarpathySource(tmp_path / "list.json", test=test, **options)

    return write


def test_a_picture_has_all_its_captions_without_blank_ones(listed):
    source = listed()
    assert (source.mode, len(source)) == ("pairs", 3)
    assert (source[0].picture, source[0].captions) == (b"val2014/a.jpg", ("a dog", "a brown dog"))
    assert (source[0].uri, source[0].group, source.groups()) == ("val2014/a.jpg", None, None)
    assert source[2].captions == ("ein Hünd", "two\0dogs")
    with pytest.raises(BadSampleError, match="no caption"):
        source[1]
    assert list(source.captions(np.arange(3))) == ["a dog", "a brown dog", "ein Hünd", "two\0dogs"]


def test_splits_are_chosen_by_name_and_those_left_out_are_counted(listed):
    def paths(source):
        return [source.uri(place) for place in range(len(source))]

    assert paths(listed()) == ["val2014/a.jpg", "e.jpg", "d.jpg"]
    assert paths(listed(test=True)) == ["b.jpg"]
    assert paths(listed(split="val,train")) == ["c.jpg", "val2014/a.jpg", "e.jpg"]
    assert paths(listed(split="val,val")) == ["c.jpg"]
    assert paths(listed(test=True, test_split="val")) == ["c.jpg"]
    assert str(listed().unused) == "; 1 × pictures of other splits, such as val: --split train,restval,val"
    assert not listed(test_split="test,val").unused
    assert not listed(test=True).unused
    assert paths(listed(PICTURES[:2])) == ["val2014/a.jpg"]  # without restval, as in Flickr30k's list


def test_the_description_names_file_root_and_split_and_changes_with_the_file(listed, tmp_path):
    described = listed().describe()
    assert (described["kind"], described["split"]) == ("karpathy", "train,restval")
    assert listed(test=True).describe()["test-split"] == "test"
    assert listed(PICTURES[:2]).describe()["listing"] != described["listing"]
    assert listed(root=tmp_path / "val2014").describe()["root"] == str(tmp_path / "val2014")


def test_an_unknown_split_is_answered_with_the_splits_there_are(listed):
    with pytest.raises(SourceError, match=r"no picture of tain; name one of train, test, val, restval with --split$"):
        listed(split="tain")
    with pytest.raises(SourceError, match=r"no picture of  restval; name one of"):
        listed(split="train, restval")
    with pytest.raises(SourceError, match=r"no picture of x; name one of test, val with --test-split$"):
        listed(test=True, test_split="x")


HOSTILE = {
    "another list": b'[{"file_name": "a.jpg"}]',
    "annotations of coco": b'{"images": [{"file_name": "a.jpg", "id": 1}], "annotations": []}',
    "images are no list": b'{"images": 3}',
    "cut": json.dumps({"images": PICTURES}).encode()[:-3],
    "empty": b"",
    "deep": b"[" * 100_000,
    "deep in it": b'{"images": [' + b"[" * 100_000,
    "long number": b'{"images": ' + b"9" * 5_000 + b"}",
    "no text": json.dumps({"images": [picture("a.jpg", "train") | {"sentences": [{"raw": 1}]}]}).encode(),
    "no list of sentences": json.dumps({"images": [picture("a.jpg", "train") | {"sentences": None}]}).encode(),
    "no name": json.dumps({"images": [picture(None, "train", "a dog")]}).encode(),
    "half a character": b'{"images": [{"filename": "\\ud800", "split": "train", "sentences": []}]}',
    "bytes": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_another_json_and_a_damaged_one_are_refused_with_the_form_that_is_expected(listed, data):
    with pytest.raises(SourceError, match=r'list\.json is not in the form \{"images": \[\{"filepath" \(optional\)'):
        listed(data)


def test_hostile_names_are_bad_samples_and_splits_may_be_of_any_type(listed):
    source = listed([picture("a\0.jpg", "train", "x"), picture("/dev/zero", "train", "x"), picture("b.jpg", [1], "x")])
    for place in range(2):
        with pytest.raises(BadSampleError):
            source[place]
    assert str(source.unused).endswith("such as [1]: --split train,restval,[1]")


def test_a_list_above_the_limit_and_a_missing_one_are_refused(listed, tmp_path, monkeypatch):
    with pytest.raises(SourceError, match="is not a file"):
        KarpathySource(tmp_path / "none.json", test=False)
    monkeypatch.setattr("thermopile.pipeline.sources.karpathy.MAX_BYTES", 100)
    with pytest.raises(SourceError, match=r"bytes, above 100; Karpathy's lists are smaller"):
        listed()
