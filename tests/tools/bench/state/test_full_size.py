"""`thermopile bench state --part windowed` at the size for which its figures are asked, and at one of seconds."""

import json
import shutil

import pytest
from click.testing import CliRunner

from thermopile.tools.cli import main

FULL_SIZE = {"samples": 2 * 10**8, "budget": 512, "step-ms": 50}
SMALL_SIZE = {"samples": 2 * 10**6, "budget": 5, "step-ms": 0}
BYTES_A_ROW = 32
DISK_BYTES_A_ROW = 70
"""A row's bytes twice, blocks being replaced by new files, and a little more."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("size", "most_waiting"),
    # How long nothing takes says nothing; at the full size a step has its 50 ms.
    [pytest.param(SMALL_SIZE, 100, id="small"), pytest.param(FULL_SIZE, 5, id="full", marks=pytest.mark.soak)],
)
def test_an_epoch_through_a_window_reads_and_writes_every_block_once_in_little_memory(size, most_waiting, tmp_path):
    needed, free = size["samples"] * DISK_BYTES_A_ROW, shutil.disk_usage(tmp_path).free
    if needed > free:
        pytest.skip(f"needs {needed / 1e9:.1f} GB of disk at {tmp_path}, where {free / 1e9:.1f} GB are free")
    options = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    done = CliRunner().invoke(
        main, ["bench", "state", "--part", "windowed", "--json", "--dir", str(tmp_path), *options]
    )
    assert done.exit_code == 0, done.output
    measured = json.loads(done.stdout)["parts"]["windowed"]
    assert measured["sizes"] == {
        "samples": size["samples"], "budget_mb": size["budget"], "batch": 16_384, "step_ms": size["step-ms"],
    }  # fmt: skip
    ours = {name: figure["ours"] for name, figure in measured["figures"].items()}
    assert ours["peak_memory_gb"] <= 1.2
    assert ours["wait_percent"] <= most_waiting
    # Once each, less what is in memory when the epoch begins, and more what is read ahead when it ends.
    in_memory = size["budget"] * 10**6 / (size["samples"] * BYTES_A_ROW)
    assert ours["blocks_read"] == pytest.approx(1, abs=in_memory)
    assert ours["blocks_written"] == pytest.approx(1, abs=in_memory)
