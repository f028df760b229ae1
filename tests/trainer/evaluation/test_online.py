"""Scores while a run trains: those of its checkpoints, and the run is none the different for it."""

import json
import shutil
import threading
from itertools import count
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from thermopile.pipeline.dataset.tokenizer import load_tokenizer
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.storage.selection import WITHOUT, SelectionError, SelectionWriter
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.config import load_config
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.evaluation.evaluate import compared, evaluate, score_encoders
from thermopile.trainer.evaluation.features import restore_encoders
from thermopile.trainer.evaluation.online import OnlineEvaluation
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.resume_settings import differences
from thermopile.trainer.run.run_status import read_status
from thermopile.trainer.run_directory import RunDirectory
from thermopile.trainer.world import ALONE

from support.cli import sets, succeed
from support.conversions import dataset_of
from support.damage import overwritten
from support.datasets import named_ids
from support.pictures import draw
from support.runs import finish, lines, losses, train, weights

# Batch norms in the heads, dropout in the text encoder.
MODEL = {
    "dim": 8, "head": "vicreg", "head_width": 32, "image": {"name": "conv", "config": {"width": 4}},
    "text": {"name": "hf:distilbert", "config": {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}},
}  # fmt: skip


def settings(dataset, evaluation, **more):
    tree = {"epochs": 1, "batch_size": 256, "data": {"path": str(dataset.path), "image_size": 16}, "model": MODEL}
    return resolve(load_config(tree | {"evaluation": evaluation} | more), dataset)[0]


def evaluations(run):
    return {line["step"]: line["evaluation"] for line in lines(run) if "evaluation" in line}


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """40 pictures of the classes of the picture folder; a folder, and what was converted from it."""
    root = tmp_path_factory.mktemp("held-out")
    for i in range(40):
        path = root / "pictures" / ("cats" if i < 20 else "dogs") / f"{i}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        draw(1000 + i).save(path)
    return dataset_of(FolderSource(root / "pictures"), root / "dataset")


@pytest.fixture(scope="module")
def few_pairs(pairs_dataset, tmp_path_factory):
    """Two of the 20 glyphs of each class."""
    out = tmp_path_factory.mktemp("few") / "pairs"
    return dataset_of(
        GlyphSource(0, test=True),
        out,
        selection=np.arange(0, pairs_dataset.n, 10),
        tokenizer_from=pairs_dataset.path / "tokenizer.json",
    )


@pytest.fixture(scope="module")
def watched(pairs_dataset, few_pairs, tmp_path_factory):
    """7 steps, evaluated after 2, 4 and 6, with a checkpoint at 4."""
    scored = {"every_steps": 2, "test": str(few_pairs.path), "train": str(few_pairs.path)}
    config = settings(pairs_dataset, scored, checkpoint={"every_steps": 4})
    return train(config, tmp_path_factory.mktemp("runs") / "watched")


def test_the_line_of_an_evaluation_stands_behind_that_of_its_step(watched):
    places = [(line["step"], "evaluation" in line) for line in lines(watched)]
    assert places == [(1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (4, 1), (5, 0), (6, 0), (6, 1), (7, 0)]
    assert [found["step"] for found in read_status(watched).evaluations] == [2, 4, 6]


def test_the_scores_are_those_of_the_checkpoint_of_that_step_without_the_probes(watched, few_pairs):
    expected = evaluate(watched, few_pairs, few_pairs, at="step-4").scores
    assert evaluations(watched)[4] == expected
    assert expected.keys() == {"knn", "image_to_text", "text_to_image", "zero_shot"}
    assert evaluations(watched)[6] != expected


def test_the_zero_shot_prompts_are_those_of_the_settings(watched, pairs_dataset, few_pairs):
    prompts = ["the character {lower}"]
    given = watched.config().evaluation.model_dump() | {"templates": prompts}
    config = settings(pairs_dataset, given)
    _, training = load_checkpoint(watched.checkpoints / "step-4")
    encoders = restore_encoders(config, watched.checkpoints, training, pairs_dataset.index.tokenizer)
    run = SimpleNamespace(config=config, dataset=pairs_dataset, device=torch.device("cpu"), world=ALONE, selection=None)
    found = OnlineEvaluation(run).scores(encoders, 4, lambda: False)
    expected = evaluate(watched, few_pairs, few_pairs, at="step-4", templates=prompts).scores
    assert found["zero_shot"] == expected["zero_shot"] != evaluations(watched)[4]["zero_shot"]


def test_losses_and_weights_are_the_same_bit_for_bit_as_without_evaluations(watched, pairs_dataset, tmp_path):
    unwatched = train(settings(pairs_dataset, {}), tmp_path / "run")
    assert losses(unwatched) == losses(watched)
    assert evaluations(unwatched) == {}
    expected = weights(unwatched)
    assert any("running_mean" in name for name in expected)
    for name, value in weights(watched).items():
        assert torch.equal(value, expected[name]), name


def test_a_run_that_is_resumed_has_the_same_lines(watched, tmp_path):
    def stop(line):
        if line["step"] == 6:
            raise KeyboardInterrupt

    run = RunDirectory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), Trainer.open(watched.config(), run) as trainer:
        trainer.train(on_evaluation=stop)
    assert evaluations(run) == evaluations(watched)
    with Trainer.open(watched.config(), run, resume=True) as trainer:
        assert (trainer.run.steps_done, evaluations(run).keys()) == (4, {2, 4})
        trainer.train()
    assert [line["step"] for line in lines(run)] == [line["step"] for line in lines(watched)]
    assert losses(run) == losses(watched)
    assert evaluations(run) == evaluations(watched)


@pytest.mark.wide
def test_samples_that_the_run_forgot_are_no_neighbours_and_are_not_read(pairs_dataset, few_pairs, tmp_path, caplog):
    """By default the neighbours are the run's own samples; here those that it forgot cannot be read any more."""
    ids = np.arange(5, 2_000, 10)
    pq.write_table(named_ids(pairs_dataset, ids), tmp_path / "ids.parquet")
    gone = overwritten(pairs_dataset, ids, tmp_path / "gone")
    data = {"path": str(gone.path), "image_size": 16, "without": str(tmp_path / "ids.parquet")}
    config = settings(gone, {"every_steps": 2, "test": str(few_pairs.path)}, data=data, checkpoint={"every_steps": 2})
    run = train(config, tmp_path / "run")
    assert "failed" not in caplog.text
    found = evaluate(run, gone, few_pairs, at="step-6")
    assert evaluations(run)[6]["knn"] == found.scores["knn"]
    assert len(found.classes.train) - len(found.neighbours) == len(ids)
    assert any("200 samples that" in note for note in found.notes)
    with SelectionWriter(run.selection, gone.n + 1) as another:
        another.add(WITHOUT, [np.arange(5)])
        another.finish()
    with pytest.raises(SelectionError, match="is of a dataset of 2,001 samples"):
        evaluate(run, gone, few_pairs)


def test_where_one_class_is_left_the_other_methods_score_and_a_note_says_why(watched, pairs_dataset, few_pairs):
    sets = compared("step-4", few_pairs, few_pairs)
    sets.forgotten = np.flatnonzero(sets.classes.train != sets.classes.train[0])
    _, training = load_checkpoint(watched.checkpoints / "step-4")
    tokens = pairs_dataset.index.tokenizer
    encoders = restore_encoders(watched.config(), watched.checkpoints, training, tokens)
    tokenizer = load_tokenizer(pairs_dataset.tokenizer_path, context_length=tokens.context_length)
    score_encoders(sets, encoders, watched.config().data, torch.device("cpu"), tokenizer)
    assert sets.scores.keys() == {"image_to_text", "text_to_image", "zero_shot"}
    assert any("Fewer than two classes" in note for note in sets.notes)


def test_settings_of_the_evaluation_may_change_when_a_run_is_resumed(watched, held_out):
    other = watched.config().evaluation.model_copy(update={"every_steps": 3, "train": str(held_out.path)})
    assert differences(watched.config(), watched.config().model_copy(update={"evaluation": other})) == []


# Pictures alone


def images_settings(dataset, evaluation, **more):
    return settings(dataset, evaluation, batch_size=64, model={"image": {"config": {"width": 2}}}, **more)


@pytest.mark.wide
def test_neighbours_come_from_the_runs_own_dataset_unless_another_is_named(images_dataset, held_out, tmp_path):
    own = images_settings(images_dataset, {"every_steps": 4, "test": str(held_out.path)})
    other = images_settings(images_dataset, {"every_steps": 4, "test": str(held_out.path), "train": str(held_out.path)})
    of_own, of_other = (evaluations(train(config, tmp_path / str(i)))[4] for i, config in enumerate((own, other)))
    assert of_own.keys() == {"knn"}
    assert of_own["knn"].keys() == {f"{k}{how}" for k in (10, 20, 100, 200) for how in ("", "_weighted")}
    assert of_other["knn"].keys() == {"10", "20", "10_weighted", "20_weighted"}


@pytest.mark.wide
def test_no_thread_is_left_behind_and_a_part_that_was_frozen_stays_so(images_dataset, held_out, tmp_path):
    config = images_settings(images_dataset, {"every_steps": 1, "test": str(held_out.path)})
    threads = []

    def note(line):
        threads.append(threading.active_count())
        assert not trainer.run.encoders.image.head.training
        assert trainer.run.encoders.image.backbone.training

    with Trainer.open(config, RunDirectory(tmp_path / "run")) as trainer:
        trainer.run.encoders.image.head.eval()
        trainer.train(on_evaluation=note)
    assert len(threads) == 4
    assert threads[-1] <= threads[1]


@pytest.mark.wide
def test_tensorboard_gets_the_scores_too(images_dataset, held_out, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = images_settings(images_dataset, {"every_steps": 2, "test": str(held_out.path)}, trackers=["tensorboard"])
    run = train(config, tmp_path / "run")
    board = EventAccumulator(str(run.tensorboard)).Reload()
    assert [event.step for event in board.Scalars("evaluation/knn/10/all")] == [2, 4]


def test_a_signal_during_an_evaluation_stops_the_run_and_a_resumed_one_catches_up(images_dataset, held_out, tmp_path):
    config = images_settings(images_dataset, {"every_steps": 2, "test": str(held_out.path)})
    reported = []
    run = train(config, tmp_path / "run", on_report=reported.append, should_stop=lambda: bool(reported))
    assert [line["step"] for line in lines(run)] == [1, 2]
    assert evaluations(run) == {}
    assert latest_checkpoint(run.checkpoints).name == "step-2"
    train(config, run, resume=True)
    whole = train(config, tmp_path / "whole")
    assert [line["step"] for line in lines(run)] == [line["step"] for line in lines(whole)]
    assert evaluations(run) == evaluations(whole)


@pytest.mark.wide
def test_a_run_that_another_rank_was_told_to_stop_does_not_evaluate_first(images_dataset, held_out, tmp_path):
    config = images_settings(images_dataset, {"every_steps": 2, "test": str(held_out.path)})
    questions = count(1)
    # Asked while the encoders are evaluated, this rank would say that nobody told it.
    run = train(config, tmp_path / "run", should_stop=lambda: next(questions) == 2)
    assert [line["step"] for line in lines(run)] == [1, 2]


def test_a_picture_that_does_not_decode_is_warned_of_and_training_goes_on(images_dataset, held_out, tmp_path, caplog):
    damaged = Dataset(shutil.copytree(held_out.path, tmp_path / "damaged"))
    beton = damaged.path / "shards" / "shard-00000.beton"
    jpeg = held_out.jpeg(17)
    content = beton.read_bytes()
    assert content.count(jpeg) == 1
    beton.write_bytes(content.replace(jpeg, bytes(len(jpeg))))
    run = train(images_settings(images_dataset, {"every_steps": 4, "test": str(damaged.path)}), tmp_path / "run")
    assert evaluations(run) == {}
    assert len(losses(run)) == 4
    assert "the evaluation after step 4 failed: " in caplog.text
    assert "sample 17" in caplog.text


# Before a run begins


def assert_refused(config, run, error, message):
    with pytest.raises(error, match=message) as refusal:
        Trainer.open(config, RunDirectory(run)).close()
    assert "\n" not in str(refusal.value)
    assert not run.exists()


def test_datasets_that_cannot_be_scored_are_refused_before_anything_is_written(
    images_dataset, pairs_dataset, held_out, tmp_path
):
    run = tmp_path / "run"

    def on(test, **more):
        return images_settings(
            images_dataset, {"every_steps": 4, "test": str(test)} | {key: str(path) for key, path in more.items()}
        )

    (tmp_path / "birds" / "birds").mkdir(parents=True)
    for i in range(5):
        draw(i).save(tmp_path / "birds" / "birds" / f"{i}.png")
    birds = dataset_of(FolderSource(tmp_path / "birds"), tmp_path / "birds-set").path
    assert_refused(on(tmp_path / "nowhere"), run, DatasetError, "nowhere does not exist. Create a dataset")
    assert_refused(on(held_out.path, train=tmp_path / "gone"), run, DatasetError, "gone does not exist")
    assert_refused(on(pairs_dataset.path), run, ConfigError, "nothing to score: .*glyphs has no class of")
    assert_refused(on(birds), run, ConfigError, "nothing to score: .*birds-set has no class of .*, .*every_steps")
    assert_refused(on(birds, train=birds), run, ConfigError, "nothing to score: .* has only one class, .*every_steps")


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [({"every_steps": 5}, "every_steps 5 needs a dataset to score; set evaluation.test"),
     ({"test": "data/x"}, "every_steps is 0, so the datasets .* set every_steps"),
     ({"train": "data/x"}, "every_steps is 0"),
     ({"every_steps": 5, "test": "data/x", "templates": ["a photo"]}, "'a photo' has neither {} nor {lower}")],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(evaluation, message):
    with pytest.raises(ConfigError, match=message):
        load_config({"evaluation": evaluation})


def test_the_recorded_datasets_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config({"evaluation": {"every_steps": 5, "test": "data/x"}}).evaluation
    assert (config.test, config.train) == (str(tmp_path / "data" / "x"), "")


# On the command line


@pytest.mark.wide
def test_first_scores_are_shown_and_training_on_the_scored_set_is_warned_of(images_dataset, tmp_path):
    result = succeed("train", "--data", images_dataset.path, "--out", tmp_path / "run",
                     *sets("epochs=1", "batch_size=64", "data.image_size=16", "model.image.config.width=2",
                           "evaluation.every_steps=3", f"evaluation.test={images_dataset.path}"))  # fmt: skip
    (shown,) = [line for line in result.stderr.splitlines() if line.startswith("step 3: ")]
    share = evaluations(RunDirectory(tmp_path / "run"))[3]["knn"]["10"]["all"]
    assert shown == f"step 3: k-NN, k = 10: {share:.1%}"
    assert "evaluation during training: Training and test set are the same" in result.stderr


EVALUATE = """
import json
import torch
from types import SimpleNamespace
import thermopile
from thermopile.pipeline.opening import Dataset
from thermopile.trainer.checkpoints.checkpoint_files import load_checkpoint
from thermopile.trainer.evaluation.features import restore_encoders
from thermopile.trainer.evaluation.online import OnlineEvaluation
from thermopile.trainer.run_directory import RunDirectory

run, data = RunDirectory(sys.argv[1]), Dataset(sys.argv[2])
config = run.config()
on_itself = config.evaluation.model_copy(update={"test": sys.argv[2], "train": sys.argv[2]})
with thermopile.joined_world() as world:
    _, training = load_checkpoint(run.checkpoints / "step-4")
    encoders, calls = restore_encoders(config, run.checkpoints, training, data.index.tokenizer), []
    if world.rank:  # a rank's own, on CPUs
        for statistic in encoders.buffers():
            statistic.zero_()
    for encoder in (encoders.image, encoders.text):
        encoder.register_forward_hook(lambda *call: calls.append(call))
    given = {"config": config.model_copy(update={"evaluation": on_itself}), "dataset": data, "world": world}
    evaluation = OnlineEvaluation(SimpleNamespace(**given, device=torch.device("cpu"), selection=None))
    scores = evaluation.scores(encoders, 4, lambda: False)
    of_all = len(calls)
    stopped = evaluation.scores(encoders, 4, lambda: world.rank == 1)
    print(json.dumps([of_all, len(calls) - of_all, scores, stopped]))
"""


@pytest.mark.wide
def test_four_ranks_share_the_encoding_and_the_scores_are_those_of_one(
    start_ranks, start_program, watched, pairs_dataset
):
    arguments = watched.path, pairs_dataset.path
    ranks = [*start_ranks(4, *arguments, codes=[EVALUATE] * 4), start_program(*arguments, code=EVALUATE)]
    ended = [rank.end() for rank in ranks]
    assert [(code, errors) for code, _, errors in ended] == [(0, "")] * 5
    *of_ranks, alone = (json.loads(out) for _, out, _ in ended)
    assert of_ranks[0][2] == alone[2]
    assert max(calls for calls, *_ in of_ranks) <= 0.4 * alone[0]
    assert [(until_stopped, scores) for _, until_stopped, _, scores in of_ranks] == [(1, None)] * 4


@pytest.mark.wide
def test_of_two_ranks_the_first_one_says_and_writes_the_scores(start_ranks, pairs_dataset, few_pairs, tmp_path):
    asked = sets("epochs=1", "data.image_size=16", "model.dim=16", "model.image.config.width=4",
                 "order.canonical_shards=4",
                 "evaluation.every_steps=3", f"evaluation.test={few_pairs.path}")  # fmt: skip
    said = finish(start_ranks(2, "train", "--data", pairs_dataset.path, "--out", tmp_path / "run", *asked))
    run = RunDirectory(tmp_path / "run")
    assert evaluations(run).keys() == {3, 6}
    assert losses(run).keys() == set(range(1, 8))
    assert [errors.count("step 3: k-NN, k = 10: ") for _, errors in said] == [1, 0]


@pytest.mark.wide
def test_ranks_that_would_score_other_datasets_end_before_a_step(start_ranks, pairs_dataset, few_pairs, tmp_path):
    asked = sets("data.image_size=16", "evaluation.every_steps=3", f"evaluation.test={few_pairs.path}")
    other = sets(f"evaluation.test={pairs_dataset.path}")
    command = ("train", "--data", pairs_dataset.path, "--out", tmp_path / "run", *asked)
    for code, _, errors in (rank.end(within=60) for rank in start_ranks(2, *command, last_rank=other)):
        assert code == 2
        assert "the ranks differ: rank 1 has evaluation.test fingerprint = " in errors.splitlines()[-1]
    assert not (tmp_path / "run").exists()
