"""Zero-shot: prompts, and the mean of their unit features."""

import torch
from torch.nn import functional as F

from thermopile.trainer.evaluation.scoring import prompts, zero_shot


def test_the_name_goes_where_the_template_has_its_place():
    assert prompts(["Cat", "{} \\1"], ["a {}", "my {lower}, {}!"]) == [
        "a Cat", "my cat, Cat!", "a {} \\1", "my {} \\1, {} \\1!",
    ]  # fmt: skip


def test_a_class_is_the_mean_of_its_prompts_unit_features_of_norm_one_again():
    features = {
        "a left": [1.0, 0.0], "the left": [0.0, 1.0],  # 45°
        "a right": [0.8, 0.6], "the right": [0.8, 0.6],  # 36.9°; its mean is the longer one
    }  # fmt: skip
    at = torch.tensor([44.0, 42.0, 40.0, 10.0]).deg2rad()
    images = torch.stack([at.cos(), at.sin()], 1)
    texts = torch.tensor([features[text] for text in prompts(["left", "right"], ["a {}", "the {}"])])
    predicted = zero_shot(images, texts, templates=2)
    assert predicted.argmax(1).tolist() == [0, 0, 1, 1]  # cut at (45° + 36.9°) / 2 = 40.9°


def test_with_one_template_a_class_is_its_prompt():
    texts = F.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert zero_shot(texts, texts, templates=1).argmax(1).tolist() == [0, 1, 2]
