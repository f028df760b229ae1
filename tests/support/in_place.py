"""Datasets in place, made from tars and from what a conversion of the same tars gives."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from thermopile.pipeline.dataset.index import read_index, seal_index
from thermopile.pipeline.dataset.row_records import write_row_records
from thermopile.pipeline.opening import Dataset
from thermopile.storage.files import sha256_of

from support.pictures import as_bytes
from support.tars import write_members

IN_BETON = 1 << 63


def write_tars(folder: Path, tars: int, samples: int) -> list[Path]:
    """Write tars of so many samples: a JPEG of noise of about 4 KB, a caption, and JSON of up to 2 KB."""
    folder.mkdir(parents=True)
    random, paths = np.random.default_rng(0), []
    for number in range(tars):
        paths.append(folder / f"{number:05d}.tar")
        members = []
        for place in range(samples):
            pixels = random.integers(0, 256, (64 + place % 9, 64, 3), dtype=np.uint8)
            key, picture = f"{number:05d}{place:04d}", as_bytes(Image.fromarray(pixels), "JPEG", quality=80)
            about = json.dumps({"words": "x" * int(random.integers(2000))}).encode()
            members += [(f"{key}.jpg", picture), (f"{key}.txt", b"noise %d" % place), (f"{key}.json", about)]
        write_members(paths[-1], *members)
    return paths


def members_of(tar: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(tar) as opened:
        return [member for member in opened if member.name.endswith(".jpg")]


def in_place(converted: Dataset, tars: list[Path], out: Path, *, root: Path | None = None, kept_every: int = 7) -> Path:
    """Write the dataset in place that a conversion of these tars would be; each k-th picture stays in its .beton."""
    root = root or tars[0].parent
    pictures = list(map(members_of, tars))
    shutil.copytree(converted.path, out)
    index, digests = read_index(out), []
    length = index.tokenizer.context_length if index.tokenizer else 0
    for shard in range(converted.shards):
        files = {suffix: out / "shards" / index.shard_name(shard, suffix) for suffix in ("beton", "rows", "parquet")}
        old, records, data = files["beton"].read_bytes(), converted.records(shard).copy(), bytearray(b"placeholder")
        for row, record in enumerate(records):
            at, tokens_at, size = int(record["jpeg_at"]), int(record["tokens_at"]), int(record["jpeg_bytes"])
            tar, place = divmod(int(record["source_index"]), 1 << 32)
            member = pictures[tar][place]
            assert member.size == size, "the conversion has changed a picture"
            if row % kept_every == 0:
                records["jpeg_at"][row] = IN_BETON | len(data)
                data += old[at : at + size]
            else:
                records["jpeg_at"][row] = member.offset_data
            records["tokens_at"][row] = len(data)
            data += old[tokens_at : tokens_at + 4 * length * int(record["captions"])]
        files["beton"].write_bytes(data)
        files["rows"].unlink()
        write_row_records(files["rows"], records, len(data))
        digests.append({suffix: sha256_of(file) for suffix, file in files.items()})
    named = [[tar.relative_to(root).as_posix(), tar.stat().st_size, tar.stat().st_mtime_ns] for tar in tars]
    change_index(out, shard_digests=digests, tars={"root": str(root), "files": named})
    return out


def change_index(path: Path, **fields) -> None:
    """Seal dataset.json with other fields, which need not be valid."""
    kept = read_index(path).model_dump(exclude={"format", "fingerprint"}) | fields
    (path / "dataset.json").write_bytes(seal_index(kept))


def versions_of(path: Path, root, versions: list) -> None:
    """Record another root of the tars and other versions."""
    files = [
        [name, size, version] for (name, size, _), version in zip(read_index(path).tars.files, versions, strict=True)
    ]
    change_index(path, tars={"root": str(root), "files": files})
