"""A hook of mkdocs (mkdocs.yml): the site has the repository's files under their own paths, so links need no change.

README.md is its first page, docs/*.md and PAGES are pages, and every other file that a page links to is beside them as
it is. A link that shows a page's file name shows its title here. docs/api.md has the docstrings of the public names, in
the order of `thermopile`.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the pages and what they link to, in place of what mkdocs found in docs/; the theme's files stay."""
    pages = {"index.md": (ROOT / "README.md").read_text("utf-8").replace("](README.md", "](index.md")}
    pages |= {name: (ROOT / name).read_text("utf-8") for name in PAGES if (ROOT / name).exists()}
    for page in sorted((ROOT / "docs").glob("*.md")):
        pages[f"docs/{page.name}"] = page.read_text("utf-8").replace("](../README.md", "](../index.md")
    pages["docs/api.md"] = _api()
    titles = {PurePosixPath(name).name: text.partition("\n")[0].removeprefix("# ") for name, text in pages.items()}
    found = Files([file for file in files if not str(file.abs_src_path).startswith(str(ROOT / "docs"))])
    beside = set[str]()
    for name, text in pages.items():
        text = re.sub(r"\[(?:docs/)?(\w+\.md)\]\(", lambda match: f"[{titles.get(match[1], match[1])}](", text)
        for to in {match[1] for match in LINK.finditer(text)}:
            path = normpath(PurePosixPath(name).parent / to)
            if "://" in to or path in pages:
                continue
            if (ROOT / path).is_file():
                beside.add(path)
            else:  # a folder has no page
                text = re.sub(rf"\[([^\]]+)\]\({re.escape(to)}\)", r"\1", text)
        found.append(File.generated(config, name, content=text))
    for path in beside:
        found.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return found


def _api() -> str:
    """The page of public names."""
    lines = (ROOT / "__init__.py").read_text("utf-8").split("if TYPE_CHECKING:\n")[1].split("\n\n")[0].splitlines()
    homes = [re.fullmatch(r"    from \.(\S+) import (\w+) as \w+", line) for line in lines]
    words = "The examples begin with `import thermopile`, and run in the tests, one after another.\n\n"
    return (
        f"# Public names\n\n{words}"
        + "\n\n".join(f"::: thermopile.{home[1]}.{home[2]}" for home in homes if home)
        + "\n"
    )
