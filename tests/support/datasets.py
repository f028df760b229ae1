"""Facts about the datasets that conftest makes, and changes to an index."""

from thermopile.pipeline.dataset_index import read_index, seal_index


def captions_of(number: int) -> list[str]:
    """One to five captions, none of which another number has: those of a sample in `captions_dataset`."""
    return [f"picture {number} in the words of {name}" for name in ("Ada", "Bo", "Cy", "Di", "Ed")[: 1 + number % 5]]


def change_content(path, *values):
    """Seal dataset.json with other counts of what samples repeat, or none."""
    fields = read_index(path).model_dump(exclude={"format", "fingerprint"})
    del fields["source"]["content"]
    fields["source"] |= dict(zip(["content"], values, strict=False))
    (path / "dataset.json").write_bytes(seal_index(fields))
