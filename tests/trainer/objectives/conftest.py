"""Every objective in turn, on one thread."""

import pytest
import torch

from support.objectives import FRAMED


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For tensors as small as here a second thread costs more than it saves, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=FRAMED, ids=lambda case: f"{case[0]}-{case[1]}{case[2]}", scope="session")
def case(request):
    """Name, mode and frame, of every objective in turn."""
    return request.param
