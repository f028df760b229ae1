"""The commands as functions: from a folder of pictures to a report, features and files, in Python alone."""

import os
from pathlib import Path

import pytest

import thermopile
from thermopile.pipeline.errors import DatasetExistsError
from thermopile.trainer.errors import ConfigError

from support.cli import succeed
from support.pictures import draw


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("verbs") / "pictures"
    for number in range(96):
        folder = root / ("ant", "bee<b>")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        draw(number).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def data(pictures):
    return thermopile.convert(pictures, pictures.with_name("data"), holdout=0.25, workers=1, max_size=24)


def test_a_folder_becomes_the_dataset_that_the_command_makes(pictures, data, tmp_path):
    words = ("folder", pictures, tmp_path / "data", "--holdout", 0.25, "--max-size", 24, "--workers", 1)
    succeed("convert", *words)
    assert data.index.fingerprint == thermopile.Dataset(tmp_path / "data").index.fingerprint
    assert (data.n, thermopile.Dataset(f"{os.fspath(data)}-test").n) == (72, 24)
    with pytest.raises(DatasetExistsError):
        thermopile.convert(pictures, data, workers=1)


def test_a_notebook_shows_a_dataset_with_its_pictures_and_no_markup_of_its_texts(data):
    shown = data._repr_html_()
    assert shown.count("data:image/jpeg;base64,") == 6
    assert "bee&lt;b&gt;" in shown
    assert "<b>" not in shown


@pytest.mark.wide
def test_a_folder_of_pictures_becomes_a_report_features_scores_and_files(data, tmp_path, capfd):
    reports, out = [], tmp_path / "run"
    settings = {"epochs": 2, "batch_size": 16, "log_every": 4, "data": {"image_size": 16}}
    run = thermopile.train(data, out=out, preset="small", settings=settings, on_report=reports.append)
    assert [report.step for report in reports][-1] == run.snapshots[-1].step == 8
    assert "training: 8/8" in capfd.readouterr().err
    assert str(out) in run._repr_html_()
    with pytest.raises(ConfigError, match="lr"):
        thermopile.train(data, out=tmp_path / "other", settings={"lr": 1})

    findings = thermopile.inspect(run, features=72)
    assert findings.page == Path(out / "report" / "report.html")
    assert findings._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert thermopile.inspect(run, write=False).page is None
    assert set(thermopile.evaluate(run, f"{os.fspath(data)}-test").scores) == {"knn", "probe"}
    assert thermopile.embed(run, data, tmp_path / "features.parquet").exists()
    assert [path.name for path in thermopile.export(run, tmp_path / "files", "safetensors")] == ["image.safetensors"]


def test_presets_and_objectives_are_listed_with_what_they_are():
    assert thermopile.list_presets()["small"].startswith("A few thousand of your own pairs")
    listed = succeed("presets").stdout
    assert [line.split()[0] for line in listed.splitlines()] == [*thermopile.list_presets()]
    assert thermopile.list_objectives()["clip"].startswith("Mini-batch loss")
    assert all(thermopile.list_objectives().values())
