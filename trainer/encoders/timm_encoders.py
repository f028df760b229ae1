"""Image encoders from timm, and what they share with open_clip's. Untrained, unless the settings name weights."""

from collections import defaultdict
from contextlib import suppress
from importlib import import_module
from typing import Any

from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ConfigError, refusing
from .backbones import refuse_absurd, refuse_too_large
from .own_backbone import OwnBackbone


def imported(key: str, package: str) -> Any:
    """Import the package that the setting `key` needs. Raises ConfigError with the command that installs it."""
    cure = f"; pip install 'thermopile[{package}]', and torchvision from the index that torch comes from"
    kinds = ImportError, RuntimeError, AttributeError  # the last two by torchvision beside another torch
    with refusing(f"{key}: {package} cannot be imported", *kinds, cure=cure):
        return import_module(package)


class LibraryBackbone(OwnBackbone):
    """A library's module. matcher: its groups of layers, as timm's group_matcher gives them; None: one group."""

    def __init__(self, key: str, body: Any, width: int, recompute: bool, given: Any, matcher: Any) -> None:
        if recompute and not any(isinstance(module, _BatchNorm) for module in body.modules()):
            with suppress(AssertionError):  # models that cannot are recomputed as a whole, as are those with batch
                body.set_grad_checkpointing()  # norms, which would count each batch twice
                recompute = False
        super().__init__(key, body, width, recompute, given)
        self._matcher = matcher

    def groups(self) -> list[nn.Module]:
        if self._matcher is None:
            return [self.body]
        from timm.models import group_parameters

        layer_of = group_parameters(self.body, self._matcher, reverse=True)
        layers: dict[int, list[nn.Module]] = defaultdict(list)

        def sort(module: nn.Module, path: str) -> None:
            """Add the largest modules that are of one layer, and the other weights by themselves."""
            of = {layer_of[path + name] for name, _ in module.named_parameters()}
            if len(of) == 1:
                layers[of.pop()].append(module)
            elif of:
                for name, weight in module.named_parameters(recurse=False):
                    layers[layer_of[path + name]].append(nn.ParameterList([weight]))
                for name, child in module.named_children():
                    sort(child, f"{path}{name}.")

        sort(self.body, "")
        return [nn.ModuleList(layers[layer]) for layer in sorted(layers)]


class TimmBackbone(LibraryBackbone):
    """The pooled features of a timm model."""

    def __init__(self, name: str, own: dict[str, Any], recompute: bool, image_size: int, pretrained: bool) -> None:
        """name: NAME or NAME:FILE. own: arguments of timm.create_model; `pretrained` fetches timm's weights."""
        key, (name, _, file) = f"model.image.name = 'timm:{name}'", name.partition(":")
        timm = imported(key, "timm")
        if not timm.is_model(name.partition(".")[0]):  # a name with a colon is of a directory or another's model
            raise ConfigError(f"{key}: timm has no such model; timm.list_models() has their names")
        reserved = ("num_classes", "in_chans", "features_only", "checkpoint_path", "cache_dir", "pretrained_cfg")
        if refused := [setting for setting in own if setting.startswith(reserved)]:
            raise ConfigError(f"model.image.config.{refused[0]} is not for a run to set; remove it")
        settings, trained = {key: value for key, value in own.items() if key != "pretrained"}, own.get("pretrained")
        if trained not in (None, False, True) or (file and not file.endswith(".safetensors")):
            raise ConfigError(
                f"{key}: pretrained is true or false; weights of a file are model.image.name = "
                f"'timm:{name}:FILE.safetensors' (others may run code)"
            )
        refuse_absurd(key, own)
        with refusing(f"{key} cannot be created"):
            published = timm.models.get_pretrained_cfg(name)
            if published.fixed_input_size:
                settings = {"img_size": image_size} | settings
            # timm would read other files as well.
            source: dict[str, Any] = {"hf_hub_filename": "model.safetensors", "url": None}
            fixed = {"num_classes": 0, "pretrained_cfg_overlay": source}
            refuse_too_large(lambda: timm.create_model(name, **fixed, **settings))
            if file and pretrained:  # without classifier, so that timm takes no weights but all of the model
                heads = published.classifier if isinstance(published.classifier, tuple) else (published.classifier,)
                kept = {key: value for key, value in load_file(file).items() if key.rpartition(".")[0] not in heads}
                source |= {"state_dict": kept, "num_classes": 0}
            model = timm.create_model(name, bool(pretrained and (trained or file)), **fixed, **settings)
            model.pretrained_cfg.pop("state_dict", None)
        matcher = getattr(model, "group_matcher", lambda: None)()
        super().__init__(key, model, model.head_hidden_size, recompute, image_size, matcher)
        self.settings = settings
