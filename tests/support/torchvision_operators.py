"""Lets PyPI's torchvision be imported beside a CPU build of torch, where timm and open_clip import it.

Its Python code describes operators of its compiled code, which asks for CUDA and is not loaded there. They are declared
here, without code. No test runs them.
"""

from importlib.metadata import PackageNotFoundError, version

import torch

OPERATORS = ("deform_conv2d", "ps_roi_pool", "roi_pool", "ps_roi_align", "roi_align", "qnms", "nms")
LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def _is_foreign() -> bool:
    try:
        return torch.__version__.endswith("+cpu") and not version("torchvision").endswith("+cpu")
    except PackageNotFoundError:
        return False


if _is_foreign():
    for operator in OPERATORS:
        LIBRARY.define(f"{operator}(Tensor values) -> Tensor")
        LIBRARY.define(f"_{operator}_backward(Tensor values) -> Tensor")
