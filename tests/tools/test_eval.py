"""`thermopile eval` from one end to the other: what it scores, what it leaves out and says so, what it refuses."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.trainer.checkpoints.checkpoint_files import load_checkpoint, save_checkpoint
from thermopile.trainer.evaluation import evaluate as evaluating
from thermopile.trainer.evaluation import scoring

from support.cli import answer, assert_one_line, cli, sets, succeed
from support.conversions import dataset_of
from support.pictures import draw
from support.written_runs import write_run

BANDS = {"all", "head", "medium", "tail"}


def evaluate(path, train, test, *options):
    return cli("eval", path, "--train", train.path, "--test", test.path, *options)


def scores_of(path, train, test, *options):
    result = evaluate(path, train, test, "--json", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def trained(dataset, out, *settings):
    succeed("train", "--data", dataset.path, "--out", out, *sets(*settings))
    return out


FOURTEEN_STEPS = ("epochs=2", "checkpoint.every_steps=7", "optimizer.warmup=0")


@pytest.fixture(scope="module")
def pairs_run(pairs_dataset, tmp_path_factory):
    """14 steps of small encoders on pairs: checkpoints at 7 and 14."""
    small = ("data.image_size=16", "model.dim=8", "model.image.config.width=4")
    return trained(pairs_dataset, tmp_path_factory.mktemp("runs") / "pairs", *FOURTEEN_STEPS, *small)


@pytest.fixture(scope="module")
def images_run(images_dataset, tmp_path_factory):
    """A few steps on pictures alone, with a momentum network."""
    settings = ("epochs=1", "batch_size=64", "data.image_size=24", "objective.name=moco_v3", "model.momentum=0.99")
    return trained(images_dataset, tmp_path_factory.mktemp("runs") / "images", *settings)


@pytest.fixture(scope="module")
def pairs_scores(pairs_dataset, tmp_path_factory):
    """Of encoders that have learned something."""
    run = trained(pairs_dataset, tmp_path_factory.mktemp("runs") / "learned", *FOURTEEN_STEPS, "data.image_size=32")
    return scores_of(run, pairs_dataset, pairs_dataset, "--template", "the character {lower}")


@pytest.mark.wide
def test_pairs_get_every_score_in_every_band(pairs_scores):
    scores = pairs_scores["scores"]
    assert {method: list(variants) for method, variants in scores.items()} == {
        "knn": [f"{k}{weighted}" for weighted in ("", "_weighted") for k in (10, 20, 100, 200)],
        "probe": ["lbfgs", "sgd", "sgd_90"],
        "image_to_text": ["1", "5", "10"], "text_to_image": ["1", "5", "10"],
        "zero_shot": ["top1", "top3", "top5", "mean_per_class"],
    }  # fmt: skip
    for variants in scores.values():
        for shares in variants.values():
            assert set(shares) == BANDS
            # 20 samples of each of 100 classes, of which 34, 33 and 33 make the bands.
            mean = 0.34 * shares["head"] + 0.33 * shares["medium"] + 0.33 * shares["tail"]
            assert mean == pytest.approx(shares["all"])
    assert pairs_scores["checkpoint"] == "step-14"
    assert pairs_scores["classes_of_band"] == {"head": 34, "medium": 33, "tail": 33}


@pytest.mark.wide
def test_the_features_of_a_trained_run_beat_chance(pairs_scores):
    scores = pairs_scores["scores"]
    for method, variant in (("knn", "10"), ("probe", "lbfgs"), ("probe", "sgd")):
        assert scores[method][variant]["all"] > 0.05, (method, scores)  # of 100 classes
    for direction in ("image_to_text", "text_to_image"):
        at_1, at_5, at_10 = (scores[direction][k]["all"] for k in ("1", "5", "10"))
        assert at_1 <= at_5 <= at_10
        assert at_10 > 0


@pytest.mark.wide
def test_the_notes_say_that_the_sets_are_the_same_and_balanced(pairs_scores):
    same, balanced = pairs_scores["notes"]
    assert "are the same" in same
    assert "Every class has 20 training samples" in balanced


def test_evaluating_again_gives_the_same_and_an_older_checkpoint_other_scores(pairs_run, hostile_dataset):
    latest = scores_of(pairs_run, hostile_dataset, hostile_dataset)
    assert scores_of(pairs_run, hostile_dataset, hostile_dataset) == latest
    older = scores_of(pairs_run, hostile_dataset, hostile_dataset, "--at", "step-7")
    assert (latest["checkpoint"], older["checkpoint"]) == ("step-14", "step-7")
    assert older["scores"] != latest["scores"]


def test_samples_without_class_or_caption_and_a_k_too_large_are_left_out(pairs_run, hostile_dataset):
    result = scores_of(pairs_run, hostile_dataset, hostile_dataset)
    assert list(result["scores"]["knn"]) == ["10", "20", "10_weighted", "20_weighted"]
    assert all(set(shares) == BANDS for variants in result["scores"].values() for shares in variants.values())
    assert "are the same" in result["notes"][0]
    assert any("no k-NN for k = 100, 200: 65 training samples have" in note for note in result["notes"])
    assert set(result["scores"]) == {"knn", "probe", "image_to_text", "text_to_image", "zero_shot"}


def test_the_table_names_every_score_and_the_bands(images_run, images_dataset):
    result = evaluate(images_run, images_dataset, images_dataset)
    assert result.exit_code == 0, result.stderr
    named = ["k-NN, k = 200", "k = 200, weighted", "linear probe, L-BFGS", "linear probe, SGD", "SGD of 90 epochs"]
    for words in ("step-4", *named, "head (1)", "tail (0)", "–"):
        assert words in result.stdout
    assert "The run has no text encoder, so there are no retrieval and no zero-shot scores." in result.stdout
    assert "linear probe, L-BFGS: 1/1" in result.stderr


def test_few_shot_probes_are_trained_only_where_asked_for(images_run, images_dataset):
    sets, asked = (images_run, images_dataset, images_dataset), ("--shots", 5, "--shots", 1, "--draws", 2)
    result, plain = scores_of(*sets, *asked), scores_of(*sets)
    assert [*result["scores"].pop("few_shot")] == [*result["half_widths"]["few_shot"]] == ["5", "1"]
    assert result["half_widths"]["few_shot"]["1"]["all"] > 0
    assert (result["scores"], plain["half_widths"]) == (plain["scores"], {})
    assert re.search(r"linear probe, 1 a class +\d+\.\d ± \d+\.\d", evaluate(*sets, *asked).stdout)
    assert_one_line(evaluate(*sets, "--augment", "no such"), 2, "no such", "crop_flip")


@pytest.mark.wide
def test_a_probe_on_views_takes_the_encoder_ninety_passes(images_run, images_dataset):
    result = cli("eval", images_run, "--test", images_dataset.path, "--augment", "crop_flip", "--json")
    assert [*json.loads(result.stdout)["scores"]["probe"]] == ["lbfgs", "sgd", "sgd_90", "sgd_90_views"]
    total = 90 * images_dataset.n
    assert f"linear probe, augmented views: {total:,}/{total:,}" in result.stderr


def test_without_classes_and_captions_one_line_says_why_there_is_nothing_to_score(images_run, pairs_run, flat_dataset):
    nothing = f"{flat_dataset.path} gives nothing to score: {flat_dataset.path} has no classes, and "
    for run, why in ((images_run, "the run has no text encoder"), (pairs_run, "it has no captions")):
        refused = evaluate(run, flat_dataset, flat_dataset)
        assert_one_line(refused, 2, f"{nothing}{why}; choose other datasets")
        assert "pictures: " not in refused.stderr  # which were not encoded in vain


def test_test_pictures_that_the_run_was_trained_on_are_counted(images_run, tmp_path):
    for i in range(24):
        draw(i).save(tmp_path / f"{i}.jpg")
    for folder, numbers in (("train", range(20)), ("test", range(17, 24)), ("new", range(20, 24))):
        for i in numbers:
            place = tmp_path / folder / "ab"[i % 2] / f"{i}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / f"{i}.jpg", place)
    train, test, new = (
        dataset_of(FolderSource(tmp_path / of), tmp_path / f"{of}-out") for of in ("train", "test", "new")
    )
    said = "of 7 test pictures are in the training set too, byte for byte: their scores say nothing of new samples."
    assert f"3 {said}" in scores_of(images_run, train, test)["notes"]
    assert not any("byte for byte" in note for note in scores_of(images_run, train, new)["notes"])


def test_a_dataset_of_one_sample_a_class_can_be_evaluated(images_run, tmp_path):
    for i, name in enumerate(("cats", "dogs")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (30, 20), (200 * i, 90, 9)).save(tmp_path / "pictures" / name / "one.png")
    two = dataset_of(FolderSource(tmp_path / "pictures"), tmp_path / "two")
    assert scores_of(images_run, two, two)["scores"]["probe"]["lbfgs"]["all"] == 1.0


@pytest.mark.wide
def test_a_class_that_training_lacks_is_left_out_of_class_scores_and_counted(images_run, images_dataset, tmp_path):
    for folder, name in (("known", "cats"), ("known", "dogs"), ("all", "cats"), ("all", "dogs"), ("all", "birds")):
        (tmp_path / folder / name).mkdir(parents=True)
        for number in range(4):
            draw(ord(name[0]) + number).save(tmp_path / folder / name / f"{number}.png")
    known, all_ = (dataset_of(FolderSource(tmp_path / name), tmp_path / f"{name}-set") for name in ("known", "all"))
    with_birds, without = scores_of(images_run, images_dataset, all_), scores_of(images_run, images_dataset, known)
    assert with_birds["scores"] == without["scores"]
    (note,) = set(with_birds["notes"]) - set(without["notes"])
    assert note.startswith("4 of 12 test samples are left out of k-NN and linear probe: ")
    assert note.endswith("lacks their 1 class, such as 'birds', by name.")


def test_the_prompts_of_a_file_are_as_if_each_was_given(pairs_run, pairs_dataset, tmp_path):
    (tmp_path / "prompts.txt").write_text("{}\n# and\nthe character {lower}\n")
    given = {"tokenizer_from": pairs_dataset.path / "tokenizer.json", "selection": np.arange(0, pairs_dataset.n, 10)}
    few = dataset_of(GlyphSource(0, test=True), tmp_path / "few", **given)
    sets = (pairs_run, few, few)
    of_file = scores_of(*sets, "--template", "a {}", "--templates", tmp_path / "prompts.txt")
    assert of_file == scores_of(*sets, *(f"--template={each}" for each in ("a {}", "{}", "the character {lower}")))
    assert of_file["scores"]["zero_shot"] != scores_of(*sets, "--templates", "clip-80")["scores"]["zero_shot"]


def test_json_also_has_the_scores_under_the_names_of_clip_benchmark(pairs_run, images_dataset, hostile_dataset):
    result = scores_of(pairs_run, hostile_dataset, hostile_dataset)
    of_all = {
        (method, variant): scores["all"]
        for method, variants in result["scores"].items()
        for variant, scores in variants.items()
    }
    assert result["clip_benchmark"] == {
        "acc1": of_all["zero_shot", "top1"], "acc5": of_all["zero_shot", "top5"],
        "mean_per_class_recall": of_all["zero_shot", "mean_per_class"],
        "image_retrieval_recall@1": of_all["text_to_image", "1"],
        "image_retrieval_recall@5": of_all["text_to_image", "5"],
        "image_retrieval_recall@10": of_all["text_to_image", "10"],
        "text_retrieval_recall@1": of_all["image_to_text", "1"],
        "text_retrieval_recall@5": of_all["image_to_text", "5"],
        "text_retrieval_recall@10": of_all["image_to_text", "10"],
    }  # fmt: skip
    of_two_classes = scores_of(pairs_run, images_dataset, images_dataset)["clip_benchmark"]
    assert of_two_classes.keys() == {"acc1", "mean_per_class_recall"}


def test_retrieval_and_zero_shot_need_no_training_set_of_these_classes(pairs_run, hostile_dataset):
    result = answer("eval", pairs_run, "--test", hostile_dataset.path)  # the run's own dataset has other classes
    assert set(result["scores"]) == {"image_to_text", "text_to_image", "zero_shot"}
    assert dict.fromkeys(("head", "medium", "tail")).items() <= result["scores"]["zero_shot"]["top1"].items()
    own = scores_of(pairs_run, hostile_dataset, hostile_dataset)["scores"]["zero_shot"]
    assert all(result["scores"]["zero_shot"][variant]["all"] == own[variant]["all"] for variant in own)
    assert any("has no class of" in note and "no k-NN and linear probe scores" in note for note in result["notes"])


def test_a_path_of_the_runs_own_dataset_beside_another_training_set_is_refused(pairs_run, pairs_dataset):
    data = pairs_dataset.path
    given = ("--train", data, "--test", data, "--data", data)
    assert_one_line(cli("eval", pairs_run, *given), 2, "--data", "leave one out")


def test_another_dataset_in_the_place_of_the_runs_own_is_refused(pairs_run, pairs_dataset, hostile_dataset):
    refused = cli("eval", pairs_run, "--test", pairs_dataset.path, "--data", hostile_dataset.path)
    assert_one_line(refused, 2, f"{hostile_dataset.path} is not the dataset of {pairs_run}", "--train")


def test_the_training_set_is_by_default_the_runs_own(pairs_run, pairs_dataset, tmp_path):
    given = {"tokenizer_from": pairs_dataset.path / "tokenizer.json", "selection": np.arange(0, pairs_dataset.n, 10)}
    few = dataset_of(GlyphSource(0, test=True), tmp_path / "few", **given)
    assert answer("eval", pairs_run, "--test", few.path) == scores_of(pairs_run, pairs_dataset, few)


def test_class_names_are_read_with_blanks_or_from_a_file_or_a_column(pairs_run, tmp_path, monkeypatch):
    classes = ["n01440764", "n01443537", "sea_lion"]
    for number, name in enumerate(classes):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for more in range(4):
            draw(4 * number + more).save(tmp_path / "pictures" / name / f"{more}.png")
    test, asked = dataset_of(FolderSource(tmp_path / "pictures"), tmp_path / "test"), []
    prompts = scoring.prompts
    monkeypatch.setattr(evaluating, "prompts", lambda names, *more: asked.append([*names]) or prompts(names, *more))

    def said(*options):
        found = answer("eval", pairs_run, "--test", test.path, *options)
        assert set(found["scores"]["zero_shot"]) == {"top1", "top3", "mean_per_class"}
        return asked.pop(), [note for note in found["notes"] if note.startswith(("Class names", "Underscores"))]

    names, (meaningless, blanks) = said()
    assert names == ["n01440764", "n01443537", "sea lion"]
    assert meaningless.startswith("Class names such as n01440764 say nothing to a text encoder; give --classnames FILE")
    assert blanks == "Underscores in class names, as in sea_lion, are blanks; --classnames group keeps them."
    file = tmp_path / "names.txt"
    for lines in ("# in order\ntench\ngoldfish\nsea_lion\n",
                  "sea_lion\tsea_lion\nother\tx\nn01443537\tgoldfish\nn01440764\ttench"):  # fmt: skip
        file.write_text(lines)
        assert said("--classnames", file) == (["tench", "goldfish", "sea_lion"], [])
    assert said("--classnames", "group") == (classes, [])


def test_class_names_that_do_not_fit_the_classes_are_refused(pairs_run, images_dataset, tmp_path):
    def given(lines):
        (tmp_path / "names.txt").write_text(lines)
        return evaluate(pairs_run, images_dataset, images_dataset, "--classnames", tmp_path / "names.txt")

    assert_one_line(
        given("cat\n"), 2, "has 1 names, but there are 2 classes, from 'cats' to 'dogs'", "class, tab, name"
    )
    assert_one_line(given("cats\tcat\n"), 2, "has 0 names for the class 'dogs'")
    assert_one_line(given("cats\ta\ncats\tb\ndogs\tc\n"), 2, "has 2 names for the class 'cats'")
    column = evaluate(pairs_run, images_dataset, images_dataset, "--classnames", "uri")
    assert_one_line(column, 2, "--classnames uri has 200 names for the class 'cats'; give it one")
    gone = evaluate(pairs_run, images_dataset, images_dataset, "--classnames", "no such")
    assert_one_line(gone, 2, "--classnames no such: there is no such column, and as a file: ")


def test_pictures_alone_can_be_classified_by_a_run_on_pairs_but_not_retrieved(pairs_run, images_dataset):
    result = scores_of(pairs_run, images_dataset, images_dataset)
    assert set(result["scores"]) == {"knn", "probe", "zero_shot"}
    assert any("has no captions, so there are no retrieval scores" in note for note in result["notes"])


def test_trained_network_and_moving_average_have_scores_of_their_own(images_run, images_dataset):
    scores = {
        network: scores_of(images_run, images_dataset, images_dataset, "--network", network)
        for network in ("online", "momentum")
    }
    assert [each["network"] for each in scores.values()] == ["online", "momentum"]
    assert scores["online"]["scores"] != scores["momentum"]["scores"]
    assert any("--network momentum" in note for note in scores["online"]["notes"])
    momentum = evaluate(images_run, images_dataset, images_dataset, "--network", "momentum")
    assert "step-4, momentum network" in momentum.stdout


def test_a_run_without_a_momentum_network_is_refused_where_it_is_asked_for(pairs_run, pairs_dataset):
    result = evaluate(pairs_run, pairs_dataset, pairs_dataset, "--network", "momentum")
    assert_one_line(result, 2, "has no momentum network (model.momentum is 0); score it without --network")


def test_the_output_says_which_weights_were_scored_and_missing_ones_are_refused(images_run, images_dataset):
    assert scores_of(images_run, images_dataset, images_dataset, "--weights", "raw")["weights"] == "raw"
    assert "step-4, raw weights" in evaluate(images_run, images_dataset, images_dataset).stdout
    lacking = evaluate(images_run, images_dataset, images_dataset, "--weights", "averaged")
    assert_one_line(lacking, 2, "has no averaged weights (model.ema is 0); leave out --weights averaged")
    both = evaluate(images_run, images_dataset, images_dataset, "--weights", "averaged", "--network", "momentum")
    assert_one_line(both, 2, "a momentum network has no averaged weights; leave out")


def test_a_run_that_is_none_or_has_no_checkpoint_is_refused(pairs_run, hostile_dataset, tmp_path):
    assert_one_line(evaluate(tmp_path, hostile_dataset, hostile_dataset), 1, "is not a run")
    write_run(tmp_path / "fresh", hostile_dataset, {})
    assert_one_line(evaluate(tmp_path / "fresh", hostile_dataset, hostile_dataset), 1, "has no checkpoint yet")
    wrong = evaluate(pairs_run, hostile_dataset, hostile_dataset, "--at", "step-8")
    assert_one_line(wrong, 1, "no checkpoint 'step-8'; available: step-7, step-14")


def test_datasets_that_do_not_fit_are_refused(pairs_run, tmp_path):
    assert_one_line(cli("eval", pairs_run, "--train", tmp_path, "--test", tmp_path), 1, "is not a dataset")


def test_wrong_usage_is_told_from_failure(pairs_run, pairs_dataset):
    assert_one_line(cli("eval", pairs_run, "--train", pairs_dataset.path), 2, "--test")
    template = evaluate(pairs_run, pairs_dataset, pairs_dataset, "--template", "a photo")
    assert_one_line(template, 2, "neither {} nor {lower}")
    templates = evaluate(pairs_run, pairs_dataset, pairs_dataset, "--templates", "clip-81")
    assert_one_line(templates, 2, "clip-81", "No such file", "shipped: clip-80")


def test_a_checkpoint_of_other_encoders_or_a_damaged_one_is_refused_in_one_line(pairs_run, pairs_dataset, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(pairs_run, copy)
    info, training = load_checkpoint(copy / "checkpoints" / "step-14")
    del training["encoders"]["image.head.bias"]
    save_checkpoint(copy / "checkpoints", info, training)
    assert_one_line(evaluate(copy, pairs_dataset, pairs_dataset), 1, "does not contain the encoders")
    (copy / "checkpoints" / "step-14" / "tensors.safetensors").write_bytes(b"")
    damaged = evaluate(copy, pairs_dataset, pairs_dataset)
    assert_one_line(damaged, 1, "step-14 is damaged", "Choose another with --at: step-7")
