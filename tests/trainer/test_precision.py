"""How precisely a GPU computes: a setting of the run, and of the process only while the run lasts."""

import pytest
import torch

from thermopile.trainer.config import load_config
from thermopile.trainer.precision import fast_kernels

BACKENDS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)


@pytest.mark.parametrize(
    ("precision", "kernels"), [("float32", "ieee"), ("tf32", "tf32"), ("bf16", "tf32"), ("fp16", "tf32")]
)
def test_products_of_float32_use_tf32_unless_the_run_is_in_float32(precision, kernels):
    before = [backend.fp32_precision for backend in BACKENDS], torch.backends.cudnn.benchmark
    with fast_kernels(load_config({"precision": precision, "cudnn_benchmark": True})):
        assert [backend.fp32_precision for backend in BACKENDS] == [kernels, kernels]
        assert torch.backends.cudnn.benchmark
    assert before == ([backend.fp32_precision for backend in BACKENDS], torch.backends.cudnn.benchmark)


def test_a_caller_has_its_own_settings_back_after_an_error():
    before = [backend.fp32_precision for backend in BACKENDS], torch.backends.cudnn.benchmark
    with pytest.raises(KeyError), fast_kernels(load_config({"precision": "tf32", "cudnn_benchmark": True})):
        raise KeyError
    assert before == ([backend.fp32_precision for backend in BACKENDS], torch.backends.cudnn.benchmark)


def test_cudnn_s_attention_is_off_during_a_run():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with fast_kernels(load_config({"precision": "bf16", "cudnn_benchmark": False})):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
