"""Stored bytes are verified as they are read: every changed byte of a picture or its tokens is a fault of its own."""

from io import BytesIO

import numpy as np
import pytest

from thermopile.pipeline.dataset.row_records import RECORD
from thermopile.pipeline.dataset.stored_sample import CHANGED, SOUND, TOKENS_CHANGED, Located, checksum, read_samples
from thermopile.storage.files import RegularFile

from support.pictures import draw

TOKENS = np.arange(12, dtype=np.int32)  # of two captions


@pytest.fixture
def jpeg():
    file = BytesIO()
    draw(0).save(file, "JPEG")
    return file.getvalue()


def fault(tmp_path, stored, jpeg):
    """Return what is wrong with a row that was stored as `jpeg` and TOKENS, if the file now has these bytes."""
    (file := tmp_path / "beton").write_bytes(stored)
    records = np.zeros(1, RECORD)
    for name, value in {"jpeg_bytes": len(jpeg), "height": 24, "width": 32, "tokens_at": len(jpeg), "captions": 2,
                        "jpeg_checksum": checksum(np.frombuffer(jpeg, np.uint8).copy()),
                        "tokens_checksum": checksum(TOKENS.view(np.uint8))}.items():  # fmt: skip
        records[name] = value
    opened = RegularFile(file)
    located = Located.of(records, file=opened.number, vocab_size=12, context_length=6)
    _, found = read_samples(located, 0, 1, np.array([len(jpeg)]), np.empty(len(jpeg), np.uint8))
    return found


def test_every_changed_byte_of_a_picture_and_of_all_its_captions_tokens_is_found(tmp_path, jpeg):
    sound = jpeg + TOKENS.tobytes()
    assert fault(tmp_path, sound, jpeg) == SOUND
    for at in [*range(0, len(jpeg), 97), len(jpeg) - 1, *range(len(jpeg), len(sound))]:
        harmed = bytearray(sound)
        harmed[at] ^= 1
        assert fault(tmp_path, bytes(harmed), jpeg) == (CHANGED if at < len(jpeg) else TOKENS_CHANGED), at
