"""A plain PyTorch loop with thermopile's batches, loss and rows, and checkpoints of its own. To resume, run it again.

python examples/plain_loop.py data/pairs runs/plain
torchrun --standalone --nproc-per-node 2 examples/plain_loop.py data/pairs runs/plain
"""

import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import thermopile

SETTINGS = {
    "epochs": 5,
    "batch_size": 256,  # over all ranks
    "data": {"image_size": 32},
    "objective": {"name": "isogclr", "tau_init": 0.05},
}


class Pair(nn.Module):
    def __init__(self, vocab_size, width=64):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                                   nn.Linear(16 * width, width))  # fmt: skip
        self.text = nn.EmbeddingBag(vocab_size, width)

    def forward(self, images, tokens):
        return normalize(self.image(images), dim=1), normalize(self.text(tokens), dim=1)


def main(data, path, epochs=SETTINGS["epochs"], make=Pair):
    if "RANK" in os.environ:
        distributed.init_process_group()
    file = Path(path, "checkpoint.pt")
    with (
        thermopile.Loader(data, SETTINGS | {"epochs": int(epochs)}) as loader,
        thermopile.RowStore(Path(path, "rows"), loader) as rows,
    ):
        torch.manual_seed(0)
        model = make(loader.dataset.index.tokenizer.vocab_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        parts = {"model": model, "optimizer": optimizer, "loader": loader, "rows": rows}
        if file.exists():
            for name, state in torch.load(file, weights_only=True).items():
                parts[name].load_state_dict(state)
        encode = DistributedDataParallel(model) if loader.world.size > 1 else model
        while loader.steps_done < int(epochs) * len(loader):
            for batch in loader:  # the rest of an epoch
                loss = rows.loss(*encode(batch.views[0], batch.tokens), batch.sample_ids)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            checkpoint = {
                name: part.state_dict() for name, part in parts.items()
            }  # on all ranks: they write their rows
            if loader.world.is_first:
                torch.save(checkpoint, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
                print(f"step {loader.steps_done}: loss {loss.item():.4f} on {loader.world.size} ranks")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
