"""The parts of `make gpu`, in the order of their worth, in which they run and stand on the page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One measurement."""

    name: str
    title: str
    function: str
    """module:function, of this package; called with Findings and the arguments."""
    needs: tuple[str, ...]
    """Modules without which it cannot run."""
    usual: float
    """Seconds that it is likely to take; with less time left it is not begun."""
    seconds: float
    """It is ended after this long."""
    arguments: tuple[str, ...] = ()


OBJECTIVE = ("torch", "numpy", "pydantic", "click", "rich")
TRAINER = (*OBJECTIVE, "numba", "tomli_w", "zarr", "icechunk", "numcodecs", "pyarrow", "safetensors", "tokenizers",
           "transformers")  # fmt: skip
DATA = (*TRAINER, "ffcv", "PIL", "sklearn")
DALI = (*DATA, "nvidia.dali")
RIVAL = (*DATA, "open_clip_train", "webdataset", "braceexpand", "ftfy", "wcwidth", "timm", "torchvision", "pandas")
TESTS = (*TRAINER, "pytest", "pytest_timeout", "hypothesis", "PIL")
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "tomli_w": "tomli-w", "pytest_timeout": "pytest-timeout",
            "nvidia.dali": "nvidia-dali-cuda130", "open_clip_train": "open_clip_torch"}  # fmt: skip
"""Module → package, where the names differ."""

PARTS = (
    Part("smoke", "Ten steps with each loader", "runs:smoke", TRAINER, 60, 120),
    Part("training", "Training on real data", "feeding:training", DATA, 60, 150, ("crop_flip",)),
    Part("training-simclr", "Training on real data, SimCLR's recipe", "feeding:training", DALI, 50, 120, ("simclr",)),
    Part("training-pairs", "Training on real data, pairs", "feeding:training", DALI, 60, 120, ("clip",)),
    Part("dali", "DALI", "feeding:dali", DALI, 75, 150),
    Part("dali-damage", "DALI and a damaged JPEG", "dali:damage", DALI, 45, 100),
    Part("dali-memory", "DALI's memory", "dali:memory", DALI, 60, 120),
    Part("tests-dali", "Tests of DALI on the GPU", "suite:tests", (*TESTS, "ffcv", "nvidia.dali"), 60, 120,
         ("dali",)),
    Part("step-bf16", "A step in bfloat16", "steps:measure", TRAINER, 55, 105, ("bf16",)),
    Part("objective", "The objective", "objective:measure", OBJECTIVE, 90, 180),
    Part("copies", "Copies, kernels and idle time", "copies:copies", TRAINER, 40, 90),
    Part("waits", "Waits for the GPU", "copies:waits", TRAINER, 45, 90, ("float32", "bf16", "checkpointed", "pieces")),
    Part("checkpoint", "Checkpoints", "runs:checkpoint", TRAINER, 50, 90),
    Part("resume", "A stopped and resumed run", "runs:resume", TRAINER, 40, 90),
    Part("exact", "A stopped and resumed run of ResNet-50, deterministic", "runs:exact", TRAINER, 60, 130,
         ("ResNet", "deterministic")),
    Part("exact-vit", "A stopped and resumed run of ViT-B/32, deterministic", "runs:exact", TRAINER, 50, 130,
         ("ViT", "vit")),
    Part("rival-resnet", "Beside open_clip: RN50", "rival:measure", RIVAL, 70, 150, ("RN50", "plain")),
    Part("rival-vit", "Beside open_clip: ViT-B-32", "rival:measure", RIVAL, 50, 120, ("ViT-B-32", "plain")),
    Part("real", "Real training", "real:measure", (*DATA, "matplotlib", "pandas"), 180, 300),
    Part("nccl", "One rank", "runs:one_rank", TRAINER, 45, 90),
    Part("step-deterministic", "A step in bfloat16, deterministic", "steps:measure", TRAINER, 50, 90,
         ("deterministic",)),
    Part("step-compiled", "A step in bfloat16, compiled", "steps:measure", TRAINER, 90, 150, ("compiled",)),
    Part("rival-resnet-compiled", "Beside open_clip, compiled: RN50", "rival:measure", RIVAL, 240, 420,
         ("RN50", "compiled")),
    Part("rival-vit-compiled", "Beside open_clip, compiled: ViT-B-32", "rival:measure", RIVAL, 180, 300,
         ("ViT-B-32", "compiled")),
    Part("waits-compiled", "Waits for the GPU, compiled", "copies:waits", TRAINER, 60, 120, ("compiled",)),
    Part("step-float32", "A step in float32", "steps:measure", TRAINER, 55, 105, ("float32",)),
    Part("step-tf32", "A step in TF32", "steps:measure", TRAINER, 45, 90, ("tf32",)),
    Part("step-checkpointed", "A step in bfloat16 with activation checkpointing", "steps:measure", TRAINER, 55, 105,
         ("checkpointed",)),
    Part("step-vit", "A step of ViT-B/32 in bfloat16", "steps:measure", TRAINER, 45, 90, ("vit",)),
    Part("tests", "Tests on the GPU", "suite:tests", TESTS, 60, 150, ("not compiled and not dali",)),
    Part("tests-compiled", "Tests of compiled code on the GPU", "suite:tests", TESTS, 60, 150, ("compiled",)),
)  # fmt: skip
