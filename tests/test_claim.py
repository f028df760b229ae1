"""The method's claim, on data whose truth is known: frequent semantics get high temperatures, rare ones low.

iSogCLR, Figures 5 and 8, show it on CC3M and CIFAR by looking; here class sizes are known, so it is a number.
"""

import pytest

from support.cli import answer, sets, succeed


def spearman_figures(folder, seed, *settings):
    data, out = folder / "glyphs", folder / "run"
    succeed("convert", "glyphs", data, "--seed", seed)
    succeed("train", "--preset", "glyphs", "--data", data, "--out", out, *sets(f"seed={seed}", *settings))
    (by_class,) = answer("inspect", out)["groups"]
    return by_class["correlation"].values()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mean_temperature_of_a_class_follows_its_size(tmp_path, seed):
    for side in spearman_figures(tmp_path, seed):
        assert side["spearman"] >= 0.75
        assert abs(side["permuted"]) <= 0.15


@pytest.mark.wide
def test_the_claim_shows_within_half_of_the_training(tmp_path):
    for side in spearman_figures(tmp_path, 0, "epochs=10", "optimizer.warmup=50"):
        assert side["spearman"] >= 0.6
        assert abs(side["permuted"]) <= 0.3
