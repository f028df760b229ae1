"""Pictures and their classes as arrays: numpy's .npy and .npz, and idx files such as MNIST's, packed by gzip or not."""

import io
import math
import zlib
from collections.abc import Iterator, Sequence
from gzip import GzipFile
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...storage.arrays import Int64s, Uint8s
from ...storage.place import AnyPlace, Place, place_of
from ..errors import SourceError
from . import NEVER, Account, ClassGroups, Read, Sample, Source, Work
from .listing import as_text, listing_digest, real_root
from .source_file import SourceFile

MAX_BYTES = 4 << 30
"""Limit of an array, since it is held in memory."""
_IMAGE, _GROUP = "images;x;x_train;train_images;arr_0", "labels;y;y_train;train_labels;arr_1"
"""Names of arrays by numpy, Keras and MedMNIST."""


class ArraysSource(Source):
    """Pictures, uint8 [n, height, width] or [n, height, width, 1 or 3], held in memory; a worker gets its shard's.

    files: an .npz; or a .npy or idx file of the pictures, and perhaps one of their classes: integers, [n] or [n, 1].
    image, group: names of arrays in an .npz, separated by `;`, the first that exists. group None: no classes.
    Raises SourceError if a file or an array is none of these, damaged or above MAX_BYTES, or a name fits no array.
    """

    mode = "images"
    _pixels: Uint8s

    def __init__(self, files: Sequence[AnyPlace], *, image: str = _IMAGE, group: str | None = _GROUP) -> None:
        self.files, self.unused = [*map(place_of, files)], Account()
        (place, pixels), *labels = (found for file in self.files for found in self._read(file, image, group))
        is_npz = not {place, *dict(labels)} <= {*map(str, self.files)}  # whose arrays have a name behind the file's
        if (image, group) != (_IMAGE, _GROUP) and not is_npz:
            raise SourceError(f"--image and --group name arrays of an .npz, which {place} is not; leave them out")
        shape = pixels.shape[:3] if pixels.shape[3:] == (1,) else pixels.shape
        is_one = len(shape) == 3 and shape[2] in (3, 4)  # a single picture in colour, not rows that are pictures
        if pixels.dtype != np.uint8 or 0 in shape or len(shape) not in (3, 4) or shape[3:] not in ((), (3,)) or is_one:
            raise SourceError(f"{place} is {pixels.dtype} {shape}; pictures are uint8, n × H × W or n × H × W × 3")
        self._pixels, self._classes = pixels.reshape(shape), np.zeros(len(pixels), np.int32)
        self._names: tuple[str, ...] = ("",)
        if len(labels) > 1:
            raise SourceError("pass an .npz, or the file of the pictures and at most one of their classes")
        for place, values in labels:
            if values.dtype.kind not in "iu" or values.shape not in ((len(self),), (len(self), 1)):
                wrong = f"{place} is {values.dtype} {values.shape}"
                raise SourceError(f"{wrong}; classes are integers, one for each of {len(self):,} pictures")
            numbers, classes = np.unique(values, return_inverse=True)
            self._names, self._classes = tuple(map(str, numbers.tolist())), classes.ravel().astype(np.int32)
        self._listing = listing_digest(self._pixels, self._classes, np.array(self._names, "S"))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_pixels": self._pixels[:0]}

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(index, self._pixels[index])

    def _sample(self, index: int, pixels: Uint8s) -> Sample:
        group = self._names[self._classes[index]]
        return Sample(self.uri(index), self.key(index), Image.fromarray(pixels), group=group or None)

    def uri(self, index: int) -> str:
        return f"{as_text(self.files[0].name)}/{index}"

    def work(self, indices: Int64s, unchanged_since: int = NEVER) -> Work:
        return Work(indices, unchanged_since, self._pixels[indices])

    def read(self, work: Work) -> Iterator[Read]:
        for index, pixels in zip(work.indices.tolist(), work.rows, strict=True):
            yield Read(index, self._sample(index, pixels))

    def groups(self) -> ClassGroups | None:
        return ClassGroups(self._names, self._classes) if any(self._names) else None

    def stored_bytes(self) -> int:
        return self._pixels.nbytes

    def describe(self) -> dict[str, Any]:
        return {"kind": "arrays", "root": real_root(self.files), "listing": self._listing}

    def marks(self) -> dict[str, str]:
        return {as_text(file.name): self._listing for file in self.files}

    def _read(self, file: Place, image: str, group: str | None) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the array of a file, or the pictures and the classes of an .npz, each with its place for messages."""
        try:
            opened = SourceFile(file)
            _refuse_large(opened.size)
            with opened.reader() as plain:
                if (start := plain.peek(2)[:2]) in (b"\0\0", b"\x1f\x8b"):
                    yield str(file), _idx(plain if start == b"\0\0" else GzipFile(fileobj=plain))
                elif start not in (b"\x93N", b"PK"):
                    raise ValueError("it is neither .npy nor .npz nor idx")
                elif isinstance(loaded := np.load(plain, allow_pickle=False), np.ndarray):
                    yield str(file), loaded
                else:
                    yield from self._chosen(file, loaded, image, group)
        except (ValueError, OSError, EOFError, MemoryError, RuntimeError, zlib.error, BadZipFile) as error:
            raise SourceError(f"{file} cannot be read: {error}") from error

    def _chosen(self, file: Place, npz: Any, image: str, group: str | None) -> Iterator[tuple[str, NDArray[Any]]]:
        sizes = {member.filename.removesuffix(".npy"): member.file_size for member in npz.zip.infolist()}
        for option, names in (("image", image), ("group", group or "")):
            if name := next((each for each in names.split(";") if each in sizes), ""):
                _refuse_large(sizes.pop(name))
                yield f"{file}: {name}", np.asarray(npz[name])
            elif option == "image" or (names and ";" not in names):
                raise SourceError(f"{file} has no array {names}; name one of {', '.join(sizes)[:500]} with --{option}")
        self.unused.add("arrays", next(iter(sizes), ""), "--image NAME --group NAME", len(sizes))


def _refuse_large(size: int) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"{size:,} bytes, above {MAX_BYTES:,}; divide it, and add the other parts with --append")


def _idx(file: io.BufferedIOBase) -> Uint8s:
    """Read an idx file: two zero bytes, the type, the number of dimensions, each of these as >u4, the values."""
    start = file.read(4)
    if len(start) < 4 or start[2] != 8:
        raise ValueError("an idx file begins with 00 00 08, for unsigned bytes, and the number of dimensions")
    shape = np.frombuffer(file.read(4 * start[3]), ">u4").tolist()
    _refuse_large(size := math.prod(shape))
    data = file.read(size + 1)  # to the end, where gzip compares its checksum
    if len(shape) != start[3] or len(data) != size:
        raise ValueError(f"its header says {size:,} values, but it has {'more' if data[size:] else f'{len(data):,}'}")
    return np.frombuffer(data, np.uint8).reshape(shape)
