"""The columns of a state that breaks no rule. Tests of its check damage them."""

import numpy as np

from thermopile.state_store.commit import ColumnPart
from thermopile.state_store.durable import Repository
from thermopile.state_store.schema import Description, Schema

from support.commits import commit

FIELDS = {"image/log_s": -np.inf, "image/tau": 0.05, "image/u": 0.0}
SAMPLES, BLOCK = 1000, 300
STEP = 7


def write_columns(path, columns, fingerprint="glyphs-1"):
    """Write a state of these columns, and return its repository."""
    repository = Repository.create(path, Description(len(columns["visits"]), Schema(FIELDS), BLOCK, fingerprint))
    commit(repository, STEP, [ColumnPart(0, columns)], epoch=2)
    return repository


def sound_columns(samples=SAMPLES, step=STEP):
    """Every third sample never visited; tau down to the bounds of the settings, as the objective clamps it."""
    ids = np.arange(samples)
    seen = ids % 3 > 0
    tau = np.clip(np.linspace(0.0, 1.2, samples, dtype=np.float32), np.float32(0.005), np.float32(1.0))
    values = {"image/log_s": np.sin(ids), "image/tau": tau, "image/u": np.cos(ids)}
    columns = {name: np.where(seen, values[name], initial).astype(np.float32) for name, initial in FIELDS.items()}
    visits = seen * (1 + ids // BLOCK)
    return columns | {"visits": visits.astype(np.uint32), "last_step": (seen * step).astype(np.uint32)}
