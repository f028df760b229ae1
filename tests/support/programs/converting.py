"""A conversion with a test set held out, in many small shards; tests kill it. Arguments: pictures, OUT.

It prints "ready" or that Ctrl-C would reach its workers, which takes seconds, and begins when a line comes in.
"""

import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.conversion.shard_pool import start_workers_early
from thermopile.pipeline.sources import shards
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.splits import hold_out


def convert_both(pictures, out, workers):
    source = FolderSource(pictures)
    train, test = hold_out(len(source), source.groups(), 40, 0)
    settings = ConvertSettings(max_error_rate=1)
    shards.MIN_SHARD_ROWS, shards.MIN_SHARD_BYTES = 4, 1
    convert(source, out, settings, workers=workers, resume=True, selection=train)
    convert(source, out.with_name(f"{out.name}-test"), settings, workers=workers, resume=True, selection=test)


if __name__ == "__main__":
    start_workers_early()
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        blocked = pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
    print("ready" if signal.SIGINT in blocked else "Ctrl-C would reach the workers", flush=True)
    sys.stdin.readline()
    convert_both(Path(sys.argv[1]), Path(sys.argv[2]), workers=2)
