"""What every test shares: hypothesis' rules, and data made once."""

import gc
import os

gc.disable()  # until all is imported, which it would slow by a tenth

# Before torch or hf libraries are imported: nothing here may ask the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tensors here are small. Two threads that meet at each operation are ten times slower where others use the cores too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import Phase, settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

# The first example of a property compiles numba kernels; a deadline would fail it. Examples are the same in every run
# of the tests, so that a failure is one for everybody. Only the soak looks for the smallest example that fails, which
# can take minutes. Left to itself, Hypothesis also draws numbers that stand in whichever modules are imported by then,
# so that other tests would decide the examples.
assert providers.is_local_module_file
providers.is_local_module_file = lambda path: False
settings.register_profile("soak", deadline=None, derandomize=True)
settings.register_profile("daily", settings.get_profile("soak"), phases=set(Phase) - {Phase.shrink, Phase.explain})
settings.load_profile("daily")

import fcntl  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from io import BytesIO  # noqa: E402
from pathlib import Path  # noqa: E402

# Where `support` is, for this process and for those that tests start.
ROOT = str(Path(__file__).parent)
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import pytest  # noqa: E402

from thermopile.benchmarks.object_server import Server, object_server  # noqa: E402
from thermopile.pipeline.opening import Dataset  # noqa: E402
from thermopile.pipeline.sources import Source  # noqa: E402
from thermopile.pipeline.sources.folder import FolderSource  # noqa: E402
from thermopile.pipeline.sources.glyphs import GlyphSource  # noqa: E402
from thermopile.pipeline.sources.parquet import ParquetSource  # noqa: E402
from thermopile.pipeline.sources.webdataset import WebDatasetSource  # noqa: E402
from thermopile.storage import bucket  # noqa: E402
from thermopile.storage.local import LocalPath  # noqa: E402

from support.azure import azure_server  # noqa: E402
from support.datasets import captions_of  # noqa: E402
from support.google import google_server  # noqa: E402
from support.in_place import write_tars  # noqa: E402
from support.pictures import draw  # noqa: E402
from support.sources import NoiseSource  # noqa: E402

pytest_plugins = ["cpu_budget", "support.started"]

# A shell that starts the tests in the background has them ignore Ctrl-C, and so all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

LEFT_OUT = pytest.StashKey[int]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out unread, in `make test`, files of which all tests are wide: importing them takes seconds."""
    if "not wide" in config.option.markexpr and collection_path.suffix == ".py":
        return "\npytestmark = pytest.mark.wide\n" in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests for more GPUs than there are, and begin with the folders that take longest.

    At the end, one process would work on them while the other waits.
    """
    items.sort(key=lambda item: place_of(scope_of(item.nodeid)))
    wanted = {item: marker.kwargs.get("count", 1) for item in items if (marker := item.get_closest_marker("gpu"))}
    if not wanted:
        return
    import torch

    gpus = torch.cuda.device_count()
    left_out = {item for item, count in wanted.items() if count > gpus}
    items[:] = [item for item in items if item not in left_out]
    config.stash[LEFT_OUT] = len(left_out)


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but not in the half million objects that imports and collection have made."""
    gc.freeze()
    gc.enable()


def scope_of(nodeid: str) -> str:
    """Return what one process runs whole: a folder, whose tests share fixtures and fork servers, or a file of none.

    Of the longest folders, what is below them: one process took half an hour for all wide tests of `trainer`.
    """
    top, *below = nodeid.partition("::")[0].split("/")
    return f"{top}/{below[0]}" if top in ("pipeline", "trainer") else top


LONGEST = ("trainer/test_ranks.py", "tools", "hosts", "trainer", "state_store", "test_claim.py", "test_bit_flips.py")
"""Beginnings of the scopes that are run first, in this order."""


def place_of(scope: str) -> int:
    return next((place for place, first in enumerate(LONGEST) if scope.startswith(first)), len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    from xdist.scheduler import LoadScopeScheduling

    gc.enable()  # this process collects no tests itself

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out} tests left out: they need more GPUs than this machine has; make gpu")


@pytest.fixture(scope="session", autouse=True)
def folders_are_places(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let temporary folders have the verbs of places, as those have that a user names."""
    make = tmp_path_factory.mktemp
    tmp_path_factory.mktemp = lambda *args, **options: LocalPath(make(*args, **options))


def converted(source: Source, out: Path) -> Dataset:
    """Convert all samples, unless another process of these tests has done so.

    The test is skipped where ffcv is missing, which writes the shards.
    """
    try:
        from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
    except ImportError as error:
        pytest.skip(f"needs ffcv to convert a dataset: {error}")
    out.parent.mkdir(exist_ok=True)
    with out.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        convert(source, out, ConvertSettings(), workers=1, resume=True)
    return Dataset(out)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all processes of these tests."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def pairs_dataset(shared: Path) -> Dataset:
    """2,000 pairs: 20 glyphs of each of 100 classes, with captions."""
    return converted(GlyphSource(0, test=True), shared / "pairs" / "glyphs")


@pytest.fixture(scope="session")
def picture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 PNG pictures of several sizes in two folders; picture i is draw(i)."""
    root = tmp_path_factory.mktemp("pictures")
    for i in range(300):
        path = root / ("cats" if i < 200 else "dogs") / f"{i:03d}.png"
        path.parent.mkdir(exist_ok=True)
        draw(i, height=24 + i % 7, width=32 + i % 5).save(path)
    return root


@pytest.fixture(scope="session")
def images_dataset(picture_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The picture folder, converted."""
    return converted(FolderSource(picture_folder), tmp_path_factory.mktemp("images") / "pictures")


@pytest.fixture(scope="session")
def captions_dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """512 pairs with one to five captions each: the picture of key k is draw(k), its captions captions_of(k)."""
    folder, pictures = tmp_path_factory.mktemp("captions"), []
    for number in range(512):
        file = BytesIO()
        draw(number).save(file, "JPEG")
        pictures.append(file.getvalue())
    table = pa.table({"image": pictures, "caption": [captions_of(number) for number in range(512)]})
    pq.write_table(table, folder / "pairs.parquet", row_group_size=100)
    return converted(ParquetSource([folder / "pairs.parquet"]), folder / "pairs")


@pytest.fixture(scope="session")
def noise_dataset(shared: Path) -> Dataset:
    """4,096 pairs in 4 shards, 18 MB: pictures of noise, each its own."""
    return converted(NoiseSource(4096), shared / "noise" / "noise")


@pytest.fixture(scope="session")
def of_tars(shared: Path) -> tuple[list[Path], Dataset]:
    """Six tars of 100 pairs with pictures of noise, and what a conversion of them gives."""
    folder = shared / "of_tars"
    folder.mkdir(exist_ok=True)
    with (folder / "writing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tars = sorted((folder / "tars").glob("*.tar")) or write_tars(folder / "tars", 6, 100)
    return tars, converted(WebDatasetSource(tars), folder / "converted")


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    """A server with an empty bucket, s3://bucket, to which the environment leads. For tests marked `wide`."""
    with object_server() as server:
        yield server


@pytest.fixture(scope="module", params=[google_server, azure_server], ids=["gs", "az"])
def other_cloud(request, tmp_path_factory):
    """The scheme of a cloud with an empty bucket, "bucket", to which the environment leads. For tests marked `wide`."""
    with request.param(tmp_path_factory.mktemp("cloud")) as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        bucket._store.cache_clear()
        yield "gs" if request.param is google_server else "az"
    bucket._store.cache_clear()


@pytest.fixture
def file_size_limit():
    """Limit the size of the files that this process writes: a write then fails half-way, as on a full disk."""

    @contextmanager
    def limit(max_bytes):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit
