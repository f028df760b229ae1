"""Commands on a dataset at an address: the output that they give for one on disk, and errors of one line."""

import json

import pytest

import thermopile
from thermopile.benchmarks.object_server import uploaded
from thermopile.storage.bucket import Address

from support.cli import answer, assert_one_line, cli, succeed

pytestmark = pytest.mark.wide

PLACE = "s3://bucket/data/glyphs"


@pytest.fixture(scope="module", autouse=True)
def place(s3, pairs_dataset, tmp_path_factory):
    """The address of the pairs, under their own name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THERMOPILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        assert pairs_dataset.name == "glyphs"
        yield uploaded(pairs_dataset.path, Address.parse(PLACE))


@pytest.fixture(scope="module")
def trained(place, tmp_path_factory):
    """A run of one epoch, made by the command line."""
    out = tmp_path_factory.mktemp("runs") / "run"
    done = succeed("train", "--preset", "glyphs", "--data", PLACE, "--out", out, "--set", "epochs=1", "--set",
               "batch_size=128", "--set", "data.image_size=16", "--set", "data.cache=100MB")  # fmt: skip
    assert f"from {PLACE}" in done.stderr
    return out


def test_show_draws_the_same_sheet(pairs_dataset, tmp_path):
    sheets = []
    for dataset in (PLACE, pairs_dataset.path):
        succeed("show", dataset, "--out", tmp_path / "sheet.html", "--overwrite", "--image-size", 32)
        sheets.append((tmp_path / "sheet.html").read_bytes())
    assert sheets[0] == sheets[1]


def test_check_reads_all_of_it(tmp_path):
    done = cli("convert", "check", PLACE)
    assert (done.exit_code, done.stdout) == (0, f"{PLACE} is sound: 2,000 samples\n")


def test_check_names_a_changed_object(place, pairs_dataset):
    uploaded(pairs_dataset.path, changed := Address("bucket", "changed"))
    data = bytearray((pairs_dataset.path / "shards" / "shard-00000.beton").read_bytes())
    data[len(data) // 2] ^= 1
    (changed / "shards" / "shard-00000.beton").write(bytes(data))
    done = cli("convert", "check", changed)
    assert done.exit_code == 1
    assert "shard-00000.beton" in done.stdout


def test_the_settings_hold_the_address_and_status_knows_the_wait(trained):
    assert f'path = "{PLACE}"' in (trained / "config.toml").read_text()
    status = answer("status", trained)
    assert "fetch_wait" in json.dumps(status)


def test_inspect_reports_with_pictures_and_notebooks_read_them(trained, pairs_dataset):
    succeed("inspect", trained)
    page = (trained / "report" / "report.html").read_text()
    assert "data:image/jpeg" in page or "data:image/png" in page
    facts = answer("inspect", trained, "--sample", 5)
    assert pairs_dataset.rows([5])[0]["caption"] in json.dumps(facts, ensure_ascii=False)
    opened = thermopile.open_run(trained)
    assert opened.dataset.jpeg(5) == pairs_dataset.jpeg(5)
    assert thermopile.open_run(trained, data=PLACE).dataset.n == 2000


def test_eval_gives_the_scores_of_the_dataset_on_disk(trained, pairs_dataset):
    scores = []
    for dataset in (PLACE, pairs_dataset.path):
        done = succeed("eval", trained, "--train", dataset, "--test", dataset, "--json")
        scores.append(json.loads(done.stdout)["scores"])
    assert scores[0] == scores[1]


def test_a_resumed_run_keeps_its_address(trained):
    done = succeed("train", "--out", trained, "--resume")
    assert "nothing to do" in done.output


@pytest.mark.parametrize(
    ("dataset", "exit_code", "words"),
    [
        ("s3://bucket/none", 1, "s3://bucket/none is not a dataset"),
        ("s3://no-such-bucket/x", 1, "there is no bucket no-such-bucket"),
        ("ftp://bucket/x", 2, "is not an address in an object store: write s3://bucket/path"),
    ],
)
def test_what_is_no_dataset_is_an_error_of_one_line(dataset, exit_code, words, tmp_path):
    for command in (
        ("show", dataset, "--out", tmp_path / "sheet.html"),
        ("train", "--data", dataset, "--out", tmp_path / "run"),
    ):
        assert_one_line(cli(*command), exit_code, words)
