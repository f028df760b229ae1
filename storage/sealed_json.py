"""JSON files with a checksum of their content as the last member.

Any JSON parser can read them. The checksum detects damage; it does not prove who wrote the file.
"""

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

_CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "crc32": lambda data: f"{zlib.crc32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}
_SEAL = re.compile(rb',\s*"(crc32|sha256)": "([0-9a-f]+)"\s*\}\s*\Z')


class DamagedJSONError(ValueError):
    """The text is not valid JSON, or does not match its checksum."""


def seal_line(tree: Mapping[str, Any]) -> bytes:
    """Return one line of JSON, without a newline, whose last member is the CRC-32 of the text before it.

    tree: at least one member, none named crc32. Raises ValueError for numbers that are not finite.
    """
    text = json.dumps(tree, allow_nan=False).encode()
    return text[:-1] + f', "crc32": "{_CHECKSUMS["crc32"](text[:-1])}"}}'.encode()


def seal_document(tree: Mapping[str, Any]) -> bytes:
    """Return indented JSON, ending in a newline, whose last member is the sha256 of the text before it.

    tree: at least one member, none named sha256. Raises ValueError for numbers that are not finite.
    """
    text = json.dumps(tree, indent=1, allow_nan=False).removesuffix("\n}").encode()
    return text + f',\n "sha256": "{_CHECKSUMS["sha256"](text)}"\n}}\n'.encode()


def verify(text: bytes) -> str:
    """Verify the checksum of sealed JSON and return the checksum's name. Much faster than `unseal`.

    Raises DamagedJSONError.
    """
    if not (seal := _SEAL.search(text[-200:])):
        raise DamagedJSONError("its checksum is missing: it is truncated or damaged")
    kind = seal[1].decode()
    if _CHECKSUMS[kind](text[: len(text) - len(seal[0])]) != seal[2].decode():
        raise DamagedJSONError("it is damaged: its checksum does not match")
    return kind


def unseal(text: bytes) -> dict[str, Any]:
    """Return the sealed object without its checksum. Raises DamagedJSONError."""
    kind = verify(text)
    tree = parse(text)
    if not isinstance(tree, dict):
        raise DamagedJSONError("it is not a JSON object")
    del tree[kind]
    return tree


def finite(value: float | None) -> float | None:
    """Return null for NaN and infinity, which JSON does not have."""
    return None if value is None or not math.isfinite(value) else value


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the tree's values by full key, such as `optimizer.lr`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def parse(text: bytes | str) -> Any:
    """Parse JSON from an untrusted source. Raises DamagedJSONError, also for excessive nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise DamagedJSONError("it is nested too deeply") from None
    except ValueError as error:  # including bytes that are not UTF-8
        raise DamagedJSONError(f"it is not valid JSON: {error}") from None
