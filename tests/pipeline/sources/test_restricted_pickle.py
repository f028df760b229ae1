"""A pickle read as data."""

import contextlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.pipeline.sources.restricted_pickle import PickledArray, load_restricted

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@settings(max_examples=30)
@given(VALUES, st.integers(0, 4))
def test_plain_values_come_back(value, protocol):
    assert load_restricted(pickle.dumps(value, protocol)) == value


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4))
def test_arrays_of_bytes_come_back_and_no_others(rows, columns, protocol):
    array = np.arange(rows * columns, dtype=np.uint8).reshape(rows, columns)
    assert np.array_equal(load_restricted(pickle.dumps(array, protocol)).uint8(), array)
    for other in (array.astype(np.int16), array.astype(object)):
        with pytest.raises(ValueError, match="not an array of uint8"):
            load_restricted(pickle.dumps(other, protocol)).uint8()


@pytest.mark.parametrize("module_and_name", ["os system", "builtins eval", "numpy frombuffer", "_codecs decode",
                                             "numpy.core.multiarray fromfile", "numpy ndarray.tofile"])  # fmt: skip
def test_every_other_name_is_refused(module_and_name):
    module, name = module_and_name.split()
    with pytest.raises(pickle.UnpicklingError, match=f"it asks for {module}.{name}, which is not allowed"):
        load_restricted(f"c{module}\n{name}\n.".encode())


@pytest.mark.parametrize(
    "data",
    [
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR.",
        b"c_codecs\nencode\n}X\x01\x00\x00\x00aK\x01sb.",
        b"c_codecs\nencode\n(N}X\x07\x00\x00\x00__new__K\x01stb.",
        b"cnumpy\nndarray\n(N}X\x05\x00\x00\x00uint8K\x01stb.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"",
        b".",
    ],
)
def test_a_hostile_pickle_is_refused_and_leaves_no_trace(data):
    with pytest.raises(pickle.UnpicklingError):
        load_restricted(data)
    array = np.ones((2, 2), np.uint8)
    assert np.array_equal(load_restricted(pickle.dumps(array, 2)).uint8(), array)


@pytest.mark.parametrize("opcode", [b"r\xff\xff\xff\xff", b"p99999999999\n", b"p-1\n"])
def test_a_number_that_would_make_the_memo_larger_than_memory_is_refused(opcode):
    with pytest.raises(pickle.UnpicklingError, match="it uses memo index"):
        load_restricted(b"]" + opcode + b".")


IN_A_PROCESS_OF_ITS_OWN = """
import sys
from pickle import UnpicklingError
from thermopile.pipeline.sources.restricted_pickle import load_restricted
try:
    load_restricted(sys.stdin.buffer.read())
except UnpicklingError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"}N" + b"\x85" * 100_000 + b"Ns.", "more than 2,000,000 objects or 1,000 containers"),  # ends in a crash
        (b"]" * 100_000 + b"a" * 99_999 + b".", "more than 2,000,000 objects or 1,000 containers"),
        (b"(" + b"N" * 2_000_000 + b"l.", "more than 2,000,000 objects or 1,000 containers"),
        (b"}N" + b"2\x86" * 60 + b"Ns.", "it uses one container in two places"),  # never ends
        (b"}N" + b"".join(b"\x86q%ch%c" % (n, n) for n in range(60)) + b"Ns.", "it uses one container in two places"),
        (b"]\x940h\x00.", "it uses one container in two places"),
    ],
    ids=["deep key", "deep list", "many objects", "doubled", "doubled by number", "popped and fetched"],
)
def test_a_pickle_that_would_crash_the_process_or_never_end_is_refused_at_once(data, reason):
    child = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN]
    done = subprocess.run(child, input=data, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert reason in done.stdout.decode()


def test_a_string_that_stands_in_several_places_is_read():
    name = "a name"
    assert load_restricted(pickle.dumps([name, name, {name: name}], 2)) == [name, name, {name: name}]


def test_an_array_larger_than_its_bytes_is_refused_without_being_allocated():
    data = pickle.dumps(np.zeros((2, 3), np.uint8), 3)
    shape = pickle.dumps((2, 3), 3)[2:-2]
    assert data.count(shape[:4]) == 1
    array = load_restricted(data.replace(shape[:4], b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f"))
    assert isinstance(array, PickledArray)
    with pytest.raises(ValueError, match="reshape"):
        array.uint8()


WHOLE = pickle.dumps({"data": np.zeros((2, 3), np.uint8), "labels": [1, 2], "names": ["a"]}, 2)


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=3), st.integers(0, len(WHOLE)))
def test_a_pickle_changed_anywhere_is_read_or_refused_and_does_nothing_else(changes, length):
    data = bytearray(WHOLE)
    for place, value in changes:
        data[place] = value
    with contextlib.suppress(pickle.UnpicklingError, ValueError):
        value = load_restricted(bytes(data[:length]))
        if isinstance(value, dict) and isinstance(array := value.get("data"), PickledArray):
            array.uint8()
