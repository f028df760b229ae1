"""`thermopile convert`: write a dataset from a source, and a test set on request; check one."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any, NamedTuple

import click
import numpy as np
from click.core import ParameterSource
from numpy.typing import NDArray

from ..pipeline.conversion.append import appended_path, is_joining, join, refuse_known, refuse_ungrowable
from ..pipeline.conversion.convert import ConvertSettings, PartNumber, Summary, convert_part
from ..pipeline.conversion.convert import convert as convert_source
from ..pipeline.conversion.convert import finish as finish_parts
from ..pipeline.conversion.plan import largest_bytes, shard_count
from ..pipeline.conversion.shard_pool import Counts, start_workers_early
from ..pipeline.conversion.steps import Job, unfinished
from ..pipeline.dataset import CAPTION, Dataset
from ..pipeline.dataset_index import ERRORS_FILE, TOKENIZER_FILE, Content, ImagePolicy, read_index
from ..pipeline.errors import DatasetExistsError, SourceError
from ..pipeline.sources import Groups, Source
from ..pipeline.sources.dataset_source import DatasetSource
from ..pipeline.sources.splits import hold_out, long_tail
from ..pipeline.tokenizer import MAX_FILE_BYTES
from ..storage.local import LocalPath
from ..storage.place import Place
from ..trainer.run.selection_files import selected_ids
from .arguments import ANY_PLACE, DatasetPath
from .convert_sources import KINDS, Kind, users_kind
from .printing import plain_text
from .progress import in_units, progress_bar

SECONDS_UNTIL_TOLD = 2.0
MAX_OF_A_KIND = 10
"""Findings of a kind that `check` prints."""


class _Kinds(click.Group):
    """Also takes `module:name` for a kind."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(users_kind(cmd_name)) if ":" in cmd_name else super().get_command(ctx, cmd_name)


@click.group(
    cls=_Kinds,
    epilog="\b\nExamples:\n"
    "  thermopile convert glyphs data/glyphs\n"
    "  thermopile convert folder ~/pictures data/pictures --max-size 256\n"
    "  thermopile convert webdataset cc12m/*.tar data/cc12m --resume\n"
    "  thermopile convert my_records:Records ~/records data/records\n"
    "  thermopile convert check data/pictures",
)
def convert() -> None:
    """Convert a source to a dataset directory, or check one.

    Samples that cannot be read are left out and listed in OUT/errors.jsonl. Use --resume to continue an interrupted
    conversion.
    """


def _number_or_share(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is None or 0 < value < 1 or (value >= 1 and value.is_integer()):
        return value
    raise click.BadParameter(f"{value:g} is neither a number of samples nor a fraction between 0 and 1")


def _part_number(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{value!r} is not I/K with I from 1 to K, such as 1/8")
    return int(found[1]), int(found[2])


def _options(kind: Kind) -> Iterator[click.Option]:
    """Yield the options shared by several kinds, named as the parameters of `run_conversion`."""
    if not (kind.own_test or kind.is_dataset):
        yield click.Option(
            ["--holdout"],
            type=float,
            callback=_number_or_share,
            metavar="N|FRACTION",
            help="Hold out this many samples, or fraction, as OUT-test, class-balanced.",
        )
    if not (kind.own_test or kind.is_dataset):
        yield click.Option(
            ["--append"],
            is_flag=True,
            help="Append the samples to the dataset OUT, with its tokenizer and picture sizes; its own "
            "samples keep their ids.",
        )
    if kind.src and not kind.is_dataset:
        yield click.Option(
            ["--longtail"],
            type=click.FloatRange(1, min_open=True),
            metavar="RATIO",
            help="Cut the classes to an exponential long tail: the first is RATIO times the last. "
            "Applied after --holdout; samples without a class are kept.",
        )
    if kind.captions:
        yield click.Option(
            ["--vocab-size"],
            type=click.IntRange(300),
            default=1024,
            show_default=True,
            help="Vocabulary size of the tokenizer trained on the captions.",
        )
        yield click.Option(
            ["--tokenizer"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Use this tokenizer.json instead of training one.",
        )
        yield click.Option(
            ["--context-length"], type=click.IntRange(4), default=32, show_default=True, help="Tokens per caption."
        )
    if not kind.is_dataset:
        yield click.Option(
            ["--max-size"],
            type=click.IntRange(8),
            default=512,
            show_default=True,
            help="Downscale pictures whose short side is longer, in pixels.",
        )
        yield click.Option(
            ["--quality"],
            type=click.IntRange(1, 100),
            default=90,
            show_default=True,
            help="JPEG quality of re-encoded pictures.",
        )
    yield click.Option(
        ["--on-error"],
        type=click.Choice(["skip", "fail"]),
        default="skip",
        show_default=True,
        help="Leave out samples that cannot be used, or fail at the first.",
    )
    yield click.Option(
        ["--max-error-rate"],
        type=click.FloatRange(0, 1),
        default=0.1,
        show_default=True,
        help="Fail if a larger share of the samples cannot be used.",
    )
    yield click.Option(
        ["--seed"],
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Seed of the shuffle and of all draws; same seed, same dataset.",
    )
    yield click.Option(["--workers"], type=click.IntRange(1), help="Worker processes. Default: one per core.")
    yield click.Option(["--resume"], is_flag=True, help="Continue an interrupted conversion.")
    yield click.Option(["--overwrite"], is_flag=True, help="Replace OUT if it is a dataset.")
    yield click.Option(
        ["--part"],
        callback=_part_number,
        metavar="I/K",
        help="Convert only part I of K, beside other parts, on any machine that shares the files. "
        "Repeat it after an interruption.",
    )
    yield click.Option(
        ["--on"],
        type=click.Choice(["ray"]),
        help="Convert on the Ray cluster that RAY_ADDRESS names, or on a local one of --workers cores. "
        "Repeat it after an interruption.",
    )
    yield click.Option(["--finish"], is_flag=True, help="Make the dataset of all parts, once they are converted.")


def _command(kind: Kind) -> click.Command:
    def run(out: Place, seed: int, src: Any = None, **values: Any) -> None:
        own = {name: values.pop(name) for option in kind.options if (name := option.name)}
        run_conversion(kind, seed if kind.src is None else src, own, out, seed=seed, **values)

    many = kind.pattern is not None
    src = [click.Argument(["src"], type=kind.src, nargs=-1 if many else 1, required=True)] if kind.src else []
    out = click.Argument(["out"], type=ANY_PLACE)
    return click.Command(
        kind.name,
        params=[*src, out, *kind.options, *_options(kind)],
        callback=run,
        help=kind.help,
        epilog=f"\b\nExample:\n  thermopile convert {kind.name} {kind.example}",
    )


for _kind in KINDS:
    convert.add_command(_command(_kind))


@convert.command(
    short_help="Check that a dataset is sound.",
    epilog="\b\nExamples:\n"
    "  thermopile convert check data/pictures\n"
    "  thermopile convert check data/pictures --json\n\n"
    "Exit codes: 0 sound, 1 not sound or not found, 2 wrong usage.",
)
@click.argument("dataset", type=DatasetPath())
@click.option("--workers", type=click.IntRange(1), help="Threads. Default: one per core.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.pass_context
def check(context: click.Context, dataset: Place, workers: int | None, as_json: bool) -> None:
    """Check that DATASET is sound: read every byte and decode every picture.

    Compares shards with their digests, tables with the FFCV files, pictures with their recorded sizes and tokens with
    the captions. Ids must be dense, and no source sample may occur twice.
    """
    samples = read_index(dataset).n
    from ..pipeline.conversion.check import check_dataset  # late, because it imports torch

    with progress_bar(f"checking {dataset.name}", samples) as bar:
        findings = list(check_dataset(dataset, workers=workers, on_progress=bar.update))
    if as_json:
        found = [finding._asdict() for finding in findings]
        click.echo(json.dumps({"dataset": str(dataset), "samples": samples, "sound": not found, "findings": found}))
    elif not findings:
        click.echo(f"{dataset} is sound: {samples:,} samples")
    else:
        for kind in dict.fromkeys(finding.kind for finding in findings):
            of_kind = [finding for finding in findings if finding.kind == kind]
            for finding in of_kind[:MAX_OF_A_KIND]:
                click.echo(f"{kind}: {finding.where}: {plain_text(finding.what)}")
            if len(of_kind) > MAX_OF_A_KIND:
                click.echo(f"{kind}: and {len(of_kind) - MAX_OF_A_KIND:,} more")
        click.echo("Not sound. Convert the dataset again, or copy it again from its origin.")
    if findings:
        context.exit(1)


class Split(NamedTuple):
    """One dataset to write."""

    out: Place
    source: Source
    selection: NDArray[np.int64] | None
    """Source indices; None for all."""
    groups: Groups | None
    grown: LocalPath | None = None
    """The dataset that it is to be appended to."""

    @property
    def shown(self) -> Place:
        """The dataset that the user knows."""
        return self.grown or self.out

    @property
    def samples(self) -> int:
        return len(self.source) if self.selection is None else len(self.selection)

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the selected pictures in the source; None if unknown."""
        stored = self.source.stored_bytes()
        return None if stored is None else stored * self.samples // len(self.source)

    def samples_of(self, part: PartNumber) -> int:
        """Return about how many samples a part has."""
        shards = range(shard_count(self.samples, self.stored_bytes))
        return self.samples * len(shards[part.shards]) // len(shards)

    @property
    def classes(self) -> str:
        """` of 3 classes`, empty for a source without classes, and whether they are appended."""
        appended = " to append" if self.grown else ""
        if self.groups is None:
            return appended
        of_sample = self.groups.of_sample if self.selection is None else self.groups.of_sample[self.selection]
        unlabelled = [i for i, name in enumerate(self.groups.names) if not name]  # samples without a class share one
        return f" of {len(np.setdiff1d(of_sample, unlabelled)):,} classes{appended}"


def run_conversion(
    kind: Kind,
    src: Any,
    own: dict[str, Any],
    out: Place,
    *,
    workers: int | None,
    resume: bool,
    overwrite: bool,
    part: tuple[int, int] | None,
    on: str | None,
    finish: bool,
    append: bool = False,
    holdout: float | None = None,
    longtail: float | None = None,
    **options: Any,
) -> None:
    """Convert `src`, opened with the kind's `own` options, or a part of it, to `out` and perhaps `out`-test."""
    _refuse_contradictions(out, _paths(src, own), part, on, finish)
    grown = _to_append_to(out, holdout) if append else None
    select = own.pop("select") if kind.is_dataset else None
    outs = [out, out.with_name(f"{out.name}-test")] if kind.own_test or holdout else [out]
    if grown is not None:
        outs, resume = [appended_path(grown)], True
    if not (resume or part or on or finish):
        for each in outs:
            unfinished(each).refuse_existing(overwrite=overwrite, resume=False)
    if on:
        from ..pipeline.conversion.on_ray import cluster

        src, own = _absolute(src), {name: _absolute(value) for name, value in own.items()}
        click.get_current_context().with_resource(cluster(workers))
    else:
        start_workers_early()
    with _told_when_slow(f"listing {kind.name} …"):
        sources = kind.open(src, **own)
        settings = _settings(sources[0], grown, **options)
        splits = _splits(sources, outs, settings.seed, holdout, longtail)
        if select is not None:
            assert isinstance(sources[0], DatasetSource)
            splits = [splits[0]._replace(selection=selected_ids(select, sources[0].dataset.index))]
        if grown is not None:
            splits = [splits[0]._replace(grown=grown)]
        _announce(splits)
    if grown is not None:
        refuse_known(grown, Job.of(sources[0], settings, splits[0].selection, settings.tokenizer).plan)
    to_finish = False
    with TemporaryDirectory(prefix="thermopile-convert-") as folder:
        for split in splits:
            how: dict[str, Any] = {"overwrite": overwrite}
            if grown is None and split.out != out:  # a test set has the tokenizer of its training set
                how["tokenizer_from"] = _tokenizer_of(out, Path(folder))
            if part:
                to_finish |= _convert_part(split, settings, PartNumber(*part), workers=workers, **how)
            elif finish:
                _finish(split, settings, **how)
            elif on:
                from ..pipeline.conversion.on_ray import convert_on_ray

                _convert(convert_on_ray, split, settings, reads=_paths(src, own), **how)
            else:
                _convert(convert_source, split, settings, workers=workers, resume=resume, **how)
    if grown is not None and not part:
        with _told_when_slow("appending …"):
            join(grown)
        index = read_index(grown)
        click.echo(f"{grown}: {index.n:,} samples with those appended")
        _say_content(grown, index.content)
    if to_finish:
        click.echo("next: when all parts are done, the same command with --finish in place of --part")
    else:
        click.echo(
            f"next: thermopile show {out} --out {out.name}.png; thermopile train --data {out} --out runs/{out.name}"
        )


def _refuse_contradictions(
    out: Place, reads: Iterable[Path], part: tuple[int, int] | None, on: str | None, finish: bool
) -> None:
    if part and finish:
        raise click.UsageError("--part and --finish exclude each other: finish after all parts")
    if on and (part or finish):
        raise click.UsageError("--on ray converts all parts and finishes: leave out --part and --finish")
    if on and out.is_remote:
        raise click.UsageError(f"--on ray writes to directories only, and {out} is an address; use --part I/K")
    for path in reads:
        if path.resolve().is_relative_to(str(out.resolve())):
            raise click.UsageError(f"OUT {out} contains the source {path}; choose another directory")


def _tokenizer_of(out: Place, folder: Path) -> Path | None:
    """Return the tokenizer of a dataset, unfinished or not, or None if it has none; of a remote one, a copy."""
    copy = folder / TOKENIZER_FILE
    in_progress = () if out.is_remote else (unfinished(out).tokenizer,)
    for file in (*in_progress, out / TOKENIZER_FILE):
        with suppress(FileNotFoundError):
            copy.write_bytes(file.read_bytes(MAX_FILE_BYTES))
            return copy
    return None


def _to_append_to(out: Place, holdout: float | None) -> LocalPath:
    """Return the dataset's folder, after finishing an append that was interrupted near its end."""
    if out.is_remote:
        raise click.UsageError(f"--append writes to local datasets only, and {out} is in an object store")
    if holdout:
        raise click.UsageError("--append and --holdout exclude each other: append to the test set by itself")
    context = click.get_current_context()
    for name in ("max_size", "quality", "vocab_size", "tokenizer", "context_length"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--append keeps the settings of {out}; leave out --{name.replace('_', '-')}")
    folder = LocalPath(str(out.resolve()))  # the new shards are renamed, so they are written on the same disk
    refuse_ungrowable(folder)
    if is_joining(folder):
        join(folder)
    return folder


def _paths(src: Any, own: dict[str, Any]) -> list[Path]:
    values = [value if isinstance(value, tuple) else (value,) for value in (src, *own.values())]
    return [path for several in values for path in several if isinstance(path, Path)]


def _absolute(value: Any) -> Any:
    """Return an argument with absolute paths, since other machines have other working directories."""
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    return value.absolute() if isinstance(value, Path) else value


def _settings(source: Source, grown: LocalPath | None, **options: Any) -> ConvertSettings:
    """Return the settings of a conversion; for a dataset, or one that grows, those it was made with."""
    if grown is not None:
        index = read_index(grown)
        if index.mode != source.mode:
            raise click.UsageError(f"{grown} holds {index.mode}, but the source {source.mode}; convert it separately")
        kept: dict[str, Any] = {"image": index.image}
        if index.tokenizer is not None:
            kept |= {"tokenizer": grown / TOKENIZER_FILE, "context_length": index.tokenizer.context_length}
        return ConvertSettings(**kept, **{name: options[name] for name in ("seed", "on_error", "max_error_rate")})
    if not isinstance(source, DatasetSource):
        image = ImagePolicy(max_size=options.pop("max_size"), quality=options.pop("quality"))
        return ConvertSettings(image=image, **options)
    index = source.dataset.index
    options["image"] = index.image
    if index.tokenizer is not None:
        options |= {"tokenizer": source.dataset.tokenizer_path, "context_length": index.tokenizer.context_length}
    return ConvertSettings(**options)


@contextmanager
def _told_when_slow(words: str) -> Iterator[None]:
    timer = Timer(SECONDS_UNTIL_TOLD, click.echo, [words], {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _splits(
    sources: tuple[Source, ...], outs: list[Place], seed: int, holdout: float | None, longtail: float | None
) -> list[Split]:
    """Return the datasets to write. The test set is held out first; the long tail is cut from the rest."""
    source, *own_test = sources
    groups, train, test = source.groups(), None, None
    _refuse_what_no_sample_has(source, groups)
    if holdout:
        train, test = hold_out(len(source), groups, holdout, seed)
    if longtail:
        if groups is None:
            raise click.UsageError("--longtail needs classes, and this source has none")
        train = long_tail(np.arange(len(source)) if train is None else train, groups, longtail, seed)
    splits = [Split(outs[0], source, train, groups)]
    if own_test:
        splits.append(Split(outs[1], own_test[0], None, own_test[0].groups()))
    elif holdout:
        splits.append(Split(outs[1], source, test, groups))
    return splits


def _refuse_what_no_sample_has(source: Source, groups: Groups | None) -> None:
    """Refuse names given on the command line that no sample has, as they may be mistyped; defaults may be absent."""
    context = click.get_current_context()
    for option, found in (("caption", source.mode == "pairs"), ("group", groups is not None)):
        given, by = context.params.get(option), context.get_parameter_source(option)
        if given and not found and by is ParameterSource.COMMANDLINE:
            raise SourceError(f"--{option} {given!r} matches no sample; choose another, or none: --{option} ''")


def _announce(splits: list[Split]) -> None:
    """Print one line per dataset on stderr, and a warning if the disk may be too small."""
    needed = 0
    for split in splits:
        words = f"{split.shown.name}: {split.samples:,} samples{split.classes}"
        if (here := split.stored_bytes) is not None:
            most = largest_bytes(split.samples, here)
            if not split.out.is_remote:
                needed += most - unfinished(split.out).path.size_below()
            words += f", {in_units(here)} in the source, at most about {in_units(most)} in {split.shown}"
        click.echo(words, err=True)
    if splits[0].out.is_remote:
        return
    out = Path(str(splits[0].out)).absolute()
    folder = next(folder for folder in (out, *out.parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        click.echo(
            f"Warning: this needs up to {in_units(needed)}, but only {in_units(free)} are free in {folder}; "
            "free some space or lower --max-size. If the disk fills up, continue with --resume.",
            err=True,
        )


def _convert(convert: Callable[..., Summary], split: Split, settings: ConvertSettings, **how: Any) -> None:
    try:
        with progress_bar(f"converting {split.shown.name}", split.samples) as bar:
            bar.update(0, "preparing")
            summary = convert(
                split.source,
                split.out,
                settings,
                selection=split.selection,
                on_progress=_Shown(bar.update, split.samples),
                **how,
            )
    except DatasetExistsError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        # A store that went away is not asked again: it would hide the error for as long as it is waited for.
        kept = split.out.is_remote or unfinished(split.out).in_progress
        if kept and "--resume" not in str(error):
            click.echo("Finished shards are kept; continue with the same command and --resume.", err=True)
        raise
    _say_summary(summary, split, settings)


def _convert_part(split: Split, settings: ConvertSettings, part: PartNumber, **how: Any) -> bool:
    """Convert a part and print what was done; return whether the dataset is still to be finished."""
    name = f"part {part} of {split.shown.name}"
    with progress_bar(f"converting {name}", split.samples_of(part)) as bar:
        bar.update(0, "preparing")
        done = convert_part(
            split.source, split.out, settings, part, selection=split.selection, on_progress=_Shown(bar.update), **how
        )
    if not done.samples and part.number <= done.shards:
        click.echo(f"all shards of {split.shown} are done; nothing to convert")
        return split.grown is not None
    rate = f"; {done.seconds:.1f} s, {done.seen / done.seconds:,.0f} img/s" if done.seen else ", all done before"
    what = f"{done.samples:,} samples{rate}" if done.samples else "no shard is left for it"
    click.echo(f"{name}: {what}; {done.shards_done:,} of all {done.shards:,} shards are done")
    return True


def _finish(split: Split, settings: ConvertSettings, **how: Any) -> None:
    with _told_when_slow(f"putting {split.shown.name} together …"):
        summary = finish_parts(split.source, split.out, settings, selection=split.selection, **how)
    _say_summary(summary, split, settings, "put together from its parts")


class _Shown:
    """Shows a conversion's progress, rate and number of samples left out on a bar."""

    def __init__(self, update: Callable[[int, str], None], total: int = 0) -> None:
        self._update, self._total = update, total
        self._started: float | None = None
        self._first = self._last = 0

    def __call__(self, counts: Counts) -> None:
        if self._started is None or counts.done == self._first:  # the workers are still starting
            self._started, self._first = time.monotonic(), counts.done
        elif counts.done != self._last:
            rate = (counts.done - self._first) / (time.monotonic() - self._started)
            left_out = f", {counts.left_out:,} left out" if counts.left_out else ""
            ending = ", putting it together" if counts.done == self._total else ""
            self._update(counts.done, f"{rate:,.0f} img/s{left_out}{ending}")
        self._last = counts.done


def _say_summary(
    summary: Summary, split: Split, settings: ConvertSettings, if_none_was_seen: str = "nothing to convert"
) -> None:
    """Print what was converted on stdout."""
    index, path = summary.index, split.shown
    shards = "1 shard" if len(index.shard_digests) == 1 else f"{len(index.shard_digests):,} shards"
    captions = ""
    if index.captions_per_sample > 1:
        captions = f" with {index.total_captions:,} captions, at most {index.captions_per_sample} each,"
    result = f"{index.n:,} samples{split.classes}{captions} in {shards}, {in_units(summary.path.size_below())}"
    if not summary.seen:
        click.echo(f"{path} is complete: {result}; {if_none_was_seen}")
    else:
        rate = summary.seen / max(summary.seconds, 1e-9)
        click.echo(f"{path}: {result}; {summary.seconds:.1f} s, {rate:,.0f} img/s")
    if summary.left_out:
        reasons = "; ".join(f"{count:,} × {plain_text(reason, 80)}" for reason, count in summary.reasons)
        click.echo(f"  {summary.left_out:,} left out, see {path / ERRORS_FILE}: {reasons}")
    if index.tokenizer and index.tokenizer.truncated:
        click.echo(f"  {index.tokenizer.truncated:,} captions were truncated to {settings.context_length} tokens")
    if split.grown is None:  # else the whole dataset's follows
        _say_content(path, index.content)


def _say_content(place: Place, content: Content | None) -> None:
    """Print what the samples of a dataset repeat, and how many are blank."""
    if content and content.sharing_captions:
        caption = f"that of sample {content.caption_sample:,}"
        if not place.is_remote:  # else a table would be fetched
            row = Dataset(place).take(np.array([content.caption_sample]), [CAPTION]).to_pylist()[0]
            caption = f"“{plain_text(row[CAPTION] or '', 60)}”"
        click.echo(
            f"  samples that share their caption with another: {content.sharing_captions:,}; the most frequent, "
            f"{caption}, occurs {content.with_caption:,} times"
        )
    if content and content.copies:
        click.echo(
            f"  exact copies of earlier pictures: {content.copies:,}; the most frequent picture occurs "
            f"{content.most_copied:,} times"
        )
    if content and content.blank != 0:
        blank = f"{content.blank:,}" if content.blank else "unknown, as an earlier version converted some samples"
        click.echo(f"  blank pictures, of one colour: {blank}")
