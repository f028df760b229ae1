import pytest

from thermopile.tools.bench.objective.contenders import RIVALS, Case, create_contender
from thermopile.trainer.objectives import OBJECTIVES

MODES = [(name, mode) for name, objective in OBJECTIVES.items() for mode in objective.settings_of_mode]


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_every_contender_of_every_objective_takes_a_step(name, mode):
    case = Case(name, mode, batch=8, dim=4, device="cpu")
    for contender in case.contenders:
        create_contender(contender, case)()


def test_only_the_objective_that_the_rivals_are_written_for_has_them():
    with_rivals = {(name, mode) for name, mode in MODES if set(RIVALS) & set(Case(name, mode, 8, 4, "cpu").contenders)}
    assert with_rivals == {("isogclr", "bimodal")}


def test_two_views_make_twice_the_rows():
    assert Case("simclr", "unimodal", batch=8, dim=4, device="cpu").rows == 16
    assert Case("clip", "bimodal", batch=8, dim=4, device="cpu").rows == 8
