"""What is compared on icons, glyphs and Fashion-MNIST, as real.toml has it: what decides most first."""

from __future__ import annotations

import os
import tomllib
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from .plan import BASELINES, EPOCHS, METHOD, Axis, Method, Mode, Run, Settings, baseline_run, searched, train_run
from .results import Results
from .schedule import Part, Runs, trials
from .search import chosen

PLAN = tomllib.loads(Path(__file__).with_name("real.toml").read_text("utf-8"))
TRIALS, SEEDS, FURTHER_SEEDS = 8, (0, 1, 2), (3, 4)
"""Of a search; of every variant; of those besides that three seeds leave a claim undecided about."""
SHORT: Settings = {"epochs": int(epochs)} if (epochs := os.environ.get("REAL_DATA_EPOCHS")) else {}
"""For tests: the epochs of every run."""


def _method(name: str, objective: str, axes: dict[str, dict[str, Any]], fixed: Settings | None = None) -> Method:
    on, _, short = name.partition(" ")
    mode: Mode = "unimodal" if on == "fashion" else "bimodal"
    tried = {key: Axis(**axis | {"values": tuple(axis["values"])}) for key, axis in axes.items()}
    found = searched(mode, short, tried, fixed, objective=objective)
    return found._replace(on=on, trials=TRIALS, fixed=found.fixed | PLAN["shared"][on] | SHORT)  # type: ignore[arg-type]


METHODS = {name: _method(name, **entry) for name, entry in PLAN["searched"].items()}
METHODS |= {f"glyphs {name}": METHOD["bimodal", name] for name in ("sogclr", "isogclr")}


class Variant(NamedTuple):
    """What is compared; its fields are described in real.toml."""

    method: str
    changed: Settings | None = None
    names: dict[str, str] | None = None
    data: str = ""
    """Empty: that of the method."""
    seeds: tuple[int, ...] = SEEDS


VARIANTS = {name: Variant(name) for name in METHODS} | {name: Variant(**of) for name, of in PLAN["variant"].items()}


def compared(name: str, results: Results, seed: int) -> Run | None:
    """A variant's run; None while its search is unfinished."""
    of, changed, names, data, _ = VARIANTS[name]
    method, changed = METHODS[of], changed or {}
    if (found := chosen(method, results)) is None:
        return None
    settings = found if names is None else {new: found[key] for key, new in names.items()}
    if "objective.name" in changed:
        kept = {key: value for key, value in method.fixed.items() if not key.startswith("objective.")}
        method = method._replace(fixed=kept | {"objective.mode": method.mode})
    return train_run(method, settings | changed | SHORT, data or method.data[1], seed=seed)


def whole(name: str, results: Results) -> list[Run | None]:
    """The trials of a method's search, as long as compared runs are."""
    longer = {"epochs": EPOCHS["bimodal"]} | SHORT
    return [run and run._replace(settings=run.settings | longer) for run in trials(METHODS[name], results)]


def parts() -> list[Part]:
    """Everything that is compared, but for further seeds."""
    planned = [Part(entry["name"], entry["seconds"], partial(_runs, entry)) for entry in PLAN["part"]]
    return [Part("nothing trained", 60, _baselines), *planned]


def _runs(entry: dict[str, Any], results: Results) -> Runs:
    for name in entry.get("search", ()):
        yield from trials(METHODS[name], results)
    for name in entry.get("whole", ()):
        yield from whole(name, results)
    for seed, name in product(SEEDS, entry.get("compare", ())):
        if seed in VARIANTS[name].seeds:
            yield compared(name, results, seed)


def _baselines(results: Results) -> Runs:
    yield baseline_run("bimodal", "icons", "untrained")
    for name in BASELINES:
        yield from (baseline_run("bimodal", "long-tailed", name), baseline_run("unimodal", "fashion", name))
