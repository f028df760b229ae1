"""Mutants of modules with kernels: a process with a warm cache must run their code, not what was compiled before."""

import os
import shutil
import subprocess
import sys
from itertools import islice

import numpy as np
from broken_copy import CHECKOUT, BrokenCopy
from drawn import mutants

MODULES = (
    "pipeline/rng.py", "pipeline/order/bijection.py", "pipeline/dataset/raw_bytes.py",
    "pipeline/dataset/stored_sample.py", "pipeline/dataset/row_records.py",
    "pipeline/views/draws.py", "pipeline/views/recipes.py", "pipeline/views/pixels.py", "pipeline/views/resample.py",
    "pipeline/loading/ffcv_loader.py", "state_store/records.py",
)  # fmt: skip
EACH = 3
SECONDS = 300


def look_for_kept(copy: BrokenCopy) -> list[str]:
    """Break these modules one line at a time; return the mutants that give another result with a warm cache."""
    print("kernels that are kept", flush=True)
    dataset, warm, empty = (copy.path(f"../{name}") for name in ("dataset", "warm", "empty"))
    make_dataset(dataset)
    whole, wrong, drawn, changed = run(copy, dataset, warm), list[str](), 0, 0
    for module in MODULES:
        for mutant in islice(mutants(copy, module), EACH):
            with copy.with_code(module, mutant.code):
                shutil.rmtree(empty, ignore_errors=True)
                compiled, kept = run(copy, dataset, empty), run(copy, dataset, warm)
            drawn, changed = drawn + 1, changed + (compiled != whole)
            shown = f"{module}, {mutant.function}: {mutant.line}  ->  {mutant.broken}"
            print(
                f"  {drawn}: {shown}\n    {'the same' if compiled == kept else 'OTHER'} with a warm cache", flush=True
            )
            wrong += [] if compiled == kept else [shown]
    print(f"  {drawn} mutants, of which {changed} change the result; {len(wrong)} give another with a warm cache")
    assert run(copy, dataset, warm) == whole
    return wrong


def make_dataset(path):
    from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
    from thermopile.pipeline.sources.folder import FolderSource

    sys.path.insert(0, str(CHECKOUT / "tests"))
    from support.pictures import draw

    folder = path.with_name("pictures")
    folder.mkdir()
    for i in range(64):
        draw(i, height=40 + i % 7, width=50 + int(np.sqrt(i))).save(folder / f"{i}.png")
    convert(FolderSource(folder), path, ConvertSettings(), workers=1)


def run(copy: BrokenCopy, dataset, cache) -> tuple[int, str]:
    program = [sys.executable, str(copy.path("tests/support/programs/running_kernels.py")), str(dataset)]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(copy.path("build/types"))}
    try:
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return -1, "it did not end"
    return done.returncode, done.stdout or done.stderr.strip().rpartition("\n")[2]
