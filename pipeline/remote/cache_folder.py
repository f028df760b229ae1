"""Where caches have their folders, one for each process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ...storage.files import user_cache

VARIABLE = "THERMOPILE_CACHE"


def cache_root() -> Path:
    """Return the folder of all caches: $THERMOPILE_CACHE, else the user's usual cache folder."""
    return Path(os.environ.get(VARIABLE) or user_cache())


def free_bytes() -> int:
    """Return the free bytes of the caches' disk."""
    root = cache_root()
    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free
