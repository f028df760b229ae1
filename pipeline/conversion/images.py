"""Convert any picture that Pillow opens to an upright RGB JPEG that the loaders can decode, or give a reason.

Colour profiles are not applied, as in nearly every loader. A JPEG's markers tell its coding and number of scans, which
Pillow does not; source: ITU-T T.81, annex B.
"""

from __future__ import annotations

import io
import re
import warnings
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from ...storage.arrays import Uint8s
from ...storage.kernels import kernel
from ..dataset.index import MAX_PIXELS, ImagePolicy
from ..dataset.jpeg import decode
from ..dataset.raw_bytes import writable
from ..dataset.row_records import MAX_JPEG_BYTES
from ..dataset.stored_sample import size_in_header
from ..errors import BadSampleError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Other formats are refused: Pillow starts other programs for some. MPO is a JPEG followed by more pictures."""
_OPENED: tuple[str, ...] = FORMATS
with suppress(ImportError):  # the extra `heic`
    from pillow_heif import register_heif_opener

    register_heif_opener()
    _OPENED = (*FORMATS, "HEIF")
MAX_SIDE = 65_500
"""libjpeg's limit; FFCV stores a side in 16 bits."""

DARK = 15
"""The highest value, of 255, in a picture of 12 bits that is read as one of 16."""
MAX_SCANS = 100
"""Ordinary JPEGs have about ten; each costs a pass over all pixels, but only a hundred bytes of the file."""
MAX_SEGMENTS = 10_000
"""Segments hold up to 64 KB each: far more than fits a page of the dataset's file."""
MAX_FILL = 1_000
"""Limit of meaningless bytes between two segments; there should be none, and Pillow scans each."""

_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_APP0, _APP1, _APP15 = 0xE0, 0xE1, 0xEF
_JFIF_BYTES = 16
"""Length of the first segment of nearly every JPEG without a thumbnail."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ONE_PASS_FRAMES = (0xC0, 0xC1)
_HUFFMAN_FRAMES = (0xC0, 0xC1, 0xC2)
"""Baseline, extended and progressive."""
# Excludes stuffed zeros and restarts, which occur in coded data, and fill bytes.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")

_OTHER_FILES = {
    b"%PDF": "a PDF document",
    b"%!PS": "a PostScript document",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"#!": "a script",
}
"""First bytes → kind of files often found among pictures."""

_HEIC_EXTRA = ", which needs pip install 'thermopile[heic]'"
_BITS_PER_SAMPLE, _PHOTOMETRIC, _MAX_SAMPLE_VALUE, _EXTRA_SAMPLES = 258, 262, 281, 338
"""Tags of TIFF 6.0."""
_PNG = b"\x89PNG\r\n\x1a\n"
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → transformation that makes the picture upright."""


class StoredImage(NamedTuple):
    """A picture in its stored form."""

    jpeg: bytes
    height: int
    width: int
    is_blank: bool
    """Whether all pixels have one colour."""
    tone: int
    """-1 if 99 % of the values are at most DARK, 1 if they are within DARK of white, else 0."""


def to_stored(picture: bytes | Image.Image, policy: ImagePolicy) -> StoredImage:
    """Keep a JPEG byte for byte if possible; otherwise make the picture upright RGB and encode it.

    A JPEG is kept if it is Huffman-coded YCbCr, upright, within policy.max_size, and the loaders' decoder accepts it
    without warnings; bytes after its end are kept too. Animations give their first picture; transparency becomes white.
    Raises BadSampleError for non-pictures, truncated or damaged files, and bombs.
    """
    if isinstance(picture, Image.Image):
        return _read(picture, None, policy)
    if not picture:
        raise BadSampleError("the file is empty")
    coding = coding_of(picture) if picture.startswith(b"\xff\xd8") else None
    if coding and coding.plain_size and (kept := _kept(picture, *coding.plain_size, policy)):
        return kept  # without Pillow: saves a tenth of a conversion's time
    try:
        return _read(picture, coding, policy)
    except BadSampleError:
        if (plain := _without_metadata(picture)) == picture:
            raise
        return _read(plain, coding, policy)


def _read(picture: bytes | Image.Image, coding: Coding | None, policy: ImagePolicy) -> StoredImage:
    data = picture if isinstance(picture, bytes) else b""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, and bombs, which are refused below
            Image.MAX_IMAGE_PIXELS = policy.max_pixels  # Pillow raises on opening above twice as many
            opened = picture if isinstance(picture, Image.Image) else Image.open(io.BytesIO(data), formats=_OPENED)
            with opened as image:
                if image.width * image.height > policy.max_pixels:
                    size, limit = f"{image.width}×{image.height}", f"above --max-pixels {policy.max_pixels:,}"
                    raise BadSampleError(f"too many pixels: {size}, {limit}")
                can_stay = coding and coding.is_huffman and _is_plain_ycbcr(image) and _orientation(image) == 1
                if can_stay and (kept := _kept(data, image.height, image.width, policy)):
                    return kept
                wanted_width, wanted_height = _reduced(image.size, policy)
                # A JPEG decodes faster at 1/2, 1/4 or 1/8 of its size; the resize filter does the rest.
                image.draft(None, (2 * wanted_width, 2 * wanted_height))
                image.load()
                # Read after loading: Pillow rotates a TIFF itself, and a PNG may store the orientation at its end.
                turn = _UPRIGHT.get(_orientation(image))
                return _encode(_rgb(image if turn is None else image.transpose(turn)), policy)
    except BadSampleError:
        raise
    except UnidentifiedImageError:  # its message contains a memory address
        raise BadSampleError(_what_it_is(data)) from None
    except Image.DecompressionBombError:  # raised on opening, before the size is known
        raise BadSampleError(f"too many pixels: more than twice --max-pixels {policy.max_pixels:,}") from None
    except Exception as error:  # Pillow's decoders raise nearly anything on hostile input
        # Pillow's message if it is one of these; others may quote the file.
        cause = next((f": {each}" for each in ("truncated", "too large") if each in str(error).lower()), "")
        raise BadSampleError(f"damaged or not supported{cause}") from error


def _kept(picture: bytes, height: int, width: int, policy: ImagePolicy) -> StoredImage | None:
    """Return a Huffman-coded, upright YCbCr JPEG that the decoder accepts; None if it must be encoded again."""
    limit = min(MAX_PIXELS, policy.max_pixels)  # of a stored picture, and of a picture that is read
    fits = 0 < height * width <= limit and min(height, width) <= policy.max_size and len(picture) <= MAX_JPEG_BYTES
    is_sound, look = _decodes(writable(picture), height, width) if fits else (False, (False, 0))
    return StoredImage(picture, height, width, *look) if is_sound else None


def decodes(jpeg: bytes, height: int, width: int) -> bool:
    """Return whether training's decoder accepts the bytes without warnings at this size."""
    return bool(_decodes(writable(jpeg), height, width)[0])


@kernel()
def _look(pixels: Uint8s) -> tuple[bool, int]:
    """Return `is_blank` and `tone` of RGB pixels, uint8 [3 * height * width]; mostly by the first few."""
    is_blank, others, lighter, darker = True, len(pixels) // 100, 0, 0
    for place in range(3, len(pixels)):
        if pixels[place] != pixels[place - 3]:
            is_blank = False
            break
    for value in pixels:
        lighter += value > DARK
        darker += value < 255 - DARK
        if lighter > others and darker > others:
            return is_blank, 0
    return is_blank, -1 if lighter <= others else 1


@kernel()
def _decodes(jpeg: Uint8s, height: int, width: int) -> tuple[bool, tuple[bool, int]]:
    """Return whether the decoder accepts the bytes, and how the picture looks."""
    pixels = np.empty(3 * height * width, np.uint8)
    # The decoder's buffer is sized by the header.
    if size_in_header(jpeg) != (height, width) or not decode(jpeg, height, width, pixels, 1):
        return False, (False, 0)
    return True, _look(pixels)


def _is_plain_ycbcr(image: Image.Image) -> bool:
    """Return whether this is a JPEG of one picture in YCbCr, as decoders assume; Adobe's channels may be RGB."""
    if image.format != "JPEG" or image.mode != "RGB":
        return False
    names = bytes(layer[0] for layer in image.layer)  # type: ignore[attr-defined]
    return image.info.get("adobe_transform", 1) == 1 and names != b"RGB"


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1, upright, if missing or unreadable, as in browsers."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # noqa: BLE001 - damaged EXIF raises nearly anything, and the picture is still usable
        return 1
    return orientation if orientation in _UPRIGHT else 1


def _rgb(image: Image.Image) -> Image.Image:
    """Convert with Pillow, except deep pixels, which it would clip at 255, and transparent pixels, put on white."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    says_nothing = image.format == "TIFF" and _EXTRA_SAMPLES not in image.tag_v2  # type: ignore[attr-defined]
    if image.has_transparency_data and not says_nothing:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() == (0, 0):
            return image.convert("RGB")  # a BMP's unused channel: nobody stores a picture that cannot be seen
        # Drop the colours of transparent pixels, which were never meant to be seen.
        paper = Image.new("RGB", image.size, "white")
        paper.paste(image, mask=image.getchannel("A"))
        return paper
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert floating-point pixels of 0 to 1, or integers of 0 to 65,535 or a TIFF's own white, to 8-bit grey.

    A TIFF of 16 bits that uses fewer than 12 of them holds a camera's or a scanner's numbers, whose white is not known.
    """
    grey, tags = np.asarray(image), getattr(image, "tag_v2", {})
    white = 1.0 if image.mode == "F" else 65_535.0
    bits, named = tags.get(_BITS_PER_SAMPLE, (16,))[0], tags.get(_MAX_SAMPLE_VALUE)
    if image.mode != "F":
        white = float(named[0] if isinstance(named, tuple) else named or (1 << min(bits, 16)) - 1)
    low, high = float(grey.min()), float(grey.max())
    is_unknown = tags and image.mode != "F" and not named and bits >= 16 and high < 1 << 12
    if not (0 <= low <= high <= white) or is_unknown:
        raise BadSampleError(f"deep pixels of unknown scale: {low:g} to {high:g}; 0 to {white:g} is understood")
    pixels = np.rint(grey.astype(np.float32) * np.float32(255 / white)).astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == 0:
        pixels = 255 - pixels  # white is zero
    if isinstance(transparent := image.info.get("transparency"), int):
        pixels[grey == transparent] = 255
    return Image.fromarray(pixels)


def _without_metadata(picture: bytes) -> bytes:
    """Return a PNG with the chunks alone that its pixels need; other files as they are.

    Pillow refuses a sound picture for a text or a profile that is large, short, or has a wrong checksum.
    """
    if not picture.startswith(_PNG):
        return picture
    kept, place = [_PNG], len(_PNG)
    while place < len(picture):
        end = place + 12 + int.from_bytes(picture[place : place + 4], "big")
        name = picture[place + 4 : place + 8]
        if name[:1].isupper() or name == b"tRNS":
            kept.append(picture[place:end])
        place = end
    return b"".join(kept)


def _reduced(size: tuple[int, int], policy: ImagePolicy) -> tuple[int, int]:
    """Return width and height with the short side at most policy.max_size; never enlarges."""
    scale = min(1.0, policy.max_size / min(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _encode(image: Image.Image, policy: ImagePolicy) -> StoredImage:
    if (size := _reduced(image.size, policy)) != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
    if max(image.size) > MAX_SIDE:
        raise BadSampleError(f"too long: {image.width}×{image.height} pixels; a side may have {MAX_SIDE:,}")
    if image.width * image.height > MAX_PIXELS:
        pixels = f"{image.width}×{image.height} pixels, above {MAX_PIXELS:,}"
        raise BadSampleError(f"too large: {pixels}; a smaller --max-size fits")
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=policy.quality, comment="")  # else Pillow keeps a GIF's, up to 64 kB
    if buffer.tell() > MAX_JPEG_BYTES:
        found = f"{buffer.tell():,} bytes as JPEG, above {MAX_JPEG_BYTES:,}"
        raise BadSampleError(f"too large: {found}; a smaller --max-size fits")
    return StoredImage(buffer.getvalue(), image.height, image.width, *_look(writable(image.tobytes())))


def _what_it_is(data: bytes) -> str:
    """Name the kind of bytes that Pillow does not recognise, without quoting them.

    A link in an untrusted folder may point to any file on this machine, and the dataset stores reasons.
    """
    start = data[:1000].lstrip().lower()
    if start.startswith(b"<"):
        return "an SVG drawing, not pixels" if b"<svg" in start else "a page of HTML or XML, not a picture"
    if data[4:8] == b"ftyp" and data[8:12] not in (b"avif", b"avis"):
        can_be_read = "HEIF" in _OPENED
        return f"a film, or a {'damaged ' if can_be_read else ''}HEIC picture{_HEIC_EXTRA * (not can_be_read)}"
    kind = next((kind for magic, kind in _OTHER_FILES.items() if data.startswith(magic)), None)
    return f"{kind}, not a picture" if kind else f"not a {', '.join(FORMATS)} picture, or its start is damaged"


class Coding(NamedTuple):
    """Coding of the first picture in a JPEG file."""

    is_huffman: bool
    """Baseline or progressive, which every decoder supports; not arithmetic or lossless, which hardware lacks."""
    scans: int
    """Number of passes over the whole picture."""
    plain_size: tuple[int, int] | None = None
    """Height and width of a baseline JPEG of 8-bit YCbCr in one scan with a minimal header: no EXIF, no Adobe or other
    application marker, and no bytes between segments, on which decoders disagree; else None."""


def coding_of(jpeg: bytes) -> Coding:
    """Walk the markers: to the first scan if the header shows that it is the only scan, else to the end.

    Raises BadSampleError for decoder bombs: too many scans, segments or fill bytes.
    """
    frame, scans, place, header, is_plain = 0, 0, 0, b"", True
    for _ in range(MAX_SEGMENTS):
        found = _MARKER.search(jpeg, place)
        if not found or found.end() + 8 > len(jpeg) or (marker := jpeg[found.end() - 1]) == _EOI:
            return Coding(frame in _HUFFMAN_FRAMES, scans)
        if not scans and found.start() - place > MAX_FILL:
            raise BadSampleError(f"a bomb: more than {MAX_FILL:,} bytes between two parts of its header")
        is_plain &= found.start() == place and not _APP1 <= marker <= _APP15
        place = found.end()
        if marker == _SOI:
            continue
        if marker in _FRAMES:
            frame, header = marker, jpeg[place + 2 : place + 17]
        length = int.from_bytes(jpeg[place : place + 2], "big")
        is_plain &= marker != _APP0 or length == _JFIF_BYTES
        if marker == _SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise BadSampleError(f"a bomb: more than {MAX_SCANS} scans")
            if frame in _ONE_PASS_FRAMES and jpeg[place + 2] == header[5]:
                # The coded data follows, which is slow to search.
                is_plain &= header[0] == 8 and header[5] == 3 and header[6::3] != b"RGB"
                size = int.from_bytes(header[1:3], "big"), int.from_bytes(header[3:5], "big")
                return Coding(is_huffman=True, scans=1, plain_size=size if is_plain else None)
        place += length
    raise BadSampleError(f"a bomb: more than {MAX_SEGMENTS:,} segments")
