"""A tree of tensors and plain values, as files have it and back."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.checkpoints.tensors import join, load_tensors, save_tensors, take_apart

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
TENSORS = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 9),
)  # fmt: skip
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.text() | st.integers(0, 2) | st.sampled_from(["0", "1", "$tensor", "a/b", "a"]) | st.booleans() | st.none()
TREES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


def same(one, other):
    """Equal, of the same types all the way down, in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return one == other or (one != one and other != other)


@settings(max_examples=100)
@given(TREES)
def test_a_tree_comes_back_exactly_from_its_tensors_and_json(tree):
    tensors, rest = take_apart(tree)
    assert same(join(tensors, json.loads(json.dumps(rest, allow_nan=False))), tree)


@settings(max_examples=20)
@given(st.dictionaries(st.sampled_from(["a", "b/c", "ü", ""]), TENSORS))
def test_tensors_of_every_type_come_back_from_their_file(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("tensors") / "t.safetensors"
    save_tensors(path, tensors)
    assert same(dict(sorted(load_tensors(path).items())), dict(sorted(tensors.items())))


def test_tensors_are_named_by_their_paths():
    tree = {"optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}}, "encoders": {"image.head.weight": torch.ones(1)}}
    assert sorted(take_apart(tree)[0]) == ["encoders/image.head.weight", "optimizer/state/0/exp_avg"]


def test_weights_in_another_memory_format_are_stored_by_value(tmp_path):
    weights = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors, rest = take_apart([weights])
    save_tensors(tmp_path / "tensors", tensors)
    stored = load_tensors(tmp_path / "tensors")
    assert stored["0"].is_contiguous()
    assert torch.equal(join(stored, rest)[0], weights)


def test_what_is_neither_tensor_nor_plain_is_refused_with_its_place():
    with pytest.raises(TypeError, match="a/0 is a set"):
        take_apart({"a": [{1}]})


@pytest.mark.parametrize(
    "rest",
    [
        {"$tensor": "gone"}, {"$tensor": 3}, [{"$tensor": "t"}, {"$tensor": "t"}], {"$tuple": 3}, {"$float": "1e9"},
        {"$items": [[1]]}, {"$items": [3]}, {"$items": [[[], 1]]}, {"$tensor": "t", "more": 1}, {"$else": 1}, {}, None,
        json.loads("[" * 900 + "]" * 900),
    ],
)  # fmt: skip
def test_a_rest_that_was_not_made_so_is_one_kind_of_error(rest):
    with pytest.raises(ValueError, match=r"\w"):
        join({"t": torch.ones(1)}, rest)
