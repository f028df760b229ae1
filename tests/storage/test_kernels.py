"""Compiled code on disk: it is what its name says, whoever wrote it, and whatever happens to the files."""

import hashlib
import importlib
import math
import os
import pickle
import pkgutil
import shutil
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import thermopile
from thermopile.storage import kernels

from support.programs import program

CALLED = """
from collections import namedtuple
from thermopile.storage.kernels import kernel

FACTOR = 2
ADDEND = TABLE[1]
Pair = namedtuple("Pair", "first second")

@kernel()
def called(a):
    return a * FACTOR + ADDEND

@kernel()
def of_pair(pair):
    return pair.first
"""
CALLING = """
from called import Pair, called, of_pair
from thermopile.storage.kernels import kernel

@kernel()
def calling(a):
    return called(a) + of_pair(Pair(a, 5))
"""
TABLE = "TABLE = (0, 1)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of kept code of this test, empty."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_said", set())
    monkeypatch.setattr(kernels, "_TOLD_AFTER_SECONDS", math.inf)
    return tmp_path / "cache" / f"kernels-{os.geteuid()}"


def add():
    """A function as a new process has it: nothing is compiled yet."""

    def add(a, b):
        return a + b

    return kernels.kernel()(add)


def is_kept(arguments=(1, 2)):
    """Whether a new process takes the sum's code from disk; its result is right in any case."""
    function = add()
    assert function(*arguments) == sum(arguments)
    return sum(function.stats.cache_hits.values()) == 1


def kept(folder):
    (file,) = folder.iterdir()
    return file


def test_a_second_process_takes_the_code_from_disk(folder):
    assert [is_kept() for _ in range(3)] == [False, True, True]
    assert not is_kept((1.0, 2.0))
    assert is_kept((1.0, 2.0))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_code_is_kept_in_the_home_where_no_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not is_kept()
    assert kept(tmp_path / ".cache" / "thermopile" / f"kernels-{os.geteuid()}")
    assert is_kept()


# Whoever plants code: it is not run.


class Planted:
    """What unpickling it does, it would do to root."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (self.made,)


def planted(file, made):
    data = pickle.dumps(Planted(str(made)))
    return hashlib.sha256(file.name.encode() + data).digest() + data


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def as_another_user(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, 12345)


def plant(file, made):
    file.write_bytes(planted(file, made))


def plant_as_another(file, made):
    plant(file, made)
    as_another_user(file)


def plant_writable(mode):
    def spoil(file, made):
        plant(file, made)
        file.chmod(mode)

    return spoil


def plant_folder_writable(mode):
    def spoil(file, made):
        plant(file, made)
        file.parent.chmod(mode)

    return spoil


def plant_folder_of_another(file, made):
    plant(file, made)
    as_another_user(file.parent)


def plant_link(file, made):
    plant(file, made)
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def plant_folder_link(file, made):
    plant(file, made)
    elsewhere = file.parent.rename(file.parent.with_name("elsewhere"))
    file.parent.symlink_to(elsewhere)


PLANTED = {
    "by another user": plant_as_another,
    "in a file that a group may write": plant_writable(0o660),
    "in a file that all may write": plant_writable(0o602),
    "in a folder of another user": plant_folder_of_another,
    "in a folder that a group may write": plant_folder_writable(0o770),
    "in a folder that all may write": plant_folder_writable(0o1777),
    "behind a link": plant_link,
    "in a folder behind a link": plant_folder_link,
    "without a checksum": lambda file, made: file.write_bytes(pickle.dumps(Planted(str(made)))),
    "under another name": lambda file, made: file.write_bytes(planted(file.with_name("other"), made)),
    "with a byte before it": lambda file, made: file.write_bytes(b"\0" + planted(file, made)),
}


@pytest.mark.parametrize("spoil", PLANTED.values(), ids=PLANTED)
def test_code_that_somebody_else_can_have_written_is_never_run(folder, tmp_path, capsys, spoil):
    is_kept()
    spoil(kept(folder), tmp_path / "made")
    assert not is_kept()
    assert not (tmp_path / "made").exists()
    assert capsys.readouterr().err.count("\n") <= 1


def test_the_planted_code_of_these_tests_would_run_if_it_were_read(folder, tmp_path):
    is_kept()
    plant(kept(folder), tmp_path / "made")
    assert not is_kept()
    assert (tmp_path / "made").exists()


def as_pipe(file):
    file.unlink()
    os.mkfifo(file)


def as_directory(file):
    file.unlink()
    file.mkdir()


DAMAGED = {
    "empty": lambda file: file.write_bytes(b""),
    "cut in its checksum": lambda file: os.truncate(file, 20),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "cut by a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "flipped in its checksum": lambda file: file.write_bytes(flipped(file.read_bytes(), 3)),
    "flipped": lambda file: file.write_bytes(flipped(file.read_bytes(), 1000)),
    "no numba's": lambda file: file.write_bytes(hashlib.sha256(file.name.encode() + b"code").digest() + b"code"),
    "a pipe": as_pipe,
    "a link to nothing": lambda file: (file.unlink(), file.symlink_to("nothing")),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_compiled_again_without_a_word_and_replaced(folder, capsys, damage):
    is_kept()
    damage(kept(folder))
    assert not is_kept()
    assert is_kept()
    assert capsys.readouterr().err == ""


def test_a_file_under_another_file_s_name_is_compiled_again(folder):
    is_kept((1, 2))
    whole = kept(folder)
    is_kept((1.0, 2.0))
    (of_floats,) = {*folder.iterdir()} - {whole}
    integers = whole.read_bytes()
    whole.write_bytes(of_floats.read_bytes())
    of_floats.write_bytes(integers)
    assert not is_kept((1, 2))
    assert not is_kept((1.0, 2.0))


def test_code_compiled_for_other_types_than_those_of_its_name_is_compiled_again(folder):
    is_kept((1, 2))
    integers = kept(folder)
    data = integers.read_bytes()[32:]
    is_kept((1.0, 2.0))
    (of_floats,) = {*folder.iterdir()} - {integers}
    of_floats.write_bytes(hashlib.sha256(of_floats.name.encode() + data).digest() + data)
    assert not is_kept((1.0, 2.0))


def test_code_of_another_numba_is_not_taken(folder, monkeypatch):
    is_kept()
    monkeypatch.setattr(kernels, "_VERSIONS", ("another",))
    assert not is_kept()


# Where nothing can be kept: a line says so, once.


def no_folder(folder, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/cache")


def no_home(folder, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-has-this-name").expanduser())


def a_file(folder, monkeypatch):
    folder.parent.mkdir()
    folder.touch()


@pytest.mark.parametrize("spoil", [no_folder, no_home, a_file])
def test_without_a_folder_kernels_are_compiled_in_memory_with_one_line(folder, monkeypatch, capsys, spoil):
    spoil(folder, monkeypatch)
    assert not any(is_kept((one, one)) for one in (1, 1.0, 1j))
    said = capsys.readouterr().err
    assert "cannot be kept" in said
    assert said.count("NUMBA_CACHE_DIR") == said.count("\n") == 1


def test_on_a_full_disk_kernels_are_compiled_in_memory_and_no_part_of_a_file_is_left(folder, capsys, file_size_limit):
    with file_size_limit(1000):
        assert not any(is_kept() for _ in range(2))
    assert not [*folder.iterdir()]
    assert capsys.readouterr().err.count("File too large") == 1


def test_a_folder_that_vanishes_is_made_again(folder):
    is_kept()
    shutil.rmtree(folder.parent)
    assert not is_kept()
    assert is_kept()


def test_files_do_not_pile_up(folder, monkeypatch):
    monkeypatch.setattr(kernels, "_MAX_FILES", 4)
    for addend in range(9):
        kernels.kernel()(lambda a, addend=addend: a + addend)(1)  # as after nine edits
        assert len([*folder.iterdir()]) <= 4
    kernels.kernel()(lambda a, addend=8: a + addend)(1)
    assert len([*folder.iterdir()]) <= 4


# What was compiled from other code is not taken.


@pytest.fixture
def result(tmp_path, folder, monkeypatch):
    """Return a function that gives calling(10) in a new process, and whether all of its code came from disk."""
    for name, text in {"called": TABLE + CALLED, "calling": CALLING}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def result():
        for name in ("called", "calling"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        calling = importlib.import_module("calling").calling
        return calling(10), sum(calling.stats.cache_hits.values()) == 1

    yield result
    for name in ("called", "calling"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a * FACTOR", "a / FACTOR", 16.0),
        ("FACTOR = 2", "FACTOR = 3", 41),
        ("TABLE = (0, 1)", "TABLE = (0, 7)", 37),
        ("first second", "second first", 26),
        ("pair.first", "pair.second", 26),
        ("@kernel()\ndef called", "@kernel(error_model='numpy')\ndef called", 31),
    ],
)
def test_after_an_edit_of_what_a_function_calls_or_names_the_next_process_runs_the_new_code(
    tmp_path, result, old, new, expected
):
    assert result() == (31, False)
    assert result() == (31, True)
    whole = (tmp_path / "called.py").read_text()
    assert old in whole
    (tmp_path / "called.py").write_text(whole.replace(old, new))
    assert result() == (expected, False)
    assert result() == (expected, True)
    (tmp_path / "called.py").write_text(whole)
    assert result() == (31, True)


def all_kernels():
    for module in pkgutil.walk_packages(thermopile.__path__, "thermopile."):
        if module.name.split(".")[1] in ("storage", "pipeline", "state_store", "trainer", "tools"):
            yield from vars(importlib.import_module(module.name)).values()


@pytest.mark.wide  # imports everything
def test_the_facts_of_every_kernel_are_the_same_in_every_process():
    found = {each for each in all_kernels() if isinstance(each, Dispatcher)}
    assert len(found) > 70
    for each in found:
        facts = repr(kernels._code_facts(each))
        assert " at 0x" not in facts, each  # an address
        named = [each.py_func.__globals__.get(name) for name in each.py_func.__code__.co_names]
        modules = {value.__name__.partition(".")[0] for value in named if isinstance(value, type(os))}
        assert modules <= {"numpy", "math", "ctypes"}, each  # what it takes from other modules is not among the facts


def test_values_are_told_apart_exactly():
    classes = namedtuple("Pair", "a b"), namedtuple("Pair", "b a")
    values = [1, 1.0, np.uint64(1), np.int64(1), np.array([1.0]), np.array([1.0 + 1e-12]), np.array([1]), *classes]
    assert len({repr(kernels._value_facts(value)) for value in values}) == len(values)


# What a first start says.


def test_what_takes_longer_than_two_seconds_is_said_once_and_by_the_first_rank(folder, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "_TOLD_AFTER_SECONDS", 0)
    for _ in range(2):
        is_kept((1, 2))
        is_kept((1.0, 2.0))
    assert capsys.readouterr().err == "Compiling kernels, once on this machine.\n"
    monkeypatch.setattr(kernels, "_said", set())
    monkeypatch.setenv("LOCAL_RANK", "1")
    is_kept((1, 2.0))
    assert capsys.readouterr().err == ""


# Processes and threads at once.


@pytest.mark.parametrize("rounds", [pytest.param(2, marks=pytest.mark.wide), pytest.param(200, marks=pytest.mark.soak)])
def test_processes_that_compile_at_once_leave_what_each_name_says(tmp_path, rounds):
    subprocess.run(program("compiling_at_once", tmp_path / "cache", rounds), check=True, timeout=3600)


@pytest.mark.parametrize("rounds", [pytest.param(2, marks=pytest.mark.wide), pytest.param(200, marks=pytest.mark.soak)])
def test_threads_may_compile_what_calls_the_same_functions(tmp_path, rounds):
    subprocess.run(program("compiling_in_threads", tmp_path / "cache", rounds), check=True, timeout=3600)
