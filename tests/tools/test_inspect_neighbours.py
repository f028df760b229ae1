"""`inspect --sample --neighbours`, `--serve --neighbours` and `--duplicates` on a run of two steps."""

import json
import shutil
from contextlib import contextmanager
from queue import Queue
from threading import Thread
from urllib.request import urlopen

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.state_store.reader import StateReader
from thermopile.tools.inspection.features.features_file import FeaturesFile
from thermopile.tools.serving import server as server_module
from thermopile.trainer.run_directory import RunDirectory

from support.cli import answer, assert_one_line, cli, sets, succeed

SETTINGS = ("epochs=1", "batch_size=32", "order.canonical_shards=2", "data.image_size=16", "data.workers=1",
            "model.dim=8",
            "model.image.config.width=4", "log_every=1", "model.ema=0.9", "optimizer.warmup=200")  # fmt: skip


def inspect(run, *words):
    return cli("inspect", run.path, *words)


def trained(dataset, path, *settings):
    parts = sets(*SETTINGS, *settings)
    succeed("train", "--data", dataset.path, "--out", path, *parts)
    return RunDirectory(path)


@pytest.fixture(scope="module")
def original(hostile_dataset, tmp_path_factory):
    return trained(hostile_dataset, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def run(original, tmp_path):
    return RunDirectory(shutil.copytree(original.path, tmp_path / "run"))


@pytest.fixture(scope="module")
def seen(original):
    done = inspect(original, "--sample", 3, 7, "--neighbours", 5, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["samples"]


def test_neighbours_and_negatives_are_those_of_the_features_that_the_file_keeps(original, seen):
    features = FeaturesFile(original.report / "features.f16")
    rows = np.concatenate([block.copy() for _, block in features.blocks()])
    tau = StateReader.open(original.state).rows(3, 4, ["image/tau", "text/tau"])
    found = seen[0]["neighbours"]
    for kind, side in (("pictures", 0), ("captions", 1)):
        similarity = np.minimum(np.delete(rows[:, side] @ rows[3, side], 3), 1)  # float16 may round a norm up
        np.testing.assert_allclose(found["nearest"][kind]["similarity"], np.sort(similarity)[:-6:-1], atol=1e-5)
    for name, own, other in (("image", 0, 1), ("text", 1, 0)):
        exponents = np.delete(rows[:, other] @ rows[3, own], 3) / tau[f"{name}/tau"][0]
        weights = np.exp(exponents) / np.exp(exponents).sum()
        np.testing.assert_allclose(found["negatives"][name]["p"], np.sort(weights)[:-6:-1], rtol=1e-3)
    assert [sample["sample_id"] for sample in seen] == [3, 7]


def test_features_are_made_once_and_again_where_they_do_not_fit(run, seen):
    def stamp():
        return (run.report / "features.f16").stat().st_mtime_ns

    words = ("--sample", 3, "--neighbours", 5, "--json")
    first = stamp()
    same = json.loads(inspect(run, *words).stdout)
    assert (same["samples"][0], same["notes"], stamp()) == (seen[0], [], first)
    raw = json.loads(inspect(run, *words, "--weights", "raw").stdout)
    assert stamp() != first
    assert "The features were made again: " in raw["notes"][0]
    assert raw["samples"][0]["neighbours"] != seen[0]["neighbours"]
    (run.report / "features.f16").write_bytes(b"damaged")
    again = json.loads(inspect(run, *words).stdout)
    assert again["samples"][0] == seen[0]
    assert "is not a file of features" in again["notes"][0]


def test_tables_and_contact_sheets_name_every_ranking(run):
    done = inspect(run, "--sample", 3, 7, "--neighbours", 4)
    assert done.exit_code == 0, done.output
    titles = ["Nearest pictures", "Nearest captions", "Hardest negatives: captions for its picture",
              "Hardest negatives: pictures for its caption"]  # fmt: skip
    page = (run.report / "samples.html").read_text("utf-8")
    for title in titles:
        assert f"\n{title}." in done.stdout
        assert f"<h3>{title}</h3>" in page
    assert page.count('loading="lazy"') == 32
    assert page.count("<h2") == 3
    assert "Weights of the negatives" in page
    assert all(f"{sample}, tau 0." in page for sample in (3, 7))
    assert "<script>alert" not in page
    assert "\x1b" not in done.stdout


def test_a_run_on_images_has_pictures_only(flat_dataset, tmp_path):
    run = trained(flat_dataset, tmp_path / "run", "batch_size=16", "order.canonical_shards=1")
    found = answer("inspect", run.path, "--sample", 3, "--neighbours", 4)["samples"][0]["neighbours"]
    assert (list(found["nearest"]), list(found["negatives"])) == (["pictures"], ["sample"])
    assert found["nearest"]["pictures"]["sample_ids"] == found["negatives"]["sample"]["sample_ids"]
    assert found["pair_similarity"] is None
    done = inspect(run, "--duplicates")
    assert done.exit_code == 0, done.output


def test_a_run_without_temperatures_has_negatives_without_weights(hostile_dataset, tmp_path):
    run = trained(hostile_dataset, tmp_path / "run", "objective.name=clip")
    found = answer("inspect", run.path, "--sample", 3, "--neighbours", 4)["samples"][0]["neighbours"]
    assert not {"p", "p_by_rank"} & found["negatives"]["image"].keys()
    assert "they have no weights" in inspect(run, "--sample", 3, "--neighbours", 4).stdout
    assert "Weights of the negatives" not in (run.report / "samples.html").read_text("utf-8")


def test_a_read_only_run_keeps_its_features_elsewhere(run, tmp_path):
    shutil.rmtree(run.report)
    run.report.write_text("no directory")
    (tmp_path / "elsewhere").mkdir()
    done = inspect(run, "--sample", 3, "--neighbours", 4, "--json", "--to", tmp_path / "elsewhere")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["features.f16"]


def test_a_link_in_place_of_the_features_is_refused(run, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (run.report / "features.f16").unlink()
    (run.report / "features.f16").symlink_to(tmp_path / "precious")
    assert_one_line(inspect(run, "--sample", 3, "--neighbours", 4), 1, "features.f16 is a link")
    assert_one_line(inspect(run, "--duplicates"), 1, "features.f16 is a link")
    assert_one_line(inspect(run, "--serve"), 1, "features.f16 is a link")
    assert_one_line(inspect(run, "--serve", "--neighbours", 4), 1, "features.f16 is a link")
    assert (tmp_path / "precious").read_text() == "precious"


@contextmanager
def serve(run, *words):
    """Serve a run by the command, in a thread; gives a function (place) -> the JSON that is answered."""
    listening, done = Queue(), []

    class Server(server_module.PageServer):
        def serve_forever(self):
            listening.put(self)
            super().serve_forever()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "PageServer", Server)
        command = Thread(target=lambda: done.append(inspect(run, "--serve", *words)))
        command.start()
        server = listening.get(timeout=60)
        try:
            yield lambda place: json.loads(urlopen(server.address + place, timeout=60).read())
        finally:
            server.shutdown()
            command.join()
    assert done[0].exit_code == 0, done[0].output
    assert server.address in done[0].stdout


def served_ids(answer):
    return [[card["id"] for card in listed["samples"]] for listed in answer["lists"]]


def test_the_served_page_makes_the_features_first_and_shows_the_same_neighbours(run, seen):
    (run.report / "features.f16").unlink()
    with serve(run, "--neighbours", "5") as told:
        assert told("about")["neighbours"] is True
        found = seen[0]["neighbours"]
        rankings = [*found["nearest"].values(), *found["negatives"].values()]
        assert served_ids(told("neighbours/3")) == [ranking["sample_ids"] for ranking in rankings]
        margins = [card["margin"] for card in told("samples?sort=margin")["samples"]]
        assert margins == sorted(margins)


def test_the_served_page_takes_the_features_that_are_there_and_makes_none(run, seen):
    with serve(run) as told:
        assert [len(ids) for ids in served_ids(told("neighbours/3"))] == [12] * 4
        assert told("about")["notes"] == []
    assert inspect(run, "--sample", 3, "--neighbours", 1, "--weights", "raw").exit_code == 0
    of_raw_weights = (run.report / "features.f16").read_bytes()
    with serve(run) as told:
        about = told("about")
    assert about["neighbours"] is False
    assert "(raw weights, 66 samples" in about["notes"][0]
    assert about["notes"][0].endswith("--neighbours makes the features again.")
    assert (run.report / "features.f16").read_bytes() == of_raw_weights


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--neighbours", "3"], "--neighbours needs samples"),
        (["--sample", "1", "--neighbours", "0"], "0 is not in the range"),
        (["--sample", "1", "--weights", "raw"], "--weights has no effect with --sample that needs no encoders"),
        (["--serve", "--weights", "raw"], "--weights has no effect with --serve that needs no encoders"),
        (["--serve", "--sample", "1", "--neighbours", "3"], "--sample has no effect with --serve"),
        (["--duplicates", "--sample", "1"], "--sample has no effect with --duplicates"),
        (["--duplicates", "--by", "width"], "--by has no effect with --duplicates"),
        (["--export", "x.csv", "--duplicates"], "--duplicates has no effect with --export"),
    ],
)
def test_wrong_usage_is_one_clear_error(original, words, said):
    assert_one_line(inspect(original, *words), 2, said)


def test_without_a_checkpoint_or_the_dataset_there_are_no_neighbours(run, hostile_run, tmp_path):
    assert_one_line(inspect(hostile_run, "--sample", 1, "--neighbours", 2), 1, "has no checkpoint yet")
    (tmp_path / "elsewhere").mkdir()
    served = inspect(hostile_run, "--serve", "--neighbours", 2, "--to", tmp_path / "elsewhere")
    assert_one_line(served, 1, "has no checkpoint yet")
    settings = run.config()
    data = settings.data.model_copy(update={"path": str(tmp_path / "moved")})
    run.record(settings.model_copy(update={"data": data}))
    assert_one_line(inspect(run, "--sample", 1, "--neighbours", 2), 1, "need the run's dataset", "--data")
    assert_one_line(inspect(run, "--duplicates"), 1, "need the run's dataset", "--data")


def test_duplicates_are_written_as_rows_and_shown_with_thresholds(run):
    done = inspect(run, "--duplicates")
    assert done.exit_code == 0, done.output
    assert "correlation ≥ 0.995 and difference ≤ 1.9 grey levels" in done.stdout
    assert done.stdout.splitlines()[-2:] == [str(run.report / f"duplicates.{kind}") for kind in ("parquet", "html")]
    pairs = pq.read_table(run.report / "duplicates.parquet")
    seen = answer("inspect", run.path, "--duplicates")
    assert sum(seen[f"{reason}_pairs"] for reason in ("exact", "near", "blank")) == len(pairs)
    assert seen["thresholds"] == {"similarity": 0.9, "correlation": 0.995, "difference": 1.9}
    assert "Figures</h2>" in (run.report / "duplicates.html").read_text("utf-8")
