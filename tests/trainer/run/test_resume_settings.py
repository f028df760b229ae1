"""What a run may be resumed with: nothing else unless it is named, and nothing that would make it another run."""

import re
from pathlib import Path

import pytest

from thermopile.trainer.config import flat, load_config, to_tree
from thermopile.trainer.config.layers import merge
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.run.build import device_named
from thermopile.trainer.run.resume_settings import as_recorded, differences
from thermopile.trainer.run.starting import compare

RUN = load_config({"objective": {"name": "isogclr", "mode": "bimodal", "rho": 2.0, "tau_init": 0.01}})


def changes(allowed, run=RUN, **asked):
    tree = to_tree(run)
    merge(tree, asked)
    return [tuple(change) for change in compare(Path("runs/a"), run, load_config(tree), allowed)]


@pytest.mark.parametrize("allowed", [["optimizer.lr"], ["optimizer"], ["optimizer."], ["epochs", "optimizer.lr"]])
def test_a_change_is_allowed_by_its_name_or_that_of_its_table(allowed):
    assert changes(allowed, optimizer={"lr": 0.5}) == [("optimizer.lr", 0.001, 0.5)]


@pytest.mark.parametrize("allowed", [[], ["epochs"], ["optimizer.l"], ["optimizer.lr_min"], ["o"]])
def test_a_change_that_nothing_names_is_refused_with_the_option_that_allows_it(allowed):
    words = "the run has 0.001, asked for 0.5. Omit them, allow them with --allow-change optimizer.lr, or start a"
    with pytest.raises(ConfigError, match=re.escape(words)):
        changes(allowed, optimizer={"lr": 0.5})


def test_the_choice_of_captions_changes_results():
    with pytest.raises(ConfigError, match=r"has 'draw', asked for 'first'.* --allow-change data\.captions"):
        changes([], data={"captions": "first"})
    assert changes(["data.captions"], data={"captions": "first"}) == [("data.captions", "draw", "first")]


def test_the_device_that_auto_chooses_here_is_no_change():
    here = device_named("auto").type
    assert changes([], device=here) == []
    with pytest.raises(ConfigError, match="device: the run has 'auto', asked for"):
        changes([], device="cpu" if here == "cuda" else "cuda")


def test_what_changes_no_result_needs_no_name():
    assert changes([], log_every=3, data={"workers": 4}, state={"prefetch_steps": 5}) == []


@pytest.mark.parametrize(
    "asked",
    [{"seed": 1}, {"batch_size": 128}, {"order": {"canonical_shards": 4}}, {"order": {"blocks_per_shard": 4}},
     {"order": {"window_blocks": 4}},
     {"model": {"dim": 8}}, {"model": {"image": {"name": "hf:vit-b"}}}, {"objective": {"mode": "unimodal"}},
     {"objective": {"tau_init": 0.02}}, {"objective": {"learn_b": False}}, {"objective": {"similarity": "distance"}},
     {"optimizer": {"name": "lion", "eps": "none"}}, {"init": {"run": "/other@step-3"}},
     {"model": {"ema": 0.99}}, {"model": {"image": {"locked": True}}}, {"optimizer": {"layer_decay": 0.7}},
     {"optimizer": {"weight_decay": 0.1}}, {"optimizer": {"betas": [0.5, 0.5]}}],
)  # fmt: skip
def test_what_order_weights_or_state_depend_on_cannot_change_even_where_it_is_named(asked):
    key = next(iter(flat(asked)))
    with pytest.raises(ConfigError, match=rf"{key}: .* \(cannot change: .*\)\. Omit them or start a new run"):
        changes([key, "optimizer"], **asked)


@pytest.mark.parametrize(
    ("objective", "key"), [("clip", "log_logit_scale"), ("fastclip_v3", "tau"), ("fastclip_v0", "tau")]
)
def test_what_is_learned_cannot_be_set_any_more(objective, key):
    run = load_config({"objective": {"name": objective, "mode": "bimodal", key: 0.1}})
    with pytest.raises(ConfigError, match=f"objective.{key}: .*cannot change: it is restored from the checkpoint"):
        changes(["objective"], run, objective={key: 0.2})


def test_a_temperature_that_is_constant_may_change():
    run = load_config({"objective": {"name": "sogclr", "mode": "bimodal", "tau": 0.1}})
    assert changes(["objective.tau"], run, objective={"tau": 0.2}) == [("objective.tau", 0.1, 0.2)]


def test_all_that_is_refused_is_named_at_once_and_only_what_may_change_is_offered():
    with pytest.raises(ConfigError, match=r"seed: .*cannot change.*; epochs: .*allow them with --allow-change epochs,"):
        changes([], seed=1, epochs=3)


def local(name, start="", **config):
    return load_config({"init": {"run": start}, "model": {"image": {"name": name, "config": config}}})


def test_a_local_model_that_is_gone_is_the_recorded_one_with_the_asked_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorded = local(f"hf:{tmp_path}/model", model_type="resnet", layer_type="basic")
    assert as_recorded(local("hf:./model"), recorded) == recorded
    asked = as_recorded(local("hf:./model", layer_type="bottleneck"), recorded)
    assert [change.key for change in differences(recorded, asked)] == ["model.image.config.layer_type"]


def test_the_recipe_keeps_the_normalisation_of_the_model_that_is_taken_as_recorded(tmp_path):
    def settings(model, recipe, **config):
        return load_config({"model": {"image": {"name": model, "config": config}}, "data": {"recipe": recipe}})

    brought = {"name": "clip", "mean": [0.5, 0.5, 0.5]}
    recorded = settings(f"hf:{tmp_path}/model", brought, model_type="resnet")
    assert as_recorded(settings(f"hf:{tmp_path}/model", "clip"), recorded) == recorded
    for asked in (settings(f"hf:{tmp_path}/model", "simclr"), settings("conv", "clip")):
        assert as_recorded(asked, recorded).data.recipe == asked.data.recipe


def test_a_local_model_that_is_gone_is_locked_as_it_is_asked_for(tmp_path):
    recorded = local(f"hf:{tmp_path}/model", model_type="resnet")
    tree = {"name": f"hf:{tmp_path}/model", "locked": True, "unlocked_groups": 1}
    asked = as_recorded(load_config({"model": {"image": tree}}), recorded)
    assert {change.key for change in differences(recorded, asked)} == {
        "model.image.locked", "model.image.unlocked_groups"
    }  # fmt: skip


def test_another_model_or_run_to_start_from_stays_what_is_asked_for(tmp_path):
    recorded = local(f"hf:{tmp_path}/model", "/a@step-3", model_type="resnet")
    for asked in (local(f"hf:{tmp_path}/other"), local("hf:resnet-18"), local("conv", "/a@step-4")):
        assert as_recorded(asked, recorded) == asked
    assert as_recorded(local("conv", "/a"), recorded).init.run == "/a@step-3"
