"""What a step has beside two batches of features: keys and local views, made of the features themselves."""

from typing import NamedTuple

import torch

from thermopile.trainer.objectives import OBJECTIVES


class Frame(NamedTuple):
    """Whether a step has keys, and how many local views, at most 2."""

    keys: bool = False
    local: int = 0

    def __str__(self):
        return ("-keys" if self.keys else "") + (f"-{self.local} local views" if self.local else "")


PLAIN = Frame()


def frames_of(name, mode):
    """The frames that an objective takes in a mode."""
    objective = OBJECTIVES[name]
    takes = objective.keys if mode == "unimodal" else "never"
    keys = {"never": [False], "optional": [False, True], "always": [True]}[takes]
    return [Frame(each, local) for each in keys for local in ((0, 2) if objective.has_local else (0,))]


FRAMED = [
    (name, mode, frame)
    for name, objective in OBJECTIVES.items()
    for mode in objective.settings_of_mode
    for frame in frames_of(name, mode)
]


def turned(rows, columns):
    """The rows with their first columns in another order: as long, to the last bit, and much like themselves."""
    return torch.cat([rows[..., 1:columns], rows[..., :1], rows[..., columns:]], dim=-1)


def keys_of(frame, first, second):
    """Keys of the two views, or None."""
    return (turned(first.detach(), 4), turned(second.detach(), 4)) if frame.keys else None


def local_of(frame, first, second):
    """Local views; what they get as a gradient, the features get."""
    return [turned(side, 2) for side in (first, second)][: frame.local]


def directions_of(frame, across, first, second):
    """Return anchors, the rows of their positives and the tables of their candidates, for each direction."""
    views, targets = [first, second, *local_of(frame, first, second)], keys_of(frame, first, second) or (first, second)
    pairs = [(view, target) for view in range(len(views)) for target in (0, 1) if view != target]
    return [(views[v], targets[a], [targets[a]] if across or frame.keys else targets) for v, a in pairs]
