"""Files of zero-shot prompts, and those that are shipped."""

from pathlib import Path

from ...storage.files import read_regular
from ..config import checked_template
from ..errors import ConfigError

SHIPPED = {path.stem: path for path in Path(__file__).with_name("templates").glob("*.txt")}
"""Name → file; its first lines name the source."""


def read_templates(name: str) -> tuple[str, ...]:
    """Return the templates of a shipped set, such as clip-80, or of a file: one a line; empty lines and # do not count.

    Raises ConfigError if the file cannot be read, has no templates, or one without a placeholder.
    """
    try:
        lines = map(str.strip, read_regular(SHIPPED.get(name, Path(name)), 1 << 20).decode("utf-8-sig").splitlines())
        found = tuple(checked_template(line) for line in lines if line and not line.startswith("#"))
        if not found:
            raise ValueError("the file has none; write one a line, such as `a photo of a {}`")
    except (OSError, ValueError) as error:
        raise ConfigError(f"templates {name}: {error} (shipped: {', '.join(SHIPPED)})") from error
    return found
