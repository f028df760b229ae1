"""Fill FOLDER with the wheels that a bare GPU image lacks: it has torch, transformers and what is in gpu_image.txt.

ffcv comes from dist/, where `make` has built it. DALI is not brought: it is larger than all else.
"""

import re
import subprocess
import sys
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

HERE = Path(__file__).resolve().parent
DIST = HERE.parent / "dist"
FOR_TESTS = {"hypothesis", "pytest", "pytest-timeout", "xxhash"}
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main(folder: Path, python: str) -> None:
    """Fill a folder, whose wheels are replaced, for a version of Python, such as 3.12."""
    there = {canonicalize_name(name) for name in (HERE / "gpu_image.txt").read_text().split()}
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    for name, version in lacking(there, python).items():
        if not fetch(folder, f"{name}=={version}", python):
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
            subprocess.run([*command, f"{name}=={version}"], check=True, stdout=subprocess.DEVNULL)
    refuse_incomplete(folder, there, python)
    megabytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 1e6
    print(f"{len(list(folder.glob('*.whl')))} wheels, {megabytes:.1f} MB, for Python {python}: {folder}")


def lacking(there: set[str], python: str) -> dict[str, str]:
    """Return name and version of each package that is needed and not there, as installed here."""
    todo, found = [*map(Requirement, FOR_TESTS), *needs(metadata.requires("thermopile"), python)], dict[str, str]()
    while todo:
        name = canonicalize_name(todo.pop().name)
        if name not in there | found.keys():
            found[name] = metadata.version(name)
            todo += needs(metadata.requires(name), python)
    return found


def needs(lines: list[str] | None, python: str) -> list[Requirement]:
    """Return a package's requirements without extras."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    every = map(Requirement, lines or ())
    return [one for one in every if one.marker is None or one.marker.evaluate(environment)]


def fetch(folder: Path, pinned: str, python: str) -> bool:
    """Download a wheel; return False if there is none."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms,
               "--find-links", DIST, "--python-version", python, "--dest", folder, pinned]  # fmt: skip
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def refuse_incomplete(folder: Path, there: set[str], python: str) -> None:
    """Exit with a line for each requirement that neither folder nor image meets, and for what is there twice."""
    wheels = sorted(folder.glob("*.whl"))
    named = [parse_wheel_filename(wheel.name)[:2] for wheel in wheels]
    versions, wrong = dict(named), []
    if len(versions) < len(named):
        wrong.append(f"{len(named) - len(versions)} packages are there twice")
    for (name, _), wheel in zip(named, wheels, strict=True):
        with ZipFile(wheel) as archive:
            (inside,) = (entry for entry in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", entry))
            lines = message_from_bytes(archive.read(inside)).get_all("Requires-Dist", [])
        for one in needs(lines, python):
            needed = canonicalize_name(one.name)
            if not (one.specifier.contains(versions[needed]) if needed in versions else needed in there):
                wrong.append(f"{name} needs {one}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
