"""Write a dataset from a source, and a test set on request."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

import click

from ..pipeline.conversion.append import appended_path, is_joining, join, refuse_known, refuse_ungrowable
from ..pipeline.conversion.conversion import Conversion, Summary, lengths_of
from ..pipeline.conversion.partial import Partial
from ..pipeline.conversion.plan import ConvertSettings
from ..pipeline.conversion.shard_pool import processes, start_workers_early
from ..pipeline.dataset.index import TOKENIZER_FILE, DatasetIndex, ImagePolicy, read_index
from ..pipeline.dataset.tokenizer import MAX_FILE_BYTES
from ..pipeline.errors import DatasetExistsError, SourceError
from ..pipeline.opening import Dataset, usual_image_size
from ..pipeline.order.order import MIN_ROWS_PER_STEP, too_few
from ..pipeline.sources import Source
from ..pipeline.sources.csv_source import CsvSource
from ..pipeline.sources.dataset_source import DatasetSource
from ..pipeline.sources.splits import Drawn, Limited
from ..pipeline.sources.webdataset import nobody_has
from ..storage.bucket import Address
from ..storage.files import read_regular
from ..storage.local import LocalPath
from ..storage.place import AnyPlace, Place, place_of
from ..storage.sealed_json import parse
from ..trainer.config.layers import read_preset
from ..trainer.run.selection_files import selected_ids
from ..trainer.run_directory import refuse_in_run
from . import convert_splits
from .convert_options import ConvertOptions, PartNumber
from .convert_sources import Kind, kind_named, users_kind
from .printing import MAX_ERROR_CHARACTERS, plain_text
from .progress import progress_bar

SECONDS_UNTIL_HINT = 2.0
TRIAL = 2_000
"""Samples that a dry run reads, unless --limit says how many."""
FEW_SAMPLES = 20_000
"""Below, the preset `small` is meant for the dataset; from so many pairs on, 1 % are enough to plant."""


def convert(
    source: Source | AnyPlace | Sequence[AnyPlace],
    out: AnyPlace,
    *,
    kind: str = "",
    seed: int = 0,
    holdout: float | None = None,
    longtail: float | None = None,
    limit: int | None = None,
    append: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    **options: Any,
) -> Dataset:
    """Convert a source to the dataset `out` as `thermopile convert` does, with progress, and open it.

    source: a folder, a list, tars, Parquet files, or a Source of your own. kind: the command's, such as `cifar`; by
    default what the source's name ends with tells. options: the command's others, such as caption="txt" or
    max_size=256. Raises SourceError, DatasetError, DatasetExistsError; click.UsageError for options that do not fit.

        >>> thermopile.convert("pictures", "data/mine", caption="txt", holdout=0.25)
        data/mine: 72 samples in 1 shard, ...
        <Dataset data/mine: 72 samples>
    """
    shared = {*ConvertSettings.model_fields, *ImagePolicy.model_fields}
    own = {name: options.pop(name) for name in [*options] if name not in shared}
    how: dict[str, Any] = {"seed": seed, "holdout": holdout, "longtail": longtail, "limit": limit, "append": append}
    how |= {"resume": resume, "overwrite": overwrite, "workers": workers, "given": {*options, *own}}
    src: Any = source
    if isinstance(source, Source):
        known = users_kind(type(source).__name__)
    else:
        given = [source] if isinstance(source, str | os.PathLike | Address) else [*source]
        known, src = kind_named(kind, str(given[0])), seed
        if known.src:
            places = [known.src.convert(os.path.expanduser(str(each)), None, None) for each in given]
            src = places if known.many else places[0]
    run(known, src, own, place_of(out), ConvertOptions.of(options | how))
    return Dataset(out)


def run(kind: Kind, src: Any, own: dict[str, Any], out: Place, asked: ConvertOptions) -> list[dict[str, Any]]:
    """Convert `src`, opened with the kind's `own` options, or a part of it, to `out` and perhaps `out`-test.

    Returns each dataset's summary as a JSON object.
    """
    _refuse_contradictions(out, _paths(src, own), asked)
    named = {name: own[name] for name in ("caption", "group") if name in asked.given and own.get(name)}
    grown = _to_append_to(out, asked) if asked.append else None
    select = own.pop("select") if kind.is_dataset else None
    outs = [out, out.with_name(f"{out.name}-test")] if kind.own_test or asked.holdout else [out]
    if grown is not None:
        outs, asked = [appended_path(grown)], replace(asked, resume=True)
    if not (asked.resume or asked.part or asked.on or asked.finish):
        for each in outs:
            Partial(each).refuse_existing(overwrite=asked.overwrite, resume=False)
    written, limit = outs, asked.limit
    if asked.dry_run:
        trial = click.get_current_context().with_resource(TemporaryDirectory(prefix="thermopile-dry-run-"))
        written, limit = [LocalPath(trial) / each.name for each in outs], asked.limit or TRIAL
    if asked.on:
        from ..pipeline.conversion.on_ray import cluster

        src, own = _absolute(src), {name: _absolute(value) for name, value in own.items()}
        click.get_current_context().with_resource(cluster(asked.workers))
    else:
        start_workers_early()
    with _hint_if_slow(f"listing {kind.name} …"):
        sources = kind.open(src, **own, **_of_tars(grown, named, asked) if kind.in_order else {})
        for note in sources[0].notes:
            click.echo(plain_text(note, MAX_ERROR_CHARACTERS), err=True)
        settings = _settings(sources[0], grown, asked)
        if asked.dry_run:  # counts them all, and refuses them at the end, where it would name no file that is gone
            settings = settings.model_copy(update={"max_error_rate": 1.0})
        splits = _splits(sources, [*zip(written, [grown] if grown else outs, strict=True)], asked, named)
        if select is not None:
            assert isinstance(sources[0], DatasetSource)
            splits = [splits[0]._replace(selection=selected_ids(Path(select), sources[0].dataset))]
        if limit:
            for place, split in enumerate(splits):
                rule = Limited(limit, split.selection)
                splits[place] = split._replace(selection=rule if split.tars else rule(len(split.source), None))
    with _hint_if_slow("estimating the size …"):
        convert_splits.announce(splits, settings)
    if grown is not None:
        refuse_known(grown, Conversion(sources[0], splits[0].out, settings, splits[0].selection).plan)
    results = _convert_all(splits, settings, asked, _paths(src, own))
    if asked.dry_run:
        for result in results:
            left_out, allowed = result["left_out"], asked.settings.max_error_rate
            if left_out > allowed * (total := left_out + result["samples"]) + 1e-9:
                unusable = f"{left_out:,} of {total:,} samples that were tried cannot be used"
                why = f"since --max-error-rate allows {allowed:.3g} of them"
                raise SourceError(f"{unusable}; the conversion would fail, {why}. Nothing was written")
        click.echo("nothing was written; next: the same command without --dry-run")
        return results
    if grown is not None and not asked.part:
        with _hint_if_slow("appending …"):
            join(grown)
        index = read_index(grown)
        click.echo(f"{grown}: {index.n:,} samples with those appended")
        convert_splits.say_content(grown, index)
    if any(each.get("to_finish") for each in results):
        click.echo("next: when all parts are done, the same command with --finish in place of --part")
    else:
        for split in splits[:1] if asked.longtail else ():
            convert_splits.say_longtail(split.shown)
        click.echo(f"next: {_next_steps(out, 'glyphs' if kind.name == 'glyphs' else '', asked.model)}")
    return results


def _next_steps(out: Place, preset: str, of_model: tuple[str, Path]) -> str:
    """Return the commands that suit a dataset. preset: the one that was made for it, if any."""
    index = read_index(out)
    if index.n < MIN_ROWS_PER_STEP:
        return f"{out} has {too_few(index.n)}"
    # Of a remote dataset the table would be fetched, and of pictures in tars the tars listed again.
    usual = size = 64 if out.is_remote else usual_image_size(Dataset(out, pictures=False))
    is_small, settings, sides = index.n < FEW_SAMPLES, list[str](), tuple[str, ...]()
    if preset and index.n < read_preset(preset).get("batch_size", 0):
        preset = ""
    if is_small and not preset:
        preset, size = "small", min(usual, 64)
    model, folder = of_model
    if model and index.mode == "pairs":
        sides, size = _encoders_in(folder, size)
        settings += [f"model.{side}.name={model}" for side in sides]
        preset = "" if sides else preset  # which would replace the model's encoders
    if not preset and size > 64:  # for which there are no built-in encoders
        from ..trainer.run.chosen_settings import NAMED  # late, because it imports torch

        unnamed = [side for side in NAMED if side not in sides and (side == "image" or index.mode == "pairs")]
        settings += [f"model.{side}.name={NAMED[side]}" for side in unnamed]
    is_chosen = not preset and out.is_remote
    settings += [f"data.image_size={size}"] * (is_chosen or size != (64 if preset == "small" else usual))
    settings += ["data.planted=0.01"] * (index.mode == "pairs" and not is_small)
    shown, named = f" --image-size {size}" * (size != usual), f" --preset {preset}" * bool(preset)
    data, run, page = (quote(each) for each in (str(out), f"runs/{out.name}", f"{out.name}.html"))
    train = "".join([f"{named} --data {data} --out {run}", *(f" --set {quote(setting)}" for setting in settings)])
    return f"thermopile show {data} --out {page}{shown}; thermopile train{train}"


def _encoders_in(folder: Path, size: int) -> tuple[tuple[str, ...], int]:
    """Return the sides that a model's directory has encoders for, and the size of its pictures, else `size`."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        config = parse(read_regular(folder / "config.json"))
        if config["model_type"] in ("clip", "siglip"):
            return ("image", "text"), int(config["vision_config"].get("image_size", 224))
        return ("text",), size
    return (), size


def _convert_all(
    splits: list[convert_splits.Split], settings: ConvertSettings, asked: ConvertOptions, reads: list[Path]
) -> list[dict[str, Any]]:
    """Convert each dataset, or the part asked for; return each one's summary as a JSON object."""
    results, out = list[dict[str, Any]](), splits[0].out
    with TemporaryDirectory(prefix="thermopile-convert-") as folder:
        options: dict[str, Any] = {"overwrite": asked.overwrite, "pool": processes(asked.workers)}

        def conversion_of(split: convert_splits.Split) -> Conversion:
            """A test set has the tokenizer of its training set."""
            tokens = () if split is splits[0] else (_tokenizer_of(out, Path(folder)), lengths_of(out))
            return Conversion(split.source, split.out, settings, split.selection, *tokens, **options)

        def begin_tests() -> None:
            """Begin them with their training set, since whoever begins that has counted the samples."""
            for split in splits[1:]:
                conversion_of(split).begin()

        for split in splits:
            conversion = conversion_of(split)
            if asked.part:
                counts_all = split is splits[0] and splits[1:] and split.source.files_in_order
                results.append(_convert_part(split, conversion, asked.part, begin_tests if counts_all else None))
                continue
            if asked.finish:
                with _hint_if_slow(f"putting {split.shown.name} together …"):
                    summary = conversion.finish()
                convert_splits.say_summary(summary, split, settings, "put together from its parts")
            elif asked.on:
                from ..pipeline.conversion.on_ray import convert_on_ray

                summary = _convert(partial(convert_on_ray, conversion, reads=reads), split, settings)
            else:
                summary = _convert(partial(conversion.run, resume=asked.resume), split, settings)
            results.append(convert_splits.summary_as_json(summary, split))
        if len(splits) > 1 and not (asked.part or out.is_remote):  # else the whole index of the rows would be fetched
            convert_splits.say_shared(*splits)
    return results


def _refuse_contradictions(out: Place, reads: Iterable[Path], asked: ConvertOptions) -> None:
    refuse_in_run(out)
    if asked.part and asked.finish:
        raise click.UsageError("--part and --finish exclude each other: finish after all parts")
    if asked.dry_run and (asked.part or asked.finish or asked.on or asked.resume):
        raise click.UsageError("--dry-run converts some samples at once: leave out --part, --finish, --on and --resume")
    if asked.on and (asked.part or asked.finish):
        raise click.UsageError("--on ray converts all parts and finishes: leave out --part and --finish")
    if asked.on and out.is_remote:
        raise click.UsageError(f"--on ray writes to directories only, and {out} is an address; use --part I/K")
    if asked.append and asked.overwrite:
        raise click.UsageError("--append adds to OUT, and --overwrite replaces it: leave out one of them")
    if asked.settings.tokenizer and "vocab_size" in asked.given:
        raise click.UsageError("--vocab-size is of a tokenizer to train, in whose place --tokenizer is: leave out one")
    for path in reads:
        if path.resolve().is_relative_to(str(out.resolve())):
            raise click.UsageError(f"OUT {out} contains the source {path}; choose another directory")


def _tokenizer_of(out: Place, folder: Path) -> Path | None:
    """Return the tokenizer of a dataset, unfinished or not, or None if it has none; of a remote one, a copy."""
    copy = folder / TOKENIZER_FILE
    for file in (Partial(out).dataset / TOKENIZER_FILE, out / TOKENIZER_FILE):
        with suppress(FileNotFoundError):
            copy.write_bytes(file.read_bytes(MAX_FILE_BYTES))
            return copy
    return None


def _to_append_to(out: Place, asked: ConvertOptions) -> LocalPath:
    """Return the dataset's folder, after finishing an append that was interrupted near its end."""
    if out.is_remote:
        raise click.UsageError(f"--append writes to local datasets only, and {out} is in an object store")
    if asked.holdout:
        raise click.UsageError("--append and --holdout exclude each other: append to the test set by itself")
    for name in ("max_size", "quality", "max_pixels", "vocab_size", "tokenizer", "context_length"):
        if name in asked.given:
            raise click.UsageError(f"--append keeps the settings of {out}; leave out --{name.replace('_', '-')}")
    folder = LocalPath(str(out.resolve()))  # the new shards are renamed, so they are written on the same disk
    refuse_ungrowable(folder)
    if is_joining(folder) and not asked.dry_run:
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


def _settings(source: Source, grown: LocalPath | None, asked: ConvertOptions) -> ConvertSettings:
    """Return the settings of a conversion; for a dataset, or one that grows, those it was made with."""
    if grown is not None:
        index = read_index(grown)
        if (index.tars is None) != (source.index is None):
            raise click.UsageError(f"convert both {grown} and the samples appended to it with --in-place, or neither")
        if source.mode not in ("", index.mode):
            raise click.UsageError(f"{grown} holds {index.mode}, but the source {source.mode}; convert it separately")
        return asked.settings.model_copy(update=_kept(index, lambda: grown / TOKENIZER_FILE))
    if isinstance(source, DatasetSource):
        return asked.settings.model_copy(update=_kept(source.dataset.index, lambda: source.dataset.tokenizer_path))
    if asked.of_captions and (source.mode == "images" or source.describe().get("caption", "") is None):
        options = " and ".join(f"--{name.replace('_', '-')}" for name in asked.of_captions)
        cure = "leave out what is of captions, or name them with --caption"
        raise click.UsageError(f"no captions are converted, so {options} would have no effect; {cure}")
    return asked.settings.suited_to(source, partial(click.echo, err=True))


def _of_tars(grown: LocalPath | None, named: Mapping[str, str], asked: ConvertOptions) -> dict[str, Any]:
    """Return what a source of tars must know of the command and of the dataset that it is appended to."""
    index, captions = read_index(grown) if grown else None, ["caption"] if asked.of_captions else []
    return {
        "required": (*named, *captions),
        "required_mode": index.mode if index else "",
        "behind": index and index.tars,
    }


def _kept(index: DatasetIndex, tokenizer: Callable[[], Path]) -> dict[str, Any]:
    """Return the settings that a dataset was made with."""
    if index.tokenizer is None:
        return {"image": index.image}
    return {"image": index.image, "tokenizer": tokenizer(), "context_length": index.tokenizer.context_length}


@contextmanager
def _hint_if_slow(words: str) -> Iterator[None]:
    timer = Timer(SECONDS_UNTIL_HINT, click.echo, [words], {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _splits(
    sources: tuple[Source, ...], outs: list[tuple[Place, Place]], asked: ConvertOptions, named: Mapping[str, str]
) -> list[convert_splits.Split]:
    """Return the datasets to write, each to a place, under a name; the test set is held out before the tail is cut."""
    source, *own_test = sources
    rules = [Drawn(asked.holdout, asked.longtail, asked.settings.seed, test) for test in (False, True)]
    is_drawn = asked.holdout or asked.longtail
    if source.files_in_order:
        drawn = rules if is_drawn else [None, None]
        return [
            convert_splits.Split(*out, source, rule, None, asked.append) for out, rule in zip(outs, drawn, strict=False)
        ]
    # A user's source may have to read every sample for them.
    groups = source.groups() if is_drawn or type(source).groups is not Source.groups else None
    if isinstance(source, CsvSource):
        source.refuse_wrong_root()
    has = {"caption": source.mode == "pairs", "group": groups is not None}
    for option, name in named.items():
        if not has[option]:
            raise SourceError(nobody_has(option, name))
    if asked.longtail and groups is None:
        raise click.UsageError("--longtail needs classes, and this source has none")
    train = rules[0](len(source), groups) if is_drawn else None
    splits = [convert_splits.Split(*outs[0], source, train, groups, asked.append)]
    splits += [convert_splits.Split(*outs[1], test, None, test.groups()) for test in own_test]
    if asked.holdout and not own_test:
        splits.append(convert_splits.Split(*outs[1], source, rules[1](len(source), groups), groups))
    return splits


def _convert(convert: Callable[..., Summary], split: convert_splits.Split, settings: ConvertSettings) -> Summary:
    try:
        with progress_bar(f"converting {split.shown.name}{split.unit}", split.total) as bar:
            bar.update(0, "preparing")
            summary = convert(on_progress=convert_splits.ConversionProgress(bar.update, split), tell=bar.note)
    except DatasetExistsError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        # A store that went away is not asked again: it would hide the error for as long as it is waited for.
        is_unknown = split.out.is_remote and isinstance(error, OSError | KeyboardInterrupt)
        begun = Partial(split.out)
        if not split.is_trial and "--resume" not in str(error) and (is_unknown or begun.keeps_work):
            kept = "" if is_unknown or not begun.keeps_shards else "Finished shards are kept; "
            click.echo(f"{kept}continue with the same command and --resume.", err=True)
        raise
    convert_splits.say_summary(summary, split, settings)
    return summary


def _convert_part(
    split: convert_splits.Split, conversion: Conversion, part: PartNumber, on_begun: Callable[[], None] | None
) -> dict[str, Any]:
    name = f"part {part} of {split.shown.name}"
    with progress_bar(f"converting {name}{split.unit}", split.total_of(part)) as bar:
        bar.update(0, "preparing")
        shown = convert_splits.ConversionProgress(bar.update, split)
        done = conversion.part(part.number, part.count, on_progress=shown, tell=bar.note, on_begun=on_begun)
    result = {"dataset": str(split.shown), "part": str(part), "to_finish": True, **asdict(done)}
    if not done.samples and not Partial(split.out).in_progress:
        click.echo(f"all shards of {split.shown} are done; nothing to convert")
        return result | {"to_finish": split.appends}
    speed = f"; {done.seconds:.1f} s, {convert_splits.rate(done.seen, done.seconds)}"
    what = f"{convert_splits.samples(done.samples)}{speed if done.seen else ', all done before'}"
    if not done.samples:
        what = "no shard is left for it" if part.number > done.shards else "none of its samples is selected"
    click.echo(f"{name}: {what}; {done.shards_done:,} of all {done.shards:,} shards are done")
    return result
