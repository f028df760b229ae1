"""A conversion with a test set held out, in many small shards; tests kill it. Arguments: pictures, OUT.

It makes ready, which takes seconds, and begins when a line comes in.
"""

import sys
from pathlib import Path

from thermopile.pipeline.conversion import plan
from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.conversion.shard_pool import start_workers_early
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.selection import hold_out


def convert_both(pictures, out, workers):
    source = FolderSource(pictures)
    train, test = hold_out(len(source), source.groups(), 40, 0)
    settings = ConvertSettings(max_error_rate=1)
    plan.MIN_SHARD_ROWS, plan.MIN_SHARD_BYTES = 4, 1
    convert(source, out, settings, workers=workers, resume=True, selection=train)
    convert(source, out.with_name(f"{out.name}-test"), settings, workers=workers, resume=True, selection=test)


if __name__ == "__main__":
    start_workers_early()
    sys.stdin.readline()
    convert_both(Path(sys.argv[1]), Path(sys.argv[2]), workers=2)
