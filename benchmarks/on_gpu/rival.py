"""open_clip's own training script beside ours, in one process: its models, its tokens, the same tars of pairs."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import open_clip
import torch
from open_clip_train import main as open_clip_script
from PIL import Image
from torch._inductor.utils import fresh_cache
from transformers import CLIPTokenizer

import thermopile
from thermopile.pipeline.cores import cores
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.storage.files import write_atomically
from thermopile.tools.bench.step import is_out_of_memory
from thermopile.trainer.loop import Trainer
from thermopile.trainer.metrics.step_report import split

from .findings import Findings
from .real import PAIRS
from .timing import begin_peak, gigabytes, seconds_of, synchronize

BATCHES, WARM_UP, STEPS = (256, 1024), 5, 20
SIDE, CONTEXT = 224, 77
MIN_OF_RIVAL = 1.0
RIVAL = "open_clip_train"


class Done(Exception):  # noqa: N818 -- it is no error
    """Raised within a loop once its last step is timed, so that it writes no checkpoint."""


class Clock:
    """Times a loop that calls it with the number of steps made: to the first step, and a step after WARM_UP."""

    def __init__(self, device: str, warm_up: int, steps: int) -> None:
        """Start. The loop makes its model and opens its data from here on."""
        self._device, self._warm_up, self.steps = device, warm_up, steps
        begin_peak(device)
        self._began = time.perf_counter()
        self.first = self.step_seconds = 0.0

    def __call__(self, made: int) -> None:
        """Raise Done when all steps are timed. The host waits for the device only where a time is taken."""
        if made not in (1, self._warm_up, self._warm_up + self.steps):
            return
        synchronize(self._device)
        now = time.perf_counter()
        self.first = self.first or now - self._began
        if made == self._warm_up:
            self._began = now
        elif made > self._warm_up:
            self.step_seconds = (now - self._began) / self.steps
            raise Done


def measure(found: Findings, model: str, how: str) -> None:
    """Time both loops with each batch size. model: of open_clip. how: plain or compiled."""
    tars, data = _data(found)
    batches, warm_up, steps = ((16,), 2, 1) if found.small else (BATCHES, WARM_UP, STEPS)
    compiled = how == "compiled" and not found.small  # a compiler takes longer than all else
    about = f"{model} of open_clip, {_side(found)} pixels, bf16, {how}, on {data.n:,} pairs in {len(tars)} tars"
    # CUDA, cuDNN and cuBLAS start once in a process; that is not a loop's time to its first step.
    pixels, weights = torch.randn(8, 3, 32, 32, device=found.device), torch.randn(8, 3, 3, 3, device=found.device)
    seconds_of(lambda: torch.conv2d(pixels, weights).flatten(1) @ pixels.new_ones(7200, 8), 2, found.device)
    for batch in batches:
        rates: dict[str, float] = {}
        for name, loop in (("ours", _ours), (RIVAL, _open_clip)):
            torch.compiler.reset()
            clock = Clock(found.device, warm_up, steps)
            try:
                with fresh_cache() if compiled else nullcontext(), suppress(Done):
                    loop(found, clock, model, batch, compiled)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                found.note(f"{name}: a batch of {batch:,} does not fit into the memory.")
                continue
            rates[name] = batch / clock.step_seconds
            found.row(about, {
                "batch": f"{batch:,}", "loop": name, "samples a second": f"{rates[name]:,.0f}",
                "peak memory": gigabytes(found.device), "first step after": f"{clock.first:.1f} s",
            })  # fmt: skip
        if len(rates) == 2 and not found.small:
            times = rates["ours"] / rates[RIVAL]
            found.check(f"rival: {model}, b = {batch:,}, {how}: of open_clip's samples a second",
                        f"≥ {MIN_OF_RIVAL:.1f} ×", f"{times:.2f} ×", round(times, 2) >= MIN_OF_RIVAL)  # fmt: skip


def _side(found: Findings) -> int:
    return 32 if found.small else SIDE


def _data(found: Findings) -> tuple[list[Path], Dataset]:
    """Return tars of pairs and our index of them, with open_clip's tokens, made if no earlier part has."""
    folder, began = found.folder / "rival", time.monotonic()
    if not (folder / "index").is_dir():
        _write_tars(found, folder / "tars")
        write_atomically(folder / "tokenizer.json", _tokenizer().encode())
        thermopile.convert(folder / "tars", folder / "index", kind="webdataset", in_place=True, caption="txt",
                           tokenizer=folder / "tokenizer.json", context_length=CONTEXT)  # fmt: skip
        found.note(f"The tars were written and indexed (`convert webdataset --in-place`) in "
                   f"{time.monotonic() - began:.0f} s.")  # fmt: skip
    return sorted((folder / "tars").glob("*.tar")), Dataset(folder / "index")


def _write_tars(found: Findings, folder: Path) -> None:
    """Write the pairs to a tar for each worker; link the tars under further names until an epoch has all steps."""
    pairs = os.environ.get(PAIRS)
    source: Any = CsvSource(Path(pairs) / "pairs.csv") if pairs else GlyphSource(0)
    count = 64 if found.small else len(source)
    folder.mkdir(parents=True)
    written = list[Path]()
    for number in range(_workers(found)):
        written.append(folder / f"{number:03d}-00.tar")
        with tarfile.open(written[-1], "w") as tar:
            for place in range(number, count, _workers(found)):
                sample = source[place]
                for suffix, member in (("jpg", _jpeg(sample.picture)), ("txt", sample.caption.encode())):
                    about = tarfile.TarInfo(f"{place:06d}.{suffix}")
                    about.size = len(member)
                    tar.addfile(about, io.BytesIO(member))
    for copy in range(1, 1 if found.small else -(-(WARM_UP + STEPS + 2) * max(BATCHES) // count)):
        for tar_file in written:
            os.link(tar_file, tar_file.with_stem(f"{tar_file.stem[:3]}-{copy:02d}"))


def _jpeg(picture: bytes | Image.Image) -> bytes:
    if isinstance(picture, bytes):
        return picture
    written = io.BytesIO()
    picture.convert("RGB").save(written, "JPEG", quality=90)
    return written.getvalue()


def _workers(found: Findings) -> int:
    return 1 if found.small else cores()


def _tokenizer() -> str:
    """Return a tokenizer.json of open_clip's tokenizer, whose vocabulary is in its package."""
    theirs = open_clip.get_tokenizer("RN50")
    vocabulary, merges = theirs.encoder, sorted(theirs.bpe_ranks, key=theirs.bpe_ranks.__getitem__)
    start, end = theirs.all_special_ids
    names = {number: name for name, number in vocabulary.items()}
    text: str = CLIPTokenizer(vocabulary, merges, bos_token=names[start], eos_token=names[end], unk_token=names[end],
                              pad_token=names[end]).backend_tokenizer.to_str()  # fmt: skip
    return text


def _ours(found: Findings, clock: Clock, model: str, batch: int, compiled: bool) -> None:
    tower = {"name": f"open_clip:{model}"}
    tree = {
        "device": found.device, "precision": "bf16", "compile": compiled, "batch_size": batch, "epochs": 2,
        "log_every": 100, "checkpoint": {"every_minutes": 0}, "objective": {"name": "clip"},
        "data": {"image_size": _side(found), "recipe": "clip"},
        "model": {"dim": open_clip.get_model_config(model)["embed_dim"], "head": "none", "image": tower, "text": tower},
    }  # fmt: skip
    run, data = Path(mkdtemp(dir=found.folder), "run"), found.folder / "rival" / "index"
    with Trainer.from_settings(run, data, tree) as trainer:

        def after_step() -> bool:
            try:
                clock(trainer.run.steps_done)
            except Done:
                shares = split(trainer.run.flush_log()[-clock.steps :])
                waits = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
                found.note(f"Ours, {model}, b = {batch:,}: {waits}.")
                raise
            return False

        trainer.train(should_stop=after_step)


def _open_clip(found: Findings, clock: Clock, model: str, batch: int, compiled: bool) -> None:
    """Run open_clip's script as a user does; its schedule of learning rates, called before each step, is timed."""
    schedule_of = open_clip_script.cosine_lr

    def timed_schedule(*given: Any) -> Callable[[int], object]:
        schedule = schedule_of(*given)

        def before_step(made: int) -> object:
            clock(made)
            return schedule(made)

        return before_step

    tars = sorted((found.folder / "rival" / "tars").glob("*.tar"))
    options = {
        "model": model, "train-data": "::".join(map(str, tars)), "dataset-type": "webdataset", "batch-size": batch,
        "train-num-samples": (WARM_UP + STEPS + 2) * batch, "workers": _workers(found), "precision": "amp_bf16",
        "device": found.device, "logs": mkdtemp(dir=found.folder), "name": "run", "force-image-size": _side(found),
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # Its log would hide why a part failed: it makes torch write lines at the end of the process.
    with (
        patch.object(open_clip_script, "cosine_lr", timed_schedule),
        patch.object(open_clip_script, "setup_logging"),
    ):
        open_clip_script.main([*words, *(["--torchcompile"] if compiled else [])])
