"""The folder of wheels for a bare GPU image: whole by its metadata, or refused with what is missing."""

import importlib.util
from pathlib import Path
from zipfile import ZipFile

import pytest

SCRIPT = Path(__file__).parents[1] / "setup" / "gpu_wheels.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_wheels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder, name, *requirements):
    with ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        lines = [f"Requires-Dist: {each}" for each in requirements]
        archive.writestr(
            f"{name}-1.dist-info/METADATA", "\n".join(["Name: " + name, *lines, "", "Requires-Dist: words"])
        )


def test_a_folder_that_lacks_a_requirement_or_has_one_twice_is_refused(script, tmp_path):
    wheel(tmp_path, "one", "two>=1", "Torch", "three; extra == 'more'", "four; python_version < '3.12'")
    wheel(tmp_path, "two")
    script.refuse_incomplete(tmp_path, {"torch"}, "3.12")
    (tmp_path / "two-2-py3-none-any.whl").write_bytes((tmp_path / "two-1-py3-none-any.whl").read_bytes())
    with pytest.raises(SystemExit) as refused:
        script.refuse_incomplete(tmp_path, set(), "3.11")
    assert str(refused.value).splitlines() == [
        "1 packages are there twice", "one needs Torch", 'one needs four; python_version < "3.12"',
    ]  # fmt: skip


def test_what_an_extra_needs_is_needed_where_a_wheel_asks_for_the_extra(script, tmp_path):
    wheel(tmp_path, "two", "three; extra == 'more'")
    wheel(tmp_path, "one", "two")
    script.refuse_incomplete(tmp_path, set(), "3.12")
    wheel(tmp_path, "zero", "two[more]")
    with pytest.raises(SystemExit, match="two needs three"):
        script.refuse_incomplete(tmp_path, set(), "3.12")


def test_a_version_that_a_wheel_does_not_take_is_refused(script, tmp_path):
    wheel(tmp_path, "one", "two>=2")
    wheel(tmp_path, "two")
    with pytest.raises(SystemExit, match="one needs two>=2"):
        script.refuse_incomplete(tmp_path, {"two"}, "3.12")


def test_what_the_image_has_is_not_brought_nor_what_it_needs(script):
    lacking = script.lacking({"torch", "transformers", "rich", "matplotlib", "opencv-python"}, "3.12")
    assert {"zarr", "icechunk", "ffcv", "pydantic", "typing-inspection"} <= lacking.keys()
    assert not {"torch", "sympy", "markdown-it-py", "nvidia-dali-cuda130"} & lacking.keys()


def test_dali_comes_with_its_decoders_if_it_is_named(script):
    lacking = script.lacking({"torch", "numpy"}, "3.12", ["nvidia-dali-cuda130", "webdataset==0.2.86"])
    assert {"nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13", "nvidia-libnvcomp-cu13", "nvidia-nvjpeg"} <= lacking.keys()
    assert lacking["webdataset"] == "0.2.86"


def test_a_pinned_version_comes_whatever_else_needs_the_package(script):
    for more in (["hypothesis", "sortedcontainers==2.1.0"], ["sortedcontainers==2.1.0", "hypothesis"]):
        assert script.lacking(set(), "3.12", more)["sortedcontainers"] == "2.1.0"
