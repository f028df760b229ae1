"""A dataset whose index says that its samples repeat something else."""

from thermopile.pipeline.dataset_index import read_index, seal_index


def change_content(path, *values):
    """Seal dataset.json with other counts, or none."""
    fields = read_index(path).model_dump(exclude={"format", "fingerprint"})
    del fields["source"]["content"]
    fields["source"] |= dict(zip(["content"], values, strict=False))
    (path / "dataset.json").write_bytes(seal_index(fields))
