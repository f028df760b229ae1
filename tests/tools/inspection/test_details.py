import numpy as np

from thermopile.state_store import StateReader
from thermopile.tools.inspection.run import read_run
from thermopile.tools.inspection.samples import read_rows, read_samples


def test_a_sample_has_its_row_of_the_state_and_of_the_table(hostile_run, hostile_dataset, tau_by_class_size):
    details = read_samples(read_run(hostile_run), [65, 3, 3])
    assert list(details) == [3, 65]
    for sample_id, found in details.items():
        assert found.sample_id == sample_id
        assert found.state["image/tau"] == np.float32(tau_by_class_size[sample_id])
        assert (found.state["visits"], found.state["last_step"]) == (1, 5)
        assert found.table["uri"] == hostile_dataset.rows([sample_id])[0]["uri"]
        assert "row" not in found.table


def test_rows_of_one_block_are_read_at_once(hostile_run, monkeypatch):
    reader, asked, rows = StateReader.open(hostile_run.state), [], StateReader.rows

    def noted(self, start, stop, columns=None):
        asked.append((start, stop))
        return rows(self, start, stop, columns)

    monkeypatch.setattr(StateReader, "rows", noted)
    read_rows(reader, [0, 5, 15, 64, 65], reader.columns)
    assert asked == [(0, 16), (64, 66)]
