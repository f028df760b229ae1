"""The package as it is installed: one import name, and a quick start."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import thermopile

ROOT = Path(__file__).parents[1]


def imported_by(code):
    """Names of the modules that a fresh interpreter has imported after `code`."""
    report = "import sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


HEAVY = {"torch", "ffcv", "nvidia", "numba", "zarr", "icechunk", "transformers", "matplotlib", "pyarrow", "pandas"}


@pytest.mark.parametrize("code", ["import thermopile", "import thermopile.tools.cli"])
def test_importing_thermopile_or_its_command_line_imports_nothing_heavy(code):
    assert imported_by(code) & HEAVY == set()


IMPORTED_FOR_HELP = """
import sys
from click.testing import CliRunner
from thermopile.tools.cli import main

heavy, imported = set(sys.argv[1:]), {}
def show(command, *words):
    assert CliRunner().invoke(main, [*words, "--help"]).exit_code == 0, words
    imported[words], _ = heavy & set(sys.modules), heavy.difference_update(sys.modules)
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        show(command.get_command(None, name), *words, name)
show(main)
assert len(imported) > 30 and not any(imported.values()), {words: found for words, found in imported.items() if found}
"""


def test_the_help_of_no_command_waits_for_anything_heavy():
    subprocess.run([sys.executable, "-c", IMPORTED_FOR_HELP, *HEAVY], check=True)


@pytest.mark.wide
def test_torchs_compiler_is_imported_by_the_first_step_and_by_nothing_before():
    """It takes longer than torch itself, and most commands make no step."""
    assert "torch._dynamo" not in imported_by("import thermopile.trainer.loop, thermopile.trainer.export")


def test_reading_the_state_of_a_run_needs_no_torch():
    assert imported_by("from thermopile.state_store.reader import StateReader") & {"torch", "ffcv", "numba"} == set()


TRAINING_WITHOUT_LOADERS = """
import sys
from pathlib import Path

class Missing:
    def find_spec(self, name, path, target=None):
        if name == "ffcv" or name.startswith("nvidia.dali"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())

from thermopile.tools.bench.step import synthetic_dataset
from thermopile.trainer.run.build import resolve
from thermopile.trainer.config import load_config
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory

folder = Path(sys.argv[1])
dataset = synthetic_dataset(folder / "dataset", 64)

def train(loader):
    data = {"path": str(dataset.path), "loader": loader, "image_size": 16}
    config, _ = resolve(load_config({"epochs": 1, "batch_size": 32, "device": "cpu", "data": data}), dataset)
    with Trainer.open(config, RunDirectory(folder / loader)) as trainer:
        trainer.train()
        print(trainer.run.steps_done, *trainer.advice())

train("synthetic")
for loader in ("ffcv", "dali"):
    try:
        train(loader)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.wide
def test_synthetic_data_needs_neither_ffcv_nor_dali_and_others_say_what_is_missing(tmp_path):
    command = [sys.executable, "-c", TRAINING_WITHOUT_LOADERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    synthetic, ffcv, dali = done.stdout.splitlines()
    assert synthetic.startswith("2 ")
    assert "learns nothing" in synthetic
    assert ffcv.startswith("data.loader = 'ffcv' cannot be used here: ")
    assert dali.startswith("data.loader = 'dali' cannot be used here: No module named 'nvidia.dali")


def test_every_folder_of_modules_is_a_package_that_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    rooms = ("storage", "pipeline", "state_store", "trainer", "tools")
    found = [path.parent.relative_to(ROOT) for room in rooms for path in (ROOT / room).rglob("__init__.py")]
    assert sorted(listed) == sorted(["thermopile", *(".".join(("thermopile", *folder.parts)) for folder in found)])


def test_the_tests_of_a_module_have_its_name_and_stand_where_it_stands_and_others_tell_a_story():
    rooms = ("storage", "pipeline", "state_store", "trainer", "tools")
    modules = {room: [path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py")] for room in rooms}
    misplaced = [
        path
        for room in rooms
        for path in (ROOT / "tests" / room).rglob("test_*.py")
        if (homes := [each.parent for each in modules[room] if f"test_{each.name}" == path.name])
        and path.parent.relative_to(ROOT / "tests") not in homes
    ]
    assert misplaced == []


@pytest.mark.wide
def test_the_wheel_holds_every_module_of_the_package_and_nothing_else(tmp_path):
    # A copy: setuptools takes what an earlier build left behind in build/lib as well.
    outside = (
        ".*",
        "build",
        "dist",
        "demo",
        "reproduction",
        "*.egg-info",
        "__pycache__",
        "tests",
        "benchmarks",
        "examples",
        "docs",
        "setup",
    )
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(*outside))
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    subprocess.run(list(map(str, command)), check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    above = {"Dockerfile", "Makefile", "LICENSE", "CITATION.cff", "MANIFEST.in", "constraints.txt", "mkdocs.yml",
             "pyproject.toml", "setup.py"}  # fmt: skip
    assert names == {f"thermopile/{path}" for path in files if not (str(path) in above or str(path).endswith(".md"))}
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    description = zipfile.ZipFile(wheel).read(metadata).decode().partition("\n\n")[2]
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", description) == []


def test_make_takes_the_python_versions_that_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    (taken,) = re.findall(r"^PYTHONS = (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert declared == taken.split()
    assert project["requires-python"] == f">={declared[0]}"


def test_the_hooks_before_a_commit_are_the_commands_of_make_lint():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    link, *hooks = [hook["entry"] for hook in repository["hooks"]]
    made = subprocess.run(
        ["make", "-C", ROOT, "-n", "--no-print-directory", "-o", ".venv/ready", "-o", "link", "lint"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [hook.removeprefix("env ") for hook in hooks] == made.stdout.splitlines()
    assert link == "make --silent link"


def test_the_workflows_call_targets_of_the_makefile_and_nothing_else():
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    called = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values():
            called += [step["run"] for step in job["steps"] if "run" in step]
    words = [command.split() for command in called]
    assert sorted(command[-1] for command in words) == ["test", "test-wide"]
    assert all(command[0] == "make" and command[-1] in targets.split() for command in words)


def test_the_lowest_versions_that_are_declared_are_the_ones_tested_and_none_is_above_what_make_installs():
    declared = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"])
    floors = {
        canonicalize_name(each.name): next(s.version for s in each.specifier if s.operator == ">=") for each in declared
    }
    made = subprocess.run(
        ["make", "-C", ROOT, "-n", "-W", "pyproject.toml", "-o", ".venv/ready", "build/lowest/ready"],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in made.stdout.splitlines() if "--group dev" in line)
    tested = dict(word.split("==") for word in line.split() if "==" in word)
    assert {canonicalize_name(name): version for name, version in tested.items()} == floors
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    installed = {canonicalize_name(each.name): each.specifier for each in map(Requirement, filter(_is_package, lines))}
    for name, version in floors.items():
        (pin,) = installed[name]
        assert Version(pin.version) >= Version(version), name


def _is_package(line):
    return line and not line.startswith("#")


@pytest.mark.wide
def test_make_installs_all_that_the_packages_require():
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert check.stdout == "No broken requirements found.\n"


def test_ffcv_needs_neither_opencv_nor_a_libturbojpeg_of_the_system():
    (library,) = Path(find_spec("ffcv").origin).parent.glob("_libffcv*.so")
    loaded = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "libopencv" not in loaded
    (jpeg,) = re.findall(r"libturbojpeg.* => (.+) \(0x", loaded)
    assert Path(jpeg).resolve().parent == library.parents[1] / "ffcv.libs"


def test_the_wheel_of_ffcv_says_what_it_is_and_brings_its_licences():
    made = distribution("ffcv")
    assert not any("opencv" in each for each in made.requires)
    licences = {file.name: file.locate().read_text() for file in made.files if "/licenses/" in str(file)}
    assert licences.keys() == {"NOTE", "LICENSE", "LICENSE.libjpeg-turbo"}
    assert "Apache License" in licences["LICENSE"]
    assert "BSD" in licences["LICENSE.libjpeg-turbo"]
    assert licences["NOTE"] in made.metadata.get_payload()


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "thermopile", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"thermopile, version {distribution('thermopile').version}\n"


def test_type_checkers_see_the_public_names_at_their_homes():
    tree = ast.parse((ROOT / "__init__.py").read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == thermopile._HOME


def test_every_public_name_can_be_had():
    for name in thermopile.__all__:
        assert getattr(thermopile, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Datset'"):
        thermopile.Datset  # noqa: B018
