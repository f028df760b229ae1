"""Sealed JSON: ordinary JSON that tells when it is no longer what was written."""

import json

import pytest

from thermopile.storage.sealed_json import DamagedJSONError, parse, seal_document, seal_line, unseal

TREE = {"step": 3, "loss": None, "nested": {"values": [1.5, "ü", True]}}
SEALS = pytest.mark.parametrize("seal", [seal_line, seal_document])


@SEALS
def test_what_was_sealed_comes_back_and_any_program_can_read_it(seal):
    assert unseal(seal(TREE)) == TREE
    assert {key: value for key, value in json.loads(seal(TREE)).items() if key in TREE} == TREE


def test_a_sealed_line_is_one_line():
    assert b"\n" not in seal_line(TREE)


@SEALS
def test_every_flipped_bit_is_found(seal):
    text = seal(TREE)
    for place in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(DamagedJSONError):
            unseal(bytes(flipped))


@SEALS
def test_a_text_cut_short_anywhere_is_found(seal):
    text = seal(TREE).rstrip()
    for length in range(len(text)):
        with pytest.raises(DamagedJSONError):
            unseal(text[:length])


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"", b"[1,"])
def test_json_from_anywhere_is_one_kind_of_error(text):
    with pytest.raises(DamagedJSONError):
        parse(text)


def test_a_number_that_is_not_finite_is_no_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal_line({"loss": float("nan")})
