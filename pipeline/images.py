"""Any picture that Pillow opens → an upright RGB JPEG that the loaders can decode, or a reason why not."""

from __future__ import annotations

import io
import warnings
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from .beton import MAX_JPEG_BYTES
from .dataset import ImagePolicy
from .errors import BadSampleError
from .ffcv_api import imdecode

MAX_SIDE = 65_500
"""libjpeg's limit; FFCV stores a side in 16 bits."""
_EXIF_ORIENTATION = 0x0112


class StoredImage(NamedTuple):
    """A picture as a shard holds it."""

    jpeg: bytes
    height: int
    width: int


def to_stored(picture: bytes | Image.Image, policy: ImagePolicy) -> StoredImage:
    """Keep a JPEG byte for byte where that is possible; otherwise make the picture upright RGB and encode it.

    Raises BadSampleError for what is no picture, is cut short, or would be larger than Pillow's bomb limit unpacked.
    """
    if isinstance(picture, Image.Image):
        return _encode(picture, policy)
    if not picture:
        raise BadSampleError("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(picture)) as image:
                if _can_be_kept(image, picture, policy) and decodes(picture, image.height, image.width):
                    return StoredImage(picture, image.height, image.width)
                return _encode(image, policy)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadSampleError(f"too many pixels: {error}") from error
    except BadSampleError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on hostile input
        raise BadSampleError(f"{type(error).__name__}: {error}") from error


def _can_be_kept(image: Image.Image, data: bytes, policy: ImagePolicy) -> bool:
    return (
        image.format == "JPEG"
        and image.mode == "RGB"
        and min(image.size) <= policy.max_size
        and max(image.size) <= MAX_SIDE
        and len(data) <= MAX_JPEG_BYTES
        and image.getexif().get(_EXIF_ORIENTATION, 1) == 1
    )


def decodes(jpeg: bytes, height: int, width: int) -> bool:
    """Whether the decoder that training uses takes these bytes without a complaint."""
    data = np.frombuffer(jpeg, np.uint8)
    pixels = np.empty((height, width, 3), np.uint8)
    result: int = imdecode(
        data.ctypes.data, data.size, height, width, pixels.ctypes.data, height, width, 0, 0, 1, 1, False, False
    )
    return result == 0


def _encode(image: Image.Image, policy: ImagePolicy) -> StoredImage:
    image = _rgb(ImageOps.exif_transpose(image))
    scale = policy.max_size / min(image.size)
    if scale < 1:
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    if max(image.size) > MAX_SIDE:
        raise BadSampleError(f"{image.width}×{image.height} pixels: the long side is above {MAX_SIDE:,}")
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=policy.quality)
    if buffer.tell() > MAX_JPEG_BYTES:
        raise BadSampleError(f"{buffer.tell():,} bytes as JPEG, above {MAX_JPEG_BYTES:,}; a smaller --max-size fits")
    return StoredImage(buffer.getvalue(), image.height, image.width)


def _rgb(image: Image.Image) -> Image.Image:
    """Pillow's own conversion, but for 16-bit grey, which it would clip at 255 instead of scaling."""
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.float64) / 257.0
        image = Image.fromarray(np.clip(np.round(grey), 0, 255).astype(np.uint8))
    return image.convert("RGB")
