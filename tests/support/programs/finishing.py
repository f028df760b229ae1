"""Finishes a conversion of which every shard is done, killed at each n-th step. Arguments: pictures, folder, n.

The folder holds `out`, which is to be replaced, `.out.partial`, and `wanted`, the digests of what has to come out.
Prints the number of kills.
"""

import json
import shutil
import sys
from pathlib import Path

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.sources import shards
from thermopile.pipeline.sources.folder import FolderSource

from support.conversions import digests
from support.kills import killed_at


def finish(pictures, folder):
    shards.MIN_SHARD_ROWS, shards.MIN_SHARD_BYTES = 120, 1
    convert(FolderSource(pictures), folder / "out", ConvertSettings(), resume=True, overwrite=True)


def main(pictures, folder, every):
    wanted = json.loads((folder / "wanted").read_text())
    kills = 0
    while True:
        shutil.rmtree(folder / "work", ignore_errors=True)
        (folder / "work").mkdir()
        for name in (".out.partial", "out"):
            shutil.copytree(folder / name, folder / "work" / name)
        if not killed_at(1 + kills * every, folder / "work", lambda: finish(pictures, folder / "work")):
            break
        kills += 1
        finish(pictures, folder / "work")
        found = digests(folder / "work")
        assert found == wanted, (kills, set(found.items()) ^ set(wanted.items()))
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
