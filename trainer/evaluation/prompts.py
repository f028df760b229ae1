"""Zero-shot prompts: templates, of which one set is shipped, and names of classes."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ...pipeline.opening import Dataset
from ...storage.files import read_regular
from ..config import checked_template
from ..errors import ConfigError, refusing

SHIPPED = {path.stem: path for path in Path(__file__).with_name("templates").glob("*.txt")}
"""Name → file; its first lines name the source."""


def read_templates(name: str) -> tuple[str, ...]:
    """Return the templates of a shipped set, such as clip-80, or of a file: one a line; empty lines and # do not count.

    Raises ConfigError if the file cannot be read, has no templates, or one without a placeholder.
    """
    with refusing(f"templates {name}", OSError, ValueError, cure=f" (shipped: {', '.join(SHIPPED)})"):
        found = tuple(map(checked_template, _lines(SHIPPED.get(name, Path(name)))))
        if not found:
            raise ValueError("the file has none; write one a line, such as `a photo of a {}`")
    return found


def read_class_names(asked: str, classes: Sequence[str], datasets: Sequence[Dataset]) -> list[str]:
    """Return the name of each class in prompts.

    asked: a column of the datasets, or else a file with a line for each class, in order, or lines of class, tab, name.
    Raises ConfigError if the file cannot be read, or unless each class has one name; DatasetError.
    """
    names, option = defaultdict[str, set[str]](set), f"--classnames {asked}"
    having = [dataset for dataset in datasets if asked in dataset.schema.names]
    columns = [[of.column(each).to_pylist() for each in ("group", asked)] for of in having]
    pairs = [pair for both in columns for pair in zip(*both, strict=True)]
    if not having:
        with refusing(f"{option}: there is no such column, and as a file", OSError, ValueError):
            lines = _lines(Path(asked))
        in_order = not any("\t" in line for line in lines)
        if in_order and len(lines) != len(classes):
            ends = f"from {classes[0]!r} to {classes[-1]!r}" if classes else "none"
            wanted = f"there are {len(classes):,} classes, {ends}; give each a line in order, or class, tab, name"
            raise ConfigError(f"{option} has {len(lines):,} names, but {wanted}")
        pairs = [*zip(classes, lines, strict=True)] if in_order else [line.partition("\t")[::2] for line in lines]
    for group, *name in pairs:
        names[group] |= {str(each).strip() for each in name if each}
    if wrong := next((each for each in classes if len(names[each]) != 1), None):
        raise ConfigError(f"{option} has {len(names[wrong]):,} names for the class {wrong!r}; give it one")
    return [name for each in classes for name in names[each]]


def _lines(file: Path) -> list[str]:
    """Return the lines of a text file but the empty ones and remarks. Raises OSError, ValueError."""
    lines = map(str.strip, read_regular(file, 1 << 20).decode("utf-8-sig").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
