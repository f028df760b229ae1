"""Lets torchvision be imported beside another build of torch, as PyPI's is beside a CPU build; timm imports it.

Its Python code describes operators of its compiled code, which such a torch cannot load: here they are declared without
code. No test runs them. Import this module before timm or open_clip.
"""

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:  # operator torchvision::nms does not exist
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("deform_conv2d", "ps_roi_pool", "roi_pool", "ps_roi_align", "roi_align", "qnms", "nms"):
        for _each in (_name, f"_{_name}_backward"):
            _library.define(f"{_each}(Tensor values) -> Tensor")
