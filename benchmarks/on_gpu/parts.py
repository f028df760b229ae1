"""The parts of `make gpu`, in the order in which they run and stand on the page."""

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
    seconds: float
    """It is ended after this long."""
    arguments: tuple[str, ...] = ()
    after: str = ""
    """A part that must have run."""


OBJECTIVE = ("torch", "numpy", "pydantic", "click", "rich")
TRAINER = (*OBJECTIVE, "numba", "tomli_w", "zarr", "icechunk", "numcodecs", "pyarrow", "safetensors", "tokenizers",
           "transformers")  # fmt: skip
DATA = (*TRAINER, "ffcv", "PIL", "sklearn")
TESTS = (*TRAINER, "pytest", "pytest_timeout", "hypothesis", "PIL")
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "tomli_w": "tomli-w", "pytest_timeout": "pytest-timeout",
            "nvidia.dali": "nvidia-dali-cuda130"}  # fmt: skip
"""Module → package, where the names differ."""

PARTS = (
    Part("tests", "Tests on the GPU", "runs:tests", TESTS, 150, ("not compiled",)),
    Part("objective", "The objective", "objective:measure", OBJECTIVE, 60),
    Part("step-bf16", "A step in bfloat16", "steps:measure", TRAINER, 75, ("bf16",)),
    Part("step-tf32", "A step in TF32", "steps:measure", TRAINER, 60, ("tf32",)),
    Part("step-float32", "A step in float32", "steps:measure", TRAINER, 75, ("float32",)),
    Part("step-checkpointed", "A step in bfloat16 with activation checkpointing", "steps:measure", TRAINER, 75,
         ("checkpointed",)),
    Part("step-vit", "A step of ViT-B/32 in bfloat16", "steps:measure", TRAINER, 60, ("vit",)),
    Part("waits", "Waits for the GPU", "copies:waits", TRAINER, 45),
    Part("copies", "Copies of the state", "copies:copies", TRAINER, 45),
    Part("photographs", "Photographs", "feeding:photographs", DATA, 60),
    Part("training", "Training on real data", "feeding:training", DATA, 100, after="photographs"),
    Part("dali", "DALI", "feeding:dali", (*DATA, "nvidia.dali"), 75, after="photographs"),
    Part("checkpoint", "Checkpoints", "runs:checkpoint", TRAINER, 60),
    Part("resume", "A stopped and resumed run", "runs:resume", TRAINER, 60),
    Part("step-compiled", "A step in bfloat16, compiled", "steps:measure", TRAINER, 150, ("compiled",)),
    Part("tests-compiled", "Tests of compiled encoders on the GPU", "runs:tests", TESTS, 150, ("compiled",)),
)  # fmt: skip
