"""List and explain settings: `thermopile settings`, `presets`, and `train --print-config`, TOML with origins."""

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import tomli_w
from pydantic import BaseModel

from ..trainer.config import TrainConfig, flat, load_config, nearest, settings_named
from ..trainer.config.layers import PRESETS, TABLE, Layers, preset_names
from ..trainer.plugins import is_directory
from .printing import plain_text

LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def list_presets() -> dict[str, str]:
    """Return name → description of the presets, as `thermopile presets` prints them."""
    table, lines = (PRESETS / TABLE).read_text("utf-8"), dict[str, str]()
    for name in preset_names():
        row = table.partition(f'["{name}"] ')[2]
        first = (row or (PRESETS / f"{name}.toml").read_text("utf-8")).partition("\n")[0]
        lines[name] = first.removeprefix("# ")
    return lines


def list_objectives() -> dict[str, str]:
    """Return name → the first sentence of its docstring of the objectives, for `objective.name`.

    Of those that installed packages bring, not their docstrings, which only an import tells, but `module:name`.
    """
    from ..trainer.objectives import OBJECTIVES
    from ..trainer.plugins import installed

    own = {name: (inspect.getdoc(known) or "").partition("\n")[0] for name, known in OBJECTIVES.items()}
    return installed("objectives") | own


@click.command(epilog="\b\nExample:\n  thermopile train --preset isogclr/cc3m --data data/cc3m --print-config")
def presets() -> None:
    """List the presets: the papers' settings, and the example's.

    The comments of a preset's file say which tables of a paper it follows, what is not stated there, and the result.
    """
    for name, words in (listed := list_presets()).items():
        click.echo(f"{name:<{max(map(len, listed))}}  {words}")


@click.command(epilog="\b\nExamples:\n  thermopile settings data\n  thermopile settings objective.isogclr")
@click.argument("name", default="")
def settings(name: str) -> None:
    """Explain all settings, or those whose name begins with NAME.

    `objective.isogclr` explains the settings of an objective, which may be your own, `objective.module:name`;
    `objective.rho` explains that setting of every objective that has it.
    """
    described = [*_described(TrainConfig)]
    shown = [str(each) for each in described if f"{each.name}.".startswith(f"{name}." if name else "")]
    if not shown and name.startswith("objective."):
        shown = _meanings(name) or [*map(str, _of_objective(name.removeprefix("objective.")))]
    if not shown:
        meant = " or ".join(settings_named(name))
        hint = f"; {meant} is" if meant else nearest(name, [each.name for each in described])
        raise click.UsageError(f"no setting is called {name!r}{hint}")
    click.echo("\n\n".join(shown))


class _Setting(NamedTuple):
    name: str
    values: str
    default: Any
    sentence: str

    def __str__(self) -> str:
        default = "none" if self.default is None else _toml(self.default) if self.default != {} else "{}"
        words = textwrap.fill(self.sentence, 110, initial_indent="    ", subsequent_indent="    ")
        return f"{self.name} = {default}    # {self.values}\n{words}".rstrip()


def _meanings(name: str) -> list[str]:
    """Return what a setting, such as objective.rho, is in the objectives that have it, each meaning once."""
    from ..trainer.objectives import OBJECTIVES

    having = defaultdict[str, list[str]](list)
    for objective, known in OBJECTIVES.items():
        for mode, model in known.settings_of_mode.items():
            for each in (each for each in _described(model, "objective.") if each.name == name):
                having[str(each)].append(f"{objective} ({mode})")
    return [f"{text}\n    For {', '.join(of)}." for text, of in having.items()]


def _of_objective(name: str) -> list[_Setting]:
    """Return the settings of an objective: those of its modes, each once. Raises UsageError if it is unknown."""
    from ..trainer.objectives import objective_class

    try:
        models = objective_class(name).settings_of_mode.values()
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return [*{each.name: each for model in models for each in _described(model, "objective.")}.values()]


def _described(model: type[BaseModel], table: str = "") -> Iterator[_Setting]:
    """Yield the settings of a model and of its tables, as its JSON schema and the docstrings below its fields say."""
    schema, sentences = model.model_json_schema(), dict[str, str]()
    for each in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        for field, below in pairwise(definition.body if isinstance(definition, ast.ClassDef) else []):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                sentences[field.target.id] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    for key, setting in model.model_fields.items():
        if isinstance(setting.annotation, type) and issubclass(setting.annotation, BaseModel):
            yield from _described(setting.annotation, f"{table}{key}.")
        else:
            default = schema["properties"][key].get("default")
            yield _Setting(f"{table}{key}", _values(schema["properties"][key]), default, sentences.get(key, ""))


def _values(schema: Mapping[str, Any]) -> str:
    """Return in words which values a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(map(_values, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    limits = " ".join(f"{sign} {schema[limit]:g}" for limit, sign in LIMITS.items() if limit in schema)
    kind = {"null": "none", "array": "list", "object": "table", "string": "text"}.get(schema.get("type", "object"))
    return f"{kind or schema['type']} {limits}".rstrip()


def shown_settings(settings: TrainConfig, layers: Layers) -> str:
    """Return all settings of a run, unset ones as comments; `--config` accepts the text.

    settings: the merged layers, resolved if there is a dataset. Values that resolving changed show the original.
    """
    tree = settings.model_dump(mode="json")
    if settings.objective.mode != "auto":
        from ..trainer.run.build import objective_settings  # imports torch

        tree["objective"] |= objective_settings(settings).model_dump(mode="json")
    asked = flat(load_config(layers.tree).model_dump(mode="json"))
    sides = {"image": settings.model.image, "text": settings.model.text}
    models = {f"model.{side}.config": encoder.name for side, encoder in sides.items() if is_directory(encoder.name)}
    lines = []
    for table, key, value in _entries(tree):
        full = f"{table}.{key}".removeprefix(".")
        origin = layers.origins.get(full, f"from {Path(models[table]).name}" if table in models else "default")
        if full in asked and asked[full] != value:
            origin = f"resolved from {asked[full]} ({origin})"
        lines.append((table, f"# {key} = none" if value is None else f"{key} = {_toml(value)}", plain_text(origin)))
    width = min(44, max(len(setting) for _, setting, _ in lines))
    text, current = [], ""
    for table, setting, origin in lines:
        if table != current:
            text += ["", f"[{table}]"]
            current = table
        text.append(f"{setting:<{width}}  # {origin}")
    return "\n".join(text)


def _entries(tree: dict[str, Any], table: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield table, key and value of every setting, a table's own settings before its subtables."""
    for key, value in tree.items():
        if not isinstance(value, dict):
            yield table, _escaped(tomli_w.dumps({key: 0}).removesuffix(" = 0\n")), value
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{table}.{key}".removeprefix("."))


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return _escaped(tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n"))


def _escaped(text: str) -> str:
    """Escape invisible and bidi characters the TOML way; the settings may be untrusted."""
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in text)
