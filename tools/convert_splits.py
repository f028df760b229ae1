"""The datasets that one `thermopile convert` writes, with messages before, during and after conversion."""

import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from ..pipeline.conversion.content import JPEG, TOKENS, row_records_of, shared
from ..pipeline.conversion.conversion import Summary
from ..pipeline.conversion.dataset_size import dataset_bytes
from ..pipeline.conversion.marker import Counts
from ..pipeline.conversion.partial import Partial
from ..pipeline.conversion.plan import ConvertSettings
from ..pipeline.dataset.index import ERRORS_FILE, DatasetIndex, read_index
from ..pipeline.dataset.samples_table import CAPTION
from ..pipeline.opening import Dataset
from ..pipeline.sources import ClassGroups, Selection, Source
from ..pipeline.sources.shards import shard_count
from ..storage.place import Place
from .convert_options import PartNumber
from .printing import plain_text
from .progress import in_units

MEGABYTE = 1_000_000


class Split(NamedTuple):
    out: Place
    shown: Place
    """The dataset that the user knows: `out`, the one to append to, or the one that a dry run does not write."""
    source: Source
    selection: Selection
    groups: ClassGroups | None
    appends: bool = False

    @property
    def total(self) -> int:
        """Unit of progress: samples, or megabytes of tars."""
        if self.tars:
            return -(-(self.source.stored_bytes() or 0) // MEGABYTE)
        return len(self.selection) if isinstance(self.selection, np.ndarray) else len(self.source)

    @property
    def tars(self) -> int:
        return self.source.files_in_order

    @property
    def is_trial(self) -> bool:
        """Whether nothing is kept, as of a dry run."""
        return self.out.parent != self.shown.parent

    @property
    def unit(self) -> str:
        return ", MB" if self.tars else ""

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the selected pictures in the source; None if unknown."""
        stored = self.source.stored_bytes()
        if stored is None or self.tars:
            return stored
        return stored * self.total // len(self.source)

    @property
    def words(self) -> str:
        if self.tars:
            return f"{self.tars:,} tar{'s' * (self.tars > 1)}{self.classes}"
        without = self._sizes().get("", 0)
        unlabelled = f", {without:,} of them without a class" if without else ""
        return f"{samples(self.total)}{self.classes}{unlabelled}"

    def total_of(self, part: PartNumber) -> int:
        """Return about how much of the total a part has."""
        if self.tars:
            return -(-self.total // part.count)
        shards = range(shard_count(self.total, self.stored_bytes))
        return self.total * len(shards[part.number - 1 :: part.count]) // len(shards)

    @property
    def classes(self) -> str:
        """` of 3 classes`, empty for a source without classes, and whether they are appended."""
        return _of_classes(None if self.groups is None else sum(map(bool, self._sizes())), self.appends)

    def _sizes(self) -> dict[str, int]:
        """Return the number of samples by class; those without a class share one without a name."""
        if self.groups is None:
            return {}
        of_sample = self.groups.of_sample
        chosen = of_sample[self.selection] if isinstance(self.selection, np.ndarray) else of_sample
        counts = np.bincount(chosen, minlength=len(self.groups.names)).tolist()
        return {name: count for name, count in zip(self.groups.names, counts, strict=True) if count}


def samples(number: int) -> str:
    """Return `3 samples`, or `1 sample`."""
    return f"{number:,} sample{'s' * (number != 1)}"


def _of_classes(number: int | None, appends: bool) -> str:
    return ("" if number is None else f" of {number:,} class{'es' * (number != 1)}") + " to append" * appends


def rate(seen: int, seconds: float) -> str:
    """Return a speed of conversion, `0.13 img/s` or `1,200 img/s`."""
    found = seen / max(seconds, 1e-9)
    return f"{found:,.0f} img/s" if found >= 10 else f"{found:.2g} img/s"


def announce(splits: list[Split], settings: ConvertSettings) -> None:
    """Print one line per dataset on stderr, and a warning if the disk may be too small."""
    needed = 0
    for split in splits:
        words = f"{split.shown.name}: {split.words}"
        if (here := split.stored_bytes) is not None:
            words += f", {in_units(here)} in the source{', where the pictures stay' * (split.source.index is not None)}"
        if (size := dataset_bytes(split.source, split.selection, settings, here)) is not None:
            words += f", about {in_units(size)} in {split.shown}"
            needed += 0 if split.out.is_remote else size - Partial(split.out).path.size_below()
        click.echo(words, err=True)
    if splits[0].out.is_remote:
        return
    out = Path(str(splits[0].out)).absolute()
    folder = next(folder for folder in (out, *out.parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        lacking = f"this needs about {in_units(needed)}, but only {in_units(free)} are free in {folder}"
        cure = "free some space or lower --max-size. If the disk fills up, continue with --resume."
        click.echo(f"Warning: {lacking}; {cure}", err=True)


class ConversionProgress:
    """Shows a conversion's progress, rate and number of samples left out on a bar."""

    def __init__(self, update: Callable[[int, str], None], split: Split) -> None:
        self._update, self._total, self._tars = update, split.total, split.tars
        self._started: float | None = None
        self._first = self._last = 0

    def __call__(self, counts: Counts) -> None:
        done = -(-counts.done // MEGABYTE) if self._tars else counts.done
        if self._started is None or counts.seen == self._first:  # the workers are still starting
            self._started, self._first = time.monotonic(), counts.seen
        elif counts.seen != self._last:
            rate = (counts.seen - self._first) / (time.monotonic() - self._started)
            tars = f"{counts.files:,} of {self._tars:,} tars, " if self._tars else ""
            left_out = f", {counts.left_out:,} left out" if counts.left_out else ""
            ending = ", putting it together" if done >= self._total else ""
            self._update(done, f"{tars}{rate:,.0f} img/s{left_out}{ending}")
        self._last = counts.seen


def say_summary(
    summary: Summary, split: Split, settings: ConvertSettings, if_none_was_seen: str = "nothing to convert"
) -> None:
    """Print what was converted on stdout."""
    index, path = summary.index, split.shown
    shards = "1 shard" if len(index.shard_digests) == 1 else f"{len(index.shard_digests):,} shards"
    captions = " without captions" if index.mode == "images" else ""
    if index.captions_per_sample > 1:
        captions = f" with {index.total_captions:,} captions, at most {index.captions_per_sample} each,"
    classes = split.classes
    if summary.left_out and split.groups is not None:  # perhaps all samples of a class
        number = None if path.is_remote else len(Dataset(summary.path).column("group").drop_null().unique())
        classes = _of_classes(number, split.appends)
    result = f"{samples(index.n)}{classes}{captions} in {shards}, {in_units(summary.path.size_below())}"
    if not summary.seen:
        click.echo(f"{path} is complete: {result}; {if_none_was_seen}")
    else:
        click.echo(f"{path}: {result}; {summary.seconds:.1f} s, {rate(summary.seen, summary.seconds)}")
    if summary.left_out:
        reasons = "; ".join(f"{count:,} × {plain_text(reason, 120)}" for reason, count in summary.reasons)
        see = "" if split.is_trial else f", see {path / ERRORS_FILE}"
        click.echo(f"  {summary.left_out:,} left out{see}: {reasons}")
    if summary.without_class and summary.without_class < index.n:
        click.echo(f"  samples without a class: {summary.without_class:,}")
    for kind, unused in index.source.get("not_used", {}).items():
        cure = f": {unused['cure']}" if unused["cure"] else ""
        named = f"{plain_text(kind)}, such as {plain_text(unused['example'], 80)}"
        click.echo(f"  not used: {unused['number']:,} × {named}{cure}")
    if (in_tars := index.source.get("pictures_in_tars")) is not None and index.tars:
        click.echo(f"  {in_tars:,} pictures stay in the tars below {index.tars.root}; {index.n - in_tars:,} are stored")
    if ignored := index.source.get("captions_ignored"):
        were = "captions were" if ignored > 1 else "caption was"
        click.echo(f"  {ignored:,} {were} ignored: none of the samples read beforehand has one")
    for tone in ("nearly_black", "nearly_white"):
        if count := index.source.get(tone):
            click.echo(f"  {tone.replace('_', ' ')} pictures: {count:,}")
    if index.tokenizer and index.tokenizer.truncated:
        were = "captions were" if index.tokenizer.truncated > 1 else "caption was"
        click.echo(f"  {index.tokenizer.truncated:,} {were} truncated to {settings.context_length} tokens")
    if not split.appends:  # else the whole dataset's follows
        say_content(summary.path, index)


def summary_as_json(summary: Summary, split: Split) -> dict[str, Any]:
    """Return what `say_summary` prints as a JSON object."""
    index = summary.index
    return {
        "dataset": str(split.shown),
        "samples": index.n,
        "mode": index.mode,
        "captions": index.total_captions,
        "truncated": index.tokenizer.truncated if index.tokenizer else 0,
        "shards": len(index.shard_digests),
        "bytes": summary.path.size_below(),
        "seconds": summary.seconds,
        "notes": split.source.notes,
        "left_out": summary.left_out,
        "reasons": dict(summary.reasons),
        "without_class": summary.without_class,
        "not_used": index.source.get("not_used", {}),
        "nearly_black": index.source.get("nearly_black", 0),
        "nearly_white": index.source.get("nearly_white", 0),
        "content": index.content and index.content.model_dump(),
    }


def say_longtail(place: Place) -> None:
    """Print the classes' sizes, the largest first; of many classes those at either end."""
    sizes = Counter(Dataset(place, pictures=False).column("group").drop_null().to_pylist()).most_common()
    named = [f"{plain_text(name, 40)} {size:,}" for name, size in sizes]
    shown = ", ".join([*named[:5], "…", *named[-5:]] if len(named) > 10 else named)
    click.echo(f"  long tail: {len(named):,} classes; the head is {shown}, the tail")


def say_content(place: Place, index: DatasetIndex) -> None:
    """Print what the samples of a dataset repeat, and how many are blank."""
    content, tokens = index.content, index.tokenizer
    if content and content.sharing_captions:
        caption = f"that of sample {content.caption_sample:,}"
        if not place.is_remote:  # else a table would be fetched
            row = Dataset(place, pictures=False).take(np.array([content.caption_sample]), [CAPTION]).to_pylist()[0]
            caption = f"“{plain_text(row[CAPTION] or '', 60)}”"
        cut = f", as cut to {tokens.context_length} tokens," if tokens and tokens.truncated else ""
        most = f"the most frequent, {caption}, occurs {content.with_caption:,} times"
        click.echo(f"  samples that share their caption{cut} with another: {content.sharing_captions:,}; {most}")
    if content and content.copies:
        most = f"the most frequent picture occurs {content.most_copied:,} times"
        click.echo(f"  exact copies of earlier pictures: {content.copies:,}; {most}")
    if content and content.blank != 0:
        blank = f"{content.blank:,}" if content.blank else "unknown, as an earlier version converted some samples"
        click.echo(f"  blank pictures, of one colour: {blank}")


def say_shared(train: Split, test: Split) -> None:
    """Print how many samples of a test set have exactly the picture or the captions of a training sample."""
    indices = [read_index(split.out) for split in (train, test)]
    of_train, of_test = (row_records_of(*each) for each in zip((train.out, test.out), indices, strict=True))
    fields = {"the picture": JPEG} | ({"the captions": TOKENS} if indices[0].tokenizer else {})
    counts = {what: shared(of_test, of_train, field) for what, field in fields.items()}
    if any(counts.values()):
        said = (f"{count:,} {'has' if count == 1 else 'have'} {what}" for what, count in counts.items() if count)
        click.echo(f"  of {samples(indices[1].n)} in {test.shown.name}, {' and '.join(said)} of a training sample")
