"""Lets PyPI's torchvision be imported beside a CPU build of torch, where timm, open_clip and transformers import it.

Its Python code describes operators of its compiled code, which asks for CUDA and is not loaded there. They are declared
here, without code, as soon as something imports torchvision. No test runs them.
"""

import sys
from importlib.metadata import version

OPERATORS = ("deform_conv2d", "ps_roi_pool", "roi_pool", "ps_roi_align", "roi_align", "qnms", "nms")


class _BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.__version__.endswith("+cpu") and "+" not in version("torchvision"):
                library = torch.library.Library("torchvision", "FRAGMENT")
                for operator in OPERATORS:
                    library.define(f"{operator}(Tensor values) -> Tensor")
                    library.define(f"_{operator}_backward(Tensor values) -> Tensor")
                OPEN.append(library)  # which ends with its operators


OPEN = []
sys.meta_path.insert(0, _BeforeTorchvision())
