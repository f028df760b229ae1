import json
import math

import pytest

from thermopile.state_store.errors import FieldError
from thermopile.state_store.schema import Schema


def schema_of(count):
    return Schema({f"field_{i}": 0.0 for i in range(count)})


@pytest.mark.parametrize(
    ("fields", "row_bytes"), [(1, 32), (6, 32), (7, 64), (14, 64), (15, 128), (30, 128), (31, 192)]
)
def test_a_row_takes_half_a_cache_line_or_whole_ones(fields, row_bytes):
    assert schema_of(fields).row_words * 4 == row_bytes


def test_a_row_holds_the_fields_in_their_order_then_visits_and_last_step():
    assert Schema({"b": 0.0, "a/c": 0.0}).columns == ("b", "a/c", "visits", "last_step")


@pytest.mark.parametrize("value", [-math.inf, math.inf, 0.05, 0.0, -1e-30])
def test_an_initial_value_survives_json(value):
    schema = Schema({"image/log_s": value})
    written = json.dumps(schema.to_json(), allow_nan=False)
    assert Schema.from_json(json.loads(written)) == schema


@pytest.mark.parametrize("name", ["", "/tau", "image//tau", "image/", "../tau", "first tau", "1st"])
def test_a_name_that_is_no_path_of_identifiers_is_refused(name):
    with pytest.raises(FieldError, match="identifiers"):
        Schema({name: 0.0})


@pytest.mark.parametrize("name", ["visits", "last_step"])
def test_a_name_that_the_store_uses_itself_is_refused(name):
    with pytest.raises(FieldError, match=f"'{name}' is maintained by the store"):
        Schema({name: 0.0})


def test_a_nan_as_initial_value_is_refused():
    with pytest.raises(FieldError, match="'tau' is NaN"):
        Schema({"tau": math.nan})
