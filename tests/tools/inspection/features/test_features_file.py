"""The file of all samples' features: what comes back, and which files are refused."""

import os

import numpy as np
import pytest

from thermopile.storage.files import NotRegularFileError
from thermopile.storage.sealed_json import seal_line, unseal
from thermopile.tools.inspection.features.features_file import (
    HEADER_BYTES,
    NAME,
    FeaturesFile,
    FeaturesOf,
    UnusableFeaturesError,
    write_features,
)
from thermopile.trainer.errors import RunError

SAMPLES, DIM = 2500, 8
OF = FeaturesOf(samples=SAMPLES, checkpoint="step-5", weights="raw", digest="0" * 64)


def unit_rows(*shape, seed=0):
    rows = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


@pytest.fixture
def features():
    return unit_rows(SAMPLES, 2, DIM)


@pytest.fixture
def path(features, tmp_path):
    write_features(tmp_path / NAME, OF, iter([features[:700], features[700:]]))
    return tmp_path / NAME


def test_blocks_and_rows_are_the_features_rounded_to_float16(path, features):
    opened, rounded = FeaturesFile(path, OF), features.astype(np.float16).astype(np.float32)
    blocks = [(first, block.copy()) for first, block in opened.blocks()]
    assert [first for first, _ in blocks] == [0, 1024, 2048]
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), rounded)
    np.testing.assert_array_equal(opened.rows(np.array([2499, 0, 1024])), rounded[[2499, 0, 1024]])


def test_features_of_drawn_samples_come_with_their_ids(features, tmp_path):
    ids = np.sort(np.random.default_rng(0).choice(SAMPLES, 100, replace=False))
    write_features(tmp_path / NAME, OF, iter([features[ids]]), ids)
    opened = FeaturesFile(tmp_path / NAME, OF)
    np.testing.assert_array_equal(opened.drawn, ids)
    np.testing.assert_array_equal(opened.rows(np.arange(100)), features[ids].astype(np.float16))
    with pytest.raises(RunError, match="features of 100 samples were made, not of 99"):
        write_features(tmp_path / NAME, OF, iter([features[ids]]), ids[1:])


@pytest.mark.parametrize("ids", [[3, 2], [2, 2], [-1, 2], [2, SAMPLES]])
def test_drawn_samples_that_the_dataset_does_not_have_are_damage(features, tmp_path, ids):
    write_features(tmp_path / NAME, OF, iter([features[:2]]), np.array(ids))
    with pytest.raises(UnusableFeaturesError, match="names samples that the dataset does not have"):
        FeaturesFile(tmp_path / NAME, OF)


def test_every_float16_from_minus_one_to_one_is_decoded_exactly(tmp_path):
    # Subnormal numbers too, which have another exponent.
    bits = np.arange(0x3C01, dtype=np.uint16)
    values = np.concatenate([bits, bits | 0x8000]).view(np.float16)
    of = OF.model_copy(update={"samples": 2})
    write_features(tmp_path / NAME, of, iter([values.astype(np.float32).reshape(2, 1, -1)]))
    (decoded,) = [block.copy() for _, block in FeaturesFile(tmp_path / NAME, of).blocks()]
    np.testing.assert_array_equal(decoded.ravel(), values.astype(np.float32))


@pytest.mark.parametrize(
    "other", [{"checkpoint": "step-9"}, {"weights": "averaged"}, {"digest": "1" * 64}, {"samples": SAMPLES + 1}]
)
def test_the_features_of_other_encoders_are_refused(path, other):
    with pytest.raises(UnusableFeaturesError, match="which differ from those of"):
        FeaturesFile(path, OF.model_copy(update=other))


def test_a_file_that_was_cut_short_or_has_grown_is_refused(path):
    size = path.stat().st_size
    for wrong in (size - 1, size + 1, HEADER_BYTES, HEADER_BYTES - 1, 0):
        os.truncate(path, wrong)
        with pytest.raises(UnusableFeaturesError, match="cut short"):
            FeaturesFile(path, OF)


def test_a_file_that_shrinks_while_it_is_open_is_an_error_that_names_the_sample(path):
    opened = FeaturesFile(path, OF)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(RunError, match="cannot be read at sample 2048"):
        list(opened.blocks())


def test_a_link_is_refused_even_to_a_file_that_fits(path, tmp_path):
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(NotRegularFileError, match="is a link"):
        FeaturesFile(path, OF)


def test_a_pipe_is_refused_and_does_not_block(tmp_path):
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(NotRegularFileError, match="named pipe"):
        FeaturesFile(tmp_path / NAME, OF)


@pytest.mark.parametrize(
    "change",
    [
        {"sides": 17},
        {"rows": 0},
        {"dim": 0},
        {"samples": -1},
        {"format": 1},
        {"dim": 1 << 60},
        {"more": 1},
        {"dim": "8"},
    ],
)
def test_a_header_that_makes_no_sense_is_refused(path, change):
    data = path.read_bytes()
    header = seal_line(unseal(data[:HEADER_BYTES].rstrip()) | change)
    path.write_bytes(header.ljust(HEADER_BYTES) + data[HEADER_BYTES:])
    with pytest.raises(UnusableFeaturesError, match="is not a file of features"):
        FeaturesFile(path, OF)


def test_a_changed_header_is_refused(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b"step-5", b"step-6", 1))
    with pytest.raises(UnusableFeaturesError, match="checksum"):
        FeaturesFile(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -2.0])
def test_values_that_no_feature_of_norm_one_has_are_refused(path, value):
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 2000 * 2 * 2 * DIM)
        file.write(np.float16(value).tobytes())
    opened = FeaturesFile(path, OF)
    with pytest.raises(RunError, match="not of norm 1"):
        list(opened.blocks())
    with pytest.raises(RunError, match="not of norm 1"):
        opened.rows(np.array([2000]))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, features, tmp_path):
    def broken():
        yield features[:700]
        raise RunError("a damaged picture")

    before = path.read_bytes()
    for batches in (broken(), iter([features[:700]])):
        with pytest.raises(RunError):
            write_features(path, OF, batches)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]
