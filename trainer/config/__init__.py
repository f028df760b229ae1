"""A run's settings: validated as a whole, and written in full to RUN/config.toml."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, NonNegativeInt, PositiveInt, ValidationError

from ..errors import ConfigError
from .sections import (
    OPTIMIZERS,
    CheckpointConfig,
    DataConfig,
    EncoderConfig,
    EvaluationConfig,
    InitConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    OrderConfig,
    RecipeConfig,
    Section,
    StateConfig,
    checked_template,
    data_at,
    known_tracker,
    nearest,
)

__all__ = [
    "OPTIMIZERS",
    "CheckpointConfig",
    "DataConfig",
    "EncoderConfig",
    "EvaluationConfig",
    "InitConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "OrderConfig",
    "RecipeConfig",
    "StateConfig",
    "TrainConfig",
    "checked_template",
    "data_at",
    "flat",
    "load_config",
    "nearest",
    "settings_named",
    "to_toml",
    "to_tree",
]


RENAMED = {
    **{name: f"order.{name}" for name in ("canonical_shards", "blocks_per_shard", "window_blocks")},
    "init_from": "init.run",
    "init_sides": "init.sides",
    "init_state": "init.state",
    "optimizer.warmup_steps": "optimizer.warmup",
    "optimizer.warmup_epochs": "optimizer.warmup, as in '2 epochs'",
    "tensorboard": "trackers, as in ['tensorboard']",
    "cudnn_benchmark": "always on, on a GPU, unless deterministic or data.without is set; leave it out",
    "checkpoint.keep_early": "always 3; leave it out",
}
"""Earlier name of a setting → what it is now."""


class TrainConfig(Section):
    """All settings of a run."""

    seed: NonNegativeInt = 0
    """Determines order, augmentation and initial weights."""
    epochs: PositiveInt = 20
    """Passes over the samples; each leaves out what does not fill a batch, another part every time."""
    steps: NonNegativeInt = 0
    """End after this many steps, if the epochs have more; the rate's cosine ends with them; `--steps`. 0: no limit."""
    batch_size: NonNegativeInt = 0
    """Global batch size, over all ranks; 0 chooses 256, or less for small datasets, so that an epoch has
    four steps."""
    micro_batch: NonNegativeInt = 0
    """Samples that a rank encodes at once, for batches larger than the memory; 0: its whole share of the batch. Takes
    about a third more time (docs/settings.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where encoders and objective run; auto: on a GPU if there is one. The samples' state stays on the CPU."""
    precision: Literal["auto", "float32", "tf32", "bf16", "fp16"] = "auto"
    """Precision of the encoders' computation; weights, objective and state are always float32. auto is bf16 on a GPU
    that supports it, otherwise float32; unless float32 is chosen, a GPU's remaining float32 products use TF32."""
    channels_last: Literal["auto"] | bool = "auto"
    """Store images and kernels in channels-last format, which half-precision convolutions prefer; auto: on a GPU."""
    deterministic: bool = False
    """Use only deterministic GPU algorithms, so that a resumed run gives the same bits as an uninterrupted run; slower,
    and an error if torch has no such algorithm. CPUs are always deterministic."""
    compile: bool = False
    """Compile the encoders with torch.compile, which takes minutes once and makes steps faster."""
    on_nan: Literal["stop", "skip"] = "stop"
    """If features or loss are not finite, end the run (stop), or change nothing and continue (skip), at most ten times
    in a row. With skip, every step synchronises with the device."""
    trackers: tuple[Annotated[str, AfterValidator(known_tracker)], ...] = ()
    """Where the numbers of metrics.jsonl go as well: tensorboard, wandb, or a class of yours as module:name."""
    log_every: PositiveInt = 10
    """Steps between reads from the device; metrics.jsonl has a line for every step in any case."""
    init: InitConfig = InitConfig()
    order: OrderConfig = OrderConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    state: StateConfig = StateConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of the whole run."""
        of_epochs = self.epochs * steps_per_epoch
        return min(self.steps, of_epochs) if self.steps else of_epochs


def load_config(tree: Mapping[str, Any]) -> TrainConfig:
    """Validate a tree of settings. Raises ConfigError naming every bad key, with the nearest valid one for a typo."""
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(_explain(dict(e)) for e in error.errors()))) from None


def settings_named(name: str) -> list[str]:
    """Return the full names that e.g. `lr` or `--batch-size` may mean; at most three, often none."""
    wanted = name.lstrip("-").replace("-", "_").replace(".", "_")
    keys = [key for key in flat(TrainConfig().model_dump()) if f"_{key.replace('.', '_')}".endswith(f"_{wanted}")]
    return keys if len(keys) <= 3 else []


def to_tree(config: TrainConfig) -> dict[str, Any]:
    """Return the settings as a tree of TOML values."""
    return config.model_dump(mode="json", exclude_none=True)


def to_toml(config: TrainConfig) -> str:
    return tomli_w.dumps(to_tree(config))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the tree's values by full key, such as `optimizer.lr`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def _explain(error: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"] if part not in ("str", RecipeConfig.__name__))
    if error["type"] != "extra_forbidden":
        given = "" if isinstance(error["input"], Mapping | BaseModel) else f" = {error['input']!r}"
        said = error["msg"].removeprefix("Value error, ")
        return f"{key}{given}: {said}" if key else said
    if now := RENAMED.get(key):
        return f"unknown setting {key!r}: it is now {now}"
    if meant := settings_named(key):
        return f"unknown setting {key!r} (did you mean {' or '.join(map(repr, meant))}?)"
    return f"unknown setting {key!r}{nearest(key, flat(TrainConfig().model_dump()))}"
