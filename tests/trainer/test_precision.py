"""How precisely a GPU computes: a setting of the run, and of the process only while the run lasts."""

import os

import pytest
import torch

from thermopile.trainer.encoders.backbones import PooledTo4
from thermopile.trainer.precision import fast_kernels

BACKENDS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)


@pytest.mark.parametrize(
    ("precision", "kernels"), [("float32", "ieee"), ("tf32", "tf32"), ("bf16", "tf32"), ("fp16", "tf32")]
)
def test_products_of_float32_use_tf32_unless_the_run_is_in_float32(precision, kernels):
    before = [backend.fp32_precision for backend in BACKENDS], torch.backends.cudnn.benchmark
    with fast_kernels(precision, timed=True):
        assert [backend.fp32_precision for backend in BACKENDS] == [kernels, kernels]
        assert torch.backends.cudnn.benchmark
    assert before == ([backend.fp32_precision for backend in BACKENDS], torch.backends.cudnn.benchmark)


def test_a_caller_has_its_own_settings_back_after_an_error():
    before = [backend.fp32_precision for backend in BACKENDS], torch.backends.cudnn.benchmark
    with pytest.raises(KeyError), fast_kernels("tf32", timed=True):
        raise KeyError
    assert before == ([backend.fp32_precision for backend in BACKENDS], torch.backends.cudnn.benchmark)


def test_deterministic_algorithms_are_those_of_a_run_alone_and_it_times_no_kernels(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with fast_kernels("float32", timed=True, deterministic=True):
        assert not torch.backends.cudnn.benchmark
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.utils.deterministic.fill_uninitialized_memory
        maps = torch.randn(2, 3, 28, 28)
        torch.testing.assert_close(PooledTo4(4)(maps), torch.nn.AdaptiveAvgPool2d(4)(maps))
        torch.testing.assert_close(PooledTo4(4)(maps[..., 1:]), torch.nn.AdaptiveAvgPool2d(4)(maps[..., 1:]))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with fast_kernels("float32", timed=False, deterministic=True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_cudnn_s_attention_is_off_during_a_run():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with fast_kernels("bf16", timed=False):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
