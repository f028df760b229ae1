"""docs/errors.svg and the table of docs/errors.md: every exception, what it means, and the exit code that it leads to.

python setup/errors.py    # writes both; tests/test_docs.py compares them with the code
"""

import ast
from importlib import import_module
from pathlib import Path

from thermopile.tools.cli import FAILURES, WRONG_USAGE

ROOT = Path(__file__).parents[1]
PICTURE, PAGE = ROOT / "docs" / "errors.svg", ROOT / "docs" / "errors.md"
BEGIN, END = "<!-- made by setup/errors.py -->", "<!-- end -->"
COLOURS = {"2": "#d9480f", "1": "#1971c2", "–": "#868e96"}
MEANINGS = {"2": "exit code 2: wrong usage", "1": "exit code 1: failed", "–": "handled inside"}
ROW, INDENT, WIDTH = 22, 22, 400


def errors() -> dict[type[Exception], Path]:
    """Every public exception of the package, and its file."""
    found = {}
    for room in ("storage", "state_store", "pipeline", "trainer", "tools"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_"):
                    file = path.relative_to(ROOT)
                    module = import_module(".".join(("thermopile", *file.with_suffix("").parts)))
                    found[getattr(module, node.name)] = file
    return found


def exit_code(error: type[Exception]) -> str:
    if issubclass(error, WRONG_USAGE):
        return "2"
    return "1" if issubclass(error, FAILURES) else "–"


def tree(found: dict[type[Exception], Path]) -> list[tuple[int, type[BaseException]]]:
    """Depth and class, each below the class that it is derived from first; Python's own at depth 0."""
    parent = {error: error.__bases__[0] for error in found}
    rows: list[tuple[int, type[BaseException]]] = []

    def add(error: type[BaseException], depth: int) -> None:
        rows.append((depth, error))
        for child in sorted((each for each in found if parent[each] is error), key=lambda each: each.__name__):
            add(child, depth + 1)

    for root in sorted({each for each in parent.values() if each not in found}, key=lambda each: each.__name__):
        add(root, 0)
    return rows


def picture(found: dict[type[Exception], Path]) -> str:
    rows, lines, above = tree(found), [], dict[int, float]()
    for number, (depth, error) in enumerate(rows):
        x, y = 14.5 + INDENT * depth, ROW * (number + 0.5) + 4.5
        if depth:
            lines.append(f'<path class="line" d="M{x - INDENT},{above[depth - 1] + 6}V{y}H{x - 6}"/>')
        above[depth] = y
        colour = COLOURS[exit_code(error)] if error in found else "none"
        lines.append(f'<circle class="line" cx="{x}" cy="{y}" r="5" style="fill:{colour}"/>')
        lines.append(f'<text x="{x + 12}" y="{y + 4}">{error.__name__}</text>')
    for number, (code, meaning) in enumerate(MEANINGS.items()):
        y = ROW * (len(rows) + number + 1.5)
        lines.append(f'<circle class="line" cx="14.5" cy="{y}" r="5" style="fill:{COLOURS[code]}"/>')
        lines.append(f'<text x="26.5" y="{y + 4}">{meaning}</text>')
    height = ROW * (len(rows) + len(MEANINGS) + 1.5)
    style = (
        "text{font:13px sans-serif;fill:#212529}.line{fill:none;stroke:#868e96}"
        "@media(prefers-color-scheme:dark){text{fill:#e9ecef}}"
    )
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f"<style>{style}</style>", *lines, "</svg>"]) + "\n"


def table(found: dict[type[Exception], Path]) -> str:
    lines = ["| error | exit code | meaning | in |", "|---|---|---|---|"]
    for depth, error in tree(found):
        if depth:
            words = " ".join((error.__doc__ or "").partition("\n\n")[0].split()).replace("|", "\\|")
            lines.append(f"| `{error.__name__}` | {exit_code(error)} | {words} | `{found[error]}` |")
    return "\n".join(lines)


def page(text: str, found: dict[type[Exception], Path]) -> str:
    """The page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    every = errors()
    PICTURE.write_text(picture(every), "utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8"), every), "utf-8")
