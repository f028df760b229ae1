"""The graph that DALI runs: it decodes JPEGs and makes their views.

The functions are in DALI's language and run once, to build the graph. An `if` on an input is a branch that only some
samples take; an `if` on the recipe decides whether the graph has that operation at all.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import nvidia.dali
import nvidia.dali.math
from numpy.typing import NDArray

from ...storage.arrays import Float32s, Uint64s
from ...storage.kernels import kernel
from ..views.pixels import noise_at
from ..views.recipes import Recipe, ViewParameters

dali: Any = nvidia.dali  # its own types lack its constants and conditionals
fn, types = dali.fn, dali.types


@dali.pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
def views_of_jpegs(recipe: Recipe, sides: Mapping[int, int], on_gpu: bool, hardware_load: float) -> tuple[Any, ...]:
    """Return every view in `sides`, which maps its number to its side in pixels."""
    jpegs = fn.external_source(name="jpegs", dtype=types.UINT8, ndim=1, no_copy=True)
    start = fn.external_source(name="jpeg_start", dtype=types.INT64, ndim=1)
    jpeg = fn.slice(jpegs, start, fn.external_source(name="jpeg_bytes", dtype=types.INT64, ndim=1), axes=[0])
    stored_sides = fn.external_source(name="sides", dtype=types.FLOAT, ndim=1)
    # Fail here for a header with other sides, by reshaping to more bytes than there are. It would crash the process: in
    # the decoder's next run if it cannot be read, in the resize if the crop lies outside the picture that it describes.
    found = fn.peek_image_shape(jpeg, dtype=types.FLOAT, adjust_orientation=False)
    off_by = fn.reductions.sum(dali.math.abs(found[:2] - stored_sides), keep_dims=True)
    # Decode as FFCV does: orientation as stored, chroma interpolated, fast inverse DCT.
    picture = fn.decoders.image(
        fn.reshape(jpeg, rel_shape=1.0 + off_by),
        device="mixed" if on_gpu else "cpu",
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,
        use_fast_idct=True,
        hw_decoder_load=hardware_load,
    )
    return tuple([_view(picture, view, recipe, side, on_gpu) for view, side in sides.items()])


def _view(picture: Any, view: int, recipe: Recipe, side: int, on_gpu: bool) -> Any:
    pixels = fn.resize(
        picture,
        size=[side, side],
        dtype=types.FLOAT,
        interp_type=types.INTERP_LINEAR,
        antialias=True,
        roi_start=_input("start", view, types.FLOAT, 1),
        roi_end=_input("end", view, types.FLOAT, 1),
    )
    if recipe.has_affine:  # repeats the edge, since there is no fill value
        pixels = fn.warp_affine(pixels, matrix=_input("affine", view, types.FLOAT, 2), interp_type=types.INTERP_LINEAR)
    if recipe.has_colour:
        mean = fn.reductions.mean(pixels, axes=[0, 1])
        of_mean = _input("colour_mean", view, types.FLOAT, 2)
        if on_gpu:
            of_mean = of_mean.gpu()
        turned = fn.coord_transform(pixels, M=_input("colour", view, types.FLOAT, 2))
        pixels = dali.math.clamp(turned + fn.reductions.sum(of_mean * mean, axes=[1]), 0.0, 255.0)
    if recipe.has_blur:
        sigma = _input("blur", view, types.FLOAT, 0)
        if sigma > 0.0:
            pixels = fn.gaussian_blur(pixels, sigma=sigma)  # same window and borders as in the FFCV loader
    if recipe.has_solarise:
        solarise = _input("solarise", view, types.BOOL, 0)
        if solarise:
            pixels = pixels + (pixels >= 128.0) * (255.0 - 2.0 * pixels)
    if recipe.has_noise:
        noise = _input("noise", view, types.FLOAT, 3)
        pixels = dali.math.clamp(pixels + (noise.gpu() if on_gpu else noise), 0.0, 255.0)
    return fn.crop_mirror_normalize(
        pixels,
        mirror=_input("flip", view, types.INT32, 0),
        mean=[255 * mean for mean in recipe.mean],
        std=[255 * std for std in recipe.std],
    )


def _input(name: str, view: int, dtype: Any, ndim: int) -> Any:
    return fn.external_source(name=f"{name}{view}", dtype=dtype, ndim=ndim)


def inputs_of_view(recipe: Recipe, drawn: ViewParameters, side: int) -> dict[str, NDArray[Any]]:
    """Return the graph's inputs for a view of this side, by the names that `_view` uses.

    The graph mirrors last, so position-dependent values are mirrored here.
    """
    start, size = drawn.box[:, :2], drawn.box[:, 2:]
    inputs: dict[str, NDArray[Any]] = {
        "start": start.astype(np.float32),
        "end": (start + size).astype(np.float32),
        "flip": drawn.flip.astype(np.int32),
    }
    if recipe.has_affine:
        mirrored = drawn.affine * np.array([[1, -1, -1], [-1, 1, 1]], np.float32)
        maps = np.where(drawn.flip[:, np.newaxis, np.newaxis], mirrored, drawn.affine)
        maps[:, :, 2] = side * (maps[:, :, 2] + 0.5 - maps[:, :, :2].sum(2) / 2)  # DALI counts from the corner
        inputs["affine"] = maps
    if recipe.has_colour:
        inputs |= {"colour": drawn.colour, "colour_mean": drawn.colour_mean}
    if recipe.has_blur:
        inputs["blur"] = drawn.blur
    if recipe.has_solarise:
        inputs["solarise"] = drawn.solarise
    if recipe.has_noise:
        noise = np.empty((len(drawn.flip), side, side, 3), np.float32)
        _fill_noise(noise, drawn.noise, drawn.noise_key)
        noise[drawn.flip] = noise[drawn.flip, :, ::-1]
        inputs["noise"] = noise
    return inputs


@kernel()
def _fill_noise(out: Float32s, deviations: Float32s, keys: Uint64s) -> None:
    rows, side = out.shape[:2]
    for row in range(rows):
        for channel in range(3):
            for y in range(side):
                for x in range(side):
                    out[row, y, x, channel] = noise_at(deviations[row], keys[row], side, channel, y, x)
