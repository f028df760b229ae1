"""Which encoders a run may lock, and warnings about locked encoders."""

from ..config import EncoderConfig, ModelConfig, TrainConfig
from ..errors import ConfigError
from ..plugins import OPEN_CLIP, TIMM, is_directory, is_own_encoder


def refuse_impossible_locks(config: ModelConfig, mode: str) -> None:
    """Raise ConfigError if a locked encoder is not in the run, or if nothing would be left to train."""
    if mode == "unimodal" and config.text.locked:
        raise ConfigError(
            "model.text.locked = true, but a run on images has no text encoder; remove "
            "model.text.locked, or set objective.mode = 'bimodal'"
        )
    sides = {"image": config.image} | ({"text": config.text} if mode == "bimodal" else {})
    if config.predictor == "none" and all(side.locked and not side.unlocked_groups for side in sides.values()):
        names = " and ".join(f"model.{side}.locked" for side in sides)
        raise ConfigError(f"{names} = true locks all weights, so nothing trains; set unlocked_groups = 1 for a head")


def starts_trained(encoder: EncoderConfig) -> bool:
    """Return whether a new run's encoder has trained weights, or is a user's own, which may have them."""
    comes_trained = is_directory(encoder.name) or is_own_encoder(encoder.name)
    if encoder.name.startswith((TIMM, OPEN_CLIP)) and encoder.name.count(":") > 1:
        return True
    return bool(encoder.config.get("pretrained", comes_trained))


def lock_advice(config: TrainConfig) -> list[str]:
    """Return a warning for each locked encoder that keeps untrained weights. config: resolved."""
    found = []
    for side in ("image", "text") if config.objective.mode == "bimodal" else ("image",):
        encoder = getattr(config.model, side)
        if not encoder.locked or (config.init.run and config.init.sides in ("both", side)):
            continue
        if not starts_trained(encoder):
            found.append(
                f"model.{side}.locked keeps an encoder at random weights; start it from a local directory "
                f"(model.{side}.name = 'hf:/path/to/model') or from a run (--init-from)"
            )
        elif not (
            encoder.unlocked_groups
            or config.model.head == "none"
            or (config.model.head == "linear" and encoder.config.get("projection") == config.model.dim)
        ):
            found.append(
                f"model.{side}.locked keeps the projection head at random weights; train it with "
                f"model.{side}.unlocked_groups = 1, or start it from a run (--init-from)"
            )
    return found
