"""Break the code in a copy of the tree, one line at a time, and see which tests find it: `make mutants`.

    python tests/mutants [--drawn N] [WHICH …]

First twelve chosen lines (chosen.py), with the names of the tests that find each; then 36 mutants of modules with
kernels, which a warm cache must not hide (kept.py); then N mutants of each of six modules (drawn.py). Exits 1 if a
chosen mutant is not found, if one is hidden, or if a drawn one survives that explained.toml does not explain: a
survivor is killed by a new test, or listed there with the reason why no test can tell it from the code as it stands.
"""

import argparse

from broken_copy import broken_copy
from chosen import CHOSEN, look_for_chosen
from drawn import MODULES, Outcome, look_for_drawn
from kept import look_for_kept

ALL = ["chosen", "kept", *MODULES]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/mutants")
    parser.add_argument("--drawn", type=int, default=25, metavar="N", help="mutants drawn of each module (default 25)")
    parser.add_argument("which", nargs="*", metavar="WHICH", help=f"of {', '.join(ALL)} (default: all)")
    given = parser.parse_args()
    if unknown := {*given.which} - {*ALL}:
        parser.error(f"there is no {' and no '.join(unknown)}; choose from {', '.join(ALL)}")
    which_ones = given.which or ALL
    missed, hidden, outcomes = list[str](), list[str](), dict[str, Outcome]()
    with broken_copy() as copy:
        for which in which_ones:
            if which == "chosen":
                missed = look_for_chosen(copy)
            elif which == "kept":
                hidden = look_for_kept(copy)
            else:
                outcomes[which] = look_for_drawn(copy, which, given.drawn)
    if "chosen" in which_ones:
        print(f"\nchosen: {len(CHOSEN) - len(missed)} of {len(CHOSEN)} found", *missed, sep="\n  NOT FOUND: ")
    for module, outcome in outcomes.items():
        found = outcome.drawn - len(outcome.survivors)
        print(f"{module}: {found} of {outcome.drawn} found", *outcome.survivors, sep="\n  ")
    return bool(missed or hidden or any(outcome.unexplained for outcome in outcomes.values()))


raise SystemExit(main())
