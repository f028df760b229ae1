"""Parquet files of a data set on Hugging Face's hub: `hf://datasets/org/name[@revision][/path]`."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from ...storage.local import LocalPath
from ...storage.place import AnyPlace
from ..errors import SourceError

HUB = "hf://datasets/"
CACHED = re.compile(r".*/datasets--(.+?)--(.+?)/snapshots/")
"""Begins the path of a data set's file in Hugging Face's cache; the revision follows."""


def fetched(place: AnyPlace) -> list[AnyPlace]:
    """Return the files of a hub's address in Hugging Face's cache, after fetching what is missing; else the place.

    Its path names a file, or says how files' paths begin, and may have `*`; others may be cached. Raises SourceError.
    """
    if not str(place).startswith(HUB):
        return [place]
    from huggingface_hub import parse_hf_uri, snapshot_download

    try:
        found = parse_hf_uri(str(place))
        only = found.path_in_repo + "*.parquet" * (not found.path_in_repo.endswith(".parquet"))
        folder = Path(snapshot_download(found.id, repo_type="dataset", revision=found.revision, allow_patterns=only))
    except Exception as error:  # of the network, the hub, the disk
        raise SourceError(f"{place} cannot be fetched: {' '.join(str(error).split())[:300]}") from error
    return [LocalPath(file) for file in folder.rglob("*.parquet") if fnmatchcase(str(file.relative_to(folder)), only)]
