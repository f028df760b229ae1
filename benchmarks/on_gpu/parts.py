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
    """Seconds that it should take; with less time left it does not begin."""
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
    Part("smoke", "Ten steps by every loader", "smoke:measure", DATA, 30, 60),
    Part("step-bf16", "A step in bfloat16", "steps:measure", TRAINER, 40, 75, ("bf16",)),
    Part("photographs", "Photographs", "feeding:photographs", DATA, 20, 60),
    Part("training", "Training on real data", "feeding:training", DATA, 60, 100, after="photographs"),
    Part("objective", "The objective", "objective:measure", OBJECTIVE, 25, 60),
    Part("copies", "Copies of the state, and what a step is made of", "copies:copies", TRAINER, 25, 45),
    Part("waits", "Waits for the GPU", "copies:waits", TRAINER, 40, 60),
    Part("checkpoint", "Checkpoints", "runs:checkpoint", TRAINER, 30, 60),
    Part("resume", "A stopped and resumed run", "runs:resume", TRAINER, 30, 60),
    Part("exact", "The same, deterministic", "runs:exact", TRAINER, 60, 120),
    Part("ranks", "What ranks exchange", "ranks:measure", TRAINER, 15, 45),
    Part("step-vit", "A step of ViT-B/32 in bfloat16", "steps:measure", TRAINER, 30, 60, ("vit",)),
    Part("step-deterministic", "A step in bfloat16, deterministic", "steps:measure", TRAINER, 30, 60,
         ("deterministic",)),
    Part("rival", "Beside a loop in plain torch", "rival:measure", DATA, 120, 200),
    Part("step-tf32", "A step in TF32", "steps:measure", TRAINER, 30, 60, ("tf32",)),
    Part("step-float32", "A step in float32", "steps:measure", TRAINER, 40, 75, ("float32",)),
    Part("step-checkpointed", "A step in bfloat16 with activation checkpointing", "steps:measure", TRAINER, 40, 75,
         ("checkpointed",)),
    Part("dali", "DALI", "feeding:dali", (*DATA, "nvidia.dali"), 40, 75, after="photographs"),
    Part("step-compiled", "A step in bfloat16, compiled", "steps:measure", TRAINER, 90, 150, ("compiled",)),
    Part("tests", "Tests on the GPU", "runs:tests", TESTS, 60, 150, ("not compiled",)),
    Part("tests-compiled", "Tests of compiled encoders on the GPU", "runs:tests", TESTS, 90, 150, ("compiled",)),
)  # fmt: skip
