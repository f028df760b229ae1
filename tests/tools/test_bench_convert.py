"""`thermopile bench convert` at its small scale: what it does and prints, never how fast it was."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from PIL import Image

from thermopile.pipeline.dataset_index import ImagePolicy
from thermopile.pipeline.sources.webdataset import WebDatasetSource
from thermopile.tools.bench.convert.command import PARTS
from thermopile.tools.bench.convert.plain import copy_tars
from thermopile.tools.bench.convert.rate import measure
from thermopile.tools.bench.convert.sizes import FULL, SMALL
from thermopile.tools.bench.convert.tars import write_tars
from thermopile.tools.bench.photographs import HEIGHT, WIDTH, jpegs
from thermopile.tools.cli import main


def test_every_part_can_be_chosen_and_has_both_scales():
    assert set(PARTS) == set(FULL) == set(SMALL)
    assert all(sizes["kept"].kept and not sizes["encoded"].kept for sizes in (FULL, SMALL))


@pytest.mark.parametrize("part", PARTS)
def test_a_conversion_is_measured_beside_a_plain_loop(tmp_path, part):
    measured = measure(replace(SMALL[part], images=16), tmp_path)
    rate, start_up = measured.figures
    assert (rate.name, rate.asked, len(rate.ratios)) == ("images_per_second", "ratio ≥ 0.80", SMALL[part].rounds)
    assert rate.ours > 0
    assert start_up.ours >= 0
    assert "16 photographs of 400×300 in 2 tars" in measured.title


@pytest.mark.soak
def test_the_command_measures_both_and_leaves_nothing(tmp_path):
    done = CliRunner().invoke(main, ["bench", "convert", "--scale", "small", "--json", "--dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["parts"]) == list(PARTS)
    assert list(tmp_path.iterdir()) == []


def test_the_tars_hold_every_photograph_once_with_its_class(tmp_path):
    source = WebDatasetSource(write_tars(tmp_path, 5, 2))
    assert (len(source), source.mode) == (5, "images")
    assert [source[i].picture for i in range(5)] == list(jpegs(5))
    assert [source[i].group for i in range(5)] == ["0", "1", "2", "3", "4"]


def test_the_plain_loop_copies_what_is_kept_and_reduces_what_is_not(tmp_path):
    tars = write_tars(tmp_path, 3, 1)
    assert copy_tars(tars, tmp_path / "kept", ImagePolicy(), workers=1) == 3
    assert (tmp_path / "kept" / tars[0].name).read_bytes() == b"".join(jpegs(3))
    assert copy_tars(tars, tmp_path / "reduced", ImagePolicy(max_size=150), workers=1) == 3
    with Image.open(tmp_path / "reduced" / tars[0].name) as first:
        assert first.size == (WIDTH // 2, HEIGHT // 2)
