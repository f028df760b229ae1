"""Hosts convert parts of a dataset into a shared directory: it is that of one host, also where one is lost."""

import time

import pytest

from support.conversions import digests
from support.runs import finish

pytestmark = pytest.mark.wide

SMALL_SHARDS = """
from thermopile.pipeline.sources import shards
from thermopile.tools.cli import main
shards.MIN_SHARD_ROWS, shards.MIN_SHARD_BYTES = 3, 1
main()
"""


def test_parts_of_several_hosts_one_of_which_is_lost_make_the_dataset_of_one(hosts, picture_folder, tmp_path):
    ada, ben, cleo = hosts[:3]

    def convert(host, name, *options):
        words = ("convert", "folder", picture_folder, tmp_path / name / "out", "--workers", 1, *options)
        return host.start(*words, code=SMALL_SHARDS)

    parts = [convert(host, "parts", "--part", f"{number}/3") for number, host in enumerate((ada, ben, cleo), start=1)]
    while not [*(tmp_path / "parts").glob(".out.partial/**/*.errors.jsonl")]:
        assert any(part.is_running() for part in parts), [part.end() for part in parts]
        time.sleep(0.05)
    cleo.kill()
    finish([*parts[:2], convert(ben, "parts", "--part", "3/3")])
    finish([convert(ada, "parts", "--finish"), convert(ben, "whole")])
    assert digests(tmp_path / "parts" / "out") == digests(tmp_path / "whole" / "out")
