"""Any picture that Pillow opens → an upright RGB JPEG that the loaders can decode, or a reason why not.

Colours are taken as the file's numbers have them: colour profiles are not applied, as nearly no loader does.
"""

from __future__ import annotations

import io
import warnings
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..dataset_index import ImagePolicy
from ..errors import BadSampleError
from ..ffcv_api import imdecode
from ..jpeg_size import size_in_header
from ..row_records import MAX_PIXELS
from .beton import MAX_JPEG_BYTES
from .jpeg_markers import coding_of

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Nothing else is opened: Pillow also knows formats that start other programs. MPO is a JPEG with more behind it."""
MAX_SIDE = 65_500
"""libjpeg's limit; FFCV stores a side in 16 bits."""

_OTHER_FILES = {b"%PDF": "a PDF document", b"%!PS": "a PostScript document", b"PK\x03\x04": "a zip archive",
                b"\x1f\x8b": "a gzip archive", b"#!": "a script"}  # fmt: skip
"""First bytes of what often stands among pictures → its kind."""

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → what makes the picture upright."""


class StoredImage(NamedTuple):
    """A picture as a shard holds it."""

    jpeg: bytes
    height: int
    width: int


def to_stored(picture: bytes | Image.Image, policy: ImagePolicy) -> StoredImage:
    """Keep a JPEG byte for byte where that is possible; otherwise make the picture upright RGB and encode it.

    A JPEG is kept that is Huffman-coded YCbCr, upright, within policy.max_size, and that the loaders' decoder takes
    without complaint; bytes behind its end are kept with it. Of an animation the first picture is taken; what is
    transparent becomes white. Raises BadSampleError for what is no picture, is cut short or damaged, or is a bomb.
    """
    if isinstance(picture, Image.Image):
        return _encode(_rgb(picture), policy)
    if not picture:
        raise BadSampleError("the file is empty")
    coding = coding_of(picture) if picture.startswith(b"\xff\xd8") else None
    if coding and coding.plain_size and (kept := _kept_plain(picture, *coding.plain_size, policy)):
        return kept
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of bombs, which are counted here
            with Image.open(io.BytesIO(picture), formats=FORMATS) as image:
                _refuse_bomb(image)
                if coding and coding.is_huffman and _can_be_kept(image, picture, policy):
                    return StoredImage(picture, image.height, image.width)
                return _encode(_rgb(_loaded_upright(image, policy)), policy)
    except BadSampleError:
        raise
    except UnidentifiedImageError:  # its message names an address in memory
        raise BadSampleError(_what_it_is(picture)) from None
    except Image.DecompressionBombError:  # raised where it is opened: its size is not told
        raise BadSampleError(f"too many pixels: more than twice {MAX_PIXELS:,}") from None
    except Exception as error:  # Pillow's decoders raise nearly anything on hostile input
        raise BadSampleError(f"damaged or not supported{_known_cause(error)}") from error


def _kept_plain(picture: bytes, height: int, width: int, policy: ImagePolicy) -> StoredImage | None:
    """A JPEG of which the markers tell all; None where Pillow has to look. Spares a tenth of a conversion's time."""
    fits = 0 < height * width <= MAX_PIXELS and min(height, width) <= policy.max_size and len(picture) <= MAX_JPEG_BYTES
    return StoredImage(picture, height, width) if fits and decodes(picture, height, width) else None


def decodes(jpeg: bytes, height: int, width: int) -> bool:
    """Whether the decoder that training uses takes these bytes without a complaint, and they are of this size."""
    data = np.frombuffer(jpeg, np.uint8)
    if size_in_header(data) != (height, width):
        return False  # the decoder's memory is only as large as these say
    pixels = np.empty((height, width, 3), np.uint8)
    result: int = imdecode(
        data.ctypes.data, data.size, height, width, pixels.ctypes.data, height, width, 0, 0, 1, 1, False, False
    )
    return result == 0


def _refuse_bomb(image: Image.Image) -> None:
    if (pixels := image.width * image.height) > MAX_PIXELS:
        raise BadSampleError(f"too many pixels: {image.width}×{image.height} = {pixels:,}, above {MAX_PIXELS:,}")


def _can_be_kept(image: Image.Image, data: bytes, policy: ImagePolicy) -> bool:
    """Whether a Huffman-coded JPEG may be stored as it is; the decoder has the last word."""
    return (
        image.format == "JPEG"
        and image.mode == "RGB"
        and min(image.size) <= policy.max_size
        and len(data) <= MAX_JPEG_BYTES
        and _is_ycbcr(image)
        and _orientation(image) == 1
        and decodes(data, image.height, image.width)
    )


def _is_ycbcr(image: Image.Image) -> bool:
    """Whether the three channels of a JPEG are what all decoders take them for; Adobe's may be RGB."""
    names = bytes(layer[0] for layer in image.layer)  # type: ignore[attr-defined]
    return image.info.get("adobe_transform", 1) == 1 and names != b"RGB"


def _loaded_upright(image: Image.Image, policy: ImagePolicy) -> Image.Image:
    wanted_width, wanted_height = _reduced(image.size, policy)
    # A JPEG is decoded faster at 1/2, 1/4 or 1/8 of its size; the filter that follows does the rest.
    image.draft(None, (2 * wanted_width, 2 * wanted_height))
    image.load()
    # Asked after loading, for Pillow turns a TIFF by itself, and a PNG may say it at its end.
    turn = _UPRIGHT.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """EXIF's, 1 to 8; 1, upright, where there is none or it cannot be read, as browsers have it."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # noqa: BLE001 - damaged EXIF raises nearly anything, and the picture is as good as before
        return 1
    return orientation if orientation in _UPRIGHT else 1


def _rgb(image: Image.Image) -> Image.Image:
    """Pillow's own conversion, but for deep pixels, which it would clip at 255, and transparent ones, on white."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        # Not the colours below the transparency, which nobody was meant to see.
        paper = Image.new("RGB", image.size, "white")
        paper.paste(image, mask=image.getchannel("A"))
        return paper
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey from floating-point pixels of 0 to 1, or from integers of 0 to 65,535."""
    grey = np.asarray(image)
    white = 1.0 if image.mode == "F" else 65_535.0
    low, high = grey.min(), grey.max()
    if not (0 <= low <= high <= white):
        raise BadSampleError(f"deep pixels of unknown scale: {low:g} to {high:g}; 0 to {white:g} is understood")
    return Image.fromarray(np.rint(grey.astype(np.float32) * np.float32(255 / white)).astype(np.uint8))


def _reduced(size: tuple[int, int], policy: ImagePolicy) -> tuple[int, int]:
    """Width and height with the short side at most policy.max_size; they never grow."""
    scale = min(1.0, policy.max_size / min(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _encode(image: Image.Image, policy: ImagePolicy) -> StoredImage:
    if (size := _reduced(image.size, policy)) != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
    if max(image.size) > MAX_SIDE:
        raise BadSampleError(f"too long: {image.width}×{image.height} pixels; a side may have {MAX_SIDE:,}")
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=policy.quality)
    if buffer.tell() > MAX_JPEG_BYTES:
        raise BadSampleError(
            f"too large: {buffer.tell():,} bytes as JPEG, above {MAX_JPEG_BYTES:,}; a smaller --max-size fits"
        )
    return StoredImage(buffer.getvalue(), image.height, image.width)


def _what_it_is(data: bytes) -> str:
    """Why bytes that Pillow does not know are no picture for us: their kind, and never the bytes themselves.

    A link in somebody else's folder may name any file of this machine, and reasons are written into the dataset.
    """
    start = data[:1000].lstrip().lower()
    if start.startswith(b"<"):
        return "an SVG drawing, not pixels" if b"<svg" in start else "a page of HTML or XML, not a picture"
    if data[4:8] == b"ftyp":
        return "an AVIF or HEIC picture, or a film; save it as PNG or JPEG"
    kind = next((kind for magic, kind in _OTHER_FILES.items() if data.startswith(magic)), None)
    return f"{kind}, not a picture" if kind else f"not a {', '.join(FORMATS)} picture, or its start is damaged"


def _known_cause(error: Exception) -> str:
    """What Pillow says, where it is one of these: its other messages may quote the file."""
    return next((f": {cause}" for cause in ("truncated", "too large") if cause in str(error).lower()), "")
