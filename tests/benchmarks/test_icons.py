"""Icons with their names: which become pairs, and whose licence lets them."""

import io
import json
import tarfile

import numpy as np
import pytest

from thermopile.benchmarks.icons import (
    Icon,
    chosen,
    is_free,
    licence_table,
    listed,
    rarest_word_counts,
    split,
    svg_of,
)


@pytest.fixture
def archive(tmp_path):
    """Return a package with a free set and one that forbids commercial use."""
    path = tmp_path / "icons.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for prefix, spdx in (("free", "MIT"), ("closed", "CC-BY-NC-4.0")):
            icons = {"a-frog": {"body": "<g/>", "width": 30}, "gone": {"body": "<g/>", "hidden": True}}
            info = {"name": prefix.title(), "license": {"title": spdx, "spdx": spdx}}
            content = json.dumps({"prefix": prefix, "info": info, "width": 24, "icons": icons}).encode()
            member = tarfile.TarInfo(f"package/json/{prefix}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        tar.addfile(tarfile.TarInfo("package/readme.md"))
    return path


@pytest.mark.parametrize(
    ("spdx", "free"),
    [("MIT", True), ("CC-BY-SA-4.0", True), ("CC-BY-NC-4.0", False), ("CC-BY-ND-4.0", False), (None, False)],
)
def test_sets_without_derived_or_commercial_works_are_not_free(spdx, free):
    assert is_free({"license": {"title": "any"} | ({"spdx": spdx} if spdx else {})}) == free


def test_only_shown_icons_of_free_sets_are_listed(archive):
    (icon,) = listed(archive)
    assert icon[:2] == ("Free", "a-frog")
    assert 'viewBox="0 0 30 16"' in icon.svg


def test_every_set_is_in_the_table_of_licences(archive):
    assert "| Closed | CC-BY-NC-4.0 | 2 | left out |" in licence_table(archive)
    assert "| Free | MIT | 2 |  |" in licence_table(archive)


def test_an_icon_has_its_own_size_or_that_of_its_set():
    of_set = {"body": "<g/>", "width": 24}
    assert 'viewBox="0 0 24 16"' in svg_of(of_set)
    assert 'viewBox="0 -2 24 32"' in svg_of(of_set | {"top": -2, "height": 32})


def test_icons_are_chosen_by_a_seed_and_stay_in_order():
    icons = [Icon("set", str(number), "") for number in range(100)]
    some = chosen(icons, 10, 0)
    assert some == chosen(icons, 10, 0) == sorted(some, key=icons.index)
    assert len(some) == 10
    assert some != chosen(icons, 10, 1)
    assert chosen(icons, None, 0) == chosen(icons, 200, 0) == icons


def test_ten_whole_sets_are_held_out_and_no_icon_is_in_two_parts():
    sets = [f"set {number % 200}" for number in range(20_000)] + ["large"] * 5_000 + ["small"] * 20
    parts = split(sets)
    held_out = {sets[place] for place in parts.held_out}
    assert len(held_out) == 10
    assert held_out.isdisjoint({"large", "small"})
    assert held_out.isdisjoint(sets[place] for part in parts[:3] for place in part)
    assert sorted(place for part in parts for place in part) == list(range(len(sets)))
    assert len(parts.at_random) == len(parts.development) == round(0.02 * (len(sets) - len(parts.held_out)))
    assert all(np.array_equal(*two) for two in zip(parts, split(sets), strict=True))


def test_a_caption_is_as_rare_as_its_rarest_word():
    among = ["red cat", "Red dog", "red red bird"]
    assert rarest_word_counts(["RED", "red cat", "fish cat", ""], among).tolist() == [3, 1, 0, 0]
