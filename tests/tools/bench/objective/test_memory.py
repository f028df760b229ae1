from thermopile.tools.bench.isolated import run_isolated
from thermopile.tools.bench.objective.contenders import PRODUCTS, Case
from thermopile.tools.bench.objective.memory import peak_bytes

MATRIX = 4 * 4096**2


def test_the_peak_of_three_products_is_the_similarities_and_little_more():
    assert MATRIX <= run_isolated(peak_bytes, PRODUCTS, Case("isogclr", "bimodal", 4096, 16, "cpu")) <= 1.2 * MATRIX
