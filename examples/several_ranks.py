"""The same loop on several processes:

torchrun --standalone --nproc-per-node 2 examples/several_ranks.py data/glyphs runs/several_ranks
"""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import thermopile

SETTINGS = {
    "epochs": 5,
    "batch_size": 256,  # over all ranks
    "objective": {"name": "isogclr", "tau_init": 0.05},
    "data": {"image_size": 32},
}


def main(data, path, epochs=SETTINGS["epochs"]):
    with (
        thermopile.joined_world() as world,
        thermopile.Run.from_settings(path, data, SETTINGS | {"epochs": int(epochs)}, world=world) as run,
    ):
        # DDP averages the encoders' gradients; the objective gathers features and knows which samples are whose.
        encode = DistributedDataParallel(run.encoders) if world.size > 1 else run.encoders
        optimizer = torch.optim.AdamW(encode.parameters(), lr=1e-3)
        run.attach(optimizer=optimizer)
        for batch in run.batches():  # this rank's share
            state = run.take(batch.sample_ids)
            features = encode(batch)
            outcome = run.objective(features.first, features.second, state, run.progress)
            run.put(batch.sample_ids, outcome.state)
            optimizer.zero_grad()
            outcome.loss.backward()
            optimizer.step()
            run.end_step(loss=outcome.loss, **outcome.metrics)
        if world.is_first:
            print(f"{run.steps_done} steps on {world.size} ranks")


if __name__ == "__main__":
    main(*sys.argv[1:])
