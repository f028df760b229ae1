"""Models of Hugging Face's hub, `hf:org/name`: fetched where a user types the name, and read from the cache after."""

import re
from pathlib import Path
from typing import Any

from ..errors import ConfigError, one_line
from ..plugins import HF

_FILES = ["config.json", "preprocessor_config.json", "processor_config.json", "tokenizer*.json"]


def hub_name(name: str) -> tuple[str, str | None] | None:
    """Return repository and revision of `hf:org/name` or `hf:org/name@revision`; None for a directory's name."""
    path = name.removeprefix(HF)
    if not name.startswith(HF) or path.startswith((".", "~")) or Path(path).is_dir():
        return None
    found = re.fullmatch(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?", path)
    return (found["repo"], found["revision"]) if found else None


def snapshot(name: str, *, fetching: bool = False, weights: bool = True) -> Path | None:
    """Return the folder in Hugging Face's cache of a hub's name; the folder's name is the revision. Else None.

    fetching: fetch what is missing, but no code and no pickles, and without `weights` none. Raises ConfigError.
    """
    if (hub := hub_name(name)) is None:
        return None
    from huggingface_hub import snapshot_download

    try:
        files = _FILES + ["*.safetensors", "*.safetensors.index.json"] * (fetching and weights)
        only: dict[str, Any] = {"allow_patterns": files, "ignore_patterns": ["*/*"], "local_files_only": not fetching}
        return Path(snapshot_download(hub[0], revision=hub[1], **only))
    except Exception as error:  # of the network, the hub, the disk
        unknown = "is no directory here, nor in Hugging Face's cache; a new run fetches it by --set, or `hf download`"
        raise ConfigError(f"{name} {f'cannot be fetched: {one_line(error)}' if fetching else unknown}") from error
