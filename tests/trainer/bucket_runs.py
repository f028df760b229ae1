"""Helpers for the tests of runs in a bucket."""

from itertools import count

from thermopile.storage.bucket import Address
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory

from small_runs import assert_same_state, assert_same_weights, losses

OFTEN = {"checkpoint": {"every_steps": 2, "every_minutes": 0}}


_runs = count()


def new_run():
    """A run at an address that no test has used."""
    return RunDirectory(Address("bucket", f"runs/{next(_runs)}"))


def train(config, run, *, resume=False, **options):
    with Trainer.open(config, run, resume=resume) as trainer:
        trainer.run(**options)


def assert_same_run(run, whole):
    assert losses(run) == losses(whole)
    assert_same_weights(run, whole)
    assert_same_state(run, whole)
