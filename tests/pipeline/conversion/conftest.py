"""What several tests of conversion share."""

from pathlib import Path

import pytest

from support.pictures import draw
from support.tars import write_members


@pytest.fixture(scope="package")
def with_bad_ones(tmp_path_factory) -> Path:
    """240 pictures of two classes, every twelfth unusable."""
    root = tmp_path_factory.mktemp("bad") / "in"
    for i in range(240):
        path = root / ("cats" if i < 160 else "dogs") / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(i).save(path) if i % 12 else path.write_bytes(b"no picture")
    return root


@pytest.fixture(scope="package")
def tars_with_bad_ones(with_bad_ones, tmp_path_factory) -> Path:
    """The same pictures in three tars, with captions."""
    root, pictures = tmp_path_factory.mktemp("bad_tars"), sorted(with_bad_ones.rglob("*.png"))
    for tar in range(3):
        members = [(path.name, path.read_bytes()) for path in pictures[80 * tar : 80 * tar + 80]]
        members += [(f"{name[:-4]}.txt", b"picture " + name.encode()) for name, _ in members]
        write_members(root / f"{tar}.tar", *sorted(members))
    return root
