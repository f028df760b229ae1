"""A run's settings: validated as a whole, and written in full to RUN/config.toml.

Their tables are frozen models, each with its keys, defaults and checks.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from ...storage.bucket import is_address
from ...storage.place import Places, places_of
from ...storage.sealed_json import flat as flat
from ..errors import ConfigError


def nearest(given: str, valid: Iterable[str]) -> str:
    """Return a hint naming the most similar valid name, or an empty string."""
    near = get_close_matches(given, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


TRACKERS = ("tensorboard", "wandb")


def known_tracker(name: str) -> str:
    """Return a tracker's name. Raises ValueError unless it is one of TRACKERS or may be a `module:name`."""
    if name not in TRACKERS and not re.fullmatch(r"[^\s:]+:[^\s:]+", name):
        raise ValueError(f"should be {', '.join(TRACKERS)} or module:name{nearest(name, TRACKERS)}")
    return name


class Section(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RecipeConfig(BaseModel):
    """An augmentation recipe with some fields changed. All keys except the name are fields (docs/loading.md)."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "auto"

    @property
    def fields(self) -> dict[str, Any]:
        """The changed fields; `none` removes a preset's or a file's value."""
        return {key: value for key, value in (self.model_extra or {}).items() if value != "none"}


def _to_bytes(size: object) -> object:
    """Convert a size such as 512MB or 2GiB to bytes, and `none` to None."""
    if not isinstance(size, str):
        return size  # a number; pydantic validates it
    if size == "none":
        return None
    if not (parts := re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", size, re.IGNORECASE)):
        raise ValueError("is not a size; use a number of bytes, a size such as 512MB or 2GiB, or none")
    number, unit, binary = parts.groups()
    return int(float(number) * (1024 if binary else 1000) ** ["", *"kmgt"].index(unit.lower()))


def _absolute(place: str) -> str:
    return str(Path(place).resolve()) if place and not is_address(place) else place


_Size = Annotated[PositiveInt | None, BeforeValidator(_to_bytes)]
_Place = Annotated[str, AfterValidator(_absolute)]
"""Made absolute, because a run may be resumed from any directory."""


class InitConfig(Section):
    """What a new run starts from; without `run`, from weights drawn by the seed, or a model's own."""

    run: str = ""
    """RUN or RUN@step-N whose encoder weights a new run starts from; `--init-from`. Recorded with its step."""
    sides: Literal["both", "image", "text"] = "both"
    """Encoders that take their weights from `run`; the others start as they would without it."""
    state: bool = False
    """Start also from the samples' state of `run`, whose dataset has since grown by appending; `--grow`."""

    @model_validator(mode="after")
    def _needs_a_run(self) -> Self:
        if self.sides != "both" and not self.run:
            raise ValueError(f"sides {self.sides!r} needs init.run (--init-from), the run that gives the weights")
        if self.state and not self.run:
            raise ValueError("state (--grow) needs init.run (--init-from), the run that gives the state")
        return self


class OrderConfig(Section):
    """How samples are cut into ranges and blocks. Every run chooses and records it; leave it alone."""

    canonical_shards: NonNegativeInt = 0
    """Number of id ranges in the order, which the number of ranks divides; 0 chooses 8, or fewer for small batches, or
    up to 64 for many samples."""
    blocks_per_shard: NonNegativeInt = 0
    """Blocks per range, each one chunk of the state; 0 chooses a number that suits the window."""
    window_blocks: NonNegativeInt = 0
    """Blocks of a range that are shuffled together; 0 means all, or as many as suit `state.memory_budget`."""


def data_at(places: Places) -> dict[str, Any]:
    """Return the settings of a dataset's place, or of those of a mixture's parts, made absolute, over any others."""
    paths = [str(place.resolve()) for place in places_of(places)]
    return {"path": "", "parts": paths} if len(paths) > 1 else {"path": paths[0], "parts": None, "shares": None}


class DataConfig(Section):
    """The dataset, and its conversion to batches."""

    path: str = ""
    """Dataset directory, or address in an object store, such as s3://bucket/cc12m; `--data`."""
    parts: tuple[_Place, ...] | None = None
    """Several dataset directories instead, whose samples are mixed; `--data`, repeated (docs/data.md)."""
    shares: tuple[PositiveInt, ...] | None = None
    """Shares of the parts in a batch, such as [5, 2, 1]; none, the default: equal ones. `--share`, repeated."""
    tars: _Place = ""
    """Directory or address of the tars of a dataset in place, if they were moved; `--tars`."""
    cache: _Size = None
    """Disk space for each rank's cache of a dataset, or its tars, at an address: bytes, or a size such as 200GB. If its
    share of the dataset does not fit, the order is windowed. none, the default: all of it, in at most half of the free
    disk."""
    select: _Place = ""
    """Parquet file with a column sample_id: train on these samples only; `--select`. Recorded with its number of rows
    and its sha256; the run has its own copy."""
    weights: _Place = ""
    """Parquet file with the columns sample_id and weight: the factor of a sample's loss, relative to the mean weight;
    `--weights`. Recorded likewise."""
    without: _Place = ""
    """Parquet file with key or uri, or sample_id and dataset_fingerprint: exclude these samples; `--without`. They keep
    their places in the order, so all other samples keep theirs, and batches get smaller. Recorded likewise."""
    loader: Literal["auto", "ffcv", "dali", "synthetic"] = "auto"
    """Loader that decodes and augments. auto is `ffcv`. `dali` decodes on a GPU, where it has not been tried.

    A run keeps its loader when resumed on another machine; `dali` also runs without a GPU. Their views differ by about
    one level of 255. `synthetic` repeats random batches: it measures speed and learns nothing."""
    recipe: str | RecipeConfig = "auto"
    """Augmentation recipe: clip, crop_flip, simclr, simclr_cifar, moco_v3, vicreg, glyphs, or `module:name` for your
    own `thermopile.Recipe`; auto is `clip` for pairs and `crop_flip` for images. Its fields can be changed:
    `data.recipe.blur=0.5`."""
    augmentation: str = ""
    """Custom augmentation after the recipe's, as `module:function`; requires `ffcv`. A function compiled by numba that
    changes a view in place: (pixels float32 [3, H, W] in 0 … 255, key uint64)."""
    captions: Literal["draw", "first"] = "draw"
    """For a sample with several captions: draw one per epoch, or always take the first."""
    planted: float | tuple[float, ...] = 0.0
    """Pairs to train with another pair's caption, from which `inspect` estimates how many captions are wrong: a share
    up to 0.5, or a number; for a mixture also a list, one for each part. 0: none (docs/curate.md)."""
    image_size: int = Field(default=0, ge=0)
    """Side length of a view in pixels, 8 or more; 0 chooses the median shorter side of the dataset's pictures, rounded
    down to a multiple of 16 from 32 to 224."""
    local_views: int = Field(default=0, ge=0, le=64)
    """Number of small crops of a picture besides its two views, for objectives with multi-crop."""
    local_size: int = Field(default=96, ge=8)
    """Side length of a local view in pixels."""
    workers: int = Field(default=0, ge=0, le=10_000)
    """Decoding threads; 0 means one per core, plus one with `dali`."""
    ahead: int = Field(default=2, ge=1, le=1000)
    """Batches decoded ahead; pieces with `micro_batch`."""

    @field_validator("image_size")
    @classmethod
    def _large_enough(cls, side: int) -> int:
        if 0 < side < 8:
            raise ValueError("should be 8 or more, or 0 to choose it from the dataset")
        return side

    @property
    def places(self) -> str | tuple[str, ...]:
        """The dataset's path or address, or the parts' paths."""
        return self.parts or self.path

    @model_validator(mode="after")
    def _one_dataset_or_parts(self) -> Self:
        given = len(self.parts or ())
        if given == 1 or (given and self.path):
            raise ValueError("give one dataset as `path` (--data), or two and more as `parts` (--data for each)")
        if self.shares and len(self.shares) != given:
            of_parts = f"{len(self.shares)} shares for {given} parts of a mixture"
            raise ValueError(f"{of_parts}: give --data twice or more, and --share once for each")
        return self

    @model_validator(mode="after")
    def _augmentation_has_its_loader(self) -> Self:
        if self.augmentation and self.loader in ("dali", "synthetic"):
            raise ValueError(
                f"augmentation {self.augmentation!r} is compiled code, which loader {self.loader!r} "
                "cannot run; use loader = 'ffcv', or remove augmentation"
            )
        return self


class EncoderConfig(Section):
    """One encoder: a built-in by name, or one of transformers (`hf:`), timm or open_clip."""

    name: str = "auto"
    """auto is `conv` for images and `mean_embedding` for text, for views of up to 64 pixels; `hf:/path/to/model`,
    `hf:./model` and, from the hub, `hf:org/name` begin with a model's weights. `timm:NAME`,
    `timm:NAME:FILE.safetensors`, for images; `open_clip:ARCH`, `open_clip:ARCH:TAG` or
    `open_clip:ARCH:FILE.safetensors`."""
    config: dict[str, bool | int | float | str | list[int] | list[str]] = {}
    """Overrides of the encoder's own settings; for a local directory or the hub, its recorded architecture. For
    `timm:NAME`, `pretrained=true` fetches timm's weights when the run starts."""
    locked: bool = False
    """Do not train this encoder (LiT); its batch norms and dropouts are in evaluation mode."""
    unlocked_groups: int = Field(default=0, ge=0)
    """Groups of layers of a locked encoder to train nevertheless, counted from its output: 1 is the head alone, 2 the
    head and the last layers before it."""

    @model_validator(mode="after")
    def _unlocked_where_locked(self) -> Self:
        if self.unlocked_groups and not self.locked:
            raise ValueError(f"unlocked_groups {self.unlocked_groups} needs locked = true; set that, or remove it")
        return self


Weights = Literal["averaged", "raw"]


class ModelConfig(Section):
    """The encoders and their shared feature space."""

    dim: int = Field(default=64, ge=1, le=1 << 20)
    """Dimension d of the features; for a tower of a whole CLIP or SigLIP, that model's unless you set it."""
    head: Literal["linear", "none", "simclr", "simclr_bn", "moco_v3", "moco_v3_resnet", "vicreg"] = "linear"
    """Projection head of each encoder: one linear layer; none, for encoders with `dim` features; SimCLR's two layers,
    without or with batch norm; MoCo v3's three for ViTs or two for ResNets, or VICReg's three, all with batch norm."""
    head_width: int = Field(default=0, ge=0, le=1 << 20)
    """Width of the hidden layers of head and predictor; 0 is the default: the encoder's width for simclr, 4096 for
    moco_v3, 8192 for vicreg."""
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Weight of the old values in the momentum network's moving average at the run's first step; it rises to 1 by a
    cosine. 0: no momentum network. MoCo v3 uses 0.99 for 300 epochs."""
    predictor: Literal["none", "moco_v3", "moco_v3_resnet"] = "none"
    """Two layers after the trained network's head only; requires `momentum`. MoCo v3's for ViTs, or for ResNets without
    the last batch norm."""
    ema: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Weight of the old values in a moving average of the weights, such as 0.999, for evaluation and export; it starts
    lower, so that short runs forget their first weights. 0: no average."""
    activation_checkpointing: bool = False
    """Recompute the encoders' activations in backprop instead of keeping them: less memory, more time."""
    image: EncoderConfig = EncoderConfig()
    text: EncoderConfig = EncoderConfig()

    @model_validator(mode="after")
    def _hidden_layers_where_there_are_some(self) -> Self:
        if self.head in ("linear", "none") and self.predictor == "none" and self.head_width:
            raise ValueError(
                f"head_width {self.head_width} is for hidden layers, but head {self.head!r} has none; use "
                "another head, or remove head_width"
            )
        if self.predictor != "none" and not self.momentum:
            raise ValueError(
                f"predictor {self.predictor!r} compares a network with its moving average, but momentum "
                "is 0; set momentum, such as 0.99, or remove predictor"
            )
        return self

    def chosen_weights(self, asked: Weights | None) -> Weights:
        """Return the weights to use: the requested ones, or by default averaged weights if the run has them.

        Raises ConfigError if the run has no averaged weights.
        """
        if asked == "averaged" and not self.ema:
            raise ConfigError("the run has no averaged weights (model.ema is 0); leave out --weights averaged")
        return asked or ("averaged" if self.ema else "raw")


FROZEN, RANDOM = "frozen", "pair/random_log_s"
"""The objective of `thermopile score`, no loss and so not listed among the others; and its field of log s, summed over
both sides, of a sample's picture with a random caption."""


class ObjectiveConfig(BaseModel):
    """The loss. All keys except these two are settings of the objective itself (docs/objectives.md)."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "isogclr"
    """An objective of docs/objectives.md, or `module:name` for your own."""
    mode: Literal["auto", "bimodal", "unimodal"] = "auto"
    """auto is the objective's only mode if it has one; otherwise bimodal for pairs and unimodal for images."""

    @property
    def settings(self) -> dict[str, Any]:
        """The objective's own settings; `none` removes a preset's or a file's value."""
        return dict(self.model_extra or {})


_Beta = Annotated[float, Field(ge=0, lt=1)]


def _steps_or_epochs(warmup: object) -> object:
    """Convert 200, "200" and "200 steps" to a number, and "2 epochs" to that text."""
    if isinstance(warmup, str):
        if not (parts := re.fullmatch(r"(\d+)(?: (steps?|epochs?))?", warmup)):
            raise ValueError("is neither a number of steps nor, for example, '2 epochs'")
        return f"{parts[1]} epoch{'s'[: int(parts[1]) != 1]}" if "epoch" in (parts[2] or "") else int(parts[1])
    return warmup


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"momentum": 0.9},
    "lars": {"momentum": 0.9, "trust_coefficient": 1e-3},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6},
    "lion": {"betas": (0.9, 0.99)},
}
"""Name → the optimiser's own settings with their defaults, the library's except for SGD's momentum."""


class OptimizerConfig(Section):
    """The optimiser; its rate warms up, then decays. A setting that is omitted or `none` has its default.

    `betas`, `eps`, `momentum` and `trust_coefficient` are rejected if the optimiser has no such setting.
    """

    name: str = "adamw"
    """adamw, sgd, lars, lamb or lion."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, reached after the warm-up; suitable values depend on the optimiser."""
    lr_min: NonNegativeFloat = 0.0
    """Learning rate at the run's last step, where the cosine or the cooldown ends."""
    cooldown: float = Field(default=0.0, ge=0, le=1)
    """Last share of the steps, in which the rate falls linearly to lr_min; until then it stays at lr after the warm-up,
    so a fork of the run can have any length. 0: a cosine instead."""
    warmup: Annotated[NonNegativeInt | str | None, BeforeValidator(_steps_or_epochs)] = None
    """Steps in which the learning rate rises from 0 to lr, or epochs as in "2 epochs"; none, the default: 200
    steps, and at most a tenth of the run's."""
    weight_decay: NonNegativeFloat = 0.02
    """Weight decay; not applied to biases, norms and the objective's parameters."""
    betas: tuple[_Beta, _Beta] | None = None
    """Decay rates of the gradient's mean and mean square (lion: of the update and the mean), each in [0, 1)."""
    eps: PositiveFloat | None = None
    """Constant added to the root of the mean square."""
    momentum: _Beta | None = None
    """Decay rate of the update, in [0, 1)."""
    trust_coefficient: PositiveFloat | None = None
    """Norm of a layer's update relative to its weights' norm, at learning rate 1."""
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor by which each group of an encoder's layers learns more slowly than the next group, for fine-tuning, such
    as 0.75; the head has the full learning rate. 1 disables."""
    grad_clip_norm: PositiveFloat | None = None
    """Maximum norm of the gradients of all weights together; larger gradients are scaled down. none disables."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        settings = {key: value for key, value in given.items() if value is not None and value != "none"}
        name = str(settings.get("name", "adamw"))
        if name not in OPTIMIZERS:
            return settings  # name validation reports it
        own = OPTIMIZERS[name]
        if foreign := sorted({key for each in OPTIMIZERS.values() for key in each} & settings.keys() - own.keys()):
            raise ValueError(
                f"{name} has no setting {' or '.join(foreign)}; it has {', '.join(own)}. "
                f"If a preset or a file sets it, add {' '.join(f'--set optimizer.{key}=none' for key in foreign)}"
            )
        return own | settings

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in OPTIMIZERS:
            near = nearest(name, OPTIMIZERS)
            raise ValueError(f"unknown optimiser{near}; available: {', '.join(OPTIMIZERS)}")
        return name

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min {self.lr_min} is above lr {self.lr}; lower lr_min")
        return self

    @property
    def warmup_parts(self) -> tuple[int, int]:
        """Steps and epochs of the warm-up, of which one is 0."""
        number, _, unit = str(self.warmup or 0).partition(" ")
        return (0, int(number)) if unit else (int(number), 0)


class CheckpointConfig(Section):
    """When to save, besides the last step, and which checkpoints to keep, each with its state snapshot."""

    every_steps: NonNegativeInt = 0
    """Checkpoint every N steps; 0 disables."""
    every_minutes: NonNegativeFloat = 15.0
    """Checkpoint every N minutes; 0 disables."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """Also keep checkpoints whose step is a multiple of this; 0 disables."""


class StateConfig(Section):
    """The samples' state during training. Affects results only if `order.window_blocks` is 0."""

    memory_budget: _Size = None
    """RAM for the rows of one process: bytes, or a size such as 512MB or 2GiB; none, the default, holds all rows."""
    prefetch_steps: int = Field(default=2, ge=1, le=16)
    """Number of coming steps whose rows are gathered in advance."""


def checked_template(template: str) -> str:
    """Validate a zero-shot prompt. Raises ValueError if it has no placeholder for the class name."""
    if "{}" not in template and "{lower}" not in template:
        raise ValueError(f"{template!r} has neither {{}} nor {{lower}}, the placeholders for the class name")
    return template


class EvaluationConfig(Section):
    """Scoring the encoders on a held-out set during training. Does not affect the training."""

    every_steps: NonNegativeInt = 0
    """Evaluate every N steps; 0 disables."""
    test: _Place = ""
    """The dataset to score, other than the training set."""
    train: _Place = ""
    """The dataset that provides neighbours and the class sizes for the bands; empty: the run's own."""
    templates: tuple[Annotated[str, AfterValidator(checked_template)], ...] = ()
    """Zero-shot prompts; {} is the class name, {lower} the same in lower case. Empty: "a photo of a {}"."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if self.every_steps and not self.test:
            raise ValueError(f"every_steps {self.every_steps} needs a dataset to score; set evaluation.test")
        if not self.every_steps and (self.test or self.train):
            raise ValueError(
                "every_steps is 0, so the datasets of `test` and `train` are not used; set every_steps, "
                "or clear both, as in --set evaluation.test="
            )
        return self

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after this step."""
        return bool(self.every_steps) and step % self.every_steps == 0


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
    """Passes over the samples; each leaves out the few that do not fill a batch, others every time."""
    steps: NonNegativeInt = 0
    """End after this many steps, if the epochs have more; the rate's cosine ends there, too; `--steps`. 0: no limit."""
    batch_size: NonNegativeInt = 0
    """Global batch size, over all ranks; 0 chooses 256, or less for small datasets, so that an epoch has four steps."""
    micro_batch: NonNegativeInt = 0
    """Samples that a rank encodes at once, for batches larger than the memory; 0: its whole share of the batch. Takes
    about a third more time (docs/settings.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where encoders and objective run; auto: on a GPU if there is one. The samples' state stays on the CPU."""
    precision: Literal["auto", "float32", "tf32", "bf16", "fp16"] = "auto"
    """Precision of the encoders' computation; weights, similarities and state are always float32. auto is bf16 on a GPU
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
        raise ConfigError(explained(error)) from None


def load_recorded(tree: Mapping[str, Any]) -> TrainConfig:
    """As `load_config`, of a run's settings: before these existed, all products were in float32, nothing compiled."""
    config = load_config(tree)
    settings = {"precision": "float32", "compile": False} | config.objective.settings
    return config.model_copy(update={"objective": config.objective.model_copy(update=settings)})


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


def explained(error: ValidationError) -> str:
    """Return every bad key with its value and the reason, and for an unknown one the nearest valid key."""
    return "; ".join(dict.fromkeys(_explain(dict(each)) for each in error.errors()))


def _explain(error: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"] if part not in ("str", RecipeConfig.__name__))
    if error["type"] != "extra_forbidden":
        given = "" if isinstance(error["input"], Mapping | BaseModel) else f" = {error['input']!r}"
        is_table = error["type"] in ("dict_type", "model_type")
        reason = f"set each by name, {key}.NAME=VALUE" if is_table else error["msg"].removeprefix("Value error, ")
        return f"{key}{given}: {reason}" if key else reason
    if now := RENAMED.get(key):
        return f"unknown setting {key!r}: it is now {now}"
    if meant := settings_named(key):
        return f"unknown setting {key!r} (did you mean {' or '.join(map(repr, meant))}?)"
    return f"unknown setting {key!r}{nearest(key, flat(TrainConfig().model_dump()))}"
