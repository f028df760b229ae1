"""The description for package indexes, where relative links of README.md lead nowhere; see also pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
REPOSITORY = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]


def absolute(link: re.Match[str]) -> str:
    """A link to a file becomes a link to the repository; a picture, one to its bytes."""
    kind = "raw" if link[1] == "!" else "blob"
    return f"{link[1]}[{link[2]}]({REPOSITORY}/{kind}/main/{link[3]})"


if __name__ == "__main__":
    readme = (HERE / "README.md").read_text("utf-8")
    description = re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, readme)
    # With its name, setuptools knows that this file is none of the package's modules, which lie beside it.
    setup(script_name=__file__, long_description=description, long_description_content_type="text/markdown")
