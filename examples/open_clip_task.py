"""open_clip's own training script, `open_clip_train.main`, with thermopile's batches, loss and rows in place of its.

python examples/open_clip_task.py data/pairs settings.toml --model ViT-B-32 --batch-size 256 --epochs 30 --name first \\
  --dataset-type synthetic --resume latest

settings.toml holds thermopile's settings, such as [objective] name = "isogclr". The other options are open_clip's:
`--dataset-type synthetic` is needed, since it does not train without data of its own, and `--workers` has no effect.
Under torchrun it trains on several ranks. The rows are in LOGS/NAME/rows, which `thermopile inspect` reads. open_clip's
checkpoints name the snapshot of the rows of their step, so `--resume latest` goes on from both.

The captions' tokens are those that the dataset was converted with, so convert it with the model's tokenizer:
thermopile convert webdataset tars/*.tar data/pairs --tokenizer hf:openai/clip-vit-base-patch32 --context-length 77
`--in-place` leaves the pictures in the tars.
"""

import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

from open_clip_train import main as open_clip
from open_clip_train.params import parse_args
from torch import nn

import thermopile

REFUSED = {"accum_freq": 1, "siglip": False, "distill_model": None, "horovod": False, "dataset_resampled": False}
"""Options that would change what the loss or the order is given, and the value of each that works."""


class Rows(nn.Module):
    """Part of the model, so that open_clip saves and restores it: the objective, and the snapshot of the rows."""

    def __init__(self, store):
        super().__init__()
        self.store, self.objective = store, store.objective

    def get_extra_state(self):
        return self.store.state_dict()

    def set_extra_state(self, state):
        self.store.load_state_dict(state)


class Task:
    """open_clip's functions that are replaced, under their names there."""

    def __init__(self, data, settings, options):
        self.data, self.settings, self.args = data, settings, parse_args(options)
        for option, works in REFUSED.items():
            if getattr(self.args, option) != works:
                sys.exit(f"--{option.replace('_', '-')} does not work with thermopile's loss; leave it out")
        if self.args.name is None:
            sys.exit("choose a --name: the rows are kept in its folder")
        self.theirs = {name: getattr(open_clip, name) for name in ("create_model_and_transforms", "train_one_epoch")}

    def create_model_and_transforms(self, *given, **options):
        """Open loader and rows, now that the ranks are connected, and make the rows a part of the model."""
        args, (model, *transforms) = self.args, self.theirs["create_model_and_transforms"](*given, **options)
        size = model.visual.image_size
        of_task = {
            "batch_size": args.batch_size * int(os.environ.get("WORLD_SIZE", 1)),
            "epochs": args.epochs,
            "seed": args.seed,
            "data": {"image_size": size[0] if isinstance(size, tuple) else size},
        }
        of_task["data"] |= self.settings.get("data", {})
        self.loader = thermopile.Loader(self.data, self.settings | of_task)
        tokens = self.loader.dataset.index.tokenizer
        sizes, of_model = (tokens.vocab_size, tokens.context_length), (model.vocab_size, model.context_length)
        if sizes != of_model:
            sys.exit(f"{self.data} has (vocabulary, context) {sizes}, {args.model} {of_model}; convert it again")
        self.rows = thermopile.RowStore(os.path.join(args.logs, args.name, "rows"), self.loader)
        model.rows = Rows(self.rows)
        return model, *transforms

    def get_data(self, args, transforms, epoch=0, tokenizer=None):
        if args.resume is None and epoch == 0:  # killed between the rows' first snapshot and its checkpoint
            self.rows.load_state_dict({"snapshot": "step-0"})
        return {"train": SimpleNamespace(dataloader=self, set_epoch=self.loader.set_epoch)}

    @property
    def num_batches(self):
        return len(self.loader)

    @property
    def num_samples(self):
        return len(self.loader) * self.loader.config.batch_size

    def __iter__(self):
        for batch in self.loader:
            self.ids = batch.sample_ids  # of the step that open_clip now makes
            yield batch.views[0], batch.tokens.long()

    def create_loss(self, args):
        def loss(image_features, text_features, logit_scale, output_dict=True, **of_model):
            value = self.rows.loss(image_features, text_features, self.ids)
            return {"contrastive_loss": value + 0 * logit_scale}  # DDP waits for a gradient of every weight

        return loss

    def train_one_epoch(self, *given, **options):
        self.theirs["train_one_epoch"](*given, **options)
        self.rows.checkpoint()  # on all ranks; open_clip's checkpoint, which the first rank writes, then names it

    def run(self, options):
        for name in ("create_model_and_transforms", "get_data", "create_loss", "train_one_epoch"):
            setattr(open_clip, name, getattr(self, name))
        try:
            return open_clip.main(options)
        finally:
            if hasattr(self, "rows"):
                self.rows.close()
                self.loader.close()


if __name__ == "__main__":
    data, settings, *options = sys.argv[1:]
    sys.exit(Task(data, tomllib.loads(Path(settings).read_text()), options).run(options))
