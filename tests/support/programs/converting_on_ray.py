"""A conversion on a Ray cluster, in small shards and with pauses; tests kill it. Arguments: pictures, OUT."""

import sys
from pathlib import Path

from thermopile.pipeline.conversion.conversion import Conversion
from thermopile.pipeline.conversion.on_ray import cluster, convert_on_ray
from thermopile.pipeline.sources import shards
from thermopile.storage.local import LocalPath

from support.sources import PausingSource

if __name__ == "__main__":
    shards.MIN_SHARD_ROWS, shards.MIN_SHARD_BYTES = 30, 1
    with cluster(None):
        convert_on_ray(Conversion(PausingSource(Path(sys.argv[1]), Path.cwd()), LocalPath(sys.argv[2])))
