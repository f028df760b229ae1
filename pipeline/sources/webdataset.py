"""WebDataset tar shards, such as img2dataset's: consecutive members with the same key are a sample.

A tar is read once, from front to back. Nothing is unpacked to disk, and nobody holds a list of samples: sample i of tar
t has the source index t · 2³² + i.
"""

import base64
import hashlib
import os
import time
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa

from ...storage.arrays import Bools, Int64s
from ...storage.bucket import Address
from ...storage.local import LocalPath
from ...storage.place import AnyPlace, Place, common_folder, place_of
from ..dataset.index import Tar, Tars, is_plain_name
from ..errors import BadSampleError, SourceChangedError, SourceError
from . import Account, Asked, BadSample, ClassGroups, Draw, Facts, Piece, Read, Sample, Selection, Source, marks_of
from .caption_lengths import MEASURED_ON, measure
from .folder import HEIC, PICTURES
from .listing import (
    MAX_CAPTION_BYTES,
    as_text,
    caption_texts,
    files_ending,
    files_in,
    groups_by_name,
    if_any,
    names_below_common_folder,
    real_root,
    says_nothing_about_the_file,
)
from .shards import MAX_SHARD_ROWS, WINDOW_BYTES, WINDOW_ROWS, in_runs, shard_count
from .source_file import PIECES_AHEAD, ForwardReader, SourceFile, Version
from .tar_members import MAX_MEMBER_BYTES, BrokenTarError, Members, TarMember, TarPart, key_and_suffix, samples_of

T = TypeVar("T")
MIN_SAMPLE_BYTES = 1024
"""What a picture takes in a tar at least, with its header."""
FEW_TARS = 64
"""Fewer local tars are cut at samples, so that all cores of most machines have work. Their number does not count, since
a dataset is the same wherever it is converted."""
SAMPLED_SHARE, SAMPLED_BYTES, SAMPLED_TAR_BYTES = 0.03, 64 << 20, 4 << 20
"""Before the conversion, this share of the bytes is read, or SAMPLED_BYTES if that is more, from the beginnings of
tars, at least SAMPLED_TAR_BYTES of each."""
_CURES = {b"txt": "caption txt", b"caption": "caption caption", b"json": "caption json:FIELD", b"cls": "group cls"}
_SCATTERED = "; members of a key must be adjacent: tar --sort=name"
SIDE_BY_SIDE = 8
"""Tars read at a time when no picture is converted meanwhile."""


class TarWork(NamedTuple):
    """Pieces to be read one after the other, and mixed."""

    number: int
    pieces: Sequence[Piece]
    seed: int
    mode: str = ""
    """`images` or `pairs`; empty: a pair is a sample with a caption."""
    selected: Sequence[Bools] | None = None
    """Which samples of each piece's tar to read, bool [samples]; None for all."""

    @property
    def max_rows(self) -> int:
        """Rows to reserve in a shard, of which the work may give several."""
        return min(MAX_SHARD_ROWS, max(1, sum(map(bytes_of, self.pieces)) // MIN_SAMPLE_BYTES))


def bytes_of(piece: Piece) -> int:
    return piece.stop - piece.start


@dataclass
class Sampled:
    """What the beginnings of some tars hold."""

    captions: list[str]
    samples: int = 0
    bytes: int = 0
    with_caption: int = 0
    with_group: int = 0
    without: str = ""
    """Why the first unusable caption is none."""
    damage: str = ""
    """A tar that cannot be read to its end, and why."""

    @property
    def mode(self) -> Literal["images", "pairs"]:
        return "pairs" if self.with_caption else "images"

    def add(self, other: Self) -> None:
        for field in fields(self):
            if field.name not in ("damage", "without"):
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.damage, self.without = self.damage or other.damage, self.without or other.without


class WebDatasetSource(Source):
    """Reads the samples of tars in order.

    given: tars, or folders of them. image: suffixes of pictures; a sample's first match is used. caption: suffixes of a
    text with one caption per line, or json:FIELD for a field of the .json member, a text or a list of texts; None for
    images only. group: likewise; a sample without such a member has no class. A damaged or truncated tar gives the
    samples before the damage, plus one unreadable sample that says why. in_place: the tars are to keep the pictures,
    numbered after those of `behind`. required: options, `caption` or `group`, that some sample must have.
    required_mode: `images` or `pairs`, which the samples must be. Raises SourceError if there is no tar, OSError if a
    tar cannot be found.
    """

    mode = ""

    def __init__(
        self,
        given: Sequence[AnyPlace],
        *,
        image: str = "jpg;jpeg;png;webp",
        caption: str | None = "txt",
        group: str | None = "cls",
        key_by: Literal["first-dot", "last-dot"] = "first-dot",
        in_place: bool = False,
        behind: Tars | None = None,
        required: Sequence[str] = (),
        required_mode: str = "",
    ) -> None:
        self.unused = Account()
        versions = dict(sorted(_versions(map(place_of, given), self.unused), key=lambda found: str(found[0])))
        if not versions:
            raise SourceError(f"there are no tar files to read{self.unused}")
        self.tars, self.versions = tuple(versions), tuple(versions.values())
        self._options = {"image": image, "caption": caption, "group": group}
        self._last_dot = key_by == "last-dot"
        self._image, self._caption, self._group = map(TarPart.of, (image, caption, group))
        self._wanted = {*self._image.suffixes, *self._caption.suffixes, *self._group.suffixes}
        self._names = names_below_common_folder(self.tars)
        self.files_in_order = len(self.tars)
        self.index = self._index(behind) if in_place else None
        self._required, self._required_mode = required, required_mode
        self._sampled: Sampled | None = None
        self._counted: tuple[Int64s, ClassGroups | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_sampled": None, "_counted": None}  # which no worker needs

    def stored_bytes(self) -> int:
        return int(self.sizes().sum())

    def sizes(self) -> Int64s:
        return np.array([size for size, _ in self.versions], np.int64)

    def describe(self) -> dict[str, Any]:
        listed = hashlib.sha256()
        for name, (size, _) in zip(self._names, self.versions, strict=True):
            listed.update(f"{size} {name}\n".encode())
        return {
            "kind": "webdataset",
            "root": real_root(self.tars),
            "tars": len(self.tars),
            **self._options,
            **({"key_by": "last-dot"} if self._last_dot else {}),
            "listing": listed.hexdigest(),
            **({"in_place": True} if self.index else {}),
        }

    def marks(self) -> dict[str, str]:
        return marks_of(self._names.__getitem__, self.versions)

    def _index(self, before: Tars | None) -> Tars:
        """Raises SourceError for a link, a name that no index can have, and tars that are not below `before`'s root."""
        places = [tar.parent.resolve() / tar.name for tar in self.tars]
        root, files = before.root if before else common_folder([place.parent for place in places]), list[Tar]()
        for tar, place, (size, tag) in zip(self.tars, places, self.versions, strict=True):
            files.append(Tar(str(place).removeprefix(f"{root}/"), size, tag))
            is_link = isinstance(tar, LocalPath) and tar.is_symlink()
            if is_link or not (root.isprintable() and is_plain_name(files[-1].name)):
                raise SourceError(f"{tar} cannot stay in place: it must be a plain file below {root}, not a link")
        return Tars(root=root, files=(*(before.files if before else ()), *files))

    def extent(self, selection: Selection) -> dict[str, Any]:
        """All unknown: tars are not counted before they are read."""
        return {"samples": None, "selected": None, "selection": selection and str(selection), "shards": None}

    def lengths(self, asked: Asked) -> None:
        """Return None: only `facts` reads captions."""

    def facts(self, asked: Asked, tell: Callable[[str], None] = lambda words: None) -> Facts:
        """Read a sample of the tars, and all of them if a rule must know the samples' number and classes.

        Raises SourceError if there is no sample, or if nothing is selected.
        """
        sampled = self.sampled(asked.seed, tell)
        mode, vocab_size, context_length = sampled.mode, asked.vocab_size, asked.context_length
        if mode == "pairs" and not (context_length and (vocab_size or asked.tokenizer)):
            some = [sampled.captions[i] for i in in_runs(len(sampled.captions), MEASURED_ON)]
            if lengths := measure(some, vocab_size or None, context_length or None, asked.tokenizer):
                tell(str(lengths))
                vocab_size, context_length = lengths.vocab_size, lengths.context_length
        counts, selected = self._selected(asked.selection, tell) if callable(asked.selection) else (None, None)
        groups = self._groups(sampled, asked.seed)
        return Facts(
            mode=mode,
            vocab_size=vocab_size,
            context_length=context_length,
            groups=groups,
            counts=counts,
            selected=selected,
        )

    def is_of(self, facts: Facts) -> bool:
        """Return whether the groups hold every byte of the tars once."""
        ends = dict.fromkeys(range(len(self.tars)), 0)
        for piece in sorted(piece for group in facts.groups or () for piece in group):
            if piece.start != ends.get(piece.tar):
                return False
            ends[piece.tar] = piece.stop
        return [*ends.values()] == self.sizes().tolist() and (facts.counts is None or len(facts.counts) == len(ends))

    def training_captions(self, asked: Asked) -> list[str]:
        return self.sampled(asked.seed).captions

    def works(self, facts: Facts, asked: Asked, shards: int, unchanged_since: int) -> Iterator[TarWork]:
        """Yield the work of each group; a tar's version is known, so `unchanged_since` has no effect."""
        bits = selected_bits(facts)
        for number, group in enumerate(facts.groups or ()):
            selected = None if bits is None else [bits[piece.tar] for piece in group]
            yield TarWork(number, group, asked.seed, facts.mode, selected)

    def some(self, selection: Selection, seed: int, count: int, run: int) -> Iterator[Read]:
        """Yield the first samples of some tars; none of those in a bucket, where each would take requests."""
        if not self.tars[0].is_remote:
            for tar in (tars := np.random.default_rng(seed).permutation(len(self.tars))[: count // run].tolist()):
                yield from islice(self.from_start(tar), count // len(tars))

    def _selected(self, draw: Draw, tell: Callable[[str], None]) -> tuple[tuple[int, ...], str]:
        """Return the samples of each tar, and which of all samples are selected."""
        counts, groups = self.counted(tell)
        chosen = draw(int(counts.sum()), groups)
        if not len(chosen):
            raise SourceError("no samples are selected; there is nothing to convert")
        is_chosen = np.zeros(counts.sum(), np.bool_)
        is_chosen[chosen] = True
        packed = base64.b64encode(zlib.compress(np.packbits(is_chosen).tobytes())).decode()
        return tuple(counts.tolist()), packed

    def _groups(self, sampled: Sampled, seed: int) -> tuple[tuple[Piece, ...], ...]:
        """Permute the tars, or parts of few tars, and cut them into groups of about equal size."""
        sizes = self.sizes()
        total = int(sizes.sum())
        wanted = shard_count(total * sampled.samples // max(1, sampled.bytes), total)
        pieces = [self._whole(tar) for tar in range(len(sizes))]
        if len(pieces) < min(FEW_TARS, wanted) and not self.tars[0].is_remote:
            pieces = [part for piece in pieces for part in self._cut(piece, round(piece.stop * wanted / total))]
        order = np.random.default_rng(seed).permutation(len(pieces))
        lengths = np.array([bytes_of(pieces[i]) for i in order])
        cuts = np.searchsorted(np.cumsum(lengths) - lengths / 2, np.arange(1, wanted) * total / wanted)
        bounds = np.unique([0, *cuts, len(pieces)])
        return tuple(tuple(pieces[i] for i in order[start:end]) for start, end in pairwise(bounds.tolist()))

    def _cut(self, piece: Piece, parts: int) -> list[Piece]:
        """Cut a tar at the samples nearest to equal parts of its bytes."""
        if parts < 2:
            return [piece]
        starts = self.starts(piece.tar)
        firsts = np.searchsorted(starts, piece.stop * np.arange(1, parts) // parts)
        firsts = np.unique(firsts[(firsts > 0) & (firsts < len(starts))])
        bounds = [(0, 0), *((int(starts[first]), int(first)) for first in firsts), (piece.stop, len(starts))]
        return [Piece(piece.tar, start, stop, first) for (start, first), (stop, _) in pairwise(bounds)]

    def _whole(self, tar: int) -> Piece:
        return Piece(tar, 0, self.versions[tar][0], 0)

    def sampled(self, seed: int, tell: Callable[[str], None] = lambda words: None) -> Sampled:
        """Read the beginnings of some tars, chosen by the seed; only once. Raises SourceError if there is no sample."""
        if self._sampled is None:
            sizes = self.sizes()
            budget = max(SAMPLED_BYTES, int(SAMPLED_SHARE * sizes.sum()))
            each = max(SAMPLED_TAR_BYTES, budget // len(sizes))
            chosen = np.random.default_rng(seed).permutation(len(sizes))[: max(1, budget // each)].tolist()
            found = Sampled([])
            for here in self._side_by_side(lambda tar: self._beginning(tar, each), chosen, "reading a sample of", tell):
                found.add(here)
                if found.samples >= 1_000_000:  # more captions change few merges of a tokenizer
                    break
            if not found.samples:
                why = found.damage or f"{self.tars[chosen[0]]}: it is empty, or no member has a suffix"
                raise SourceError(f"no sample in {len(chosen):,} of {len(sizes):,} tars; the first, {why}")
            for option, samples in (("caption", found.with_caption), ("group", found.with_group)):
                if option in self._required and not samples:
                    of = f"none of {found.samples:,} samples read"
                    raise SourceError(nobody_has(option, self._options[option], of))
            if found.mode == "pairs" and not found.captions:
                given = f"--caption {self._options['caption']!r} gives none of {found.samples:,} samples a caption"
                raise SourceError(f"{given}; the first: {found.without}")
            if self._required_mode not in ("", found.mode):
                raise SourceError(f"the dataset to append to holds {self._required_mode}, the tars hold {found.mode}")
            self._sampled = found
        return self._sampled

    def _beginning(self, tar: int, most: int) -> Sampled:
        found, told = Sampled([]), {*self._caption.suffixes, *self._group.suffixes}
        try:
            file = SourceFile(self.tars[tar], self.versions[tar])
            most = min(most, file.size)
            with ThreadPoolExecutor(PIECES_AHEAD) as threads:
                reader = ForwardReader(file, 0, most, threads)

                def read(at: int, count: int) -> bytes:
                    # The first sample counts even if its picture ends later.
                    return reader.read(at, count) if found.samples or at + count <= most else file.read(at, count)

                for members in samples_of(read, file.size, file.place, told, 0, None, last_dot=self._last_dot):
                    if (end := _end(members)) > most and found.samples:
                        break
                    found.samples += 1
                    found.bytes = end
                    found.with_group += bool(if_any(self._group_of, members))
                    if self._caption.member(members) is None:
                        continue
                    found.with_caption += 1
                    try:
                        found.captions += self._captions_of(members)
                    except BadSampleError as error:
                        found.without = found.without or f"{error}{self._caption.fields_of(members)}"
        except (BrokenTarError, OSError) as error:
            self._refuse_other_than_damage(tar, error)
            found.damage = f"{self.tars[tar]}: {error}"
        return found

    def _refuse_other_than_damage(self, tar: int, error: Exception) -> None:
        """Raise the error if it says nothing about the tar, and SourceChangedError if the tar is gone."""
        if isinstance(error, FileNotFoundError):
            raise SourceChangedError(self.tars[tar]) from error
        if says_nothing_about_the_file(error):
            raise error

    def counted(self, tell: Callable[[str], None] = lambda words: None) -> tuple[Int64s, ClassGroups | None]:
        """Read all tars; return the samples of each, int64 [tars], and the samples' classes. Only once.

        A damaged tar's last sample stands for its rest.
        """
        if self._counted is None:
            all_tars = range(len(self.tars))
            groups = [*self._side_by_side(self._groups_of, all_tars, "counting samples and classes of", tell)]
            self._counted = np.array([*map(len, groups)], np.int64), groups_by_name(groups)
        return self._counted

    def _groups_of(self, tar: int) -> pa.LargeBinaryArray:
        members = self._members(self._whole(tar), self._group.suffixes)
        names = [if_any(self._group_of, found).encode() if isinstance(found, dict) else b"" for found in members]
        return pa.array(names, pa.large_binary())

    def _side_by_side(
        self, read: Callable[[int], T], tars: Sequence[int], what: str, tell: Callable[[str], None]
    ) -> Iterator[T]:
        """Yield the results for the tars in their order, a few of which are read at a time; tell what is done."""
        tell(f"{what} {len(tars):,} of {len(self.tars):,} tars …")
        told = time.monotonic()
        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
            for first in range(0, len(tars), SIDE_BY_SIDE):
                if time.monotonic() > told + 30.0:
                    tell(f"{what} tars: {first:,} of {len(tars):,}")
                    told = time.monotonic()
                yield from threads.map(read, tars[first : first + SIDE_BY_SIDE])

    def starts(self, tar: int) -> Int64s:
        """Return where each sample of a local tar begins, int64 [samples], by a walk over its headers."""
        found = self._members(self._whole(tar), (), ahead=False)
        starts = [next(iter(members.values())).start for members in found if isinstance(members, dict)]
        return np.array(starts, np.int64)

    def read(self, work: Any) -> Iterator[Read]:
        """Yield the samples of the pieces of a TarWork, mixed within windows by the seed.

        Raises OSError if a disk or a store fails, SourceChangedError, SourceError for a compressed tar.
        """
        rng, window, held = np.random.default_rng([work.seed, work.number]), list[Read](), 0
        for place, piece in enumerate(work.pieces):
            for read in self._in_order(piece, work.mode, work.selected[place] if work.selected else None):
                if read.sample is None:
                    yield read
                    continue
                window.append(read)
                held += read.done
                if len(window) == WINDOW_ROWS or held >= WINDOW_BYTES:
                    yield from (window[i] for i in rng.permutation(len(window)))
                    window, held = [], 0
        yield from (window[i] for i in rng.permutation(len(window)))

    def from_start(self, tar: int) -> Iterator[Read]:
        """Yield the samples of a tar in order, reading no further ahead than they are taken. Raises as `read`."""
        return self._in_order(self._whole(tar), "", None, ahead=False)

    def _in_order(self, piece: Piece, mode: str, selected: Bools | None, *, ahead: bool = True) -> Iterator[Read]:
        end, before = piece.start, len(self.index.files) - len(self.tars) if self.index else 0
        for place, found in enumerate(self._members(piece, self._wanted, ahead=ahead), piece.first):
            start, end = end, _end(found) if isinstance(found, dict) else end
            is_wanted = selected is None or (place < len(selected) and selected[place])
            index = (before + piece.tar << 32) + place
            ignored = mode == "images" and isinstance(found, dict) and self._caption.member(found) is not None
            sample = self._sample(piece.tar, mode, found) if is_wanted else None
            unused = self._beside(found) if is_wanted and isinstance(found, dict) else ()
            yield Read(index, sample, end - start, ignored=ignored, unused=unused)
        yield Read(-1, None, piece.stop - end, int(piece.stop == self.versions[piece.tar][0]))

    def _members(
        self, piece: Piece, wanted: Container[bytes], *, ahead: bool = True
    ) -> Iterator[Members | BrokenTarError | OSError]:
        """Yield the members of each sample of a piece; last, an error for the damaged rest."""
        try:
            file = SourceFile(self.tars[piece.tar], self.versions[piece.tar])
            with ThreadPoolExecutor(PIECES_AHEAD) as threads:
                read = ForwardReader(file, piece.start, piece.stop, threads).read if ahead else file.read
                stop = None if piece.stop == file.size else piece.stop
                yield from samples_of(read, file.size, file.place, wanted, piece.start, stop, last_dot=self._last_dot)
        except (BrokenTarError, OSError) as error:
            self._refuse_other_than_damage(piece.tar, error)
            yield error

    def _sample(self, tar: int, mode: str, members: Members | BrokenTarError | OSError) -> Sample | BadSample:
        if not isinstance(members, dict):
            return BadSample(self._names[tar], "", str(members))
        picture = self._image.member(members)
        name = (picture or next(iter(members.values()))).name
        uri, key = f"{self._names[tar]}/{as_text(name)}", as_text(key_and_suffix(name, last_dot=self._last_dot)[0])
        try:
            if picture is None:
                kinds = [suffix.rpartition(b".")[2] for suffix in members]
                if any(kind in self._image.suffixes for kind in kinds):
                    raise BadSampleError("no picture: a key ends at its name's first dot; use --key-by last-dot")
                others = [kind.decode() for kind in kinds if b"." + kind in PICTURES | HEIC]
                cure = f"; use --image {others[0]}" if others else _SCATTERED
                raise BadSampleError(f"no picture: no member of its key ends in {self._options['image']}{cure}")
            is_pair = mode == "pairs" or (not mode and self._caption.member(members) is not None)
            caption, *further = self._captions_of(members) if is_pair else (None,)
            tar_at = picture.offset if self.index else None
            group = self._group_of(members)
            return Sample(uri, key, _data(picture), caption, group, tuple(further), tar_at=tar_at)
        except BadSampleError as error:
            return BadSample(uri, key, str(error))

    def _beside(self, members: Members) -> tuple[tuple[str, str, str], ...]:
        """Return kind, name and cure of the members that look like pictures or texts, and of those of no sample."""
        used = [part.member(members) for part in (self._image, self._caption, self._group)]
        found = list[tuple[str, str, str]]()
        for suffix, member in members.items():
            kind = suffix.rpartition(b".")[2]
            if kind.startswith(b"/"):
                is_hidden = member.name.rpartition(b"/")[2].startswith(b".")
                found.append(("hidden members" if is_hidden else "members without a suffix", as_text(member.name), ""))
            elif member not in used and (cure := _CURES.get(kind, "image" if b"." + kind in PICTURES | HEIC else None)):
                cure = "key-by last-dot" if b"." in suffix else cure
                found.append((f"members that end in .{kind.decode()}", as_text(member.name), f"--{cure}"))
        return tuple(found)

    def _captions_of(self, members: Members) -> tuple[str, ...]:
        member = self._caption.member(members)
        if member is None:
            raise BadSampleError(f"no caption: no member of its key ends in {self._options['caption']}{_SCATTERED}")
        return caption_texts(self._caption.texts(_text(member)))

    def _group_of(self, members: Members) -> str | None:
        member = self._group.member(members)
        return None if member is None else self._group.class_name(_text(member))


def selected_bits(facts: Facts) -> list[Bools] | None:
    """Return for each tar which of its samples are selected, bool [samples]; None for all."""
    if facts.selected is None or facts.counts is None:
        return None
    size = sum(facts.counts) // 8 + 1  # a damaged plan unpacks to no more
    packed = zlib.decompressobj().decompress(base64.b64decode(facts.selected), size)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8)).view(np.bool_)
    return [bits[start:end] for start, end in pairwise(np.cumsum([0, *facts.counts]).tolist())]


def _versions(given: Iterable[Place], unused: Account) -> Iterator[tuple[Place, Version]]:
    """Yield tars, given or in given folders, with their versions, by one listing of each remote folder."""
    wanted = dict[Address, set[str] | None]()
    for place in given:
        if not isinstance(place, Address):
            for file in files_in([place], ".tar", unused):
                found = os.stat(str(file))
                yield file, (found.st_size, found.st_mtime_ns)
        elif place.name.endswith(".tar"):
            names = wanted.setdefault(place.parent, set())
            if names is not None:
                names.add(place.name)
        else:
            wanted[place] = None
    for folder, names in wanted.items():
        listed = {name: (size, tag) for name, size, tag in folder.listing() if names is None or name in names}
        if missing := sorted((names or set()) - listed.keys()):
            raise FileNotFoundError(f"{folder / missing[0]} does not exist")
        yield from ((folder / name, listed[name]) for name in files_ending(listed, ".tar", unused))


def nobody_has(option: str, value: object, of: str = "no sample") -> str:
    """Return the message for a name on the command line, which may be mistyped."""
    return f"--{option} {value!r} matches {of}; choose another, or none: --{option} ''"


def _end(members: Members) -> int:
    return max(member.offset + member.size for member in members.values())


def _data(member: TarMember) -> bytes:
    if member.is_link:
        raise BadSampleError("a link; pack the files in its place, with `tar --dereference --hard-dereference`")
    if member.data is None:
        raise BadSampleError(f"a member of {member.size:,} bytes, above {MAX_MEMBER_BYTES:,}")
    return member.data


def _text(member: TarMember) -> bytes:
    if member.size > MAX_CAPTION_BYTES:
        raise BadSampleError(f"a member of {member.size:,} bytes, above {MAX_CAPTION_BYTES:,}")
    return _data(member)
