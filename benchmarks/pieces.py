"""Bring a folder to a machine without a network in several goes, where one go may carry only so much.

`cut FOLDER`, where it was made, writes FOLDER-1, FOLDER-2 and so on, of 45 MB each at most. `gather FOLDER-1 TO`, on
the machine, takes one of them over, in any order. `make gpu WHEELS=TO` joins what TO has, once it is complete.
"""

# Only the standard library, for the machine has nothing else yet.
import argparse
import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from io import BufferedReader, RawIOBase
from pathlib import Path

MAX_BYTES = 45_000_000
"""The most that one numbered folder holds."""
FOR_DIGESTS = 100_000
DIGESTS = "digests"
"""The file of the pieces' sha256 digests, a line for each; the same one lies beside every piece."""


def main() -> None:
    """Cut a folder, or take one of its parts over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cut", help="write FOLDER-1, FOLDER-2, …").add_argument("folder", metavar="FOLDER", type=Path)
    gathering = commands.add_parser("gather", help="take over one of these folders")
    gathering.add_argument("folder", metavar="FOLDER", type=Path)
    gathering.add_argument("to", metavar="TO", type=Path)
    asked = parser.parse_args()
    if asked.command == "cut":
        made = cut(asked.folder)
        print(f"to bring one after another, of {MAX_BYTES / 1e6:g} MB at most: {' '.join(map(str, made))}")
    else:
        gather(asked.folder, asked.to)
        every, lacking = len(_digests(asked.to)), _lacking(asked.to)
        print(f"{asked.to}: {every - len(lacking)} of {every} pieces" + _named("; lacking", lacking))


def cut(folder: Path, max_bytes: int = MAX_BYTES) -> list[Path]:
    """Write a folder's files as numbered folders beside it, in place of earlier ones, and return those.

    max_bytes: each holds no more, beside FOR_DIGESTS bytes at most for the digests.
    """
    for old in folder.parent.glob(f"{folder.name}-[0-9]*"):
        shutil.rmtree(old)
    made, digests = list[Path](), list[str]()
    with tempfile.TemporaryFile(dir=folder.parent) as whole:
        with tarfile.open(fileobj=whole, mode="w") as archive:
            for file in sorted(folder.iterdir()):
                archive.add(file, file.name)
        whole.seek(0)
        while piece := whole.read(max_bytes - FOR_DIGESTS):
            made.append(folder.with_name(f"{folder.name}-{len(made) + 1}"))
            digests.append(hashlib.sha256(piece).hexdigest())
            made[-1].mkdir()
            _piece(made[-1], len(made)).write_bytes(piece)
    lines = "".join(f"{digest}\n" for digest in digests)
    if len(lines) > FOR_DIGESTS:
        sys.exit(f"{folder}: {len(made):,} pieces are too many; raise MAX_BYTES in {__file__}")
    for each in made:
        (each / DIGESTS).write_text(lines, "utf-8")
    return made


def gather(folder: Path, to: Path) -> None:
    """Take the pieces of a folder over. Exits with a line if it has none, or they are not as they were cut."""
    digests = _digests(folder)
    if (to / DIGESTS).exists() and _digests(to) != digests:
        sys.exit(f"{folder}: its pieces do not belong to those in {to}; empty that folder, and begin again")
    numbers = [number for number in range(1, len(digests) + 1) if _piece(folder, number).exists()]
    _refuse_damaged(folder, numbers, digests)
    if not numbers:
        sys.exit(f"{folder}: it holds no piece; name a folder that `python -m benchmarks.pieces cut` has written")
    to.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        fresh = to / "new"
        shutil.copyfile(_piece(folder, number), fresh)
        os.replace(fresh, _piece(to, number))
    shutil.copyfile(folder / DIGESTS, to / DIGESTS)


def join(folder: Path) -> None:
    """Put the files back together in a folder that pieces were gathered in, if it is one; the pieces are gone then.

    Exits with a line if pieces are lacking, or not as they were cut.
    """
    if not (folder / DIGESTS).exists():
        return
    digests = _digests(folder)
    if lacking := _lacking(folder):
        sys.exit(f"{folder}:{_named(' it lacks', lacking)} of {len(digests)} pieces; bring them with "
                 "`python3 -m benchmarks.pieces gather`")  # fmt: skip
    numbers = range(1, len(digests) + 1)
    _refuse_damaged(folder, numbers, digests)
    for old in folder.glob("*.whl"):
        old.unlink()
    pieces = [_piece(folder, number) for number in numbers]
    with _Joined(pieces) as whole, tarfile.open(fileobj=BufferedReader(whole), mode="r|") as archive:
        archive.extractall(folder, filter="data")
    for each in (folder / DIGESTS, *pieces):
        each.unlink()


class _Joined(RawIOBase):
    """The bytes of files, one after another."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._opened = ExitStack()
        self._files = [self._opened.enter_context(file.open("rb")) for file in files]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._files:
            if read := self._files[0].readinto(buffer):
                return read
            self._files.pop(0)
        return 0

    def close(self) -> None:
        self._opened.close()
        super().close()


def _digests(folder: Path) -> list[str]:
    try:
        lines = (folder / DIGESTS).read_text("utf-8").splitlines()
        why = "" if lines and all(re.fullmatch("[0-9a-f]{64}", line) for line in lines) else "it holds no digests"
    except (OSError, UnicodeDecodeError) as error:
        lines, why = [], getattr(error, "strerror", None) or "it is no text"
    if why:
        sys.exit(f"{folder / DIGESTS}: {why}; name a folder that `python -m benchmarks.pieces cut` has written")
    return lines


def _piece(folder: Path, number: int) -> Path:
    return folder / f"piece-{number}"


def _lacking(folder: Path) -> list[int]:
    return [number for number in range(1, len(_digests(folder)) + 1) if not _piece(folder, number).exists()]


def _refuse_damaged(folder: Path, numbers: Sequence[int], digests: Sequence[str]) -> None:
    damaged = [number for number in numbers if _digest(_piece(folder, number)) != digests[number - 1]]
    if damaged:
        sys.exit(f"{folder}:{_named(' not as cut', damaged)}; bring it again")


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _named(words: str, numbers: Sequence[int]) -> str:
    return f"{words} {', '.join(map(str, numbers))}" if numbers else ""


if __name__ == "__main__":
    main()
