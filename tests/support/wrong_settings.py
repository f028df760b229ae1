"""Settings that a run on small pairs refuses, as a command line names them."""

WRONG = [
    "model.image.name=hf:resnet50", "model.image.name=cnn", "model.text.name=hf:bert", "model.image.name=hf:/nowhere",
    "model.image.name=nowhere:Tower", "model.dim=0", "model.image.config.width=0", "model.image.config.depth=x",
    "model.text.config.no=1", "model.head=mlp", "model.head_width=8", "model.predictor=moco_v3", "model.momentum=0.9",
    "model.image.unlocked_groups=1", "data.image_size=4", "data.image_size=96", "data.local_views=2",
    "data.recipe=none_such", "data.recipe.blur=7", "data.augmentation=nowhere:f", "data.weights=/nowhere.parquet",
    "data.select=/nowhere.parquet", "batch_size=4000", "batch_size=6", "order.canonical_shards=3", "micro_batch=100",
    "objective.name=isogcl", "objective.rho=-1", "objective.tau_min=2", "objective.mode=unimodal3",
    "optimizer.name=adam", "optimizer.betas=[2,3]", "optimizer.momentum=0.9", "state.memory_budget=1000",
    "evaluation.every_steps=5", "evaluation.test=/nowhere", "init.run=/nowhere", "device=cuda", "trackers=7",
]  # fmt: skip
