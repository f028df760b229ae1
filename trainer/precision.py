"""The encoders' precision: half precision, TF32, and the choice of convolution kernels."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..storage.files import user_cache
from .config import TrainConfig
from .objectives.pairs import compile_for_each_shape, rounded, set_until
from .optim import Optimizer

DTYPES = {"float32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision → the dtype of autocast, if any."""


def resolve_speed(config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return the settings that trade bits for speed, with `auto` replaced by a fast choice for the device.

    On a GPU, precision is bfloat16 if it has units for it; GPUs without also lack TF32. On a CPU, choices are exact.
    """
    on_gpu = device.type == "cuda"
    half = "bf16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    fast = {"precision": half, "channels_last": on_gpu}
    return {key: value if getattr(config, key) == "auto" else getattr(config, key) for key, value in fast.items()}


def compiler_fault(device: torch.device) -> str:
    """Return why torch cannot compile for a device, empty if it can; the first time takes some seconds."""
    try:
        keep_compiled_code_at_home()
        compile_for_each_shape(rounded)(torch.zeros(1, 1, device=device))
    except Exception as error:  # noqa: BLE001 (torch's, Triton's and a C compiler's have no base)
        why = str(getattr(error, "inner_exception", error))  # torch's own text begins with a line that says nothing
        return f"torch cannot compile for {device} ({why.partition(chr(10))[0]})"
    return ""


def keep_compiled_code_at_home() -> None:
    """Have torch keep what it compiles, and later unpickles and runs, where no other user can make its folder first."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache() / "torch"))


@contextmanager
def fast_kernels(precision: str, *, timed: bool, deterministic: bool = False) -> Iterator[None]:
    """Let CUDA's float32 products and convolutions use TF32, unless the precision is float32, and cuDNN choose kernels
    by timing them if `timed`, which pays where all batches have one size; with `deterministic`, use only kernels that
    always give the same bits.

    These are settings of the whole process; the caller's are restored at the end. Meanwhile torch refuses to read its
    older names for them, such as `allow_tf32`.
    """
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    filling: Any = torch.utils.deterministic
    with ExitStack() as at_end:
        # torch prefers cuDNN's attention on an H100 and newer, which with a mask gives NaN gradients for some lengths
        # of captions (https://github.com/pytorch/pytorch/issues/196678).
        at_end.callback(cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled())
        cuda.enable_cudnn_sdp(False)
        for backend in (cuda.matmul, cudnn.conv):
            set_until(at_end, backend, "fp32_precision", "ieee" if precision == "float32" else "tf32")
        set_until(at_end, cudnn, "benchmark", timed and not deterministic)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product on a GPU
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            own = torch.are_deterministic_algorithms_enabled()
            at_end.callback(torch.use_deterministic_algorithms, own, warn_only=warns)
            torch.use_deterministic_algorithms(True)
            set_until(at_end, filling, "fill_uninitialized_memory", False)  # filling finds errors, but costs time
        yield


class MixedPrecision:
    """torch's autocast and, for fp16, whose gradients would underflow, loss scaling.

    A step whose scaled gradients overflow leaves the encoders' weights unchanged and halves the scale for the next
    steps, but may move a global temperature, whose gradients are checked separately. To detect an overflow, fp16
    synchronises with the device in every step.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        self._device_type, self.dtype = device.type, DTYPES[precision]
        """Dtype in which the encoders compute; None: their weights' dtype."""
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def autocast(self) -> torch.autocast:
        """Return the context for the encoders' forward pass."""
        return torch.autocast(self._device_type, self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the scaled loss."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> Tensor | None:
        """Update the weights by their unscaled gradients, clipped to `max_norm` if given.

        Returns the norm before clipping, a scalar on the device; not finite if fp16 skips the step.
        """
        norm = None
        if max_norm is not None:
            self.scaler.unscale_(optimizer.weights)
            norm = optimizer.clip_gradients(max_norm)
        optimizer.step(self.scaler.step)
        self.scaler.update()
        return norm
