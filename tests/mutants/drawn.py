"""Mutants of six modules that cosmic-ray makes, some of each, drawn by a seed; the module's own tests look for them."""

import ast
import random
import tomllib
from collections.abc import Iterator
from difflib import ndiff
from pathlib import Path
from typing import NamedTuple

from broken_copy import BrokenCopy
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB

SEED = 1
ORDER_TESTS = ("pipeline/order/test_order.py", "pipeline/order/test_order_windows.py")
MODULES = {
    "pipeline/order/order.py": ("pipeline/order/test_served_orders.py", *ORDER_TESTS),
    "pipeline/order/bijection.py": ("pipeline/order/test_bijection.py", *ORDER_TESTS),
    "trainer/objectives/sogclr.py": (
        "trainer/objectives/test_sogclr.py", "trainer/objectives/test_isogclr.py",
        "trainer/objectives/test_create_objective.py", "trainer/objectives/test_fastclip.py",
        "trainer/objectives/test_plain_losses.py",
    ),
    "state_store/rows.py": (
        "state_store/test_rows.py", "state_store/test_before_images.py", "state_store/test_store.py",
        "state_store/test_windowed.py",
    ),
    "state_store/windowed.py": ("state_store/test_windowed_edges.py", "state_store/test_windowed.py"),
    "state_store/records.py": ("state_store/test_records.py", "state_store/test_rows.py"),
}  # fmt: skip
"""Module -> its own tests, which run until one fails: those that find most come first."""
EXPLAINED = Path(__file__).with_name("explained.toml")


class Mutant(NamedTuple):
    function: str
    line: str
    """What is replaced: mostly one line."""
    broken: str
    code: str
    """The whole file, broken."""


class Outcome(NamedTuple):
    drawn: int
    survivors: list[str]
    unexplained: list[str]


def look_for_drawn(copy: BrokenCopy, module: str, count: int) -> Outcome:
    """Break a module in `count` ways, one at a time, and return the mutants that none of its tests finds."""
    print(f"{module}, {' '.join(MODULES[module])}", flush=True)
    explained = _explained(copy, module)
    limit = copy.run_unbroken(MODULES[module])
    survivors, unexplained, drawn = list[str](), list[str](), 0
    left = mutants(copy, module)
    while drawn < count and (mutant := next(left, None)):
        with copy.with_code(module, mutant.code):
            run = copy.run(MODULES[module], limit)
        if not run.ran:
            continue  # that says nothing about the tests
        drawn += 1
        shown = f"{mutant.function}: {mutant.line}  ->  {mutant.broken}"
        print(f"  {drawn}, {run.seconds:.0f} s: {shown}", flush=True)
        if run.passed:
            why = explained.get((mutant.function, mutant.line, mutant.broken))
            survivors.append(f"{shown}\n    {why or 'NOT EXPLAINED'}")
            unexplained += [] if why else [shown]
        print(f"    {'SURVIVES' if run.passed else f'found by {run}'}", flush=True)
    return Outcome(drawn, survivors, unexplained)


def mutants(copy: BrokenCopy, module: str) -> Iterator[Mutant]:
    """Yield a module's mutants in an order that the seed chooses, but for those that change only annotations."""
    database = WorkDB(":memory:", WorkDB.Mode.create)
    init([copy.path(module)], database, {})
    ways = sorted(
        (each.operator_name, each.occurrence, each.definition_name or "")
        for item in database.work_items
        for each in item.mutations
    )
    random.Random(f"{SEED} {module}").shuffle(ways)
    whole = copy.path(module).read_text()
    for operator, occurrence, function in ways:
        code = mutate_code(whole, get_operator(operator)(), occurrence)
        if code and _without_annotations(code) not in (None, _without_annotations(whole)):
            changes = [each for each in ndiff(whole.splitlines(), code.splitlines()) if each[0] in "-+"]
            line, broken = ("\n".join(each[2:].strip() for each in changes if each[0] == sign).strip() for sign in "-+")
            yield Mutant(function, line, broken, code)


def _without_annotations(code: str) -> str | None:
    try:
        tree = ast.parse(code)
    except SyntaxError:  # of a lone * in a signature, cosmic-ray makes other operators
        return None
    for node in ast.walk(tree):
        for name in {"annotation", "returns"} & {*node._fields}:
            setattr(node, name, None)
    return ast.dump(tree)


def _explained(copy: BrokenCopy, module: str) -> dict[tuple[str, str, str], str]:
    """Return why some mutants survive, by function, line and broken line."""
    whole, reasons = copy.path(module).read_text(), {}
    for each in tomllib.loads(EXPLAINED.read_text()).get(module, []):
        if each["line"] not in whole:
            raise SystemExit(f"{EXPLAINED} explains a mutant of a line that {module} no longer has: {each['line']}")
        reasons[each["function"], each["line"], each["broken"]] = each["why"]
    return reasons
