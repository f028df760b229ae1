"""Models of Hugging Face's hub, `hf:org/name`: fetched where a user types the name, and read from the cache after."""

import re
from pathlib import Path

from ..errors import ConfigError
from ..plugins import HF

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?")
_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "preprocessor_config.json", "tokenizer*.json")


def hub_name(name: str) -> tuple[str, str | None] | None:
    """Return repository and revision of `hf:org/name` or `hf:org/name@revision`; None for a directory's name."""
    path = name.removeprefix(HF)
    if not name.startswith(HF) or path.startswith((".", "~")) or Path(path).is_dir():
        return None
    found = _NAME.fullmatch(path)
    return (found["repo"], found["revision"]) if found else None


def fetch(name: str) -> None:
    """Fetch the model of a hub's name into Hugging Face's cache, no code and no pickles. Raises ConfigError."""
    if (hub := hub_name(name)) is None:
        return
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(hub[0], revision=hub[1], allow_patterns=list(_FILES))
    except Exception as error:  # of the network, the hub or the disk
        raise ConfigError(f"{name} cannot be fetched: {' '.join(str(error).split())[:300]}") from error


def cached(name: str, repo: str, revision: str | None) -> Path:
    """Return the folder of a fetched model, whose name is its revision. Raises ConfigError if it is not there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception as error:  # not fetched, or the cache is damaged
        raise ConfigError(
            f"{name} is no directory, and no model in Hugging Face's cache. It is fetched for a new run if you type "
            f"it: --set model.image.name={name}"
        ) from error
