"""A list in Karpathy's json, such as dataset_coco.json and dataset_flickr30k.json: several captions of a picture."""

import hashlib
import json
import os

import pyarrow as pa

from ...storage.place import AnyPlace, place_of
from ..errors import SourceError
from . import Account
from .csv_rows import SCHEMA
from .csv_source import CsvSource, opened_list
from .listing import BETWEEN_CAPTIONS, caption_texts

MAX_BYTES = 256 << 20
"""COCO's has 144 MB, and takes eight times as much memory while it is read."""
_FORM = '{"images": [{"filepath" (optional), "filename", "split", "sentences": [{"raw"}]}]}'


class KarpathySource(CsvSource):
    """The pictures of `split`, or with `test` of `test_split`, names separated by commas; paths as in a CsvSource.

    Raises SourceError if the file is missing or not in this form, or has no picture of these splits.
    """

    kind = "karpathy"

    def __init__(
        self, file: AnyPlace, *, test: bool, split: str = "train,restval", test_split: str = "test", root: AnyPlace = ""
    ) -> None:
        self.file, self.mode, self._quoting, self.unused = place_of(file), "pairs", "csv", Account()
        self.root = place_of(root or self.file.parent)
        option, names = ("test-split", test_split) if test else ("split", split)
        self._names = {option: names, "group": None}
        if (opened := opened_list(self.file)).size > MAX_BYTES:
            raise SourceError(f"{file} has {opened.size:,} bytes, above {MAX_BYTES:,}; Karpathy's lists are smaller")
        self._digest = hashlib.sha256(data := opened.read(0, opened.size)).hexdigest()
        rows = dict[str, list[dict[str, bytes]]]()
        try:
            for each in json.loads(data)["images"]:
                path, captions = os.path.join(each.get("filepath", ""), each["filename"]), each["sentences"]
                texts = BETWEEN_CAPTIONS.join(caption["raw"].encode() for caption in captions)
                row = {"image": path.encode(), "caption": texts}
                rows.setdefault(str(each["split"]), []).append(row)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SourceError(f"{file} is not in the form {_FORM}: {type(error).__name__}: {error}") from error
        lacking = [name for name in names.split(",") if name not in rows]
        chosen = [row for name in names.split(",") for row in rows.pop(name, ())]
        if not chosen or (lacking and names != "train,restval"):  # Flickr30k's list has no restval
            others = ", ".join(name for name in rows if not (test and name in split.split(",")))[:500]
            raise SourceError(f"{file} has no picture of {','.join(lacking)}; name one of {others} with --{option}")
        self._rows, self._sound = pa.Table.from_pylist(chosen, SCHEMA), len(chosen)
        for name in set() if test else rows.keys() - {*test_split.split(",")}:
            self.unused.add("pictures of other splits", name, f"--split {names},{name}", len(rows[name]))

    def _captions(self, raw: bytes | None) -> tuple[str, ...]:
        return caption_texts((raw or b"").split(BETWEEN_CAPTIONS))
