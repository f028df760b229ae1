"""`thermopile bench inspect`: what it makes, does and prints, never how fast it was; at full size, what is asked."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from thermopile.pipeline.dataset import Dataset
from thermopile.state_store import StateReader, list_snapshots
from thermopile.tools.bench.inspect.command import PARTS
from thermopile.tools.bench.inspect.made_run import write_run
from thermopile.tools.bench.inspect.pairs import PairSource
from thermopile.tools.bench.inspect.plain import write_page
from thermopile.tools.bench.inspect.report import Took, figures_of
from thermopile.tools.bench.inspect.sizes import FULL, SMALL, SNAPSHOTS, Sizes
from thermopile.tools.bench.repeated import repeat_shard
from thermopile.tools.cli import main
from thermopile.trainer.run_directory import RunDirectory


@pytest.fixture(scope="module")
def repeated(hostile_dataset, tmp_path_factory):
    """Five times the hostile pairs, whose classes have 34 to 1 samples a shard."""
    path = tmp_path_factory.mktemp("repeated") / "dataset"
    shutil.copytree(hostile_dataset.path, path)
    repeat_shard(path, 5)
    return Dataset(path)


@pytest.fixture(scope="module")
def run(repeated, tmp_path_factory):
    return RunDirectory(write_run(repeated, tmp_path_factory.mktemp("made") / "run"))


def test_every_part_can_be_chosen_and_has_both_scales():
    assert set(PARTS) == set(FULL) == set(SMALL)


def test_the_samples_are_cut_into_as_many_shards_as_a_conversion_makes():
    sizes = Sizes(rows=10**7)
    assert (sizes.shards, sizes.shard_rows, sizes.samples) == (128, 78_125, 10**7)
    assert Sizes(rows=10**8).samples == 763 * 131_062


def test_few_classes_are_large_and_most_are_small():
    source = PairSource(5000)
    sizes = Counter(source.groups().of_sample.tolist())
    assert sum(sizes.values()) == len(source) == 5000
    assert sizes[0] > 1.9 * sizes[1] > 90 * sizes[500] > 0
    assert source[4000].group == source.groups().names[source.groups().of_sample[4000]]


def test_a_repeated_shard_is_a_dataset_whose_samples_come_again(repeated, hostile_dataset):
    rows = hostile_dataset.n
    assert repeated.n == 5 * rows
    first, last = repeated.rows([7, 4 * rows + 7])
    assert first | {"sample_id": 4 * rows + 7} == last
    assert repeated.jpeg(4 * rows + 7) == hostile_dataset.jpeg(7)


def test_the_run_has_snapshots_on_whose_way_tau_comes_to_follow_class_size(run, repeated):
    tags = [snapshot.tag for snapshot in list_snapshots(run.state)]
    assert len(tags) == 1 + SNAPSHOTS
    sizes = [34, 16, 8, 4, 2, 1]
    groups = np.array([str(name)[:7] for name in repeated.column("group").to_pylist()])
    far_apart = []
    for tag in sorted(tags, key=lambda tag: int(tag.split("-")[1]))[1:]:
        tau = StateReader.open(run.state, tag).column("image/tau")
        assert ((tau >= 0.005) & (tau <= 1)).all()
        means = [tau[groups == f"class {number}"].mean() for number in range(len(sizes))]
        far_apart.append(means[0] / means[-1])
    assert far_apart == sorted(far_apart)
    assert far_apart[-1] > 1.5
    assert means[0] > means[1] > means[3]


def test_pandas_says_the_same_of_the_exported_state(run, repeated, tmp_path):
    done = CliRunner().invoke(main, ["state", "export", str(run.path), "--to", str(tmp_path / "state.parquet")])
    assert done.exit_code == 0, done.output
    write_page(tmp_path / "state.parquet", repeated.path / "shards", tmp_path / "plain.html")
    page = (tmp_path / "plain.html").read_text("utf-8")
    assert page.count("<img src=") == 8
    assert page.count("<table") == 8
    (means,) = [line for line in page.split("<tr>") if "<th>mean</th>" in line]
    assert f"<td>{StateReader.open(run.state).column('image/tau').mean(dtype=np.float64):.4f}" in means


def test_inspect_is_judged_by_the_median_of_its_time_and_the_most_of_its_memory():
    ours = [Took(50, 300 * 10**6), Took(70, 900 * 10**6), Took(55, 200 * 10**6)]
    seconds, peak = figures_of(Sizes(), ours, [Took(110, 4 * 10**9)] * 3)
    assert (seconds.ours, seconds.asked, seconds.held, seconds.ratio) == (55, "≤ 60 s", True, 2)
    assert (peak.ours, peak.alternative, peak.asked, peak.held) == (900, 4000, "≤ 1,000 MB", True)
    alone, _ = figures_of(FULL["alone"], [Took(300, 10**9)], [])
    assert (alone.asked, alone.held, alone.alternative) == ("", None, None)


def test_help_ends_with_an_example():
    help_text = CliRunner().invoke(main, ["bench", "inspect", "--help"]).stdout
    assert "thermopile bench inspect " in help_text.split("Example")[1]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_the_command_measures_a_small_run_without_judging_it_and_leaves_nothing(part, tmp_path):
    told = measured(part, "--scale", "small", directory=tmp_path)
    assert told["figures"]["peak_megabytes"]["ours"] > 0
    assert told["figures"]["peak_megabytes"]["held"] is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_a_report_keeps_to_its_time_its_memory_and_its_page_at_full_size(part, tmp_path):
    needed, free = FULL[part].disk_bytes + 10**9, shutil.disk_usage(tmp_path).free
    if needed > free:
        pytest.skip(f"needs {needed / 1e9:.1f} GB of disk at {tmp_path}, where {free / 1e9:.1f} GB are free")
    figures = measured(part, directory=tmp_path)["figures"]
    held = {name: figure["held"] for name, figure in figures.items() if figure["asked"]}
    assert set(held) >= {"peak_megabytes", "page_megabytes"}
    assert all(held.values()), figures


def measured(part: str, *options: str, directory: Path) -> dict:
    words = ["bench", "inspect", "--part", part, "--json", "--dir", str(directory), *options]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["parts"][part]
