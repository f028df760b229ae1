"""Settings in layers: the last one wins, and every value knows which that was."""

import pytest

from thermopile.trainer.config.layers import Layers, from_overrides, read_preset


def test_a_value_comes_from_the_last_layer_that_has_it():
    layers = Layers()
    layers.add({"epochs": 3, "optimizer": {"lr": 0.1, "eps": 1e-6}}, "below")
    layers.add({"optimizer": {"lr": 0.2}, "seed": 4}, "above")
    assert layers.tree == {"epochs": 3, "optimizer": {"lr": 0.2, "eps": 1e-6}, "seed": 4}
    assert layers.origins == {"epochs": "below", "optimizer.lr": "above", "optimizer.eps": "below", "seed": "above"}


def test_what_another_objective_leaves_behind_has_no_origin_either():
    layers = Layers()
    layers.add({"objective": {"name": "isogclr", "rho": 2.0}}, "below")
    layers.add({"objective": {"name": "simclr"}}, "above")
    assert layers.origins == {"objective.name": "above"}


def test_a_value_of_a_preset_comes_from_the_file_that_sets_it():
    layers = Layers()
    layers.add_preset("fastclip_v3/xlarge")
    assert layers.tree == read_preset("fastclip_v3/xlarge")
    origins = [layers.origins[key] for key in ("objective.rho", "model.image.name", "data.image_size")]
    assert origins == ["preset fastclip_v3/xlarge", "preset fastclip_v3/large", "preset fastclip_v3/medium"]


def test_a_preset_on_top_of_a_run_of_it_keeps_what_the_run_has_beside_it():
    layers = Layers()
    layers.add({"objective": {"name": "simclr", "tau": 0.3, "similarity_budget": 9}}, "the run")
    layers.add_preset("simclr/cifar100")  # which extends one of another objective
    assert layers.tree["objective"] == {"name": "simclr", "mode": "unimodal", "tau": 0.3, "similarity_budget": 9}
    assert layers.origins["objective.similarity_budget"] == "the run"


@pytest.mark.parametrize(
    ("below", "above", "merged"),
    [
        ("simclr", {"blur": 0.5}, {"name": "simclr", "blur": 0.5}),
        ({"name": "simclr", "blur": 0.5}, {"flip": 0.0}, {"name": "simclr", "blur": 0.5, "flip": 0.0}),
        ({"name": "simclr", "blur": 0.5}, {"name": "clip"}, {"name": "clip"}),
        ({"name": "simclr", "blur": 0.5}, "clip", "clip"),
        ("simclr", {"name": "clip", "blur": 0.5}, {"name": "clip", "blur": 0.5}),
    ],
)
def test_changed_fields_of_a_recipe_go_with_its_name_and_another_name_drops_them(below, above, merged):
    layers = Layers()
    layers.add({"data": {"recipe": below}}, "below")
    layers.add({"data": {"recipe": above}}, "above")
    assert layers.tree == {"data": {"recipe": merged}}


def test_the_name_of_a_recipe_keeps_its_origin_where_fields_are_changed():
    layers = Layers()
    layers.add({"data": {"recipe": "simclr"}}, "below")
    layers.add({"data": {"recipe": {"blur": 0.5}}}, "above")
    assert layers.origins == {"data.recipe.name": "below", "data.recipe.blur": "above"}


@pytest.mark.parametrize("overrides", [("data.recipe=simclr", "data.recipe.blur=0.5"),
                                       ("data.recipe.blur=0.5", "data.recipe=simclr")])  # fmt: skip
def test_a_recipes_name_and_fields_may_be_set_in_any_order(overrides):
    assert from_overrides(overrides) == {"data": {"recipe": {"name": "simclr", "blur": 0.5}}}
