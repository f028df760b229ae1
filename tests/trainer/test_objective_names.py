"""The names of objectives' settings that are known without torch are those that the objectives have."""

import pytest

from thermopile.trainer.errors import ConfigError
from thermopile.trainer.objective_names import SETTINGS, refuse_unknown
from thermopile.trainer.objectives import OBJECTIVES, create_objective


def test_every_objective_has_the_settings_that_are_known_of_it_in_this_order():
    for name, objective in OBJECTIVES.items():
        for mode, model in objective.settings_of_mode.items():
            assert SETTINGS[name] == tuple(model.model_fields), (name, mode)
    assert SETTINGS.keys() == OBJECTIVES.keys()


def test_an_unknown_setting_is_refused_in_the_words_of_the_objective_itself():
    for settings in ({"tau_mim": 1}, {"tau": 0.1, "zzz": 1}):
        with pytest.raises(ValueError, match="has no setting") as said:
            create_objective("sogclr", **settings)
        with pytest.raises(ConfigError) as said_early:
            refuse_unknown("sogclr", settings)
        assert str(said_early.value) == str(said.value)


def test_an_objective_that_is_not_known_here_is_left_to_itself():
    refuse_unknown("isoglcr", ["foo"])
