"""Helpers for the tests of conversion."""

import hashlib


def digests(root):
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def many_shards(monkeypatch, rows):
    monkeypatch.setattr("thermopile.pipeline.conversion.plan.MIN_SHARD_ROWS", rows)
    monkeypatch.setattr("thermopile.pipeline.conversion.plan.MIN_SHARD_BYTES", 1)
