"""Progress, and the schedule that is a function of it alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.trainer.objectives import Progress


def test_the_cosine_starts_at_its_start_is_half_way_at_half_time_and_ends_at_its_end():
    values = [Progress(5 * epoch, 5).cosine(1.0, 0.2, 4) for epoch in (0, 2, 4, 100)]
    assert values == pytest.approx([1.0, 0.6, 0.2, 0.2])


@given(step=st.integers(0, 10**6), steps_per_epoch=st.integers(1, 1000), epochs=st.integers(1, 100))
def test_the_cosine_never_rises_stays_in_its_range_and_is_constant_within_an_epoch(step, steps_per_epoch, epochs):
    now = Progress(step, steps_per_epoch).cosine(1.0, 0.2, epochs)
    epoch_start = step - step % steps_per_epoch
    assert 0.2 <= now <= 1.0
    assert now == Progress(epoch_start, steps_per_epoch).cosine(1.0, 0.2, epochs)
    assert now >= Progress(step + steps_per_epoch, steps_per_epoch).cosine(1.0, 0.2, epochs)


@pytest.mark.parametrize(("step", "steps_per_epoch"), [(-1, 10), (0, 0)])
def test_progress_that_cannot_be_is_refused(step, steps_per_epoch):
    with pytest.raises(ValueError, match=rf"step={step}, steps_per_epoch={steps_per_epoch}"):
        Progress(step, steps_per_epoch)
