"""Fill FOLDER with the wheels that a bare GPU image lacks: it has torch, transformers and what is in gpu_image.txt.

ffcv comes from dist/, where `make` has built it. DALI, which is larger than all else, comes only if it is named.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
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


def main(folder: Path, python: str, more: Sequence[str]) -> None:
    """Fill a folder, whose wheels are replaced, for a version of Python, such as 3.12.

    more: packages to bring besides, with all that they need; of the version that is installed here, or `name==version`.
    """
    there = {canonicalize_name(name) for name in (HERE / "gpu_image.txt").read_text().split()}
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    for name, version in lacking(there, python, more).items():
        if not fetch(folder, f"{name}=={version}", python):
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
            subprocess.run([*command, f"{name}=={version}"], check=True, stdout=subprocess.DEVNULL)
    refuse_incomplete(folder, there, python)
    megabytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 1e6
    print(f"{len(list(folder.glob('*.whl')))} wheels, {megabytes:.1f} MB, for Python {python}: {folder}")


def lacking(there: set[str], python: str, more: Sequence[str] = ()) -> dict[str, str]:
    """Return name and version of each package that is needed and not there, as pinned or installed here."""
    todo = [*map(Requirement, [*FOR_TESTS, *more]), *needs(metadata.requires("thermopile"), python)]
    found = dict[str, str]()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if name not in there:
            if name not in found or one.extras:
                todo += needs(metadata.requires(name), python, one.extras)
            pins = [each.version for each in one.specifier if each.operator == "=="]
            if pins or name not in found:
                found[name] = pins[0] if pins else metadata.version(name)
    return found


def needs(lines: list[str] | None, python: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """Return a package's requirements, with those of some extras."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    every = [Requirement(line) for line in lines or ()]
    return [one for one in every if one.marker is None
            or any(one.marker.evaluate(environment | {"extra": extra}) for extra in ("", *extras))]  # fmt: skip


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
    versions, wrong, asked = dict(named), [], []
    if len(versions) < len(named):
        wrong.append(f"{len(named) - len(versions)} packages are there twice")
    for (name, _), wheel in zip(named, wheels, strict=True):
        with ZipFile(wheel) as archive:
            (inside,) = (entry for entry in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", entry))
            lines = message_from_bytes(archive.read(inside)).get_all("Requires-Dist", [])
        asked.append((name, lines))
    extras: dict[str, set[str]] = {}
    for _, lines in asked:
        for one in needs(lines, python):
            extras.setdefault(canonicalize_name(one.name), set()).update(one.extras)
    for name, lines in asked:
        for one in needs(lines, python, extras.get(name, ())):
            needed = canonicalize_name(one.name)
            if not (one.specifier.contains(versions[needed]) if needed in versions else needed in there):
                wrong.append(f"{name} needs {one}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
