"""Full precision: inside, float32 is float32; outside, everything is as it was."""

from contextlib import suppress

import torch

from thermopile.trainer.objectives.base import full_precision

BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def test_autocast_is_off_and_products_are_true_float32_inside_alone():
    torch.set_float32_matmul_precision("medium")
    try:
        before = [backend.fp32_precision for backend in BACKENDS]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with suppress(KeyError), full_precision("cpu"):
                assert not torch.is_autocast_enabled("cpu")
                assert [backend.fp32_precision for backend in BACKENDS] == ["ieee", "ieee"]
                raise KeyError
            assert torch.is_autocast_enabled("cpu")
        assert [backend.fp32_precision for backend in BACKENDS] == before == ["tf32", "bf16"]
    finally:
        torch.set_float32_matmul_precision("highest")
