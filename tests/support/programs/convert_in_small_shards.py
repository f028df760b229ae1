"""`thermopile convert` with shards of about four samples: a few pictures make many. Arguments: those of the command."""

import sys

from thermopile.pipeline.sources import shards
from thermopile.tools.cli import main

if __name__ == "__main__":
    shards.MIN_SHARD_ROWS, shards.MIN_SHARD_BYTES = 3, 1
    main(["convert", *sys.argv[1:]])
