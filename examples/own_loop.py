"""A training loop and an encoder of one's own, on one process or several:

python examples/own_loop.py data/glyphs runs/own_loop
torchrun --standalone --nproc-per-node 2 examples/own_loop.py data/glyphs runs/own_loop

Run it again to resume after any stop. `thermopile inspect`, `status`, `eval` and `export` work on the run, the last two
with PYTHONPATH=examples and --allow-code, since they import the encoder.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thermopile


class Tower(nn.Module):
    """Pixels [b, 3, H, W] → features [b, width]; thermopile adds the projection head."""

    def __init__(self, image_size, width=128):
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1), nn.GELU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip

    def forward(self, images):
        return self.layers(images)


SETTINGS = {
    "epochs": 5,
    "batch_size": 256,  # over all ranks
    "model": {"image": {"name": "own_loop:Tower", "config": {"width": 64}}},
    "objective": {"name": "isogclr", "mode": "unimodal"},
    "data": {"image_size": 32, "recipe": "glyphs"},
}


def main(data, path, epochs=SETTINGS["epochs"]):
    with (
        thermopile.joined_world() as world,
        thermopile.Run.from_settings(path, data, SETTINGS | {"epochs": int(epochs)}, world=world) as run,
    ):
        # DDP averages the encoders' gradients; the objective gathers features and knows which samples are whose.
        encode = DistributedDataParallel(run.encoders) if world.size > 1 else run.encoders
        optimizer = torch.optim.AdamW(encode.parameters(), lr=1e-3)
        run.attach(optimizer=optimizer)  # part of every checkpoint, and restored if the run goes on
        for batch in run.batches():  # this rank's share
            state = run.take(batch.sample_ids)  # of these samples: log s, tau, u
            with run.computing("forward_backward"):  # timed, for `thermopile status`
                features = encode(batch)
                outcome = run.objective(features.first, features.second, state, run.progress)
            run.put(batch.sample_ids, outcome.state)  # written while backprop runs
            optimizer.zero_grad()
            with run.computing("forward_backward"):
                outcome.loss.backward()
            with run.computing("optimizer"):
                optimizer.step()
            run.end_step(loss=outcome.loss, **outcome.metrics)
        if world.is_first:
            print(f"{run.steps_done} steps on {world.size} ranks")


if __name__ == "__main__":
    main(*sys.argv[1:])
