"""Icons with their names: which become pairs, and whose licence lets them."""

import io
import json
import tarfile

import pytest

from thermopile.benchmarks.icons import Icon, chosen, is_free, licence_table, listed, svg_of


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
