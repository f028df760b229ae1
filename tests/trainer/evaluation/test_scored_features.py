"""Which features are scored: those before the head of a run on pictures, those behind the heads of a run on pairs."""

from functools import partial

import torch

from thermopile.trainer.config import load_config
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.evaluation.evaluate import Probes, evaluate
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.own_dataset import keep_facts
from thermopile.trainer.run_directory import RunDirectory

from support.written_checkpoints import write_checkpoint


def scores(path, dataset, pictures, head, *, blind_head):
    """k-NN and probes of a run with random weights, whose head forgets what it is given where blind_head is set."""
    settings = {
        "batch_size": 64, "data": {"path": str(dataset.path), "image_size": 24},
        "model": {"dim": 6, "head": head, "image": {"name": "conv", "config": {"width": 1}}},
    }  # fmt: skip
    config = resolve(load_config(settings), dataset)[0]
    run = RunDirectory(path)
    run.create(config, partial(keep_facts, run, dataset))
    torch.manual_seed(0)
    encoders = Encoders.create(config.model, config.objective.mode, 24, dataset.index.tokenizer)
    if blind_head:
        for parameter in encoders.image.head.parameters():
            parameter.data.fill_(0.5)
    write_checkpoint(run, 1, dataset_fingerprint=dataset.index.fingerprint, encoders=encoders.state_dict())
    found = evaluate(run, pictures, pictures, probes=Probes()).scores
    return {"knn": found["knn"], "probe": found["probe"]}


def test_a_run_on_pictures_is_scored_before_its_projection_head(images_dataset, tmp_path):
    whole = scores(tmp_path / "whole", images_dataset, images_dataset, "simclr", blind_head=False)
    assert scores(tmp_path / "blind", images_dataset, images_dataset, "simclr", blind_head=True) == whole


def test_a_run_on_pairs_is_scored_where_pictures_and_texts_meet(pairs_dataset, images_dataset, tmp_path):
    whole = scores(tmp_path / "whole", pairs_dataset, images_dataset, "linear", blind_head=False)
    assert scores(tmp_path / "blind", pairs_dataset, images_dataset, "linear", blind_head=True) != whole
