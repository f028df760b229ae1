"""`thermopile convert`: write a dataset directory from a source, and a test set on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .convert_check import check
from .convert_report import announce, say_next, say_summary
from .convert_sources import KINDS, Kind, Opened, Split
from .progress import progress_bar

if TYPE_CHECKING:
    from ..pipeline.conversion.convert import ConvertSettings
    from ..pipeline.conversion.shard_pool import Counts
    from ..pipeline.sources import Groups, Source

SECONDS_UNTIL_TOLD = 2.0


@click.group(
    epilog="\b\nExamples:\n"
    "  thermopile convert glyphs data/glyphs\n"
    "  thermopile convert folder ~/pictures data/pictures --max-size 256\n"
    "  thermopile convert webdataset cc12m/*.tar data/cc12m --resume\n"
    "  thermopile convert check data/pictures"
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


def _options(kind: Kind) -> Iterator[click.Option]:
    """Yield the options shared by several kinds, named as the parameters of `_run`."""
    if not kind.own_test:
        yield click.Option(["--holdout"], type=float, callback=_number_or_share, metavar="N|FRACTION",
                           help="Hold out this many samples, or fraction, as OUT-test, class-balanced.")  # fmt: skip
    if kind.labelled:
        yield click.Option(["--longtail"], type=click.FloatRange(1, min_open=True), metavar="RATIO",
                           help="Cut the classes to an exponential long tail: the first is RATIO times the last. "
                           "Applied after --holdout; samples without a class are kept.")  # fmt: skip
    if kind.captions:
        yield click.Option(["--vocab-size"], type=click.IntRange(300), default=1024, show_default=True,
                           help="Vocabulary size of the tokenizer trained on the captions.")  # fmt: skip
        yield click.Option(["--tokenizer"], type=click.Path(exists=True, dir_okay=False, path_type=Path),
                           help="Use this tokenizer.json instead of training one.")  # fmt: skip
        yield click.Option(["--context-length"], type=click.IntRange(4), default=32, show_default=True,
                           help="Tokens per caption.")  # fmt: skip
    yield click.Option(["--max-size"], type=click.IntRange(8), default=512, show_default=True,
                       help="Downscale pictures whose short side is longer, in pixels.")  # fmt: skip
    yield click.Option(["--quality"], type=click.IntRange(1, 100), default=90, show_default=True,
                       help="JPEG quality of re-encoded pictures.")  # fmt: skip
    yield click.Option(["--on-error"], type=click.Choice(["skip", "fail"]), default="skip", show_default=True,
                       help="Leave out samples that cannot be used, or fail at the first.")  # fmt: skip
    yield click.Option(["--max-error-rate"], type=click.FloatRange(0, 1), default=0.1, show_default=True,
                       help="Fail if a larger share of the samples cannot be used.")  # fmt: skip
    yield click.Option(["--seed"], type=click.IntRange(0), default=0, show_default=True,
                       help="Seed of the shuffle and of all draws; same seed, same dataset.")  # fmt: skip
    yield click.Option(["--workers"], type=click.IntRange(1), help="Worker processes. Default: one per core.")
    yield click.Option(["--resume"], is_flag=True, help="Continue an interrupted conversion.")
    yield click.Option(["--overwrite"], is_flag=True, help="Replace OUT if it is a dataset.")


def _command(kind: Kind) -> click.Command:
    def run(out: Path, seed: int, **values: Any) -> None:
        own = {name: values.pop(name) for parameter in kind.parameters if (name := parameter.name)}
        if kind.drawn:
            own["seed"] = seed
        _run(kind, own, out, seed=seed, **values)

    arguments = [parameter for parameter in kind.parameters if isinstance(parameter, click.Argument)]
    options = [parameter for parameter in kind.parameters if isinstance(parameter, click.Option)]
    out = click.Argument(["out"], type=click.Path(path_type=Path))
    return click.Command(
        kind.name,
        params=[*arguments, out, *options, *_options(kind)],
        callback=run,
        help=kind.help,
        epilog=f"\b\nExample:\n  thermopile convert {kind.name} {kind.example}",
    )


for _kind in KINDS:
    convert.add_command(_command(_kind))
convert.add_command(check)


def _run(
    kind: Kind,
    own: dict[str, Any],
    out: Path,
    *,
    seed: int,
    workers: int | None,
    resume: bool,
    overwrite: bool,
    holdout: float | None = None,
    longtail: float | None = None,
    **settings: Any,
) -> None:
    from ..pipeline.conversion.partial import refuse_existing
    from ..pipeline.conversion.shard_pool import start_workers_early
    from ..pipeline.dataset_index import TOKENIZER_FILE

    _refuse_to_swallow(own, out)
    convert_settings = _settings(seed, settings)
    outs = [out, out.with_name(f"{out.name}-test")] if kind.own_test or holdout else [out]
    if not resume:
        for path in outs:
            refuse_existing(path, overwrite=overwrite)
    start_workers_early()
    with _told_when_slow(f"listing {kind.name} …"):
        splits = _splits(kind.open(**own), outs, seed, holdout, longtail)
        announce(splits)
    for split in splits:
        _convert(split, convert_settings, workers=workers, resume=resume, overwrite=overwrite,
                 tokenizer_from=None if split.out == out else out / TOKENIZER_FILE)  # fmt: skip
    say_next(out)


def _refuse_to_swallow(own: dict[str, Any], out: Path) -> None:
    paths = [path for value in own.values() for path in (value if isinstance(value, tuple) else [value])]
    for path in paths:
        if isinstance(path, Path) and path.resolve().is_relative_to(out.resolve()):
            raise click.UsageError(f"OUT {out} contains the source {path}; choose another directory")


def _settings(seed: int, options: dict[str, Any]) -> ConvertSettings:
    from ..pipeline.conversion.convert import ConvertSettings
    from ..pipeline.dataset_index import ImagePolicy

    image = ImagePolicy(max_size=options.pop("max_size"), quality=options.pop("quality"))
    return ConvertSettings(seed=seed, image=image, **options)


def _splits(opened: Opened, outs: list[Path], seed: int, holdout: float | None, longtail: float | None) -> list[Split]:
    """Return the datasets to write. The test set is held out first; the long tail is cut from the rest."""
    import numpy as np

    from ..pipeline.sources.selection import hold_out, long_tail

    source, groups = opened.source, opened.source.groups()
    _refuse_what_no_sample_has(source, groups)
    train, test = None, None
    if holdout:
        train, test = hold_out(len(source), groups, holdout, seed)
    if longtail:
        if groups is None:
            raise click.UsageError("--longtail needs classes, and this source has none")
        train = long_tail(np.arange(len(source)) if train is None else train, groups, longtail, seed)
    splits = [Split(outs[0], source, train, groups)]
    if opened.test is not None:
        splits.append(Split(outs[1], opened.test, None, opened.test.groups()))
    elif holdout:
        splits.append(Split(outs[1], source, test, groups))
    return splits


def _refuse_what_no_sample_has(source: Source, groups: Groups | None) -> None:
    """Refuse names given on the command line that no sample has, as they may be mistyped; defaults may be absent."""
    from ..pipeline.errors import SourceError

    context = click.get_current_context()
    for option, found in (("caption", source.mode == "pairs"), ("group", groups is not None)):
        given, by = context.params.get(option), context.get_parameter_source(option)
        if given and not found and by is ParameterSource.COMMANDLINE:
            raise SourceError(f"--{option} {given!r} matches no sample; choose another, or none: --{option} ''")


def _convert(split: Split, settings: ConvertSettings, *, resume: bool, **how: Any) -> None:
    from ..pipeline.conversion.convert import convert as convert_source
    from ..pipeline.conversion.partial import Partial
    from ..pipeline.errors import DatasetExistsError

    try:
        with progress_bar(f"converting {split.out.name}", split.samples) as bar:
            bar.update(0, "preparing")
            summary = convert_source(split.source, split.out, settings, selection=split.selection, resume=resume,
                                     on_progress=_Shown(bar.update), **how)  # fmt: skip
    except DatasetExistsError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        if Partial(split.out).in_progress and "--resume" not in str(error):
            click.echo("Finished shards are kept; continue with the same command and --resume.", err=True)
        raise
    say_summary(summary, split, settings)


class _Shown:
    """Shows a conversion's progress, rate and number of samples left out on a bar."""

    def __init__(self, update: Callable[[int, str], None]) -> None:
        self._update = update
        self._started: float | None = None
        self._first = self._last = 0

    def __call__(self, counts: Counts) -> None:
        if self._started is None or counts.done == self._first:  # the workers are still starting
            self._started, self._first = time.monotonic(), counts.done
        elif counts.done != self._last:
            rate = (counts.done - self._first) / (time.monotonic() - self._started)
            left_out = f", {counts.left_out:,} left out" if counts.left_out else ""
            self._update(counts.done, f"{rate:,.0f} img/s{left_out}")
        self._last = counts.done


@contextmanager
def _told_when_slow(words: str) -> Iterator[None]:
    timer = Timer(SECONDS_UNTIL_TOLD, click.echo, [words], {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
