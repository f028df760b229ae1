"""Small runs made with the real parts: a converted dataset, settings as `train` resolves them, a state store."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.state_store import StateReader, StateStore
from thermopile.tools.cli import main
from thermopile.trainer.build import resolve
from thermopile.trainer.config import load_config
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.run_directory import RunDirectory

STEP = 5


@pytest.fixture
def assert_one_line():
    """Return a check: a command ended with this exit code, and its last words are one line that has all of these."""

    def check(result, exit_code, *words):
        assert result.exit_code == exit_code, result.output
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        assert result.stderr.splitlines()[-1] == line
        for word in words:
            assert word in line
        assert "Traceback" not in result.output

    return check


@pytest.fixture(scope="session")
def hostile_dataset(tmp_path_factory):
    """66 pairs whose texts are hostile, in six classes of 34 to 1, and one sample without class and caption."""
    out = tmp_path_factory.mktemp("hostile") / "dataset"
    with pytest.MonkeyPatch.context() as patch:
        # The converting processes must find the source's module as well.
        patch.syspath_prepend(Path(__file__).parent)
        from hostile_source import HostileSource

        convert(HostileSource(), out, ConvertSettings(), workers=1)
    return Dataset(out)


@pytest.fixture(scope="session")
def flat_dataset(draw, tmp_path_factory):
    """16 pictures in no folder: no captions, no classes."""
    folder = tmp_path_factory.mktemp("flat")
    for i in range(16):
        draw(i).save(folder / f"{i}.png")
    out = folder.with_name("flat-dataset")
    convert(FolderSource(folder), out, ConvertSettings(), workers=1)
    return Dataset(out)


@pytest.fixture(scope="session")
def write_run():
    """Write a run of `dataset` at `path`; taus maps a side to the tau of every sample, of which `visited` are put."""

    def write(path, dataset, taus, *, visited=None, objective="isogclr", snapshot=True):
        run = RunDirectory(path)
        tree = {"batch_size": 16, "data": {"path": str(dataset.path)}, "objective": {"name": objective}}
        config = resolve(load_config(tree), dataset)
        run.create(config)
        made = create_objective(objective, mode=config.objective.mode, **config.objective.settings)
        if not snapshot:
            return run
        identity = {"fields": made.fields, "dataset_fingerprint": dataset.index.fingerprint}
        with StateStore.create(run.state, dataset.n, block_rows=16, **identity) as store:
            ids = np.arange(dataset.n) if visited is None else np.flatnonzero(visited)
            rows = {name: torch.zeros(len(ids)) for name in made.fields}
            rows |= {f"{side}/tau": torch.tensor(tau, dtype=torch.float32)[ids] for side, tau in taus.items()}
            if len(ids):
                store.put(ids, rows, step=STEP)
                store.snapshot(STEP, epoch=1).result()
        return run

    return write


@pytest.fixture(scope="session")
def write_state():
    """Write a run of `dataset` whose rows are given: `columns` maps fields to float32 [n], the others are 0.

    visits: int [n]. objective: its name and settings.
    """

    def write(path, dataset, columns, visits, **objective):
        run = RunDirectory(path)
        tree = {"batch_size": 16, "data": {"path": str(dataset.path)}, "objective": {"name": "isogclr"} | objective}
        config = resolve(load_config(tree), dataset)
        run.create(config)
        made = create_objective(config.objective.name, mode=config.objective.mode, **config.objective.settings)
        identity = {"fields": made.fields, "dataset_fingerprint": dataset.index.fingerprint}
        rows = {name: torch.zeros(dataset.n) for name in made.fields}
        rows |= {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}
        with StateStore.create(run.state, dataset.n, block_rows=64, **identity) as store:
            for visit in range(max(visits)):
                ids = np.flatnonzero(np.asarray(visits) > visit)
                store.put(ids, {name: values[ids] for name, values in rows.items()}, step=STEP)
            store.snapshot(STEP, epoch=1).result()
        return run

    return write


@pytest.fixture(scope="session")
def train_on():
    """Go on with a run that `write_run` wrote: put the tau of the samples in `visited`, and take a snapshot."""

    def put(run, taus, step, visited=None):
        reader = StateReader.open(run.state)
        identity = {"samples": reader.samples, "dataset_fingerprint": reader.dataset_fingerprint}
        with StateStore.open(run.state, fields=reader.initial, **identity) as store:
            ids = np.arange(reader.samples) if visited is None else np.flatnonzero(visited)
            rows = {name: torch.zeros(len(ids)) for name in reader.fields}
            rows |= {f"{side}/tau": torch.tensor(tau, dtype=torch.float32)[ids] for side, tau in taus.items()}
            store.put(ids, rows, step=step)
            store.snapshot(step, epoch=1).result()

    return put


@pytest.fixture(scope="session")
def tau_by_class_size(hostile_dataset):
    """Temperatures that follow class size: 0.01 to 0.1; float64 [n]."""
    groups = hostile_dataset.column("group").to_pylist()
    return np.array([0.01 + 0.09 * groups.count(group) / 34 if group else 0.02 for group in groups])


@pytest.fixture(scope="session")
def hostile_run(hostile_dataset, tau_by_class_size, write_run, tmp_path_factory):
    """A run of the hostile dataset; its first side follows class size, its second side its reverse; copy to change."""
    taus = {"image": tau_by_class_size, "text": 0.15 - tau_by_class_size}
    return write_run(tmp_path_factory.mktemp("runs") / "hostile <b>run", hostile_dataset, taus)


@pytest.fixture(scope="session")
def inspected(hostile_run, tmp_path_factory):
    """A copy of that run whose name is written from right to left, and what `inspect` printed about it."""
    folder = tmp_path_factory.mktemp("named") / "مرحبا \u202e<b>"
    shutil.copytree(hostile_run.path, folder, ignore=shutil.ignore_patterns("report"))
    done = CliRunner().invoke(main, ["inspect", str(folder)])
    assert done.exit_code == 0, done.output
    return RunDirectory(folder), done


@pytest.fixture(scope="session")
def hostile_report(inspected):
    return inspected[0].report / "report.html"
