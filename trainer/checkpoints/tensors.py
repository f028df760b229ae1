"""Tensor trees on disk: tensors in a safetensors file, everything else as JSON."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from ...storage.files import open_regular, sync


def take_apart(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors by path, such as `optimizer/weights/state/0/exp_avg`, and the rest of the tree.

    tree: tensors, None, bool, int, float and str in dicts, lists and tuples; dict keys are plain values. In the rest,
    an object with one member encodes what JSON lacks: {"$tensor": name}, {"$tuple": [...]}, {"$float": "nan"}, and
    {"$items": [[key, value], ...]} for a dict with a key that is not a string or starts with $.
    Raises TypeError for other values.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _plain(tree, (), tensors)


def join(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """Rebuild the tree given to `take_apart` from its results, without copying tensors.

    Raises ValueError if the two do not match or the rest is not a result of `take_apart`.
    """
    left = dict(tensors)
    try:
        tree = _value(rest, left)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it is not a tree of tensors and values: {error}") from None
    if left:
        raise ValueError(f"the tensor {next(iter(left))[:100]!r} has no place in the tree")
    return tree


def _plain(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = "/".join(path)
        while name in tensors:  # 0 and "0" are different keys
            name += "'"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, list | tuple):
        values = [_plain(each, (*path, str(place)), tensors) for place, each in enumerate(value)]
        return values if isinstance(value, list) else {"$tuple": values}
    if isinstance(value, Mapping):
        items = [(key, _plain(each, (*path, str(key)), tensors)) for key, each in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(items)
        return {"$items": [[_plain(key, path, tensors), each] for key, each in items]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{'/'.join(path)} is a {type(value).__name__}, neither a tensor nor a plain value")


def _value(rest: Any, tensors: dict[str, Tensor]) -> Any:
    """tensors: the tensors not placed yet."""
    if isinstance(rest, list):
        return [_value(each, tensors) for each in rest]
    if not isinstance(rest, dict):
        return rest
    match list(rest.items()):
        case [("$tensor", str(name))] if name in tensors:
            return tensors.pop(name)
        case [("$tuple", list(values))]:
            return tuple(_value(each, tensors) for each in values)
        case [("$float", "nan" | "inf" | "-inf" as number)]:
            return float(number)
        case [("$items", list(items))]:
            return {_value(key, tensors): _value(each, tensors) for key, each in items}
    if any(key.startswith("$") for key in rest):
        raise ValueError(f"{str(rest)[:100]} has no meaning")
    return {key: _value(each, tensors) for key, each in rest.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors, no two sharing memory. Raises OSError if writing fails."""
    try:
        contiguous = {name: each.contiguous() for name, each in tensors.items()}
        save_file(contiguous, path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors creates files readable only by their owner
    sync(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file into CPU memory. Raises ValueError if it is not a safetensors file, and OSError."""
    try:
        # Not memory-mapped: a tensor would keep a deleted file's space on disk allocated.
        with open_regular(path) as file:
            return load(file.read())
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path.name} is not a complete safetensors file: {error}") from error
