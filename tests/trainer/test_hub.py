"""`hf:org/name`: fetched from the hub where a user types it, kept at its revision, and never for a file's sake."""

import pytest
from huggingface_hub import ModelCard

from thermopile.pipeline.opening import Dataset
from thermopile.trainer.encoders.hf_hub import hub_name
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets
from support.hub import SHA, hub_of, run_with
from support.runs import losses
from support.whole_models import CONTEXT, save_whole

REPO = "someone/tiny"


@pytest.fixture
def hub(tmp_path):
    """A hub with one model, and a pickle and code that nobody asks for."""
    folder = tmp_path / "published"
    save_whole(folder, "clip")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "evil.py").write_text("raise SystemExit")
    with hub_of(folder, REPO, tmp_path / "cache") as server:
        yield server


@pytest.mark.wide
def test_a_typed_name_is_fetched_once_and_the_run_keeps_its_revision(hub, images_dataset, tmp_path):
    settings = sets("data.image_size=16", "batch_size=64", "steps=2", "model.dim=8", f"model.image.name=hf:{REPO}")
    line = ("train", "--data", images_dataset.path, "--out", tmp_path / "run", *settings)
    assert "cannot be fetched" in run_with(hub, *line, HF_HUB_OFFLINE="1").stderr
    done = run_with(hub, *line)
    assert done.returncode == 0, done.stderr
    assert {"config.json", "model.safetensors"} <= {*hub.asked}
    assert not {"pytorch_model.bin", "evil.py"} & {*hub.asked}
    first = RunDirectory(tmp_path / "run")
    assert first.config().model.image.name == f"hf:{REPO}@{SHA}"
    assert run_with(hub, "export", first.path, "--to", tmp_path / "out", "--format", "hf").returncode == 0
    card = ModelCard.load(tmp_path / "out/image/README.md")
    assert (card.data.base_model, card.data.library_name) == ([REPO], "transformers")
    hub.asked.clear()
    assert "finished at step 2" in run_with(hub, *line, "--resume").stdout  # by the line that started it
    again = ("train", "--data", images_dataset.path, "--config", tmp_path / "run" / "config.toml", "--out")
    assert run_with(hub, *again, tmp_path / "again").returncode == 0  # from the cache
    assert hub.asked == []
    assert losses(RunDirectory(tmp_path / "again")) == losses(first)
    assert run_with(hub, *again, tmp_path / "none", HF_HOME=str(tmp_path / "empty")).returncode == 2
    assert hub.asked == []


@pytest.mark.wide
def test_nothing_is_fetched_for_a_name_in_a_file(hub, pairs_dataset, tmp_path):
    (tmp_path / "sent.toml").write_text(f'[model.image]\nname = "hf:{REPO}"\n')
    line = ("train", "--data", pairs_dataset.path, "--out", tmp_path / "run", "--config", tmp_path / "sent.toml")
    done = run_with(hub, *line, *sets("data.image_size=16", "model.image.config.pretrained=true"))
    assert done.returncode == 2
    assert f"hf:{REPO} is no directory here, nor in Hugging Face's cache; a new run fetches it" in done.stderr
    assert hub.asked == []


@pytest.mark.wide
def test_an_architecture_alone_is_fetched_without_weights_and_only_for_a_side_that_the_run_has(
    hub, images_dataset, tmp_path
):
    settings = ("data.image_size=16", "batch_size=64", "steps=1", f"model.image.name=hf:{REPO}",
                "model.image.config.pretrained=false", "model.text.name=hf:another/model")  # fmt: skip
    done = run_with(hub, "train", "--data", images_dataset.path, "--out", tmp_path / "run", *sets(*settings))
    assert done.returncode == 0, done.stderr
    assert "config.json" in hub.asked
    assert "model.safetensors" not in hub.asked
    assert run_with(hub, "export", tmp_path / "run", "--to", tmp_path / "out", "--format", "hf").returncode == 0
    assert ModelCard.load(tmp_path / "out/image/README.md").data.base_model is None


@pytest.mark.wide
def test_a_conversion_fetches_the_tokenizer_of_a_model_that_is_typed(hub, picture_folder, tmp_path):
    rows = [f"{path},a picture" for path in sorted(picture_folder.rglob("*.png"))[:20]]
    (tmp_path / "pairs.csv").write_text("\n".join(["filepath,title", *rows]))
    line = ("convert", "csv", tmp_path / "pairs.csv", tmp_path / "out", "--caption", "title", "--tokenizer")
    done = run_with(hub, *line, f"hf:{REPO}")
    assert done.returncode == 0, done.stderr
    assert Dataset(tmp_path / "out").index.tokenizer.context_length == CONTEXT
    assert "model.safetensors" not in hub.asked


def test_timms_weights_are_fetched_only_if_both_their_settings_are_typed(images_dataset, tmp_path):
    (tmp_path / "sent.toml").write_text('[model.image]\nname = "timm:resnet18"\n')
    line = ("train", "--data", images_dataset.path, "--out", tmp_path / "run", "--config", tmp_path / "sent.toml")
    done = cli(*line, *sets("model.image.config.pretrained=true"))
    assert_one_line(done, 2, "type model.image.name and model.image.config.pretrained with --set")


@pytest.mark.parametrize(
    "named",
    [
        'name = "timm:vit_base_patch16_224"\nconfig = {pretrained = true}',
        'name = "open_clip:ViT-B-32:laion2b_s34b_b79k"',
        'name = "open_clip:ViT-B-32:/anywhere/weights.safetensors"',
        'name = "timm:resnet18:/anywhere/weights.safetensors"',
    ],
)
def test_weights_of_timm_and_open_clip_that_a_file_names_are_refused(named, pairs_dataset, tmp_path):
    (tmp_path / "sent.toml").write_text(f"[model.image]\n{named}\n")
    line = ("train", "--data", pairs_dataset.path, "--out", tmp_path / "run", "--config", tmp_path / "sent.toml")
    done = cli(*line)
    assert (done.exit_code, "whose weights would be fetched or read; type model.image.name" in done.stderr) == (2, True)
    assert not (tmp_path / "run").exists()


def test_a_path_is_a_directory_and_org_name_is_the_hubs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("/org/name", "./org/name", "../org/name", "~/name", "resnet-18", "a/b/c"):
        assert hub_name(f"hf:{path}") is None
    assert hub_name("hf:org/name") == ("org/name", None)
    assert hub_name(f"hf:org/name@{SHA}") == ("org/name", SHA)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_name("hf:org/name") is None
