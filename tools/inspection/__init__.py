"""Analyse the temperatures of a run from its state and its dataset, one block of rows at a time.

Nothing here prints or draws progress: what takes long calls a function that the command passes. Findings are plain
dataclasses; annotations turn their fields into JSON, as pydantic reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Annotated, Any, TypeVar

from pydantic import Field, GetCoreSchemaHandler, WrapSerializer
from pydantic_core import CoreSchema, core_schema

from ...storage.arrays import AnyArray as AnyArray
from ...storage.arrays import Bools as Bools
from ...storage.arrays import Float32s as Float32s
from ...storage.arrays import Float64s as Float64s
from ...storage.arrays import Int64s as Int64s

OnDone = Callable[[int, int], None]
"""Called with how many are done, and of how many."""
OnTask = Callable[[str, int, int], None]
"""Called with the name of a task, how many are done, and of how many; with 0 before a task whose first part is long."""


def silent(*progress: object) -> None:
    """Show no progress."""


T = TypeVar("T")


@dataclass(frozen=True)
class AsJson:
    """Annotates a field whose value JSON has in another form."""

    of: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.any_schema(serialization=core_schema.plain_serializer_function_ser_schema(self.of))


Hidden = Annotated[T, AsJson(bool), Field(exclude=True)]
"""A field that JSON does not have. pydantic need not know its type."""
TO_LIST, HOW_MANY = AsJson(methodcaller("tolist")), AsJson(lambda mask: int(mask.sum()))
BY_NAME = WrapSerializer(lambda parts, show: {part.name: shown for part, shown in zip(parts, show(parts), strict=True)})


def named(key: str) -> Any:
    """Return the annotation of a field that has this key in JSON."""
    return Field(serialization_alias=key)
