"""A folder in which nearly every file tries something: what is a picture gets in upright, the rest is explained."""

import io
import json
import os
import random
import re
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline.conversion.marker import read_bad_samples
from thermopile.pipeline.sources.folder import FolderSource

from support.conversions import dataset_of
from support.pictures import as_bytes, png

CORNERS = [(200, 40, 40), (40, 160, 40), (50, 60, 210), (220, 210, 50)]
"""Red and green above blue and yellow: no turn or mirroring of it looks the same."""


def flag(height=30, width=40):
    image = Image.new("RGB", (width, height))
    for i, colour in enumerate(CORNERS):
        left, top = i % 2 * width // 2, i // 2 * height // 2
        image.paste(colour, (left, top, left + width // 2, top + height // 2))
    return image


def turned(kind, orientation):
    """The flag as a camera stores it that was held otherwise, with a note how to turn it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    turns = [None, None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM,
             Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_90, Image.Transpose.TRANSVERSE,
             Image.Transpose.ROTATE_270]  # fmt: skip
    image = flag() if orientation == 1 else flag().transpose(turns[orientation])
    return as_bytes(image, kind, exif=exif, quality=95)


def with_segments(jpeg, *segments):
    """JPEG with (marker, bytes) behind its first marker."""
    return jpeg[:2] + b"".join(bytes([255, m]) + struct.pack(">H", len(d) + 2) + d for m, d in segments) + jpeg[2:]


def deep_png():
    rows = (np.asarray(flag()).astype(np.uint16) * 257).astype(">u2").reshape(30, -1)
    return png(40, 30, b"".join(b"\0" + row.tobytes() for row in rows), depth=16)


def see_through():
    """The flag, opaque, in a frame that is transparent but not white below."""
    image = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    image.paste(flag(24, 32).convert("RGBA"), (4, 3))
    return image


def pictures():
    """Name below the folder → bytes of something that shows the flag."""
    jpeg, film = as_bytes(flag(), "JPEG", quality=95), {"save_all": True, "append_images": [Image.new("RGB", (40, 30))]}
    ink = Image.merge("CMYK", (*Image.eval(flag(), lambda value: 255 - value).split(), Image.new("L", (40, 30))))
    return {f"turned/{orientation}.jpg": turned("JPEG", orientation) for orientation in range(1, 9)} | {
        "turned/6.png": turned("PNG", 6), "turned/8.tif": turned("TIFF", 8), "turned/5.webp": turned("WEBP", 5),
        "progressive.jpg": as_bytes(flag(), "JPEG", progressive=True, quality=95),
        "cmyk.jpg": as_bytes(ink, "JPEG", quality=95), "cmyk.tiff": as_bytes(ink, "TIFF"),
        "deep.png": deep_png(), "see-through.png": as_bytes(see_through(), "PNG"),
        "see-through.webp": as_bytes(see_through(), "WEBP", lossless=True),
        "palette.png": as_bytes(flag().quantize(8), "PNG"), "bitmap.bmp": as_bytes(flag(), "BMP"),
        "packed.tif": as_bytes(flag(), "TIFF", compression="tiff_lzw"), "plain.ppm": as_bytes(flag(), "PPM"),
        "film.gif": as_bytes(flag(), "GIF", **film), "film.webp": as_bytes(flag(), "WEBP", lossless=True, **film),
        "film.png": as_bytes(flag(), "PNG", **film), "film.jpg": as_bytes(flag(), "MPO", quality=95, **film),
        "really-png.jpg": as_bytes(flag(), "PNG"), "really-jpeg.png": jpeg, "really-webp.GIF": turned("WEBP", 1),
        "huge.png": as_bytes(flag(1500, 2000), "PNG", compress_level=1), "huge.jpg": as_bytes(flag(1500, 2000), "JPEG"),
        "long-header.jpg": with_segments(jpeg, *[(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + bytes(60_000))] * 60),
        "wild-tags.jpg": with_segments(jpeg, (0xE1, b"Exif\0\0II*\0\x08\0\0\0" + bytes([255]) * 999)),
        "trailer.jpg": jpeg + b"\0" * 5000, "stray.jpg": jpeg[:-2] + bytes(7) + jpeg[-2:],
        "album.jpg/inside.jpg": jpeg, "new\nline.jpg": jpeg, "\u202egpj.exe.jpg": jpeg, "-rf.jpg": jpeg,
        os.fsdecode(b"caf\xe9.jpg"): jpeg,
    }  # fmt: skip


def no_pictures():
    """Name below the folder → bytes of something to leave out, and the reason to be given."""
    jpeg, film = as_bytes(flag(200, 200), "JPEG", quality=95), as_bytes(flag(), "JPEG", progressive=True)
    claims = (at := jpeg.index(b"\xff\xc0") + 5) and jpeg[:at] + struct.pack(">HH", 65500, 65500) + jpeg[at + 4 :]
    cut = {
        f"cut/{kind}-{share:.0%}.{kind}": (whole[: int(len(whole) * share)], "damaged|no JPEG")
        for kind in ("jpeg", "png", "gif", "webp", "tiff", "bmp")
        for whole in [as_bytes(Image.effect_noise((60, 60), 80).convert("RGB"), kind.upper())]
        for share in (0.01, 0.4, 0.8)
    }
    return cut | {
        "cut/no-end.jpg": (jpeg[:-2], "truncated"), "empty.jpg": (b"", "empty"), "empty.png": (b"", "empty"),
        "page.jpg": (b"<!DOCTYPE html>\n<html>404</html>", "HTML"), "drawing.png": (b"<svg></svg>", "SVG"),
        "words.gif": (b"a dog on the grass\n", "not a JPEG"), "script.png": (b"#!/bin/sh\nrm -rf /\n", "a script"),
        "paper.jpg": (b"%PDF-1.7\n", "a PDF"), "postscript.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "PostScript"),
        "avif.jpg": (b"\0\0\0\x20ftypavif" + bytes(99), "AVIF"), "zeros.jpg": (bytes(9999), "not a JPEG"),
        "noise.jpg": (b"\xff\xd8\xff" + random.Random(1).randbytes(9999), "damaged|a bomb"),
        "bomb.png": (png(20_000, 20_000, b""), "too many pixels"), "bomb.jpg": (claims, "too many pixels"),
        "bomb.gif": (b"GIF89a\xff\xff\xff\xff\0\0\0\x2c" + bytes(10), "too many pixels"),
        "bomb.ppm": (b"P6 99999999 99999999 255\n", "too many pixels"),
        "scan-bomb.jpg": (film[:-2] + 999 * film[film.rindex(b"\xff\xda") : -2] + b"\xff\xd9", "more than 100 scans"),
        "header-bomb.jpg": (with_segments(jpeg, *[(0xFE, b"")] * 11_000), "more than 10,000 segments"),
    }  # fmt: skip


def make_links_and_devices(root):
    """What is no regular file. Returns name → reason, None where it is a link to a picture."""
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "flag.jpg").write_bytes(as_bytes(flag(), "JPEG", quality=95))
    (root / "link-outside.jpg").symlink_to(outside / "flag.jpg")
    (root / "link-beside.jpg").symlink_to("really-png.jpg")
    (root / "link-nowhere.jpg").symlink_to("absent.jpg")
    (root / "link-in-a-circle.jpg").symlink_to("link-in-a-circle.jpg")
    (root / "link-to-a-device.jpg").symlink_to("/dev/zero")
    (root / "album.jpg" / "circle").symlink_to(root)
    (root / "folder-outside.jpg").symlink_to(outside)
    os.mkfifo(root / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(root / "socket.jpg"))
    with (root / "sparse.jpg").open("wb") as file:
        file.truncate(1 << 40)
    return {
        "link-outside.jpg": None, "folder-outside.jpg/flag.jpg": None, "link-beside.jpg": None,
        "link-nowhere.jpg": "No such file",
        "link-in-a-circle.jpg": "Too many levels", "link-to-a-device.jpg": "not a regular file",
        "pipe.jpg": "not a regular file", "socket.jpg": "not a regular file", "sparse.jpg": "too large for a picture",
    }  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The folder converted: the dataset, names of the pictures, and reason of each name to be left out."""
    root = tmp_path_factory.mktemp("hostile") / "in"
    shown, left_out = pictures(), no_pictures()
    for name, data in (shown | {name: data for name, (data, _) in left_out.items()}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    special = make_links_and_devices(root)
    reasons = {name: reason for name, (_, reason) in left_out.items()}
    reasons |= {name: reason for name, reason in special.items() if reason}
    names = [*shown, *(name for name, reason in special.items() if reason is None)]
    out = root.parent / "out"
    return dataset_of(FolderSource(root), out, max_error_rate=1.0), names, reasons


def test_no_reason_quotes_a_file_that_a_link_may_have_named(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    secrets = {"shadow": b"root:$6$secret", "token.ppm": b"P6 secret-secret 1 255\n", "bits.bmp": b"BMsecret" * 20,
               "chunk.png": b"\x89PNG\r\n\x1a\n\0\0\0\x04secretsecret"}  # fmt: skip
    for name, data in secrets.items():
        (tmp_path / name).write_bytes(data)
        (root / f"{name}.jpg").symlink_to(tmp_path / name)
    (root / "flag.jpg").write_bytes(as_bytes(flag(), "JPEG"))
    dataset_of(FolderSource(root), tmp_path / "out", max_error_rate=1.0)
    bad = list(read_bad_samples(tmp_path / "out" / "errors.jsonl"))
    assert len(bad) == len(secrets)
    quoted = [sample.reason for sample in bad if re.search(r"secr|root|\d", sample.reason)]
    assert quoted == []


def test_there_are_at_least_forty_hostile_files(hostile):
    _, names, reasons = hostile
    assert len(names) >= 40
    assert len(reasons) >= 40


def test_every_picture_is_in_and_nothing_else(hostile):
    dataset, names, _ = hostile
    uris = [row["uri"] for row in dataset.rows(range(dataset.n))]
    readable = [name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for name in names]
    assert sorted(uris) == sorted(readable)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_every_picture_is_upright_and_in_its_colours(hostile):
    dataset, _, _ = hostile
    for row in dataset.rows(range(dataset.n)):
        image = Image.open(io.BytesIO(dataset.jpeg(row["sample_id"])))
        assert (image.format, image.mode) == ("JPEG", "RGB")
        width, height = image.size
        assert width > height, row["uri"]
        middles = [image.getpixel((width * x // 4, height * y // 4)) for y in (1, 3) for x in (1, 3)]
        # Eight colours of a palette and YCbCr's rounding are all that is lost.
        assert np.abs(np.array(middles) - CORNERS).max() < 16, (row["uri"], middles)


def test_what_is_transparent_is_white_not_what_hides_below(hostile):
    dataset, _, _ = hostile
    for row in dataset.rows(range(dataset.n)):
        if "see-through" in row["uri"]:
            image = Image.open(io.BytesIO(dataset.jpeg(row["sample_id"])))
            assert min(image.getpixel((0, 0))) > 240


def test_large_pictures_are_reduced_and_the_small_ones_are_not(hostile):
    dataset, _, _ = hostile
    sizes = {row["uri"]: (row["width"], row["height"]) for row in dataset.rows(range(dataset.n))}
    assert sizes.pop("huge.png") == sizes.pop("huge.jpg") == (683, 512)
    assert set(sizes.values()) == {(40, 30)}


def test_all_else_is_listed_once_with_its_reason(hostile):
    dataset, _, reasons = hostile
    lines = [json.loads(line) for line in (dataset.path / "errors.jsonl").read_text("utf-8").splitlines()]
    assert sorted(line["uri"] for line in lines) == sorted(reasons)
    wrong = {line["uri"]: line["reason"] for line in lines if not re.search(reasons[line["uri"]], line["reason"])}
    assert not wrong
    assert all(len(line["reason"]) < 200 and "0x" not in line["reason"] for line in lines)


def test_a_folder_behind_a_link_is_entered_once_and_a_circle_is_counted(hostile):
    dataset, _, _ = hostile
    uris = [Path(row["uri"]) for row in dataset.rows(range(dataset.n))]
    assert sum(path.parts[0] == "folder-outside.jpg" for path in uris) == 1
    assert not any("circle" in path.parts for path in uris)
    assert dataset.index.source["not_used"] == {
        "links to folders that are listed already": {"number": 1, "example": "album.jpg/circle", "cure": ""}
    }
