"""A run that has collapsed says so while it trains and in `status`, and `inspect` tells no kinds of it."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import converted

from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.storage.sealed_json import seal_line
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.serving.catalogue import open_catalogue
from thermopile.trainer.config import load_config
from thermopile.trainer.metrics.step_report import collapse
from thermopile.trainer.objectives import Progress, create_objective

from support import written_runs
from support.cli import answer, cli, sets, succeed
from support.pictures import draw
from support.written_runs import write_state

SAID = "the run has collapsed or learns nothing: "
B = 32


def config_of(name="clip", batch_size=B, **optimizer):
    tree = {"batch_size": batch_size, "objective": {"name": name}, "optimizer": optimizer}
    return load_config(tree)


def steps(first, last, hits=B, likeness=0.5, loss=1.0, b=B):
    """Lines of metrics.jsonl of pairs, of which a batch finds as many on each side; 10 steps an epoch."""
    values = {f"{side}/retrieval_accuracy": hits / b for side in ("image", "text")}
    values |= {"image/likeness": likeness, "text/likeness": 0.5, "loss": loss}
    return [{"step": step, "epoch": (step - 1) // 10} | values for step in range(first, last + 1)]


# The rules


def test_one_sample_a_batch_is_chance_whatever_the_size_of_the_batch_and_three_are_not():
    for b in (16, 256, 4096):
        config = config_of(batch_size=b)
        assert collapse(steps(201, 220, hits=1, b=b), config).startswith(f"{SAID}samples are told from the others of a")
        assert collapse(steps(201, 300, hits=1.5, b=b), config)
        assert not collapse(steps(201, 220, hits=3, b=b), config)


def test_few_steps_are_not_judged_and_more_steps_are_judged_more_strictly():
    assert not collapse(steps(201, 209, hits=0, likeness=1.0), config_of())
    assert collapse(steps(201, 210, hits=0), config_of())
    assert not collapse(steps(201, 220, hits=1.5), config_of())
    assert collapse(steps(201, 300, hits=1.5), config_of())


def test_nothing_is_judged_in_the_warm_up_nor_in_the_first_two_hundred_steps():
    assert not collapse(steps(101, 200, hits=0, likeness=1.0), config_of(warmup=0))
    late = steps(201, 300, hits=0, likeness=1.0)
    assert not collapse(late, config_of(warmup=300))
    assert collapse(late, config_of(warmup=280))
    assert not collapse(late, config_of(warmup="30 epochs"))
    assert collapse(late, config_of(warmup="28 epochs"))


def test_features_that_are_alike_on_one_side_are_told_with_the_data_as_the_first_cause():
    said = collapse(steps(201, 220, likeness=0.9995), config_of(lr=0.5))
    assert said.startswith(
        f"{SAID}all image features are alike. Likely causes: all pictures or all captions are the sa"
    )
    assert "optimizer.lr = 0.5 is too high or too low, or a temperature is far off" in said
    assert not collapse(steps(201, 220, likeness=0.998), config_of())


def test_a_cross_entropy_that_stays_where_alike_features_have_it_is_told():
    assert "the loss stays at 3.4657" in collapse(steps(201, 220, loss=math.log(B) + 0.002), config_of())
    assert not collapse(steps(201, 220, loss=math.log(B) - 0.02), config_of())
    assert not collapse(steps(201, 220, loss=math.log(B)), config_of("sogclr"))
    assert "the loss stays at 4.1431" in collapse(steps(201, 220, loss=math.log(2 * B - 1)), config_of("simclr"))


def test_half_precision_is_named_as_a_cause_only_where_it_is_used():
    lines = steps(201, 220, hits=0)
    assert "fp16" not in collapse(lines, config_of())
    assert "fp16 overflows" in collapse(lines, config_of().model_copy(update={"precision": "fp16"}))


@pytest.mark.parametrize("lost", ["image/retrieval_accuracy", "image/likeness", "loss"])
def test_skipped_steps_and_damaged_values_do_not_count(lost):
    skipped = [{"step": step, "epoch": 20, "loss": None, "skipped": True} for step in range(221, 260)]
    assert not collapse(skipped, config_of())
    assert not collapse([line | {lost: None} for line in steps(201, 220)] + skipped, config_of())


@pytest.mark.parametrize(("name", "mode"), [("clip", "bimodal"), ("simclr", "unimodal"), ("vicreg", "unimodal")])
def test_likeness_is_the_mean_cosine_between_two_samples(name, mode):
    objective = create_objective(name, mode)
    features = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    units = torch.nn.functional.normalize(features, dim=2)
    given = units if objective.unit_norm else features
    found = objective(given[0], given[1], {}, Progress(0, 1)).metrics
    of_sides = torch.stack([(side @ side.T)[~torch.eye(6, dtype=torch.bool)].mean() for side in units])
    if mode == "unimodal":
        of_sides = of_sides.mean(0, keepdim=True)
    for side, expected in zip(objective.sides, of_sides, strict=True):
        torch.testing.assert_close(found[f"{side}/likeness"], expected)


# A run that was


def with_steps(run, lines):
    run.metrics_file.write_bytes(b"".join(seal_line(line) + b"\n" for line in lines))


def test_status_says_that_a_run_has_collapsed(images_dataset, tmp_path):
    run = write_state(tmp_path / "run", images_dataset, {}, [9] * images_dataset.n)
    with_steps(run, steps(1, 220))
    assert answer("status", run.path)["steps"]["collapse"] == ""
    with_steps(run, steps(1, 120) + steps(121, 220, likeness=1.0))
    assert f"collapsed      {SAID}" in succeed("status", run.path).stdout


@pytest.mark.wide
def test_inspect_tells_no_kinds_of_a_snapshot_at_which_the_run_had_collapsed(images_dataset, tmp_path, monkeypatch):
    n = images_dataset.n
    columns = {
        "sample/tau": [0.1 + i / n for i in range(n)],
        "sample/log_s": [-1.0 + 2 * (i % 6 == 0) for i in range(n)],
    }
    monkeypatch.setattr(written_runs, "STEP", 300)  # of the snapshot
    run = write_state(tmp_path / "run", images_dataset, columns, [9] * n)
    kinds = lambda: answer("inspect", run.path)["kinds"]["misfit"]["samples"]  # noqa: E731
    with_steps(run, steps(1, 300, b=16, hits=9) + steps(301, 500, likeness=1.0))  # collapsed since
    assert kinds() == 50
    with_steps(run, steps(1, 300, likeness=1.0) + steps(301, 500))
    assert kinds() == 0
    done = cli("inspect", run.path)
    assert (
        done.output.count(f"There are no kinds of samples yet: {SAID}all image features are alike. Likely causes:") == 1
    )
    refused = cli("curate", run.path, "--keep", tmp_path / "keep.parquet", "--drop-misfits")
    assert f"there are no misfits yet: {SAID}" in refused.stderr
    for _ in ("made", "opened"):
        inspection = read_run(run)
        open_catalogue(inspection, tmp_path, lambda *_: None).close()
        assert sum(f"There are no kinds of samples yet: {SAID}" in note for note in inspection.notes) == 1
    run.metrics_file.unlink()
    assert kinds() == 50


# Six ways to collapse


TINY = ("log_every=10", "data.image_size=16", "model.dim=16", "model.image.config.width=4",
        "model.text.config.width=8", "optimizer.warmup=200", "steps=220", "epochs=20")  # fmt: skip


PAPERS = ["objective.tau_init=0.01", "objective.eta=0.01"]


@pytest.fixture(scope="module")
def data(tmp_path_factory, pairs_dataset):
    """Datasets by name: sound; with one picture for all captions; with one caption for all pictures."""

    def pairs(name, pictures, captions):
        folder = tmp_path_factory.mktemp(name)
        for number in range(pictures):
            draw(number).save(folder / f"{number}.png")
        content = [(folder / f"{number}.png").read_bytes() for number in range(pictures)]
        table = {"image": [content[i % pictures] for i in range(512)],
                 "caption": [f"picture {i % captions}" for i in range(512)]}  # fmt: skip
        pq.write_table(pa.table(table), folder / "pairs.parquet")
        return converted(ParquetSource([folder / "pairs.parquet"]), folder / "pairs")

    return {"sound": pairs_dataset, "one picture": pairs("picture", 1, 512), "one caption": pairs("caption", 512, 1)}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("which", "settings", "evidence"),
    [
        ("sound", ["optimizer.lr=10"], "features are alike"),
        ("sound", ["optimizer.lr=1e-12"], "by chance"),
        ("sound", ["objective.name=sogclr", "objective.tau=0.0001"], "by chance"),
        ("sound", ["precision=fp16", "optimizer.lr=1", *PAPERS], "fp16 overflows"),
        ("one picture", [], "all image features are alike"),
        ("one caption", [], "all text features are alike"),
    ],
    ids=["rate too high", "rate too low", "temperature", "half precision", "one picture", "one caption"],
)
def test_a_run_that_collapses_says_so_once_within_two_lines_of_the_log_after_the_warm_up(
    data, tmp_path, which, settings, evidence
):
    given = sets(*TINY, f"batch_size={B}", *settings)
    done = succeed("train", "--data", data[which].path, "--out", tmp_path / "run", *given)
    (said,) = [line for line in done.stderr.splitlines() if SAID in line]
    assert evidence in said
    assert SAID in answer("status", tmp_path / "run")["steps"]["collapse"]
    if "objective.name=sogclr" not in settings:
        assert f"There are no kinds of samples yet: {SAID}" in succeed("inspect", tmp_path / "run").output


@pytest.mark.wide
@pytest.mark.parametrize("batch_size", [16, pytest.param(256, marks=pytest.mark.soak)])
def test_a_sound_run_is_never_said_to_have_collapsed(pairs_dataset, tmp_path, batch_size):
    given = ["--preset", "glyphs", *sets("steps=260", "epochs=40", f"batch_size={batch_size}")]
    done = succeed("train", "--data", pairs_dataset.path, "--out", tmp_path / "run", *given)
    assert SAID not in done.output
    assert "  retrieval " in done.stderr
    assert answer("status", tmp_path / "run")["steps"]["collapse"] == ""
