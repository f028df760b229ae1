"""What several tests of conversion share."""

from pathlib import Path

import pytest

from support.pictures import draw


@pytest.fixture(scope="package")
def with_bad_ones(tmp_path_factory) -> Path:
    """240 pictures of two classes, every twelfth unusable."""
    root = tmp_path_factory.mktemp("bad") / "in"
    for i in range(240):
        path = root / ("cats" if i < 160 else "dogs") / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(i).save(path) if i % 12 else path.write_bytes(b"no picture")
    return root
