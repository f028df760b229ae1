import numpy as np

from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.samples import read_samples


def test_a_sample_has_its_row_of_the_state_and_of_the_table(hostile_run, hostile_dataset, tau_by_class_size):
    details = read_samples(read_run(hostile_run), [65, 3, 3])
    assert list(details) == [3, 65]
    for sample_id, found in details.items():
        assert found.sample_id == sample_id
        assert found.state["image/tau"] == np.float32(tau_by_class_size[sample_id])
        assert (found.state["visits"], found.state["last_step"]) == (1, 5)
        assert found.table["uri"] == hostile_dataset.rows([sample_id])[0]["uri"]
        assert "row" not in found.table
