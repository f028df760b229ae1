"""Annotations that turn the fields of findings into JSON; pydantic reads them from plain dataclasses."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Annotated, Any, TypeVar

from pydantic import Field, GetCoreSchemaHandler, WrapSerializer
from pydantic_core import CoreSchema, core_schema

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
