"""The rival of `make gpu`: open_clip's own script beside ours has the same tokens, tars and model; never how fast."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from thermopile.benchmarks.on_gpu.findings import Findings
from thermopile.pipeline.dataset.tokenizer import encode, load_tokenizer

from support import torchvision_operators  # noqa: F401

pytest.importorskip("open_clip_train", reason="open_clip_torch is not installed (make trainers)")
if not pytest.importorskip("webdataset").__version__.startswith("0."):
    pytest.skip("open_clip reads tars with webdataset 0.2 (make trainers)", allow_module_level=True)

import open_clip

from thermopile.benchmarks.on_gpu import rival

CHECKOUT = Path(__file__).parents[2]


def test_our_captions_have_the_tokens_of_open_clips_tokenizer(tmp_path):
    captions = ["a photo of a cat", "Ünïcode, don't & 12 signs!", "  two   blanks", "word " * 100]
    (tmp_path / "tokenizer.json").write_text(rival._tokenizer(), "utf-8")
    ours = encode(load_tokenizer(tmp_path / "tokenizer.json", context_length=rival.CONTEXT), captions).tokens.tolist()
    theirs = open_clip.get_tokenizer("ViT-B-32")(captions).tolist()
    end = open_clip.get_tokenizer("ViT-B-32").eot_token_id
    assert [row[: row.index(end) + 1] for row in ours] == [row[: row.index(end) + 1] for row in theirs]


def test_a_loop_is_timed_to_its_first_step_and_after_the_warm_up_and_then_ended(monkeypatch):
    seconds = iter([0.0, 10.0, 12.0, 18.0])
    monkeypatch.setattr(rival.time, "perf_counter", lambda: next(seconds))
    clock = rival.Clock("cpu", warm_up=2, steps=3)
    for made in range(5):
        clock(made)
    with pytest.raises(rival.Done):
        clock(5)
    assert (clock.first, clock.step_seconds) == (10, 2)


@pytest.mark.wide
def test_our_index_has_all_pairs_of_the_tars_that_open_clip_reads(tmp_path):
    tars, data = rival._data(Findings("rival", tmp_path, "cpu", True))
    names = []
    for tar in tars:
        with tarfile.open(tar) as opened:
            names += opened.getnames()
    keys = data.column("key").to_pylist()
    assert sorted(names) == sorted(f"{key}.{suffix}" for key in keys for suffix in ("jpg", "txt"))


@pytest.mark.wide
def test_the_command_times_both_loops(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("from support import torchvision_operators")
    search = os.pathsep.join([str(tmp_path), str(CHECKOUT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--part", "rival-vit", "--page",
               tmp_path / "gpu.md"]  # fmt: skip
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": search})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "gpu.md").read_text("utf-8")
    assert re.findall(r"^\| 16 \| (\w+) \| [\d,]+ \| – \| [\d.]+ s \|$", text, re.M) == ["ours", "open_clip_train"]
