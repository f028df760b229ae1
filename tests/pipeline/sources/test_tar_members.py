"""Where the members of a tar lie, checked against tars that Python's tarfile and GNU tar write."""

import io
import shutil
import subprocess
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.pipeline.sources.tar_members import BrokenTarError, members_of

NAMES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1, max_size=300).filter(
    lambda name: name.strip("/") == name
)
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def listed(data):
    return list(members_of(lambda offset, size: data[offset : offset + size], len(data)))


def contents(data):
    found = (member for member in listed(data) if not member.is_link)
    return {member.name: data[member.offset : member.offset + member.size] for member in found}


def tar(files, form=tarfile.PAX_FORMAT, others=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for member in others:
            archive.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1234.5
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@settings(max_examples=40)
@given(st.dictionaries(NAMES, st.binary(max_size=1200), max_size=5), st.sampled_from(["gnu", "pax"]))
def test_every_regular_file_is_found_under_its_name_however_long(files, form):
    assert contents(tar(files, FORMATS[form])) == {name.encode(): data for name, data in files.items()}


def test_a_name_in_two_fields_is_put_together():
    name = "folder/" * 20 + "picture.jpg"
    assert contents(tar({name: b"pixels"}, tarfile.USTAR_FORMAT)) == {name.encode(): b"pixels"}


@pytest.mark.parametrize("form", FORMATS)
def test_folders_and_devices_are_no_files_and_links_are_empty_whatever_size_they_tell(form):
    others = []
    for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        member = tarfile.TarInfo(f"other {kind!r}")
        member.type, member.linkname, member.size = kind, "/etc/passwd", 5000
        others.append(member)
    data = tar({"a.jpg": b"pixels"}, FORMATS[form], others)
    assert contents(data) == {b"a.jpg": b"pixels"}
    links = [f"other {kind!r}".encode() for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)]
    assert [(member.name, member.size) for member in listed(data) if member.is_link] == [(name, 0) for name in links]


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
@pytest.mark.parametrize("form", ["v7", "ustar", "gnu", "posix"])
def test_sparse_files_are_passed_over_and_what_follows_them_is_found(tmp_path, form):
    for name, size in (("a-sparse", 1 << 20), ("z-sparse", 1 << 19)):
        with (tmp_path / name).open("wb") as file:
            for hole in range(0, size, 1 << 15):  # more holes than one header can tell of
                file.seek(hole)
                file.write(b"x")
            file.truncate(size)
    for name in ("b.jpg", "c.jpg"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    sparse = [] if form in ("v7", "ustar") else ["--sparse"]
    subprocess.run(["tar", f"--format={form}", *sparse, "-cf", "all.tar", "a-sparse", "b.jpg", "z-sparse", "c.jpg"],
                   cwd=tmp_path, check=True)  # fmt: skip
    found = contents((tmp_path / "all.tar").read_bytes())
    assert {name: found[name] for name in (b"b.jpg", b"c.jpg")} == {b"b.jpg": b"b.jpg" * 100, b"c.jpg": b"c.jpg" * 100}
    assert len(found) == (2 if sparse else 4)


FILES = {f"{number}.jpg": bytes([number]) * 700 for number in range(4)}
WHOLE = tar(FILES)
MEMBERS = listed(WHOLE)
END_MARK = MEMBERS[-1].offset + 1024


@given(st.integers(1, END_MARK))
def test_a_tar_cut_anywhere_gives_the_members_before_the_cut_and_says_that_it_is_cut(length):
    data, found = WHOLE[:length], []
    members = members_of(lambda offset, size: data[offset : offset + size], length)
    with pytest.raises(BrokenTarError, match="cut short"):
        found.extend(members)
    assert found == [member for member in MEMBERS if member.offset + member.size <= length]


def test_a_size_above_eight_gigabytes_is_read_and_one_below_zero_refused():
    large = tarfile.TarInfo("large")
    large.size = 9 << 30
    header = large.tobuf(tarfile.GNU_FORMAT)
    members = members_of(lambda offset, size: header if offset == 0 else bytes(512), 10 << 30)
    assert [member.size for member in members] == [9 << 30]
    negative = bytearray(header)
    negative[124:136] = b"-0000000001\0"
    with pytest.raises(BrokenTarError, match="not a tar archive"):
        listed(with_checksum(negative))


def test_a_header_that_differs_from_its_checksum_is_damaged():
    data = bytearray(WHOLE)
    second = WHOLE.index(b"1.jpg")
    data[second] ^= 1
    members = members_of(lambda offset, size: bytes(data[offset : offset + size]), len(data))
    assert next(members) == MEMBERS[0]
    with pytest.raises(BrokenTarError, match=r"its header at byte [\d,]+ is damaged"):
        next(members)


def with_checksum(header):
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_tar_changed_anywhere_gives_members_inside_it_or_is_said_to_be_broken(place, change):
    data = bytearray(WHOLE)
    data[place] ^= change
    try:
        found = listed(bytes(data))
    except BrokenTarError:
        return
    assert all(0 < member.offset <= member.offset + member.size <= len(data) for member in found)


@pytest.mark.parametrize("record", [b"0 path=a\n", b"-5 path=a\n", b"5\n", b"x y=z\n", b"11 size=-9\n",
                                    b"5011 size=%s\n" % (b"9" * 5000)])  # fmt: skip
def test_a_damaged_pax_header_is_broken_and_not_read_for_ever(record):
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(record)
    data = header.tobuf(tarfile.USTAR_FORMAT) + record + bytes(-len(record) % 512) + WHOLE
    with pytest.raises(BrokenTarError, match="its header at byte 0 is damaged"):
        listed(data)


def test_a_header_that_asks_for_gigabytes_is_refused_unread():
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 7 << 30
    asked = []

    def read_at(offset, size):
        asked.append(size)
        return header.tobuf(tarfile.USTAR_FORMAT) if offset == 0 else bytes(size)

    with pytest.raises(BrokenTarError, match="above 1,048,576 bytes"):
        list(members_of(read_at, 8 << 30))
    assert max(asked) <= 1 << 20
