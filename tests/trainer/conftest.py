import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def raw(make_raw, tmp_path) -> dict:
    return make_raw(tmp_path / "run")
