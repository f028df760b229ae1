"""`thermopile convert` and `thermopile convert check`: what they say, and the datasets that options make."""

import io
import json
import os
import re
import shlex
import shutil
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import thermopile
from thermopile.pipeline.errors import SourceError
from thermopile.pipeline.opening import Dataset
from thermopile.tools.cli import main

from support.cli import answer, assert_one_line, cli, succeed
from support.pictures import draw
from support.tars import write_members

run = partial(cli, "convert")


def converted(*arguments):
    result = succeed("convert", *arguments, "--workers", 1)
    return result


def jpeg(picture):
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Three classes of 40, 20 and 4 pictures."""
    root = tmp_path_factory.mktemp("classes") / "in"
    for name, size in (("ant", 40), ("bee", 20), ("cow", 4)):
        (root / name).mkdir(parents=True)
        for i in range(size):
            draw(size + i).save(root / name / f"{i:02d}.jpg")
    return root


def sizes(path):
    names = Dataset(path).column("group").to_pylist()
    return {name: names.count(name) for name in sorted(set(names))}


def test_a_conversion_is_announced_and_summed_up(tmp_path, classes):
    result = converted("folder", classes, tmp_path / "out")
    assert f"out: 64 samples of 3 classes, {sum(f.stat().st_size for f in classes.rglob('*.jpg')) / 1e3:.1f} kB in the source, about " in result.stderr  # fmt: skip # noqa: E501
    assert "converting out: 64/64" in result.stderr
    assert f"{tmp_path / 'out'}: 64 samples of 3 classes without captions in 1 shard, 4.2 MB; " in result.stdout
    assert result.stdout.endswith(
        f"next: thermopile show {tmp_path / 'out'} --out out.html; "
        f"thermopile train --preset small --data {tmp_path / 'out'} --out runs/out --set data.image_size=32\n"
    )


def test_the_preset_for_few_samples_is_named_for_few_samples_alone(tmp_path, classes, monkeypatch):
    monkeypatch.setattr("thermopile.tools.convert.FEW_SAMPLES", 64)
    assert f"; thermopile train --data {tmp_path / 'out'} " in converted("folder", classes, tmp_path / "out").stdout


@pytest.mark.parametrize(("enough", "words"), [(30, " --set data.planted=0.01\n"), (31, "=32\n")])
def test_planting_captions_is_suggested_for_enough_pairs_alone(tmp_path, classes, monkeypatch, enough, words):
    pictures = sorted(classes.rglob("*.jpg"))[:30]
    lines = ["filepath,title", *(f"{picture},picture {number}" for number, picture in enumerate(pictures))]
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    monkeypatch.setattr("thermopile.tools.convert.FEW_SAMPLES", enough)
    assert converted("csv", tmp_path / "pairs.csv", tmp_path / "out", "--caption", "title").stdout.endswith(words)
    assert "planted" not in converted("folder", classes, tmp_path / "pictures").stdout


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, pairs_dataset):
    """A list of 20 pairs of larger pictures, and a folder for a model with a tokenizer."""
    root = tmp_path_factory.mktemp("pairs")
    (root / "model").mkdir()
    shutil.copy(pairs_dataset.tokenizer_path, root / "model" / "tokenizer.json")
    for number in range(20):
        draw(number, 100, 120).save(root / f"{number}.jpg")
    lines = ["filepath,title", *(f"{number}.jpg,picture {number}" for number in range(20))]
    (root / "pairs.csv").write_text("\n".join(lines))
    return root


@pytest.mark.parametrize(
    ("config", "shown", "trained"),
    [
        ('{"model_type": "clip", "vision_config": {"image_size": 48}, "text_config": {}}', " --image-size 48",
         " --set model.image.name=hf:{0}/model --set model.text.name=hf:{0}/model --set data.image_size=48"),
        ('{"model_type": "siglip", "vision_config": {}}', " --image-size 224",
         " --set model.image.name=hf:{0}/model --set model.text.name=hf:{0}/model --set data.image_size=224"),
        ('{"model_type": "distilbert"}', " --image-size 64",
         " --set model.text.name=hf:{0}/model --set data.image_size=64"),
        ("{}", " --image-size 64", None),
        ('{"model_type": "clip", "vision_config": 3}', " --image-size 64", None),
    ],
)  # fmt: skip
def test_the_next_command_keeps_the_encoders_of_the_model_whose_tokenizer_was_used(pairs, config, shown, trained):
    (pairs / "model" / "config.json").write_text(config)
    out, model = pairs / "out", ("--context-length", 16, "--resume")
    done = converted("csv", pairs / "pairs.csv", out, "--tokenizer", f"hf:{pairs}/model", *model)
    train = (
        f"--data {out} --out runs/out{trained.format(pairs)}"
        if trained
        else f"--preset small --data {out} --out runs/out"
    )
    assert done.stdout.endswith(f"next: thermopile show {out} --out out.html{shown}; thermopile train {train}\n")


def test_the_next_command_names_encoders_for_pictures_that_the_built_in_ones_are_not_for(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.tools.convert.FEW_SAMPLES", 20)
    said = converted("folder", pairs, tmp_path / "out").stdout
    assert said.endswith(
        f"thermopile train --data {tmp_path / 'out'} --out runs/out --set model.image.name=hf:resnet-18\n"
    )


def test_the_preset_of_the_glyphs_is_not_named_for_fewer_than_its_batch(tmp_path):
    assert "train --preset small --data " in converted("glyphs", tmp_path / "out", "--limit", 20).stdout


def test_the_next_commands_are_those_of_a_shell_for_a_path_with_blanks(tmp_path, classes):
    said = converted("folder", classes, tmp_path / "my pictures").stdout.splitlines()[-1]
    show, train = map(shlex.split, said.removeprefix("next: ").split("; "))
    assert show == ["thermopile", "show", str(tmp_path / "my pictures"), "--out", "my pictures.html"]
    assert train[4:8] == ["--data", str(tmp_path / "my pictures"), "--out", "runs/my pictures"]


@pytest.mark.wide
def test_glyphs_have_a_preset_of_their_own(tmp_path):
    assert "; thermopile train --preset glyphs --data " in converted("glyphs", tmp_path / "glyphs", "--resume").stdout


def test_a_disk_that_is_too_small_gives_a_warning(tmp_path, classes, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=2_000_000))
    assert re.search(
        rf"Warning: this needs about 4\.\d MB, but only 2\.0 MB are free in {tmp_path}; free some space",
        converted("folder", classes, tmp_path / "out").stderr,
    )


def test_files_and_folders_that_go_while_sizes_are_added_up_are_no_error(tmp_path, monkeypatch):
    """Another process's conversion replaces files meanwhile."""
    (tmp_path / "stays").write_bytes(bytes(7))
    (tmp_path / "goes").write_bytes(bytes(5))
    (tmp_path / "folder" / "within").mkdir(parents=True)
    lstat = os.lstat

    def lstat_and_go(path, **options):
        found = lstat(path, **options)
        if Path(path).name == "goes":
            os.unlink(path)
            shutil.rmtree(tmp_path / "folder")
        return found

    monkeypatch.setattr(os, "lstat", lstat_and_go)
    assert tmp_path.size_below() in (7, 12)
    assert tmp_path.size_below() == 7


def test_links_are_not_followed_when_sizes_are_added_up(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "large").write_bytes(bytes(1000))
    (tmp_path / "counted").mkdir()
    (tmp_path / "counted" / "file").symlink_to(elsewhere / "large")
    (tmp_path / "counted" / "folder").symlink_to(elsewhere)
    (tmp_path / "counted" / "own").write_bytes(bytes(3))
    assert (tmp_path / "counted").size_below() == 3


def test_a_folder_with_corrupt_pictures_is_converted_without_them(tmp_path, classes):
    folder = shutil.copytree(classes, tmp_path / "in")
    (folder / "bad.png").write_bytes((folder / "ant" / "00.jpg").read_bytes()[:60])
    (folder / "empty.png").write_bytes(b"")
    (folder / "also empty.png").write_bytes(b"")
    result = converted("folder", folder, tmp_path / "out")
    assert "64 samples" in result.stdout
    assert f"3 left out, see {tmp_path / 'out' / 'errors.jsonl'}: 2 × the file is empty; 1 × " in result.stdout
    left_out = [json.loads(line)["uri"] for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert sorted(left_out) == ["also empty.png", "bad.png", "empty.png"]


def test_too_many_corrupt_pictures_are_a_failure_that_says_how_to_go_on(tmp_path, classes):
    folder = shutil.copytree(classes, tmp_path / "in")
    for i in range(8):
        (folder / f"{i}.png").write_bytes(b"")
    arguments = ("folder", folder, tmp_path / "out", "--workers", 1)
    assert_one_line(
        run(*arguments), 1, "8 of 72 samples", "--max-error-rate allows 0.1", "the file is empty", "--resume"
    )
    resumed = succeed("convert", *arguments, "--resume", "--max-error-rate", 0.2)
    assert "left out, see" in resumed.stdout
    assert_one_line(run("folder", folder, tmp_path / "strict", "--on-error", "fail"), 1, ".png': the file is empty")


def test_a_test_set_is_held_out_of_every_class_alike_before_a_long_tail_is_cut(tmp_path, classes):
    converted("folder", classes, tmp_path / "out", "--holdout", 9, "--longtail", 16)
    assert sizes(tmp_path / "out-test") == {"ant": 3, "bee": 3, "cow": 3}
    assert sizes(tmp_path / "out") == {"ant": 37, "bee": 9, "cow": 1}  # 37, 37 / 4; of 37 / 16 = 2 one is left
    both = [set(Dataset(tmp_path / name).column("uri").to_pylist()) for name in ("out", "out-test")]
    assert not both[0] & both[1]


def test_a_long_tail_is_told_by_its_classes_from_the_head_to_the_tail(tmp_path, classes):
    done = converted("folder", classes, tmp_path / "out", "--longtail", 4)
    assert "  long tail: 3 classes; the head is ant 40, bee 20, cow 4, the tail\n" in done.stdout


@pytest.mark.wide
def test_classes_of_a_users_source_are_balanced_and_cut(tmp_path):
    done = converted("support.own_code:Squares", 100, tmp_path / "out", "--holdout", 9, "--longtail", 2)
    assert sizes(tmp_path / "out-test") == {"a": 3, "b": 3, "c": 3}
    assert sizes(tmp_path / "out") == {"a": 7, "b": 17, "c": 33}  # of 7, 17 and 67; the head would be a, of 67
    assert "out: 57 samples of 3 classes" in done.stdout
    assert "the head is c 33, b 17, a 7, the tail\n" in done.stdout


def test_a_defect_of_a_users_source_is_said_to_be_of_it(tmp_path):
    refused = run("support.own_code:Defect", 20, tmp_path / "out", "--workers", 1)
    assert_one_line(refused, 1, "TypeError", "raised while support.own_code:Defect was read")


@pytest.mark.parametrize("samples", [1, 15])
def test_fewer_than_sixteen_samples_are_said_to_be_too_few_to_train_on(tmp_path, samples):
    out, few = tmp_path / "out", f"{samples} sample{'s' * (samples > 1)}, but training takes at least 16; add samples"
    assert converted("support.own_code:Squares", samples, out).stdout.endswith(f"next: {out} has {few}\n")
    refused = cli("train", "--data", out, "--out", tmp_path / "run", "--preset", "small")
    assert_one_line(refused, 2, f"{out}: {few}")


@pytest.mark.parametrize("share", ["0", "1.5", "-3", "nan", "many"])
def test_an_invalid_share_is_wrong_usage(tmp_path, classes, share):
    assert_one_line(run("folder", classes, tmp_path / "out", "--holdout", share), 2, "--holdout")


def test_a_long_tail_of_a_source_without_classes_is_wrong_usage(tmp_path, classes):
    assert_one_line(run("folder", classes / "ant", tmp_path / "out", "--longtail", 10), 2, "--longtail", "has none")
    assert not (tmp_path / "out").exists()


CAPTIONS = [f"a picture with the number {i} on it" for i in range(12)]


def write_csv(folder, pictures):
    lines = ["file,text,kind"]
    for i, picture in enumerate(pictures):
        (folder / f"{i}.jpg").write_bytes(picture)
        lines.append(f"{i}.jpg,{CAPTIONS[i]},{'ab'[i % 2]}")
    (folder / "list.csv").write_text("\n".join(lines))
    return ["csv", folder / "list.csv"], ["--image", "file", "--caption", "text", "--group", "kind"]


def write_tars(folder, pictures):
    for shard in (0, 1):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for i in range(6 * shard, 6 * shard + 6):
                members = {
                    "jpg": pictures[i],
                    "json": json.dumps({"say": CAPTIONS[i]}).encode(),
                    "cls": b"ab"[i % 2 :][:1],
                }
                for suffix, data in members.items():
                    member = tarfile.TarInfo(f"{i:02d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return ["webdataset", folder / "1.tar", folder / "0.tar"], ["--caption", "json:say"]


def write_parquet(folder, pictures):
    table = {
        "photo": [{"bytes": picture, "path": None} for picture in pictures],
        "title": CAPTIONS,
        "label": [*"ab"] * 6,
    }
    pq.write_table(pa.table(table), folder / "train.parquet", row_group_size=5)
    return ["parquet", folder], ["--image", "photo", "--caption", "title"]


def test_samples_without_a_class_and_reasons_that_differ_in_a_number_are_counted(tmp_path):
    rows = "".join(f"{number}.jpg,x,{'ant' * (number < 3)}\n" for number in range(5))
    for number in range(3):
        draw(number).save(tmp_path / f"{number}.jpg")
    (tmp_path / "list.csv").write_text(f"filepath,title,kind\n{rows}5.jpg\n", "utf-8")
    done = converted("csv", tmp_path / "list.csv", tmp_path / "out", "--group", "kind", "--max-error-rate", 1)
    assert "out: 6 samples of 1 class, 3 of them without a class, " in done.stderr
    assert "out: 3 samples of 1 class in 1 shard" in done.stdout
    assert "without a class" not in done.stdout  # their pictures are missing too
    assert "1 × row N of the file, counting the header as row N, has N columns, the header has N\n" in done.stdout


@pytest.mark.parametrize(
    "write", [write_csv, *(pytest.param(write, marks=pytest.mark.wide) for write in (write_tars, write_parquet))]
)
def test_names_of_columns_and_members_are_options(tmp_path, write):
    (tmp_path / "in").mkdir()
    pictures = [jpeg(draw(i)) for i in range(12)]
    source, options = write(tmp_path / "in", pictures)
    result = converted(*source, tmp_path / "out", *options, "--context-length", 8, "--holdout", 4)
    classes = "" if write is write_tars else " of 2 classes"  # nobody lists the samples of tars
    assert f": 8 samples{classes} in 1 shard" in result.stdout
    assert "8 captions were truncated to 8 tokens" in result.stdout
    assert "--context-length 8 cuts 100.0% of them; a longer" in result.stderr
    for name, count in (("out", 8), ("out-test", 4)):
        dataset = Dataset(tmp_path / name)
        for row in dataset.rows(range(count)):
            number = CAPTIONS.index(row["caption"])
            assert dataset.jpeg(row["sample_id"]) == pictures[number]  # byte for byte
            assert row["group"] == "ab"[number % 2]
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("out", "out-test")]
    assert tokenizers[0] == tokenizers[1]


def test_the_summary_counts_the_captions_of_samples_with_several_and_show_draws_them(tmp_path):
    captions = [[f"picture {i}", f"number {i}", "a picture"][: 1 + i % 3] for i in range(12)]
    table = pa.table({"image": [jpeg(draw(i)) for i in range(12)], "caption": captions})
    pq.write_table(table, tmp_path / "in.parquet")
    result = converted("parquet", tmp_path / "in.parquet", tmp_path / "out")
    assert ": 12 samples with 24 captions, at most 3 each, in 1 shard, " in result.stdout
    succeed("show", tmp_path / "out", "--out", tmp_path / "sheet.html")


@pytest.mark.wide
def test_a_conversion_of_tars_says_what_it_reads_and_counts_tars_and_bytes(tmp_path):
    (tmp_path / "in").mkdir()
    source, options = write_tars(tmp_path / "in", [jpeg(draw(i)) for i in range(12)])
    lines = converted(*source, tmp_path / "out", *options, "--holdout", 4).stderr.splitlines()
    kilobytes = sum(path.stat().st_size for path in (tmp_path / "in").iterdir()) / 1000
    for words in (
        f"out: 2 tars, {kilobytes:.1f} kB in the source, about 4.2 MB in ",
        f"out-test: 2 tars, {kilobytes:.1f} kB in the source, about 4.2 MB in ",
        "reading a sample of 2 of 2 tars …",
        "counting samples and classes of 2 of 2 tars …",
    ):
        assert sum(line.startswith(words) for line in lines) == 1, (words, lines)
    for dataset in ("out", "out-test"):  # a slow machine says how far it is more than once
        assert any(line.startswith(f"converting {dataset}, MB: 1/1 2 of 2 tars, ") for line in lines), lines


@pytest.mark.parametrize("option", ["--caption", "--group"])
@pytest.mark.parametrize(("write", "name"), [(write_tars, "say"), (write_parquet, "say;tell")])
def test_a_caption_or_class_that_was_asked_for_and_that_no_sample_has_is_refused(tmp_path, write, name, option):
    (tmp_path / "in").mkdir()
    source, _ = write(tmp_path / "in", [jpeg(draw(i)) for i in range(12)])
    result = run(*source, tmp_path / "out", "--image", "photo;jpg", option, name)
    assert_one_line(result, 1, f"{option} '{name}' matches no")
    assert os.listdir(tmp_path) == ["in"]


def test_a_caption_that_was_not_asked_for_need_not_be_there(tmp_path):
    (tmp_path / "in").mkdir()
    source, _ = write_tars(tmp_path / "in", [jpeg(draw(i)) for i in range(12)])
    converted(*source, tmp_path / "out", "--group", "")
    assert Dataset(tmp_path / "out").index.mode == "images"


def test_control_characters_in_an_untrusted_file_are_escaped_in_the_error(tmp_path):
    pq.write_table(pa.table({"photo": [{"\x1b[31mred": 1}]}), tmp_path / "in.parquet")
    result = CliRunner().invoke(
        main, ["convert", "parquet", str(tmp_path / "in.parquet"), str(tmp_path / "out")], color=True
    )
    assert_one_line(result, 1, "struct<[U+001B][31mred: int64>")


def test_the_test_batch_of_cifar_becomes_a_dataset_of_its_own_and_is_not_cut(tmp_path):
    (tmp_path / "in").mkdir()
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    for seed, name in enumerate(names):
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 3073), np.uint8)
        pixels[:, 0] = np.arange(40) % 10
        (tmp_path / "in" / name).write_bytes(pixels.tobytes())
    (tmp_path / "in" / "batches.meta.txt").write_text("\n".join(f"kind {i}" for i in range(10)))
    converted("cifar", tmp_path / "in", tmp_path / "out", "--longtail", 20)
    assert list(sizes(tmp_path / "out").values()) == [int(20 * 20 ** (-k / 9) + 1e-9) for k in range(10)]
    assert sizes(tmp_path / "out-test") == {f"kind {i}": 4 for i in range(10)}


def test_ids_are_the_same_with_the_classes_of_cifar_100_and_with_its_superclasses(tmp_path):
    (tmp_path / "in").mkdir()
    for seed, name in enumerate(("train.bin", "test.bin")):
        records = np.random.default_rng(seed).integers(0, 256, (40, 3074), np.uint8)
        records[:, 0], records[:, 1] = np.arange(40) % 20, np.arange(40)
        (tmp_path / "in" / name).write_bytes(records.tobytes())
    for name, count in (("fine", 40), ("coarse", 20)):
        lines = "\n".join(f"{name} {i}" for i in range(count))
        (tmp_path / "in" / f"{name}_label_names.txt").write_text(lines)
    converted("cifar", tmp_path / "in", tmp_path / "fine")
    converted("cifar", tmp_path / "in", tmp_path / "coarse", "--superclasses")
    for ending in ("", "-test"):
        fine, coarse = (
            Dataset(tmp_path / f"{name}{ending}").column("group").to_pylist() for name in ("fine", "coarse")
        )
        assert [f"coarse {int(name.split()[1]) % 20}" for name in fine] == coarse


def test_the_test_split_of_karpathys_list_becomes_a_dataset_of_its_own_with_all_captions(tmp_path):
    (tmp_path / "in").mkdir()
    images = []
    for i in range(40):
        draw(i).save(tmp_path / "in" / f"{i}.jpg")
        sentences = [{"raw": f"caption {place} of picture {i}"} for place in range(5)]
        images.append({"filename": f"{i}.jpg", "split": ("train", "test")[i % 2], "sentences": sentences})
    (tmp_path / "list.json").write_text(json.dumps({"images": images}))
    listed = ("karpathy", tmp_path / "list.json", tmp_path / "out")
    assert_one_line(run(*listed), 1, "none of 20 pictures tried exists", "--root")
    result = converted(*listed, "--root", tmp_path / "in")
    for path, parity in ((tmp_path / "out", 0), (tmp_path / "out-test", 1)):
        dataset = Dataset(path)
        assert f"{path}: 20 samples with 100 captions, at most 5 each, in 1 shard" in result.stdout
        assert {int(uri.removesuffix(".jpg")) % 2 for uri in dataset.column("uri").to_pylist()} == {parity}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "out-test" / "tokenizer.json").read_bytes()


def test_arrays_that_are_no_pictures_end_with_one_line_and_leave_nothing(tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((20, 8, 8, 3)))
    result = run("arrays", tmp_path / "images.npy", tmp_path / "out")
    assert_one_line(result, 1, "images.npy is float64 (20, 8, 8, 3); pictures are uint8, n × H × W or n × H × W × 3")
    assert [path.name for path in tmp_path.iterdir()] == ["images.npy"]


def test_python_reads_arrays_and_karpathys_list_by_the_ends_of_their_names(tmp_path):
    np.savez(tmp_path / "pictures.npz", x=np.stack([np.asarray(draw(i)) for i in range(16)]), y=np.arange(16) % 2)
    dataset = thermopile.convert(tmp_path / "pictures.npz", tmp_path / "out")
    assert sorted(dataset.column("group").to_pylist()) == ["0"] * 8 + ["1"] * 8
    (tmp_path / "dataset_coco.json").write_text("{}")
    with pytest.raises(SourceError, match="is not in the form"):
        thermopile.convert(tmp_path / "dataset_coco.json", tmp_path / "coco")


def test_the_users_own_tokenizer_is_used(tmp_path, pairs_dataset):
    (tmp_path / "in").mkdir()
    source, options = write_csv(tmp_path / "in", [jpeg(draw(i)) for i in range(12)])
    converted(*source, tmp_path / "out", *options, "--tokenizer", pairs_dataset.tokenizer_path)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == pairs_dataset.tokenizer_path.read_bytes()


def test_a_missing_folder_is_wrong_usage(tmp_path):
    assert_one_line(run("folder", tmp_path / "nowhere", tmp_path / "out"), 2, "nowhere", "does not exist")


def test_what_must_be_local_says_so_of_an_address(tmp_path, images_dataset):
    words = "s3://bucket/x is an address, and this takes local paths only"
    assert_one_line(run("cifar", "s3://bucket/x", tmp_path / "out"), 2, words)
    select = ("--select", "s3://bucket/x")
    assert_one_line(run("dataset", images_dataset.path, tmp_path / "out", *select), 2, words)


def test_an_empty_folder_is_a_failure_that_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    assert_one_line(run("folder", tmp_path / "empty", tmp_path / "out"), 1, "holds no picture")
    assert os.listdir(tmp_path) == ["empty"]


def test_an_output_that_exists_is_refused(images_dataset, picture_folder):
    result = run("folder", picture_folder, images_dataset.path)
    assert_one_line(result, 2, str(images_dataset.path), "exists", "--overwrite")


def test_glyphs_are_refused_before_any_work_where_only_the_test_set_exists(tmp_path):
    (tmp_path / "glyphs-test").mkdir()
    assert_one_line(run("glyphs", tmp_path / "glyphs"), 2, "glyphs-test exists")
    assert os.listdir(tmp_path) == ["glyphs-test"]


def test_a_picture_folder_is_never_overwritten_by_its_own_dataset(tmp_path):
    for name in ("a.png", "b.png"):
        draw(1).save(tmp_path / name)
    (tmp_path / "dataset.json").write_text('{"labels": null}')
    assert_one_line(run("folder", tmp_path, tmp_path, "--overwrite"), 2, "contains the source")
    assert_one_line(run("glyphs", tmp_path, "--overwrite"), 2, "replaces only datasets")
    assert sorted(os.listdir(tmp_path)) == ["a.png", "b.png", "dataset.json"]


def test_a_job_that_is_started_again_with_resume_says_that_nothing_is_left(tmp_path, classes):
    arguments = ("folder", classes, tmp_path / "out", "--holdout", 0.1, "--resume")
    converted(*arguments)
    shutil.rmtree(tmp_path / "out-test")
    lines = converted(*arguments).stdout.splitlines()
    assert "out is complete: 58 samples of 3 classes" in lines[0]
    assert "out-test: 6 samples of 3 classes without captions in 1 shard" in lines[1]


def test_parts_say_what_they_did_and_what_comes_next(tmp_path, classes, monkeypatch):
    monkeypatch.setattr("thermopile.pipeline.sources.shards.MIN_SHARD_ROWS", 30)  # 2 shards of 32
    monkeypatch.setattr("thermopile.pipeline.sources.shards.MIN_SHARD_BYTES", 1)
    arguments, next_line = ("folder", classes, tmp_path / "out"), "next: when all parts are done, the same command with"
    first = converted(*arguments, "--part", "1/3")
    assert "converting part 1/3 of out: 32/32" in first.stderr
    assert re.search(r"part 1/3 of out: 32 samples; .* 1 of all 2 shards are done\n" + next_line, first.stdout)
    assert "part 1/3 of out: 32 samples, all done before; 1 of all 2" in converted(*arguments, "--part", "1/3").stdout
    assert "part 3/3 of out: no shard is left for it; 1 of all 2" in converted(*arguments, "--part", "3/3").stdout
    converted(*arguments, "--part", "2/3")
    converted(*arguments, "--finish")
    again = converted(*arguments, "--part", "2/3").stdout
    assert again.startswith(f"all shards of {tmp_path / 'out'} are done; nothing to convert\nnext: thermopile show ")


def test_a_sound_dataset_passes_the_check(images_dataset):
    result = succeed("convert", "check", images_dataset.path)
    assert result.stdout == f"{images_dataset.path} is sound: 300 samples\n"
    assert answer("convert", "check", images_dataset.path)["sound"] is True


def test_what_the_check_finds_is_named_and_is_a_failure(tmp_path, images_dataset):
    copy = shutil.copytree(images_dataset.path, tmp_path / "copy")
    table = pq.read_table(copy / "shards" / "shard-00000.parquet")
    pq.write_table(table.slice(1), copy / "shards" / "shard-00000.parquet")
    result = run("check", copy)
    assert result.exit_code == 1
    assert "digest: shard-00000.parquet: the bytes differ" in result.stdout
    assert "holds 299 rows" in result.stdout
    findings = json.loads(run("check", copy, "--json").stdout)
    assert (findings["samples"], findings["sound"], len(findings["findings"])) == (300, False, 2)
    assert findings["findings"][0]["kind"] == "digest"


def test_only_some_of_many_findings_of_a_kind_are_shown(tmp_path, images_dataset):
    copy = shutil.copytree(images_dataset.path, tmp_path / "copy")
    beton = copy / "shards" / "shard-00000.beton"
    beton.write_bytes(beton.read_bytes().replace(b"\xff\xd8\xff\xe0", b"\xff\xd8\xff\xff"))
    result = run("check", copy)
    assert result.stdout.count("picture: ") == 11
    assert "picture: and 290 more" in result.stdout


def test_the_selected_samples_of_a_dataset_become_a_dataset(tmp_path, classes):
    converted("folder", classes, tmp_path / "whole", "--max-size", 16, "--seed", 3)
    whole, kept = Dataset(tmp_path / "whole"), [5, 60, 7, 31]
    pq.write_table(pa.table({"sample_id": kept}), tmp_path / "kept.parquet")
    arguments = ("dataset", tmp_path / "whole", tmp_path / "few", "--select", tmp_path / "kept.parquet")
    assert "few: 4 samples of " in converted(*arguments).stdout
    few = Dataset(tmp_path / "few")
    keys = few.column("key").to_pylist()
    assert sorted(keys) == sorted(whole.take(np.array(kept), ["key"])["key"].to_pylist())
    place = whole.column("key").to_pylist().index
    assert [few.jpeg(i) for i in range(4)] == [whole.jpeg(place(key)) for key in keys]
    assert run("check", tmp_path / "few").exit_code == 0
    assert "nothing to convert" in run(*arguments, "--resume").stdout
    pq.write_table(pa.table({"sample_id": [64]}), tmp_path / "kept.parquet")
    assert_one_line(run(*arguments, "--overwrite"), 2, "has sample 64, but the dataset has the ids 0 … 63")
    assert "--max-size" not in run("dataset", "--help").stdout


def test_a_list_of_which_no_picture_is_there_is_refused_at_once_with_the_option_for_its_folder(tmp_path):
    (tmp_path / "in").mkdir()
    _, options = write_csv(tmp_path / "in", [jpeg(draw(i)) for i in range(12)])
    (tmp_path / "in" / "list.csv").rename(tmp_path / "list.csv")
    moved = ["csv", tmp_path / "list.csv"]
    assert_one_line(run(*moved, tmp_path / "out", *options), 1, "none of 12 pictures tried exists", "--root")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    assert run(*moved, tmp_path / "out", *options, "--root", tmp_path / "in").exit_code == 0


def test_a_list_whose_first_pictures_are_missing_is_converted_if_that_many_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.pipeline.sources.csv_source._TRIED_PICTURES", 4)
    _, options = write_csv(tmp_path, [jpeg(draw(i)) for i in range(12)])
    for picture in sorted(tmp_path.glob("**/*.jpg"))[:6]:
        picture.unlink()
    done = run("csv", tmp_path / "list.csv", tmp_path / "out", *options, "--max-error-rate", 0.6)
    assert (done.exit_code, Dataset(tmp_path / "out").n) == (0, 6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--caption", "txt", "--tokenizer", "TOKENIZER", "--vocab-size", 300), ["--vocab-size", "--tokenizer"]),
        (("--context-length", 16), ["no captions are converted, so --context-length", "--caption"]),
        (("--append", "--overwrite"), ["--append", "--overwrite"]),
    ],
)
def test_options_that_would_do_nothing_beside_others_are_refused(tmp_path, classes, pairs, words, said):
    given = [pairs / "model" / "tokenizer.json" if word == "TOKENIZER" else word for word in words]
    assert_one_line(run("folder", classes, tmp_path / "out", *given), 2, *said)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("caption", "status", "said"),
    [((), 1, "--caption 'txt' matches none"), (("--caption", ""), 2, "--vocab-size would have no effect")],
)
def test_options_of_captions_are_refused_for_tars_without_any(tmp_path, caption, status, said):
    write_members(tmp_path / "in.tar", ("0.jpg", jpeg(draw(0))), ("1.jpg", jpeg(draw(1))))
    refused = run("webdataset", tmp_path / "in.tar", tmp_path / "out", "--vocab-size", 300, *caption)
    assert_one_line(refused, status, said)
    assert os.listdir(tmp_path) == ["in.tar"]


def test_a_dry_run_says_what_the_conversion_says_and_writes_nothing(tmp_path, classes):
    source = tmp_path / "in"
    shutil.copytree(classes, source)
    (source / "ant" / "bad.jpg").write_bytes(b"no picture")
    (source / "notes.txt").write_text("x")
    words = ("folder", source, tmp_path / "out", "--holdout", 8)
    tried = converted(*words, "--dry-run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert tried.stdout.endswith("nothing was written; next: the same command without --dry-run\n")
    whole = converted(*words)

    def said(text):
        lines = [line for line in text.splitlines() if "nothing was written" not in line and "next: " not in line]
        return [re.sub(r"; [\d.]+ s, .*|, see [^:]+", "", line) for line in lines]

    assert "1 left out: 1 × not a JPEG" in tried.stdout
    assert said(tried.stdout) == said(whole.stdout)
    assert_one_line(run(*words, "--dry-run", "--resume"), 2, "--dry-run", "--resume")


def test_a_dry_run_names_no_file_and_no_option_of_a_conversion_that_it_did_not_keep(tmp_path, classes):
    source = tmp_path / "in"
    shutil.copytree(classes, source)
    for number in range(16):  # a fifth
        (source / "cow" / f"bad{number}.jpg").write_bytes(b"no picture")
    words = ("folder", source, tmp_path / "out", "--dry-run")
    refused = run(*words)
    assert_one_line(refused, 1, "16 of 80 samples that were tried cannot be used", "allows 0.1 of them. Nothing was")
    assert "16 left out: 16 × not a JPEG" in refused.stdout
    assert not {"errors.jsonl", "--resume", "Finished"} & {*re.findall(r"[\w.-]+", refused.output)}
    converted("folder", classes, tmp_path / "out")
    assert "  16 left out: " in converted(*words, "--append", "--max-error-rate", 0.5).stdout


def test_classes_are_counted_that_have_a_usable_sample(tmp_path, classes):
    source = tmp_path / "in"
    shutil.copytree(classes, source)
    (source / "dog").mkdir()
    (source / "dog" / "bad.jpg").write_bytes(b"no picture")
    done = converted("folder", source, tmp_path / "out")
    assert "out: 65 samples of 4 classes, " in done.stderr
    assert "out: 64 samples of 3 classes without captions in 1 shard" in done.stdout


def test_a_part_of_which_no_sample_is_selected_is_not_taken_for_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.pipeline.sources.shards.MIN_SHARD_ROWS", 2)
    monkeypatch.setattr("thermopile.pipeline.sources.shards.MIN_SHARD_BYTES", 1)
    source, options = write_tars(tmp_path, [jpeg(draw(i)) for i in range(12)])
    words = (*source, tmp_path / "out", *options, "--limit", 1)
    said = [converted(*words, "--part", f"{number}/2").stdout for number in (1, 2)]
    parts = sorted(re.search("part ./2 of out: ([^;]+);", each)[1] for each in said)
    assert parts == ["1 sample", "none of its samples is selected"]
    assert all("next: when all parts are done, the same command with --finish" in each for each in said)
    assert "out is complete: 1 sample in 1 shard" in converted(*words, "--finish").stdout


def test_a_limit_takes_so_many_samples_of_all_of_the_source(tmp_path, classes):
    converted("folder", classes, tmp_path / "out", "--limit", 16, "--holdout", 8)
    assert sizes(tmp_path / "out") == {"ant": 11, "bee": 4, "cow": 1}
    assert Dataset(tmp_path / "out-test").n == 8
