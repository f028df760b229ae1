"""What the ranks of a run must have in common: everything that is not where a machine keeps its data."""

import pytest

from thermopile.trainer.config import flat, load_config, to_tree
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.restoring import MAY_DIFFER, differences, facts, refuse_differences
from thermopile.trainer.world import World


class Told:
    """The messages of rank 0 of three, where the last rank says something else."""

    rank, world = 0, 3

    def __init__(self, other):
        self.other = other

    def gather(self, value):
        return [value, value, self.other]

    def broadcast(self, value):
        return value


@pytest.fixture(scope="module")
def config(pairs_dataset):
    tree = {"batch_size": 128, "data": {"path": str(pairs_dataset.path), "image_size": 32}}
    return resolve(load_config(tree), pairs_dataset)[0]


@pytest.fixture(scope="module")
def of_rank_0(config, pairs_dataset):
    return facts(config, pairs_dataset)


def test_ranks_that_agree_go_on(of_rank_0):
    assert differences([of_rank_0]) == differences([of_rank_0] * 3) == []
    refuse_differences(World(size=3, control=Told(of_rank_0)), of_rank_0)


def test_a_difference_in_any_setting_or_in_the_dataset_is_named(config, of_rank_0):
    settings = flat(to_tree(config)).keys()
    assert settings - of_rank_0.keys() == MAY_DIFFER & settings
    assert {"thermopile", "order_version", "dataset samples", "dataset fingerprint"} < of_rank_0.keys()
    for key, value in of_rank_0.items():
        assert differences([of_rank_0, of_rank_0, {**of_rank_0, key: "other"}]) == [
            f"rank 2 has {key} = 'other', rank 0 {value!r}"
        ]
        lacking = {name: of_rank_0[name] for name in of_rank_0 if name != key}
        assert differences([of_rank_0, lacking]) == [f"rank 1 has {key} = none, rank 0 {value!r}"]
        assert differences([lacking, of_rank_0]) == [f"rank 1 has {key} = {value!r}, rank 0 none"]


def test_a_dataset_may_lie_elsewhere_on_another_machine_which_may_have_other_cores(config, pairs_dataset, of_rank_0):
    data = config.data.model_copy(update={"path": "/mnt/elsewhere", "workers": 3})
    assert facts(config.model_copy(update={"data": data}), pairs_dataset) == of_rank_0


def test_of_many_differences_the_first_are_named_and_the_others_counted(of_rank_0):
    world = World(size=3, control=Told(dict.fromkeys(of_rank_0, "other")))
    with pytest.raises(
        ConfigError, match=rf"^the ranks differ: rank 2 has thermopile = .*; and {len(of_rank_0) - 10} more\. Start"
    ):
        refuse_differences(world, of_rank_0)
