"""A list of image paths and captions."""

import csv
import gzip
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.dataset import dataset

from thermopile.pipeline.errors import BadSampleError, SourceError
from thermopile.pipeline.sources import csv_rows
from thermopile.pipeline.sources.csv_source import CsvSource

COUNTED = pa.proxy_memory_pool(pa.default_memory_pool())
"""It must outlive what was allocated from it."""


@pytest.fixture
def listed(tmp_path):
    """Writes a list beside a picture, and opens it."""

    def write(text, name="list.csv", **options):
        (tmp_path / "a.jpg").write_bytes(b"pixels")
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return CsvSource(tmp_path / name, **options)

    return write


def test_paths_are_relative_to_the_list_and_captions_may_be_quoted_and_of_many_lines(listed):
    source = listed('id,title,filepath\r\n7,"one, ""two""\nthree",a.jpg\r\n')
    sample = source[0]
    assert (sample.picture, sample.caption) == (b"pixels", 'one, "two"\nthree')
    assert (sample.uri, sample.key, sample.group, source.mode) == ("a.jpg", "0", None, "pairs")


def test_captions_of_many_lines_are_whole_wherever_the_file_is_cut_into_blocks(listed, monkeypatch):
    monkeypatch.setattr(csv_rows, "ROWS_AT_ONCE", 7)
    captions = [f"line one of {n}\nline two, {n}" for n in range(30)]
    source = listed("filepath,title\n" + "".join(f'a.jpg,"{caption}"\n' for caption in captions), quoting="csv")
    assert list(source.captions(np.arange(30))) == captions


def test_paths_may_be_absolute_or_relative_to_another_folder(listed, tmp_path):
    assert listed(f"filepath,title\n{tmp_path / 'a.jpg'},x\n")[0].picture == b"pixels"
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "b.jpg").write_bytes(b"others")
    assert listed("filepath,title\nb.jpg,x\n", root=tmp_path / "images")[0].picture == b"others"


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("list.tsv", "filepath\ttitle\na.jpg\tx, y\n", {}),
        ("list.csv", "filepath\ttitle\na.jpg\tx, y\n", {}),
        ("list.txt", "filepath;title\na.jpg;x, y\n", {"separator": ";"}),
        ("list.csv", "\ufefffilepath,title\na.jpg,\"x, y\"\n", {}),
    ],
)  # fmt: skip
def test_the_separator_is_a_tab_if_the_header_has_one_and_can_be_chosen(listed, name, text, options):
    assert listed(text, name, **options)[0].caption == "x, y"


def test_other_columns_can_be_named_and_captions_left_out(listed):
    text = "path,text,class\na.jpg,x,dog\na.jpg,y,\n"
    source = listed(text, image="path", caption="text", group="class")
    assert [source[i].group for i in range(2)] == ["dog", None]
    assert source.groups().names == ("", "dog")
    images = listed(text, image="path", caption=None)
    assert (images.mode, images[0].caption, list(images.captions(np.arange(2)))) == ("images", None, [])
    assert images.groups() is None


def test_columns_that_no_sample_uses_are_counted_with_the_options_that_would_use_them(listed):
    text = ",filepath,title,label,split\n0,a.jpg,x,cat,train\n"  # pandas' index has no name
    assert str(listed(text).unused) == "; 2 × columns, such as label, split: --group NAME"
    assert str(listed(text, caption=None).unused) == (
        "; 3 × columns, such as title, label, split: --caption NAME or --group NAME"
    )
    assert str(listed(text, group="label").unused) == "; 1 × columns, such as split"


def test_a_missing_column_is_answered_with_the_columns_there_are(listed):
    with pytest.raises(SourceError, match=r"no column 'title'.*first line: 'filepath', 'text'\. .* --caption$"):
        listed("filepath,text\na.jpg,x\n")
    with pytest.raises(SourceError, match=r"no column 'filepath'.* --image$"):
        listed("path,title\na.jpg,x\n")
    with pytest.raises(SourceError, match="more than one column 'title'"):
        listed("filepath,title,title\na.jpg,x,y\n")


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("", {}, "no column 'filepath'; its columns, by its first line: none"),
        ("filepath,title", {}, "no row"),
        ("filepath,title\n", {}, "no row"),
        ("filepath,title\na.jpg,x\n", {"separator": ", "}, "not one ASCII character"),
        (b"f\0i\0l\0e\0", {}, "not text in UTF-8"),
        ('"' + "x" * 200_000 + '"\n', {}, "does not begin with column names"),
    ],
    ids=["empty", "header", "header and line end", "separator", "utf-16", "endless"],
)
def test_a_file_that_is_not_a_list_is_refused(listed, text, options, reason):
    with pytest.raises(SourceError, match=reason):
        listed(text, **options)


@pytest.mark.parametrize(
    "rows",
    [
        'a.jpg,"a dog\na.jpg,a cat\n',
        'a.jpg,"a dog\na.jpg,"a cat"\na.jpg,a cow\n',
        'a.jpg,"a dog\na.jpg,"a ""big"" cat, here"\n',
        'a.jpg,"a ""dog""\r\na.jpg,"a cat"\r\n',
    ],
)
def test_a_quote_that_is_not_closed_is_refused_with_its_line(listed, rows):
    with pytest.raises(SourceError, match=r"list\.csv: the quote opened in line 4 is not closed"):
        listed('filepath,title\na.jpg,"two\nlines"\n' + rows)


def test_by_csvs_rules_text_may_follow_a_quote_and_quotes_within_a_text_are_kept(listed):
    rows = ['a.jpg,"two\nlines, and ""quotes"""', 'a.jpg,5" pipe', 'a.jpg,"big" dog', '"a.jpg",""']
    source = listed("filepath,title\n" + "\n".join(rows), quoting="csv")
    assert [source[i].caption for i in range(3)] == ['two\nlines, and "quotes"', '5" pipe', "big dog"]
    assert len(source) == 4


def test_a_folder_or_a_pipe_is_no_list(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path, tmp_path / "pipe", tmp_path / "gone"):
        with pytest.raises(SourceError, match="is not a file"):
            CsvSource(file)


def test_unreadable_images_and_missing_captions_are_bad_samples(listed, tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    rows = [(b"gone.jpg,x", "No such file"), (b".,x", "not a regular file"), (b"pipe.jpg,x", "not a regular file"),
            (b"/dev/zero,x", "not a regular file"), (b"a.jpg, ", "no caption"),
            (b"a.jpg,caf\xe9", "not UTF-8")]  # fmt: skip
    source = listed(b"filepath,title\n" + b"\n".join(row for row, _ in rows))
    for index, (_, reason) in enumerate(rows):
        with pytest.raises(BadSampleError, match=reason):
            source[index]


def test_a_path_that_is_not_utf8_is_followed_and_shown_escaped(listed, tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.jpg", "wb") as file:
        file.write(b"pixels")
    source = listed(b"filepath,title\ncaf\xe9.jpg,x\n")
    assert (source[0].picture, source[0].uri) == (b"pixels", r"caf\xe9.jpg")


def test_rows_of_another_number_of_columns_come_last_and_are_bad_samples(listed, tmp_path):
    source = listed("filepath,title\na.jpg,x\na.jpg\na.jpg,y\na.jpg,unquoted, comma\n")
    assert [source[i].caption for i in range(2)] == ["x", "y"]
    assert len(source) == 4
    with pytest.raises(
        BadSampleError, match="row 3 of the file, counting the header as row 1, has 1 columns, the header has 2"
    ):
        source[2]
    with pytest.raises(BadSampleError, match="row 5 of the file"):
        source[3]
    assert source.uri(3) == str(tmp_path / "list.csv")
    assert list(source.captions(np.arange(4))) == ["x", "y"]


def test_a_list_that_is_malformed_throughout_is_refused(listed, monkeypatch):
    monkeypatch.setattr(csv_rows, "MAX_MALFORMED", 10)
    with pytest.raises(SourceError, match="over 10 malformed rows, the last: row 12 of the file"):
        listed("filepath,title\n" + "a.jpg\n" * 20)


def test_another_caption_gives_the_listing_another_digest(listed):
    first = listed("filepath,title\na.jpg,x\n").describe()
    assert first == listed("filepath,title\na.jpg,x\n").describe()
    assert first["listing"] != listed("filepath,title\na.jpg,y\n").describe()["listing"]


texts = st.text(st.sampled_from('ab,;"\n\r\t é'), max_size=8)


@given(st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=200), st.sampled_from([",", "\t"]),
       st.sampled_from(["\n", "\r\n", "\r"]), st.integers(1, 50), st.booleans())  # fmt: skip
def test_rows_are_those_of_pythons_own_reader_wherever_the_file_is_cut(rows, separator, line_end, piece, has_bom):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as small:
        small.setattr(csv_rows, "ROWS_AT_ONCE", piece)
        file = Path(folder) / "list.csv"
        with file.open("w", newline="", encoding="utf-8-sig" if has_bom else "utf-8") as opened:
            writer = csv.writer(opened, delimiter=separator, lineterminator=line_end)
            writer.writerows([("filepath", "title", "class"), *rows])
        read = CsvSource(file, group="class", separator=separator, quoting="csv")._rows.to_pylist()
        with file.open(newline="", encoding="utf-8-sig") as opened:  # of which a lone carriage return makes more rows
            found = [row for row in csv.reader(opened, delimiter=separator) if len(row) == 3][1:]
        expected = [tuple(text.encode() for text in (*row[:2], row[2].strip())) for row in found]
        assert [(row["image"], row["caption"], row["group"]) for row in read if row["problem"] is None] == expected


def test_rows_of_a_long_list_are_taken_without_a_copy_of_all(tmp_path):
    rows = pa.table({"caption": [b"%07d" % place * 20 for place in range(100_000)]})
    with pa.OSFile(str(tmp_path / "rows"), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=1_000)
    listed, indices = (
        pa.ipc.open_file(pa.memory_map(str(tmp_path / "rows"))).read_all(),
        np.array([99_999, 5, 5, 1_000, 0]),
    )
    usual = pa.default_memory_pool()
    pa.set_memory_pool(COUNTED)
    try:
        found = dataset(listed).take(indices)
    finally:
        pa.set_memory_pool(usual)
    assert found.equals(rows.take(indices))
    assert 0 < COUNTED.max_memory() < 100_000
    assert len(dataset(listed).take(indices[:0])) == 0


def test_a_list_that_is_changed_after_it_was_read_changes_no_sample(listed, tmp_path):
    source = listed("filepath,title\na.jpg,x\n")
    (tmp_path / "list.csv").write_text("filepath,title\na.jpg,other\n")
    assert source[0].caption == "x"


def test_a_row_or_a_field_that_is_too_long_is_refused_with_its_number(listed, monkeypatch):
    monkeypatch.setattr(csv_rows, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(csv_rows, "ROWS_AT_ONCE", 2)
    for row in ("a.jpg," + "x" * 100, 'a.jpg,"' + "two\nlines " * 20 + '"'):
        with pytest.raises(SourceError, match=r"row in line 3 has more than 100 bytes|quote opened in line 3"):
            listed(f"filepath,title\na.jpg,x\n{row}\n")


# Quoting


def captions_of(source):
    return list(source.captions(np.arange(len(source))))


@pytest.mark.parametrize(
    ("rows", "captions", "said"),
    [
        ('0.jpg\t"a\n1.jpg\tb\n2.jpg\tc"\n', ['"a', "b", 'c"'], "in line 2 holds line breaks and the separator"),
        ('0.jpg\t"a\n1.jpg\tb\n2.jpg\tc\n', ['"a', "b", "c"], "the quote opened in line 2 is not closed"),
        ('0.jpg\t"Keep calm" poster\n', ['"Keep calm" poster'], "text follows the closing quote in line 2"),
        ('0.jpg\t"a \\"big\\" dog"\n1.jpg\tb\n', ['"a \\"big\\" dog"', "b"], 'line 2 has \\" within quoted text'),
    ],
    ids=["opened and closed", "only opened", "text after a quote", "backslash"],
)  # fmt: skip
def test_a_list_that_breaks_csvs_rules_is_read_without_quoting_if_that_fits_and_this_is_said(
    listed, rows, captions, said
):
    source = listed("filepath\ttitle\n" + rows, "list.tsv")
    assert captions_of(source) == captions
    assert source.describe()["quoting"] == "none"
    (note,) = source.notes
    assert "read without quoting, since " in note
    assert said in note
    assert re.search("; 1 row, such as line 2: 0.jpg.* would differ with --quoting csv", note)


def test_where_neither_reading_fits_an_unclosed_quote_is_refused_and_the_option_reads_all_other_rows(listed):
    text = 'filepath\ttitle\n0.jpg\ta\tb\n1.jpg\t"c\n2.jpg\td\n'
    with pytest.raises(SourceError, match=r"line 3 is not closed.*--quoting none"):
        listed(text)
    source = listed(text, quoting="none")
    assert (captions_of(source), len(source), source.notes) == (['"c', "d"], 3, ())


def test_a_list_that_fits_both_ways_is_read_by_csvs_rules_and_the_rows_that_differ_are_counted(listed):
    text = 'filepath\ttitle\na.jpg\tx\na.jpg\t"y ""z"""\na.jpg\t5" pipe\na.jpg\t"w"\n'
    source = listed(text)
    assert captions_of(source) == ["x", 'y "z"', '5" pipe', "w"]
    (note,) = source.notes
    assert 'by csv\'s rules; 2 rows, such as line 3: a.jpg\t"y ""z""", would keep them with --quoting none' in note
    plain = listed(text, quoting="none")
    assert captions_of(plain) == ["x", '"y ""z"""', '5" pipe', '"w"']
    assert "quoting" not in source.describe()
    assert (listed(text, quoting="csv").notes, plain.notes) == ((), ())


@pytest.mark.parametrize(
    "text",
    [
        'filepath,title\na.jpg,x\na.jpg,5" pipe\n',
        'filepath,title\na.jpg,"x, y"\na.jpg,"z"\n',
        "filepath,title\na.jpg,x\na.jpg\n",
        '"filepath","title"\n"a.jpg","x"\n"a.jpg"\n',
    ],
    ids=["no text begins with a quote", "only csv's rules fit", "no quote at all", "quoted names"],
)
def test_nothing_is_said_where_only_one_reading_makes_sense(listed, text):
    assert listed(text).notes == ()


def test_one_malformed_row_does_not_let_quotes_take_in_other_rows(listed):
    rows = [f"{n}.jpg\tcaption {n}" for n in range(100)]
    rows[10], rows[20], rows[60] = '10.jpg\t"caption 10', "20.jpg", '60.jpg\tcaption 60"'
    source = listed("filepath\ttitle\n" + "\n".join(rows), "list.tsv")
    assert (len(captions_of(source)), len(source)) == (99, 100)
    assert "read without quoting" in source.notes[0]


def test_csvs_rules_stay_where_neither_reading_fits_and_they_lose_no_more_rows(listed):
    source = listed('filepath,title,class\na.jpg,"one, two\nthree, four",x\na.jpg,y\n')
    assert (captions_of(source), len(source)) == (["one, two\nthree, four"], 2)
    assert "by csv's rules although " in source.notes[0]
    assert "--quoting none" in source.notes[0]


@pytest.mark.parametrize("quoting", [None, "csv"])
def test_a_backslash_before_a_quote_is_refused_where_no_reading_fits(listed, quoting):
    text = 'filepath,title\na.jpg,"a \\"big\\", old dog"\n'
    with pytest.raises(SourceError, match=r'line 2 has \\" within quoted text, where csv doubles the quote'):
        listed(text, quoting=quoting)
    assert len(listed(text, quoting="none")) == 1


def test_no_row_is_lost_of_a_tsv_whose_captions_have_quotes_of_their_own(listed):
    """In CC3M, some captions begin with a quote and ten times as many end with one."""
    rng = np.random.default_rng(0)
    for _ in range(6):
        captions = [f"caption {n}" for n in range(3000)]
        for place in rng.choice(3000, 3, replace=False):
            captions[place] = '"' + captions[place]
        for place in rng.choice(3000, 30, replace=False):
            captions[place] += '"'
        source = listed("filepath\ttitle\n" + "".join(f"a.jpg\t{caption}\n" for caption in captions), "list.tsv")
        assert captions_of(source) == captions


def by_the_rules(text, separator):
    """Return the rows of a csv, and whether no quoted text has a line break and the separator; no rows if malformed."""
    rows, row, at, sound = [], [], 0, True
    while at < len(text):
        quoted = re.compile(r'"((?:[^"]|"")*)"').match(text, at)
        found = quoted or re.compile(rf"[^{separator}\r\n]*").match(text, at)
        row.append(quoted[1].replace('""', '"') if quoted else found[0])
        sound = sound and not (quoted and separator in quoted[1] and "\n" in quoted[1])
        at = found.end()
        if (row[-1][:1] == '"' and not quoted) or text[at] not in (separator, "\n"):
            return [], False
        if text[at] == "\n":
            rows.append(row)
            row = []
        at += 1
    return rows, sound


@given(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, None]), st.sampled_from([",", "\t"]), st.integers(1, 60),
       st.data())  # fmt: skip
def test_every_row_is_a_sample_or_malformed_and_captions_are_those_of_an_independent_reader(
    style, separator, piece, data
):
    fields = st.text(st.sampled_from('ab" ,é' if style is None else 'ab" ,é\n\t'), max_size=6)
    rows = data.draw(st.lists(st.tuples(st.just("a.jpg"), fields, st.just("x")), min_size=1, max_size=40))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as small:
        small.setattr(csv_rows, "ROWS_AT_ONCE", piece)
        file = Path(folder) / "list.csv"
        with file.open("w", newline="", encoding="utf-8") as opened:
            opened.write(separator.join(("filepath", "title", "class")) + "\n")
            if style is None:
                opened.writelines(separator.join(row) + "\n" for row in rows)
            else:
                csv.writer(opened, delimiter=separator, quoting=style, lineterminator="\n").writerows(rows)
        text = file.read_bytes().decode()
        quoted, is_sound = by_the_rules(text, separator)
        plain = [line.split(separator) for line in text.split("\n") if line]
        fits, fits_plain = is_sound and all(len(row) == 3 for row in quoted), all(len(row) == 3 for row in plain)
        try:
            source = CsvSource(file, separator=separator)
        except SourceError:
            assert (fits, fits_plain) == (False, False)
        else:
            is_plain = source.describe().get("quoting") == "none"
            assert is_plain == (not fits) or not (fits or fits_plain)
            if is_plain or quoted:  # else Python's csv reader alone decides what text after a quote means
                read = [row[1].strip() for row in (plain if is_plain else quoted)[1:] if len(row) == 3]
                assert len(source) == len(plain if is_plain else quoted) - 1
                assert captions_of(source) == [*filter(None, read)]
        if style is not None:
            source = CsvSource(file, separator=separator, quoting="csv")
            assert captions_of(source) == [*filter(None, (text.strip() for _, text, _ in rows))]
            assert len(source) == len(rows)


# What programs write, and paths as people list them


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("pandas.csv", b",filepath,title\n0,a.jpg,\"x, y\"\n"),
        ("pandas.tsv", b'filepath\ttitle\na.jpg\t"x, y"\n'),
        ("writer_all.csv", b'"filepath","title"\r\n"a.jpg","x, y"\r\n'),
        ("writer_nonnumeric.csv", b'"id","filepath","title"\r\n1,"a.jpg","x, y"\r\n'),
        ("excel_utf8.csv", b"\xef\xbb\xbfsep=;\r\nfilepath;title\r\na.jpg;x, y\r\n"),
        ("excel_unicode.txt", "\ufefffilepath\ttitle\r\na.jpg\t\"x, y\"\r\n".encode("utf-16-le")),
        ("excel_mac.csv", b'filepath,title\ra.jpg,"x, y"\r'),
        ("excel_empty_columns.csv", b'filepath,title,,\r\na.jpg,"x, y",,\r\n'),
        ("libreoffice.csv", b'"filepath","title"\n"a.jpg","x, y"\n'),
        ("polars.csv", b'filepath,title,note\na.jpg,"x, y",""\n'),
        ("duckdb.csv", b'filepath,title,note\na.jpg,"x, y",\n'),
        ("by_hand.csv", b'filepath , title\na.jpg , "x, y"\n'),
    ],
)  # fmt: skip
def test_lists_of_other_programs_are_read(listed, name, data):
    source = listed(data, name)
    assert (len(source), source[0].picture, source[0].caption) == (1, b"pixels", "x, y")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a cat\ta.jpg\na dog\tb.jpg\n", "seems to have no header.*--image and --caption"),
        ("a cat\thttp://x.org/1\n", "seems to have no header.*img2dataset"),
        ('{"filepath": "a.jpg", "title": "x"}\n', "is JSON"),
        ("filepath;title\na.jpg;x\n", "pass --separator ';'"),
        ("filepath|title\na.jpg|x\n", r"pass --separator '\|'"),
    ],
)
def test_a_list_of_another_kind_is_refused_with_its_cause(listed, text, said):
    with pytest.raises(SourceError, match=said):
        listed(text)


def test_a_picture_is_found_however_its_path_is_spelled(listed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    for name in ("sub/b.jpg", "caf\u00e9.jpg", "re\u0301.jpg"):
        (tmp_path / name).write_bytes(b"pixels")
    names = ["sub\\b.jpg", "cafe\u0301.jpg", "r\u00e9.jpg", "~/a.jpg", " a.jpg ", f"file://{tmp_path}/caf%C3%A9.jpg"]
    source = listed("filepath,title\n" + "".join(f"{name},x\n" for name in names))
    source.refuse_wrong_root()
    assert [source[i].picture for i in range(len(names))] == [b"pixels"] * len(names)
    assert [source.uri(i) for i in range(len(names))] == names


def test_a_picture_that_is_not_there_is_answered_with_the_likely_cause(listed, tmp_path):
    (tmp_path / "b.JPG").write_bytes(b"others")
    for name, said in [("b.jpg", "b.JPG exists"), ("no\\b.jpg", "backslashes"), ("http://x.org/1.jpg", "img2dataset")]:
        source = listed(f"filepath,title\n{name},x\n")
        with pytest.raises(SourceError, match=said):
            source.refuse_wrong_root()
        with pytest.raises(BadSampleError, match=said):
            source[0]


@pytest.mark.parametrize(
    ("name", "data", "options", "captions"),
    [
        ("cc12m.tsv", b'a.jpg\tx "y"\n', {}, "seems to have no header"),
        ("laion.csv", b"URL,TEXT\nhttp://x.org/1.jpg,x\n", {}, r"no column 'filepath'.*'URL', 'TEXT'.*--image"),
        ("flickr30k.csv", b"image_name| comment_number| comment\na.jpg| 0| x, y .\n",
         {"image": "image_name", "caption": "comment", "separator": "|"}, ["x, y ."]),
        ("flickr8k.txt", b"image,caption\na.jpg,x y .\na.jpg,y .\n",
         {"image": "image", "caption": "caption"}, ["x y .", "y ."]),
        ("windows.csv", "filepath,title\r\na.jpg,café\r\n\r\na.jpg,“x”\r\n".encode(), {}, ["café", "“x”"]),
        ("latin1.csv", b"filepath,title\na.jpg,caf\xe9\na.jpg,tea\n", {}, ["tea"]),
        ("quote_alone.csv", b'filepath,title\na.jpg,"""x"""\n', {}, ['"x"']),
        ("tab_in_quotes.tsv", b'filepath\ttitle\na.jpg\t"x\ty"\n', {}, ["x\ty"]),
        ("inches.tsv", b'filepath\ttitle\na.jpg\t6" x 4"\na.jpg\t"6" x 4"\n', {}, ['6" x 4"', '"6" x 4"']),
        ("cr_in_quotes.csv", b'filepath,title\na.jpg,"x\r\ny"\na.jpg,z\n', {}, ["x\r\ny", "z"]),
        ("array.json", b'[{"filepath": "a.jpg", "title": "x"}]', {}, "is JSON"),
        ("pairs.csv.gz", gzip.compress(b"filepath,title\na.jpg,x\n", mtime=0), {}, "is compressed by gzip; unpack it"),
        ("utf16_big.csv", "\ufefffilepath,title\na.jpg,é\n".encode("utf-16-be"), {}, ["é"]),
        ("zero_byte.csv", b"filepath,title\na.jpg,x\0y\n", {}, ["x\0y"]),
        ("empty_captions.csv", b'filepath,title\na.jpg,\na.jpg,""\na.jpg,x\n', {}, ["x"]),
    ],
)  # fmt: skip
def test_lists_of_published_sets_are_read_or_refused_with_the_cause(listed, name, data, options, captions):
    if isinstance(captions, str):
        with pytest.raises(SourceError, match=captions):
            listed(data, name, **options)
    else:
        assert captions_of(listed(data, name, **options)) == captions
