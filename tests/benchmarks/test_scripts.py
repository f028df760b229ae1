"""Every benchmark at its small scale: what it does and prints, never how fast it was; at full size, what is asked."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
FIGURES = {
    ("state", "rows"): {"take_ns", "put_ns"},
    ("state", "windowed"): {"peak_memory_gb", "wait_percent", "blocks_read", "blocks_written"},
    ("state", "snapshot"): {"megabytes_per_second"},
    ("step", "checkpoint"): {"held_up_ms", "held_up_steps", "held_up_worst_steps", "first_held_up_ms",
                             "slowed_ms", "step_ms"},
    ("convert", "encoded"): {"images_per_second", "start_up_seconds"},
    ("planning", "tsv"): {"list_seconds", "classes_seconds", "plan_seconds", "tokenizer_seconds", "cut_seconds",
                          "minutes", "peak_gb"},
    ("duplicates", "query"): {"milliseconds"},
    ("duplicates", "glyphs"): {"missed_percent", "false_percent", "not_similar_percent", "largest_of_copies",
                               "smallest_of_others"},
    ("objective", "time"): {"32_products_ms", "32_autograd_ms"},
    ("objective", "memory"): {"32_products_mib", "32_autograd_mib"},
    ("momentum", "step"): {"step_ms"},
    ("embed", "speed"): {"rows_per_second"},
    ("embed", "memory"): {"megabytes"},
    ("inspect_report", "beside_pandas"): {"seconds", "peak_megabytes", "page_megabytes", "export_seconds"},
    ("serve", "page"): {"first_seconds", "slowest_ms", "ms_coldest", "ms_hottest_far_back", "ms_a_word", "ms_a_kind",
                        "ms_a_class_by_log_s", "ms_a_range_of_tau_by_id", "ms_a_sample_with_its_history",
                        "ms_a_picture", "peak_mb", "index_seconds", "index_peak_mb", "index_mb"},
    ("loader", "open"): {"ffcv_seconds", "ffcv_megabytes", "ffcv_process_megabytes", "dali_seconds", "dali_megabytes",
                         "dali_process_megabytes"},
    ("loader", "two_views"): {"public_over_ffcv", *(f"{ours}_over_{other}" for ours in ("ffcv", "dali")
                                                    for other in ("pillow", "decode"))},
    ("remote", "windowed"): {"bytes", "data_wait", "fetch_wait", "waits", "first_batch", "disk", "floor"},
    ("tars", "bytes"): {f"{way}_{what}"
                        for way in ("alone", "few_parts", "parts", "in_place", "longtail", "holdout", "ray")
                        for what in ("bytes", "requests")},
    ("tars", "forms"): {f"{form}_{what}" for form in ("converted", "index")
                        for what in ("rate", "wait_ms", "requests", "bytes", "first_batch", "cpu_us")},
    ("tars", "neighbours"): {"same_tar_percent", "over_full_shuffle"},
    ("tars", "memory"): {"reading_mb", "grown_mb", "counting"},
    ("scale", "budget"): {"epoch_hours", "plan_tsv_minutes", "plan_tsv_gb", "plan_parquet_minutes", "dataset_tb",
                          "dataset_dollars", "floor_gb", "records_gb", "fetched_gb", "reads", "reads_dollars",
                          "rows_gb", "rows_of_rank_gb", "snapshot_gb", "snapshot_writes", "manifests_mb",
                          "snapshot_dollars"},
    ("scale", "epoch"): {"order_ms", "requests", "bytes_a_sample", "blocks_read", "blocks_written", "hold_ms",
                         "fetch_wait_percent", "state_wait_percent", "floor_gb", "records_gb", "open_seconds",
                         "memory_gb"},
    ("scale", "snapshot"): {"seconds", "megabytes", "requests", "requests_a_block", "manifest_bytes"},
    ("bytes_a_step", "counted"): {f"{figure}_{ranks}{of}" for ranks in (2, 4) for figure, of in (
        ("off", ""), ("largest", ""),
        *((method, of) for method in ("clip", "fastclip_v2", "fastclip_v3", "isogclr", "local_loss", "gradients")
          for of in ("_payload", "_wire")),
    )},
    **{("bytes_a_step", setting): {f"{hosts}_{gbit}_{what}_ms" for hosts in all_hosts for gbit in (10, 100)
                                   for what in ("loss", "all")}
       for setting, all_hosts in (("medium", (2, 4, 8)), ("large", (2, 4, 8)), ("xlarge", (2,)))},
}  # fmt: skip
QUICKEST = {("objective", "time")}
"""The others import as much in a process of their own, or train: the soak runs them."""


def test_benchmarks_import_the_package_by_its_name():
    """As `python -m benchmarks.X`, they are no part of it; mypy does not see that."""
    files = sorted((CHECKOUT / "benchmarks").glob("*.py"))
    assert len(files) > 20
    assert [file.name for file in files if "from .." in file.read_text("utf-8")] == []


def run(script, *words, directory):
    command = [sys.executable, "-m", f"benchmarks.{script}", "--json", "--dir", directory, *words]
    done = subprocess.run(list(map(str, command)), cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(directory.iterdir()) == []
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("script", "part"),
    [pytest.param(*each, marks=pytest.mark.wide if each in QUICKEST else pytest.mark.soak) for each in FIGURES],
)
def test_a_benchmark_measures_a_part_without_judging_small_sizes_and_leaves_nothing(script, part, tmp_path):
    (measured,) = run(script, "--scale", "small", "--part", part, directory=tmp_path)
    assert measured["part"] == part
    assert set(measured["figures"]) == FIGURES[script, part]
    assert measured["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert measured["peak_memory_bytes"] > 10**7
    for figure in measured["figures"].values():
        assert math.isfinite(figure["ours"])
        assert figure["held"] is None


FULL_SIZE = ["--part", "windowed"]
SMALL_SIZE = [
    *FULL_SIZE, "--set", "samples=40000", "--set", "budget_mb=0.4", "--set", "step_ms=0", "--set", "batch=512"
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("words", "max_wait_percent"),
    # How long nothing takes says nothing; at the full size a step has its 50 ms.
    [pytest.param(SMALL_SIZE, 100, id="small"), pytest.param(FULL_SIZE, 5, id="full")],
)
def test_an_epoch_through_a_window_reads_and_writes_every_block_once_in_little_memory(
    words, max_wait_percent, tmp_path
):
    skip_without_disk(14.5 if words is FULL_SIZE else 0.1, tmp_path)
    (measured,) = run("state", *words, directory=tmp_path)
    ours, sizes = {name: figure["ours"] for name, figure in measured["figures"].items()}, measured["sizes"]
    assert ours["peak_memory_gb"] <= 1.2
    assert ours["wait_percent"] <= max_wait_percent
    # Once each, less what is in memory when the epoch begins, and more what is read ahead when it ends.
    in_memory = sizes["budget_mb"] * 10**6 / (sizes["samples"] * 32)
    assert ours["blocks_read"] == pytest.approx(1, abs=in_memory)
    assert ours["blocks_written"] == pytest.approx(1, abs=in_memory)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("part", "gigabytes"), [("beside_pandas", 3.5), ("alone", 11)])
def test_a_report_keeps_to_its_time_its_memory_and_its_page_at_full_size(part, gigabytes, tmp_path):
    skip_without_disk(gigabytes, tmp_path)
    (measured,) = run("inspect_report", "--part", part, directory=tmp_path)
    held = {name: figure["held"] for name, figure in measured["figures"].items() if figure["asked"]}
    assert set(held) >= {"peak_megabytes", "page_megabytes"}
    assert all(held.values()), measured["figures"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", ["tsv", "parquet"])
def test_a_hundred_million_rows_are_planned_in_their_time_and_memory(part, tmp_path):
    skip_without_disk(13, tmp_path)
    (measured,) = run("planning", "--part", part, directory=tmp_path)
    assert all(measured["figures"][name]["held"] for name in ("minutes", "peak_gb")), measured["figures"]


@pytest.mark.soak
def test_ranks_send_in_a_step_what_the_formula_says_and_no_more_than_openclips_local_loss(tmp_path):
    (measured,) = run("bytes_a_step", "--part", "counted", directory=tmp_path)
    ours = {name: figure for name, figure in measured["figures"].items() if figure["asked"]}
    assert set(ours) == {"off_2", "largest_2", "off_4", "largest_4"}
    assert all(figure["held"] for figure in ours.values()), ours
    # The scalars are less than the 2 % that are allowed.
    assert ours["off_2"]["ours"] == ours["off_4"]["ours"] == pytest.approx(0, abs=1e-9)


def skip_without_disk(gigabytes, path):
    if gigabytes * 10**9 > (free := shutil.disk_usage(path).free):
        pytest.skip(f"needs {gigabytes:.1f} GB of disk at {path}, where {free / 1e9:.1f} GB are free")
