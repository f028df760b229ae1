"""Usage: compiling_in_threads.py FOLDER ROUNDS

In each round eight threads call functions that are not compiled yet, and that call the same functions.
"""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np

from thermopile.storage.kernels import kernel

FOLDER, ROUNDS, THREADS = Path(sys.argv[1]), int(sys.argv[2]), 8
os.environ["NUMBA_CACHE_DIR"] = str(FOLDER)

FUNCTIONS = """
@kernel()
def inner(a, k):
    return 1000 * a.itemsize + 100 * a.ndim + k * a.size

@kernel()
def first(a):
    return inner(a, 7)

@kernel()
def second(a):
    return first(a) + inner(a, 7)
"""
sys.setswitchinterval(1e-6)

with ThreadPoolExecutor(THREADS) as pool:
    for done in range(ROUNDS):
        if done % 2 == 0:  # in every second round, the code comes from disk
            shutil.rmtree(FOLDER, ignore_errors=True)
        functions, together = {"kernel": kernel, "__name__": "__main__"}, Barrier(THREADS)
        exec(FUNCTIONS, functions)

        def call(number, functions=functions, together=together):
            a = np.ones([(6,), (2, 3)][number % 2], [np.int32, np.int64][number // 2 % 2])
            if number % 3 == 0:
                a.flags.writeable = False
            together.wait()
            right = 1000 * a.itemsize + 100 * a.ndim + 7 * 6
            calls = [lambda: functions["second"](a) - 2 * right, lambda: functions["inner"](a, 7) - right]
            return [each() for each in calls[:: -1 if number > 4 else 1]]

        assert [*pool.map(call, range(THREADS))] == [[0, 0]] * THREADS
