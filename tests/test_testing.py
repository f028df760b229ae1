"""The checks that users run on code of their own: what is right passes, and what is wrong is told."""

import itertools
import sys

import pytest
import torch
from torch import nn

from thermopile import Objective, Outcome, Recipe, Settings, testing
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.objectives import OBJECTIVES

from support import own_code


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_an_objective_of_ones_own_passes(mode):
    testing.check_objective("support.own_code:Weighted", mode, tau=0.5)


def test_an_objective_of_ones_own_that_weighs_its_samples_passes():
    testing.check_objective("wrong_code:Weighing")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_our_own_objectives_pass(name):
    for mode in OBJECTIVES[name].settings_of_mode if OBJECTIVES[name].keys != "always" else ():
        testing.check_objective(name, mode)


def test_encoders_recipes_and_sources_of_ones_own_pass(picture_folder):
    testing.check_image_encoder("support.own_code:Tower", width=7)
    testing.check_text_encoder("support.own_code:Words")
    testing.check_recipe("support.own_code:SOFT", blur=0.3)
    testing.check_source(own_code.Pictures(picture_folder / "dogs"))


class Plain(Objective):
    settings_of_mode = {"unimodal": Settings}  # noqa: RUF012

    def __init__(self, mode, settings):
        super().__init__(mode, settings, seen=0.0)

    def terms(self, first, second):
        return (first - second).square().sum(1)

    def seen(self, old):
        return old + 1

    def loss(self, first, second, own, state, progress):
        return Outcome(self.terms(first[own], second[own]).mean(), {"sample/seen": self.seen(state["sample/seen"])}, {})


class OfTheBatch(Plain):
    def terms(self, first, second):
        of_each = super().terms(first, second)
        return of_each * of_each.max().detach()  # of this rank's rows


class Unweighted(Plain):
    takes_weights = True


class WeightedTwice(Plain):
    takes_weights = True

    def loss(self, first, second, own, state, progress):
        weights = state.get("weight", torch.ones(1))
        loss = (weights.square() * self.terms(first[own], second[own])).mean()
        return Outcome(loss, {"sample/seen": self.seen(state["sample/seen"])}, {})


class Weighing(WeightedTwice):
    def loss(self, first, second, own, state, progress):
        rooted = {"weight": state["weight"].sqrt()} if "weight" in state else {}
        return super().loss(first, second, own, dict(state) | rooted, progress)


class Backwards(Plain):
    def seen(self, old):
        return torch.arange(len(old), dtype=old.dtype)


class OfTheOrder(Plain):
    def terms(self, first, second):
        return super().terms(first, second) * torch.arange(len(first))


class Drawn(Plain):
    calls = itertools.count()

    def terms(self, first, second):
        return super().terms(first, second) * next(self.calls)


class WithoutGradient(Plain):
    def terms(self, first, second):
        return super().terms(first, second.detach())


class NotFinite(Plain):
    def terms(self, first, second):
        return super().terms(first, second) / 0.0


class Unwritten(Objective):
    settings_of_mode = {"unimodal": Settings}  # noqa: RUF012


class OtherState(Plain):
    def loss(self, first, second, own, state, progress):
        return Outcome(self.terms(first[own], second[own]).mean(), {"sample/tau": state["sample/seen"]}, {})


class OtherSignature(Plain):
    def loss(self, features):
        return features


class Several(nn.Module):
    """An encoder that is wrong in one way."""

    def __init__(self, image_size, wrong=""):
        super().__init__()
        self.width, self.wrong = 5 if wrong == "width" else 4, wrong
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
        self.idle = nn.Parameter(torch.zeros(1)) if wrong == "idle" else None
        if wrong == "weights":
            with torch.no_grad():
                self.body[2].bias.fill_(next(Drawn.calls))

    def forward(self, images):
        features = self.body(images)
        if self.wrong == "others":
            features = features - features.mean(0)
        return features / 0 if self.wrong == "finite" else features


def without_width(image_size):
    return nn.Linear(1, 1)


NO_RECIPE = {"blur": 0.5}
SOFT = Recipe()


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "wrong_code", sys.modules[__name__])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("OfTheBatch", "`own` is a part of the rows, and loss"),
        ("Unweighted", "takes_weights, but weights change nothing"),
        ("WeightedTwice", "every sample in turn has all the weight, and loss"),
        ("Backwards", "samples in another order, and state sample/seen"),
        ("OfTheOrder", "samples in another order, and loss"),
        ("Drawn", "the same step again, and loss"),
        ("WithoutGradient", "the gradient of the features is zero or not finite"),
        ("NotFinite", "its loss on a batch of 4 is"),
        ("Unwritten", "has no `loss`; write it"),
        ("OtherState", "'sample/seen' is missing; given \\['sample/tau'\\]"),
        ("OtherSignature", "TypeError: .*thermopile.testing.check_objective says what it must do"),
        ("Several", "is not a class derived from thermopile.Objective"),
        ("Nowhere", "which has no 'Nowhere'$"),
    ],
)
def test_an_objective_that_is_wrong_is_told_what_is(name, said):
    with pytest.raises((AssertionError, ValueError), match=said):
        testing.check_objective(f"wrong_code:{name}")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("width", r"to float32 \[2, 4\]; its width 5 needs \[2, 5\]"),
        ("finite", "features that are not finite; check its initial weights"),
        ("idle", "no gradient reaches body.idle; several ranks would wait for it"),
        ("weights", "differs between two with the same seed"),
        ("others", "a sample's features depend on the others"),
    ],
)
def test_an_encoder_that_is_wrong_is_told_what_is(wrong, said):
    with pytest.raises((AssertionError, ConfigError), match=said):
        testing.check_image_encoder("wrong_code:Several", wrong=wrong)


def test_an_encoder_of_another_signature_or_without_a_width_is_told_so():
    with pytest.raises(ConfigError, match="cannot be created with tokenizer: TypeError"):
        testing.check_text_encoder("wrong_code:Several")
    with pytest.raises(ConfigError, match="It must return a torch module with the attribute width"):
        testing.check_image_encoder("wrong_code:without_width")


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("NO_RECIPE", {}, "is a dict; it must be a thermopile.Recipe"),
        ("SOFT", {"blurr": 1}, r"no field 'blurr' \(did you mean 'blur'\?\)"),
        ("SOFT", {"blur": 2.0}, r"data.recipe.blur: Input should be less than or equal to 1"),
        ("SOFT", {"flip": "often"}, "data.recipe.flip: Input should be a valid number"),
    ],
)
def test_a_recipe_that_is_wrong_is_told_what_is(name, fields, said):
    with pytest.raises(ConfigError, match=said):
        testing.check_recipe(f"wrong_code:{name}", **fields)


class OneKey(own_code.Pictures):
    def key(self, index):
        return "key"


class OtherUri(own_code.Pictures):
    def __getitem__(self, index):
        return super().__getitem__(index)._replace(uri="elsewhere")


class WithoutCaptions(own_code.Pictures):
    def __getitem__(self, index):
        return super().__getitem__(index)._replace(caption=None)


class Unstable(own_code.Pictures):
    def __getitem__(self, index):
        return super().__getitem__(index)._replace(caption=str(next(Drawn.calls)))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (OneKey, "99 keys occur more than once"),
        (OtherUri, r"sample 0: uri\(\) or key\(\) says otherwise"),
        (WithoutCaptions, "sample 0: caption None"),
        (Unstable, "sample 0 is another one when it is read again"),
    ],
)
def test_a_source_that_is_wrong_is_told_what_is(source, said, picture_folder):
    with pytest.raises(AssertionError, match=said):
        testing.check_source(source(picture_folder / "dogs"))
