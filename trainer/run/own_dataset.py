"""A run's dataset: facts of it that the run keeps, in RUN/trained_on.json and RUN/tokenizer.json, and its samples."""

from shlex import quote
from typing import Annotated

from pydantic import BaseModel, Field

from ...pipeline.dataset.index import TokenizerInfo
from ...pipeline.errors import DatasetError
from ...pipeline.opening import Dataset, Mixture, open_dataset
from ...storage.mixed_rows import MIXTURE, MixedRows
from ...storage.place import AnyPlace, Places
from ...storage.sealed_json import seal_document
from ...storage.selection import ABOUT, Selection
from ..config import TrainConfig
from ..errors import ConfigError
from ..run_directory import RunDirectory, read_facts
from .selection_files import selects, write_selection


class TrainedOn(BaseModel, frozen=True, extra="forbid"):
    """Content of trained_on.json."""

    fingerprints: Annotated[tuple[str, ...], Field(min_length=1)]
    """The dataset's, or one for each part of a mixture."""
    tokenizer: TokenizerInfo | None
    tokenizer_digest: str | None
    """sha256 of tokenizer.json; None without captions."""


def keep_facts(run: RunDirectory, dataset: Dataset) -> None:
    """Write the two files. Raises OSError, DatasetError if the dataset's tokenizer was changed."""
    index, of = dataset.index, _fingerprints(dataset)
    if index.tokenizer is not None:
        run.tokenizer.rewrite(dataset.tokenizer_path.read_bytes())
    facts = TrainedOn(fingerprints=of, tokenizer=index.tokenizer, tokenizer_digest=index.tokenizer_digest)
    run.trained_on.rewrite(seal_document(facts.model_dump()))


def _fingerprints(dataset: Dataset) -> tuple[str, ...]:
    return tuple(each.index.fingerprint for each in (dataset.parts if isinstance(dataset, Mixture) else (dataset,)))


def write_own_files(config: TrainConfig, run: RunDirectory, dataset: Dataset, selection: Selection | None) -> None:
    """Write a new run's facts of its dataset, and its own copy of what it selects. Raises as `write_selection`."""
    keep_facts(run, dataset)
    # What a killed or refused start left would be taken for this run's; all else may be someone's.
    run.selection.remove([ABOUT, MIXTURE])
    run.selection.remove_leftovers()
    if isinstance(selection, MixedRows):
        selection.write(run.selection)
    elif selection is not None:
        write_selection(config.data, dataset, run.selection)


def kept_facts(run: RunDirectory) -> TrainedOn | None:
    return read_facts(run.trained_on, TrainedOn, "samples appended to its dataset since are not left out")


def open_own(
    run: RunDirectory, places: Places, tars: AnyPlace | None, *, same: bool = False, cure: str = "--data"
) -> Dataset:
    """Open the run's dataset at its present places, without the samples that were appended since the run began.

    tars: as for `Dataset`; None: no picture is read. same: whether to refuse another dataset. cure: options that name
    another place. Raises DatasetError, OSError, ConfigError for another dataset.
    """
    known = kept_facts(run)
    try:
        dataset = open_dataset(places, tars, pictures=tars is not None, before=known.fingerprints if known else ())
    except DatasetError as error:
        why = str(error).removesuffix(".")
        raise DatasetError(f"{why}. If the run's dataset was moved, pass its new path with {cure}.") from error
    if same and known and _fingerprints(dataset) != known.fingerprints:
        it = "place" if len(known.fingerprints) == 1 else "parts, in their order,"
        raise ConfigError(f"{dataset.place} is not the dataset of {run.path}; pass that one's {it} with {cure}")
    return dataset


def growth(run: RunDirectory, config: TrainConfig, dataset: Dataset) -> list[str]:
    """Return a line on the samples appended to the run's dataset since the run began, if there are any."""
    if not dataset.appended_since:
        return []
    new = f"the {dataset.appended_since:,} new samples are left out"
    line = f"{dataset.place} has grown since {run.path} began; {new}"
    if config.data.parts or selects(config.data):  # --grow is for all samples of one dataset
        return [line]
    config_file, path, place = (quote(str(each)) for each in (run.config_file, run.path, dataset.place))
    words = f"--config {config_file} --init-from {path} --grow --data {place} --out NEW"
    return [f"{line}. To use them, go on with: thermopile train {words}"]
