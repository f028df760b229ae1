"""Files of prompts, and CLIP's, which are shipped."""

import hashlib

import pytest

from thermopile.trainer.errors import ConfigError
from thermopile.trainer.evaluation.prompts import read_templates


def test_clips_prompts_for_imagenet_are_its_eighty_in_its_order():
    found = read_templates("clip-80")
    assert (len(found), len(set(found))) == (80, 80)
    assert (found[0], found[39], found[-1]) == ("a bad photo of a {}.", "a photo of a {}.", "a tattoo of the {}.")
    # Of OPENAI_IMAGENET_TEMPLATES in open_clip, joined by newlines, which has them from CLIP's notebook.
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()
    assert digest == "4f976686fb651bb5803d4689dcd849f75efe0ef19a3c801355bc9a6f03c8a5af"


def test_a_file_has_one_a_line_besides_empty_ones_and_remarks(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("# mine\n\n  a drawing of {lower} \r\n{}!\n", "utf-8")
    assert read_templates(str(file)) == ("a drawing of {lower}", "{}!")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"a {}\na photo\n", "'a photo' has neither {} nor {lower}"), (b"# none\n", "the file has none; write one a line"),
     (b"\xff {}", "can't decode"), (None, "No such file")],
)  # fmt: skip
def test_what_is_no_file_of_prompts_is_refused(tmp_path, content, words):
    file = tmp_path / "mine.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="shipped: clip-80") as refused:
        read_templates(str(file))
    assert words in str(refused.value)
