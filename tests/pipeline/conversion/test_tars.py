"""A conversion of tars: groups of them are read once, in order, and one process decides for all what a sample tells."""

import base64
import json
import threading
import zlib
from itertools import pairwise

import numpy as np
import pytest

from thermopile.pipeline.conversion.check import check_dataset
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.conversion.partial import Partial
from thermopile.pipeline.errors import DatasetExistsError, SourceError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources import Asked
from thermopile.pipeline.sources.splits import Drawn
from thermopile.pipeline.sources.webdataset import FEW_TARS, WebDatasetSource, selected_bits

from support.conversions import convert_part, digests, finish, in_this_process, many_shards
from support.tars import HeldSample, drawn, numbered, reads_of, samples_of, write_members, write_shard

LEAST = ConvertSettings(vocab_size=300, context_length=8)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    many_shards(monkeypatch, rows=10)


def facts(source, seed=0):
    return source.facts(Asked(seed))


def here(source, out, settings=LEAST, number=1, count=1, **options):
    """Convert a part in this process."""
    return convert_part(source, out, settings, number, count, pool=in_this_process, **options)


def whole_here(source, out, settings=LEAST):
    here(source, out, settings)
    return finish(source, out, settings).index


# ClassGroups.


@pytest.fixture
def odd(tmp_path):
    """A tar of samples of one to three members, between others that belong to none, with long names; cut short."""
    members = []
    for n in range(90):
        key = f"{'a long folder/' * 12 * (n % 4 == 1)}{n:03}"
        members += [(f"{key}.jpg", b"%d" % n * (n * 7 % 900))]
        members += [(f"{key}.txt", b"text")] * (n % 3 > 0) + [(f"{key}.cls", b"7")] * (n % 3 > 1)
        members += [("no suffix", b"-" * n * 9), ("__meta__/x.txt", b"-")] * (n % 5 == 0)
    data = write_members(tmp_path / "whole", *members).read_bytes()
    (tmp_path / "0.tar").write_bytes(data[: len(data) * 9 // 10])
    return WebDatasetSource([tmp_path / "0.tar"])


def test_a_tar_cut_at_samples_gives_the_samples_of_the_whole(odd):
    pieces = sorted(piece for group in facts(odd).groups for piece in group)
    assert len(pieces) >= 4
    assert (pieces[0].start, pieces[-1].stop) == (0, odd.sizes()[0])
    assert all(piece.stop == following.start for piece, following in pairwise(pieces))
    whole = sorted(reads_of(odd), key=lambda read: read.source_index)
    parts = sorted((read for piece in pieces for read in reads_of(odd, piece)), key=lambda read: read.source_index)
    told = [(read.source_index, read.sample) for read in whole if read.sample]
    assert [(read.source_index, read.sample) for read in parts if read.sample] == told
    assert sum(read.done for read in parts) == odd.sizes()[0]
    assert sum(read.files for read in parts) == 1


def test_a_last_member_may_end_exactly_where_the_tar_is_cut(tmp_path):
    source = WebDatasetSource([write_shard(tmp_path / "0.tar", [{"__key__": f"{n}", "jpg": bytes(512)}
                                                               for n in range(40)])])  # fmt: skip
    pieces = sorted(piece for group in facts(source).groups for piece in group)
    assert all(piece.start % 1024 == 0 for piece in pieces)
    assert len(pieces) == 4
    assert len([read for piece in pieces for read in reads_of(source, piece) if read.sample]) == 40


def test_whole_tars_are_permuted_and_put_into_groups_of_about_equal_size(tmp_path, monkeypatch):
    many_shards(monkeypatch, rows=35)
    rng = np.random.default_rng(0)
    for tar in range(FEW_TARS):
        write_shard(tmp_path / f"{tar:02}.tar", numbered(range(int(rng.integers(1, 20)))))
    source = WebDatasetSource([tmp_path])
    groups = facts(source).groups
    order = [piece.tar for group in groups for piece in group]
    assert sorted(order) == [*range(FEW_TARS)] != order
    assert all(piece == (piece.tar, 0, source.sizes()[piece.tar], 0) for group in groups for piece in group)
    sizes = [sum(piece.stop for piece in group) for group in groups]
    assert len(groups) == 16
    assert max(abs(size - np.mean(sizes)) for size in sizes) <= source.sizes().max()
    assert order != [piece.tar for group in facts(source, seed=1).groups for piece in group]


def test_equal_parts_of_a_tar_are_groups_of_their_own(tmp_path):
    source = WebDatasetSource([write_shard(tmp_path / "0.tar", numbered(range(80)))])
    assert [len(group) for group in facts(source).groups] == [1] * 8


# The dataset.


def test_every_sample_is_converted_once_whether_in_parts_or_not(tmp_path):
    (tmp_path / "in").mkdir()
    for tar in range(3):
        write_shard(tmp_path / "in" / f"{tar}.tar", drawn(range(15 * tar, 15 * tar + 15)))
    summary = convert(WebDatasetSource([tmp_path / "in"]), tmp_path / "whole", LEAST, workers=2)
    dataset = Dataset(tmp_path / "whole")
    assert (summary.index.n, summary.index.mode, summary.index.tokenizer.context_length) == (45, "pairs", 8)
    assert sorted(dataset.column("caption").to_pylist()) == sorted(f"caption {n}" for n in range(45))
    indices = np.concatenate([dataset.shard(i).records()["source_index"] for i in range(dataset.shards)])
    assert sorted(indices.tolist()) == [(tar << 32) + place for tar in range(3) for place in range(15)]
    assert [*check_dataset(tmp_path / "whole")] == []
    for number in (2, 1):
        here(WebDatasetSource([tmp_path / "in"]), tmp_path / "parts", LEAST, number, 2)
    finish(WebDatasetSource([tmp_path / "in"]), tmp_path / "parts", LEAST)
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")


def test_a_group_with_more_samples_than_a_shard_gives_several(tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.pipeline.sources.webdataset.MAX_SHARD_ROWS", 4)
    many_shards(monkeypatch, rows=1000)
    source = WebDatasetSource([write_shard(tmp_path / "0.tar", drawn(range(9)))])
    index = whole_here(source, tmp_path / "out")
    assert (index.first_id, index.shards) == ((0, 4, 8, 9), ("00000", "00000.1", "00000.2"))
    assert [*check_dataset(tmp_path / "out")] == []
    assert len(set(Dataset(tmp_path / "out").column("caption").to_pylist())) == 9


def with_an_empty_group(root):
    """Tars of eight groups, one of which has no usable sample."""
    root.mkdir()
    for tar in range(8):
        samples = drawn(range(10 * tar, 10 * tar + 10))
        write_shard(root / f"{tar}.tar", [s | {"jpg": bytes(len(s["jpg"]))} for s in samples] if tar == 5 else samples)
    return WebDatasetSource([root])


def test_a_group_without_usable_samples_renumbers_no_other(tmp_path):
    settings = LEAST.model_copy(update={"max_error_rate": 0.2})
    index = whole_here(with_an_empty_group(tmp_path / "in"), tmp_path / "out", settings)
    names = [f"{part:05}" for part in range(8)]
    assert (index.n, len(index.shards)) == (70, 7)
    assert set(index.shards) < set(names)
    assert [*check_dataset(tmp_path / "out")] == []
    missing = names.index((set(names) - set(index.shards)).pop())
    assert missing < 7  # so that another follows
    assert len((tmp_path / "out" / "errors.jsonl").read_text().splitlines()) == 10


def test_captions_that_come_after_a_sample_without_any_are_ignored_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.pipeline.sources.webdataset.SAMPLED_BYTES", 1)
    monkeypatch.setattr("thermopile.pipeline.sources.webdataset.SAMPLED_TAR_BYTES", 4096)
    samples = drawn(range(30))
    write_shard(tmp_path / "0.tar", [{k: s[k] for k in ("__key__", "jpg")} if n < 20 else s
                                     for n, s in enumerate(samples)])  # fmt: skip
    index = whole_here(WebDatasetSource([tmp_path / "0.tar"]), tmp_path / "out")
    assert (index.mode, index.n, index.tokenizer) == ("images", 30, None)
    assert index.source["captions_ignored"] == 10


def test_drawn_samples_are_those_of_all_tars_by_number(tmp_path):
    samples = drawn(range(60))
    for tar in range(3):
        write_shard(tmp_path / f"{tar}.tar", samples[20 * tar : 20 * tar + 20])
    source = WebDatasetSource([tmp_path / f"{tar}.tar" for tar in range(3)])
    found = []
    for test in (False, True):
        draw = Drawn(12, None, 0, test)
        out = tmp_path / f"out-{test}"
        here(source, out, selection=draw)
        index = finish(source, out, LEAST, selection=draw).index
        keys = {int(key) for key in Dataset(out).column("key").to_pylist()}
        assert keys == set(draw(60, source.counted()[1]).tolist())
        assert index.n == len(keys)
        found.append(keys)
    assert [len(keys) for keys in found] == [48, 12]
    assert sorted(found[0] | found[1]) == [*range(60)]


# Bad samples.


def a_tar_with_bad(path, good, bad, bad_first=True):
    broken = [{"__key__": f"bad{n}", "jpg": b"x", "txt": "a"} for n in range(bad)]
    return write_shard(path, [*broken, *drawn(range(good))] if bad_first else [*drawn(range(good)), *broken])


@pytest.mark.wide
def test_the_share_of_bad_samples_holds_of_those_seen_once_there_are_many_and_of_all_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.pipeline.conversion.conversion.LEAST_SEEN", 40)
    settings = LEAST.model_copy(update={"max_error_rate": 0.1})
    few = WebDatasetSource([a_tar_with_bad(tmp_path / "few.tar", 50, 4)])  # 4 of the first 4, and of 54
    assert whole_here(few, tmp_path / "few", settings).n == 50
    many = WebDatasetSource([a_tar_with_bad(tmp_path / "many.tar", 50, 5)])
    with monkeypatch.context() as patch:
        patch.setattr("thermopile.pipeline.conversion.conversion.LEAST_SEEN", 1000)
        patch.setattr("thermopile.pipeline.sources.webdataset.WINDOW_ROWS", 1)
        assert whole_here(many, tmp_path / "many", settings).n == 50  # 5 of 55
        small = WebDatasetSource([a_tar_with_bad(tmp_path / "small.tar", 20, 5)])
        with pytest.raises(SourceError, match="at least 5 of 25 samples cannot be used"):
            whole_here(small, tmp_path / "small", settings)
    late = WebDatasetSource([a_tar_with_bad(tmp_path / "late.tar", 20, 20)])
    with pytest.raises(SourceError, match=r"at least [0-9]+ samples cannot be used; --max-error-rate allows 0.1"):
        convert(late, tmp_path / "late", settings, workers=1)


def test_the_first_bad_sample_ends_a_conversion_that_asks_for_it(tmp_path):
    source = WebDatasetSource([a_tar_with_bad(tmp_path / "0.tar", 5, 1)])
    with pytest.raises(SourceError, match=r"bad0\.jpg.*Fix it, or leave such samples out with --on-error skip"):
        whole_here(source, tmp_path / "out", LEAST.model_copy(update={"on_error": "fail"}))


def test_damaged_and_empty_tars_cost_only_what_cannot_be_read(tmp_path):
    (tmp_path / "in").mkdir()
    data = write_shard(tmp_path / "in" / "0.tar", drawn(range(20))).read_bytes()
    (tmp_path / "in" / "1.tar").write_bytes(data[: len(data) // 2])
    (tmp_path / "in" / "2.tar").touch()
    (tmp_path / "in" / "3.tar").write_text("hello" * 1000)
    source = WebDatasetSource([tmp_path / "in"])
    good = sum(not hasattr(sample, "reason") for sample in samples_of(source))
    settings = LEAST.model_copy(update={"max_error_rate": 0.5})
    assert whole_here(source, tmp_path / "out", settings).n == good
    lines = (tmp_path / "out" / "errors.jsonl").read_text()
    for uri, reason in (("1.tar", "cut short"), ("2.tar", "the file is empty"), ("3.tar", "not a tar archive")):
        (line,) = [line for line in lines.splitlines() if f'"uri": "{uri}"' in line]
        assert reason in line


# Who begins decides, and the others follow.


@pytest.fixture
def tars(tmp_path):
    (tmp_path / "in").mkdir()
    for tar in range(2):
        write_shard(tmp_path / "in" / f"{tar}.tar", drawn(range(20 * tar, 20 * tar + 20)))
    return tmp_path / "in"


def test_who_goes_on_takes_vocabulary_and_context_from_the_plan_and_cannot_name_others(tars, tmp_path):
    here(WebDatasetSource([tars]), tmp_path / "out", LEAST, 1, 2)
    unnamed = ConvertSettings(vocab_size=0, context_length=0)
    for settings, words in (
        (ConvertSettings(vocab_size=400, context_length=0), "vocab_size was 300 and is now 400"),
        (ConvertSettings(vocab_size=0, context_length=16), "context_length was 8 and is now 16"),
    ):
        with pytest.raises(DatasetExistsError, match=words):
            here(WebDatasetSource([tars]), tmp_path / "out", settings, 2, 2)
    here(WebDatasetSource([tars]), tmp_path / "out", unnamed, 2, 2)
    index = finish(WebDatasetSource([tars]), tmp_path / "out", unnamed).index
    assert (index.n, index.tokenizer.vocab_size, index.tokenizer.context_length) == (40, 300, 8)


def test_who_goes_on_may_name_what_the_sample_chose_and_nothing_else(tars, tmp_path):
    here(WebDatasetSource([tars]), tmp_path / "out", ConvertSettings(vocab_size=0, context_length=0), 1, 2)
    here(WebDatasetSource([tars]), tmp_path / "out", ConvertSettings(vocab_size=1024, context_length=32), 2, 2)
    with pytest.raises(DatasetExistsError, match="vocab_size was 1024 and is now 400"):
        here(WebDatasetSource([tars]), tmp_path / "out", ConvertSettings(vocab_size=400, context_length=32), 2, 2)


def test_vocabulary_and_context_that_nobody_names_are_chosen_by_the_sample(tars, tmp_path):
    told = []
    here(WebDatasetSource([tars]), tmp_path / "out", ConvertSettings(vocab_size=0, context_length=0), tell=told.append)
    assert told[0] == "reading a sample of 2 of 2 tars …"
    assert told[1].startswith("captions: ")
    assert "--context-length 32 cuts 0.0% of them" in told[1]


def added(tars):
    write_shard(tars / "2.tar", drawn(range(3)))


def removed(tars):
    (tars / "1.tar").unlink()


def resized(tars):
    write_shard(tars / "1.tar", drawn(range(100)))


@pytest.mark.parametrize(("change", "name"), [(added, "2.tar"), (removed, "1.tar"), (resized, "1.tar")])
def test_who_goes_on_with_other_tars_is_refused_by_their_name(tars, tmp_path, change, name):
    here(WebDatasetSource([tars]), tmp_path / "out", LEAST, 1, 2)
    change(tars)
    with pytest.raises(DatasetExistsError, match=f"{name} has changed"):
        here(WebDatasetSource([tars]), tmp_path / "out", LEAST, 2, 2)


def test_a_tar_that_changes_in_mid_conversion_ends_it(tars, tmp_path):
    def change(counts):
        (tars / "1.tar").write_bytes((tars / "1.tar").read_bytes())
        (tars / "0.tar").write_bytes((tars / "0.tar").read_bytes())

    with pytest.raises(SourceError, match=r"tar was changed .*; start it over without --resume: remove .*partial"):
        here(WebDatasetSource([tars]), tmp_path / "out", on_progress=change)


def test_parts_that_start_at_once_wait_for_the_first_which_alone_reads_a_sample(tars, tmp_path, monkeypatch):
    held = HeldSample(monkeypatch)

    def part(number):
        here(WebDatasetSource([tars]), tmp_path / "out", LEAST, number, 2, tell=held.tell)

    parts = [threading.Thread(target=part, args=(number,)) for number in (1, 2)]
    parts[0].start()
    assert held.begun.wait(30)
    parts[1].start()
    for thread in parts:
        thread.join(60)
    assert sorted(held.sampled) == [0, 1]
    assert held.was_awaited()
    assert finish(WebDatasetSource([tars]), tmp_path / "out", LEAST).index.n == 40


def test_joining_resuming_and_finishing_read_nothing_of_the_tars_for_the_plan(tars, tmp_path, monkeypatch):
    here(WebDatasetSource([tars]), tmp_path / "out", LEAST, 1, 2)
    monkeypatch.setattr(WebDatasetSource, "sampled", None)
    here(WebDatasetSource([tars]), tmp_path / "out", LEAST, 2, 2)
    assert finish(WebDatasetSource([tars]), tmp_path / "out", LEAST).index.n == 40
    assert convert(WebDatasetSource([tars]), tmp_path / "out", LEAST, resume=True).seen == 0


def test_who_was_killed_before_the_tokenizer_is_followed_by_one_who_makes_it(tars, tmp_path):
    here(WebDatasetSource([tars]), tmp_path / "whole", LEAST, 1, 2)
    here(WebDatasetSource([tars]), tmp_path / "out", LEAST, 1, 2)
    tokenizer = Partial(tmp_path / "out").dataset / "tokenizer.json"
    before = tokenizer.read_bytes()
    tokenizer.unlink()
    here(WebDatasetSource([tars]), tmp_path / "out", LEAST, 2, 2)
    assert tokenizer.read_bytes() == before


@pytest.mark.parametrize("group", [[9, 0, 512, 0], [0, 512, 1024, 1], [-1, 0, 512, 0]])
def test_a_plan_whose_groups_are_not_of_these_tars_is_damaged(tars, tmp_path, group):
    here(WebDatasetSource([tars]), tmp_path / "out", LEAST, 1, 2)
    plan = tmp_path / ".out.partial" / "plan.json"
    found = json.loads(plan.read_text())
    found["facts"]["groups"][0].append(group)
    plan.write_text(json.dumps(found))
    with pytest.raises(DatasetExistsError, match=r"plan\.json is damaged; remove it, and start over"):
        here(WebDatasetSource([tars]), tmp_path / "out", LEAST, 2, 2)


def test_a_selection_in_a_plan_unpacks_to_no_more_than_it_has_to(tars, tmp_path):
    facts = WebDatasetSource([tars]).facts(Asked(selection=Drawn(8, None, 0)))
    assert sum(bits.sum() for bits in selected_bits(facts)) == 32
    bomb = base64.b64encode(zlib.compress(bytes(50_000_000))).decode()
    assert sum(map(len, selected_bits(facts.model_copy(update={"selected": bomb})))) == 40
