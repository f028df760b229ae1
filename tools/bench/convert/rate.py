"""Images a second of a conversion, and of the plain loop, turn by turn."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from ....pipeline.conversion.convert import ConvertSettings, convert
from ....pipeline.cores import cores
from ....pipeline.dataset_index import ImagePolicy
from ....pipeline.sources.webdataset import WebDatasetSource
from ..figure import Figure
from ..measured import Measured
from ..progress import say
from ..rounds import ratios, take_turns
from .plain import copy_tars
from .sizes import Sizes
from .tars import write_tars

_FEW = 2
"""Images of a conversion that is all start-up."""


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Convert the tars, and copy them plainly, once a round each; the listing of the tars counts for both."""
    say(f"convert: making {sizes.images:,} photographs")
    policy, workers = ImagePolicy(max_size=sizes.max_size), cores()
    tars, out = write_tars(directory, sizes.images, sizes.tars), directory / "out"
    (directory / "few").mkdir()
    few = write_tars(directory / "few", _FEW, 1)

    def converted(paths: list[Path]) -> Callable[[int], float]:
        return _timed(
            out, lambda: convert(WebDatasetSource(paths), out, ConvertSettings(image=policy), workers=workers)
        )

    cold, warm = (converted(few)(start) for start in range(2))
    seconds = take_turns(
        "convert", {"convert": converted(tars), "plain": _timed(out, lambda: copy_tars(tars, out, policy, workers))},
        sizes.rounds,
    )  # fmt: skip
    rates = {name: [sizes.images / of_round for of_round in times] for name, times in seconds.items()}
    return Measured(
        f"{sizes.images:,} photographs of 400×300 in {sizes.tars} tars, {_what(sizes)}, {workers} processes; "
        f"medians of {sizes.rounds} rounds",
        f"the same processes that only read the tars, {_plainly(sizes)} and write one file for each tar",
        (
            Figure("images_per_second", "converted", "/s", median(rates["convert"]), median(rates["plain"]),
                   more_is_better=True, ratio_at_least=0.8, ratios=ratios(rates["convert"], rates["plain"])),
            Figure("start_up_seconds", "import of what workers need", "s", max(0.0, cold - warm)),
        ),
        notes=("Imports, once in a process, count for neither; starting the workers counts for both.",),
    )  # fmt: skip


def _what(sizes: Sizes) -> str:
    return "JPEGs kept" if sizes.kept else f"reduced to {sizes.max_size} pixels and encoded again"


def _plainly(sizes: Sizes) -> str:
    return "decode" if sizes.kept else "decode, reduce and encode with Pillow"


def _timed(out: Path, work: Callable[[], object]) -> Callable[[int], float]:
    """Seconds of each call, after which `out` is removed."""

    def seconds(number: int) -> float:
        os.sync()  # what was written before is nobody's
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        shutil.rmtree(out)
        return took

    return seconds
