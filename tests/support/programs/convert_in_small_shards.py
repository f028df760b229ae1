"""`thermopile convert` with shards of about four samples: a few pictures make many. Arguments: those of the command."""

import sys

from thermopile.pipeline.conversion import plan
from thermopile.tools.cli import main

if __name__ == "__main__":
    plan.MIN_SHARD_ROWS, plan.MIN_SHARD_BYTES = 3, 1
    main(["convert", *sys.argv[1:]])
