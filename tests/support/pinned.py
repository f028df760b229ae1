"""Output that is held as text."""

import pytest


def same_as_expected(path, seen):
    """Compare with the file, or write it if it is missing."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(seen, "utf-8")
        pytest.fail(f"{path.name} was written anew; look at the difference")
    assert seen == path.read_text("utf-8")
