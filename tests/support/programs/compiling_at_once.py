"""Usage: compiling_at_once.py FOLDER ROUNDS

In each round four processes compile the same functions for several types at the same moment, in an empty folder, and
must get right results; so must a later process, which compiles nothing; and every file must be what its name says.
"""

import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
from numba.core import event
from numba.core.registry import cpu_target

from thermopile.storage import kernels

FOLDER, ROUNDS, PROCESSES = Path(sys.argv[1]), int(sys.argv[2]), 4
os.environ["NUMBA_CACHE_DIR"] = str(FOLDER)

FUNCTIONS = """
@kernel()
def inner(a, k):
    return 1000 * a.itemsize + 100 * a.ndim + k * a.size

@kernel()
def outer(a):
    return inner(a, 7) + 1

@kernel("int64(int64)", "float64(float64)")
def eager(a):
    return a + a
"""


def arrays():
    for kind in (np.int32, np.int64):
        for shape in ((6,), (2, 3)):
            yield np.ones(shape, kind)
            read_only = np.ones(shape, kind)
            read_only.flags.writeable = False
            yield read_only


def check(number):
    """Call every function for every type, beginning elsewhere than the other processes."""
    functions = {"kernel": kernels.kernel, "__name__": "__main__"}  # numba imports it by name
    exec(FUNCTIONS, functions)
    given = [*arrays()]
    for a in given[number:] + given[:number]:
        right = 1000 * a.itemsize + 100 * a.ndim + 7 * 6
        calls = [("inner", (a, 7), right), ("outer", (a,), right + 1)]
        for name, arguments, expected in calls[:: -1 if number % 2 else 1]:
            assert functions[name](*arguments) == expected
    assert (functions["eager"](2), functions["eager"](2.5)) == (4, 5.0)
    return functions


def forked(number, gate=(), *, compiles=True):
    """gate: the ends of a pipe, at which a child waits until all are there."""
    if child := os.fork():
        return child
    if gate:
        os.close(gate[1])
        os.read(gate[0], 1)
    with event.install_recorder("numba:compile") as compiled:
        check(number)
    assert compiles or not compiled.buffer
    sys.exit()


def ended(*children):
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def every_file_is_what_its_name_says():
    """Compare the types that a file's code was compiled for with those from which its name follows."""
    functions = {name: each for name, each in check(0).items() if hasattr(each, "py_func")}
    (folder,) = FOLDER.iterdir()
    files = [*folder.iterdir()]
    assert len(files) > 12
    for file in files:
        signature = pickle.loads(kernels._read(file.name))[3]
        cache = functions[file.name.rpartition("-")[0]]._cache
        asked = [signature.args] if "eager" not in file.name else ["int64(int64)", "float64(float64)"]
        assert file.name in {cache._name(each, cpu_target.target_context) for each in asked}, file


for done in range(ROUNDS):
    shutil.rmtree(FOLDER, ignore_errors=True)
    gate = os.pipe()
    children = [forked(number, gate) for number in range(PROCESSES)]
    for end in gate:
        os.close(end)
    ended(*children)
    # What is compiled depends on the order: code for read-only arrays serves others too.
    ended(forked(done % PROCESSES, compiles=False))
if not (last := os.fork()):
    every_file_is_what_its_name_says()
    os._exit(0)
ended(last)
