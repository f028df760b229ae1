"""`thermopile effect` from one end to the other: scores as in `eval`, temperatures, the figure, what it refuses."""

import json
import re
import shutil
from html import escape

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.state_store.reader import StateReader
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.drift import drift
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets, succeed
from support.conversions import dataset_of
from support.pictures import draw
from support.written_runs import write_run

SMALL = ("epochs=1", "optimizer.warmup=0", "data.image_size=16", "model.dim=8", "model.image.config.width=4")


def trained(dataset, out, *settings):
    succeed("train", "--data", dataset.path, "--out", out, *sets(*SMALL, *settings))
    return out


@pytest.fixture(scope="module")
def runs(hostile_dataset, pairs_dataset, tmp_path_factory):
    """Three small runs on hostile pairs, the second and third of another seed; and one on glyphs."""
    folder = tmp_path_factory.mktemp("runs")
    seeds = [
        trained(hostile_dataset, folder / f"seed {seed} <b>", "batch_size=16", f"seed={seed}") for seed in range(3)
    ]
    return [*seeds, trained(pairs_dataset, folder / "glyphs", "batch_size=512")]


def effect(runs, test, *options):
    return json.loads(succeed("effect", *runs, "--test", test.path, "--json", *options).stdout)


def test_a_run_is_not_apart_from_itself_and_its_scores_are_those_of_eval(runs, hostile_dataset):
    found = effect([runs[0], runs[0]], hostile_dataset)
    sets = ("--train", hostile_dataset.path, "--test", hostile_dataset.path)
    evaluated = json.loads(succeed("eval", runs[0], *sets, "--json").stdout)
    expected = {method: dict(of) for method, of in evaluated["scores"].items() if method != "probe"}
    del expected["zero_shot"]["mean_per_class"]
    assert {method: set(of) for method, of in found["scores"].items()} == {m: set(of) for m, of in expected.items()}
    for method, variants in found["scores"].items():
        for variant, bands in variants.items():
            for band, one in bands.items():
                assert one is None or one["a"] == one["b"] == pytest.approx(expected[method][variant][band])
                assert one is None or (one["mean"], one["error"], one["half_width"]) == (0, 0, 0)
    assert found["scores"]["image_to_text"]["1"]["all"]["queries"] == 65
    assert set(evaluated["notes"]) < set(found["notes"])
    (of_run,) = found["temperatures"]
    assert {side: of["most_risen"] for side, of in of_run["sides"].items()} == {"image": [], "text": []}


@pytest.mark.wide
def test_several_pairs_have_an_error_of_seeds_too_and_a_page_is_written(runs, hostile_dataset, tmp_path):
    before = {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*")}
    one = effect(runs[:2], hostile_dataset)
    pairs = [runs[0], runs[1], runs[1], runs[2]]
    two = effect(pairs, hostile_dataset, "--out", tmp_path / "effect.html")
    single, double = (found["scores"]["knn"]["10"]["all"] for found in (one, two))
    assert single["seed_error"] == 0 < single["error"] == single["sample_error"]
    assert double["seed_error"] > 0
    assert any("another seed" in note for note in one["notes"])
    assert not any("another seed" in note for note in two["notes"])
    assert len(two["temperatures"]) == 2
    page = (tmp_path / "effect.html").read_text("utf-8")
    assert "image: samples whose tau rose most" in page
    assert "pair 2: {from} → {to}</h2>".format(**two["temperatures"][1]) in page
    assert all(f"<li>{side}: {escape(str(run))}, step-" in page for side, run in zip("ABAB", pairs, strict=True))
    assert page.count('src="data:image/jpeg') > 50
    assert page.count("<svg") == 1
    assert ">k-NN, k = 10</text>" in page
    assert "<script>alert" not in page
    assert {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*")} == before


def test_a_copy_of_a_run_is_not_another_seed(runs, hostile_dataset, tmp_path):
    copies = [shutil.copytree(run, tmp_path / run.name) for run in runs[:2]]
    found = effect([*runs[:2], *copies], hostile_dataset)
    assert (
        "The errors leave out how another seed would change a run; for that, give pairs of other seeds."
        in (found["notes"])
    )


def test_temperatures_that_cannot_be_read_end_the_command_before_it_scores(runs, hostile_dataset, tmp_path):
    copy = shutil.copytree(runs[1], tmp_path / "copy", ignore=shutil.ignore_patterns("state"))
    shutil.copytree(runs[2] / "state", copy / "state")
    done = cli("effect", runs[0], copy, "--test", hostile_dataset.path)
    assert_one_line(done, 1, "is not this run's state")
    assert "test pictures" not in done.stderr


def test_a_score_whose_queries_all_share_a_caption_has_no_difference_but_a_note(runs, tmp_path):
    draw(0).save(tmp_path / "0.jpg")
    same = {"image": [(tmp_path / "0.jpg").read_bytes()] * 3, "caption": ["a"] * 3}
    pq.write_table(pa.table(same), tmp_path / "same.parquet")
    found = effect(runs[:2], dataset_of(ParquetSource([tmp_path / "same.parquet"]), tmp_path / "same"))
    assert found["scores"]["image_to_text"]["1"]["all"] is None
    assert "No error of image to text, R@1: it takes two queries without a common caption." in found["notes"]


def test_the_table_has_bands_and_classes_and_errors_beside_each_difference(runs, hostile_dataset):
    told = succeed("effect", *runs[:2], "--test", hostile_dataset.path).stdout
    for words in ("B − A, points ± error (unpaired)", "tail", "k-NN, k = 10", "text to image, R@1"):
        assert words in told
    assert "\x1b" not in told
    rows = re.findall(r"([+-][\d.]+) ± [\d.]+ \([\d.]+\) +(\d+)", told.partition("classes furthest apart")[2])
    apart = [round(abs(float(points)) * int(queries) / 100) for points, queries in rows]  # queries that differ
    assert 1 < len(apart) <= 10
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] > 0
    assert "classes furthest apart" not in succeed("effect", runs[0], runs[0], "--test", hostile_dataset.path).stdout


def test_runs_on_different_datasets_are_compared_without_temperatures(runs, hostile_dataset):
    found = effect([runs[0], runs[3]], hostile_dataset)
    assert found["temperatures"] == [None]
    assert "The runs have no temperatures of the same dataset and side, so none are compared." in found["notes"]
    assert found["scores"]["knn"]


def test_temperatures_of_runs_whose_blocks_differ_are_compared_sample_by_sample(runs, hostile_dataset, tmp_path):
    reader = StateReader.open(runs[0] / "state")
    other = write_run(
        tmp_path / "other", hostile_dataset, {side: reader.column(f"{side}/tau") + 0.25 for side in ("image", "text")}
    )
    assert StateReader.open(other.state).block_rows != reader.block_rows
    found = drift(read_run(RunDirectory(runs[0])), read_run(other))
    for side in found.sides:
        assert side.change.mean == pytest.approx(0.25)
        assert (side.share_risen, side.most_fallen) == (1, [])


def test_nothing_in_common_and_wrong_usage_are_refused_in_one_line(runs, hostile_dataset, flat_dataset, tmp_path):
    of = ("--test", hostile_dataset.path)
    assert_one_line(cli("effect", *runs[:3], *of), 2, "the number of runs is odd")
    assert_one_line(cli("effect", *runs[:2], *of, "--out", tmp_path / "effect.png"), 2, "does not end in .html")
    assert_one_line(cli("effect", *runs[:2], *of, "--out", tmp_path / "no" / "effect.html"), 2, "no does not exist")
    assert_one_line(cli("effect", runs[0], tmp_path / "gone", *of), 1, "is not a run")
    wrong = cli("effect", *runs[:2], *of, "--at", "step-1000")
    assert_one_line(wrong, 1, "step-1000")
    empty = shutil.copytree(runs[0], tmp_path / "copy")
    nothing = cli("effect", runs[0], empty, "--train", flat_dataset.path, "--test", flat_dataset.path)
    assert_one_line(nothing, 2, "gives nothing to score", "has no classes, and it has no captions")
