import os

import torch

if not torch.cuda.is_available():
    # Before triton is imported: its kernels then run on CPU tensors, where a test asks for them.
    os.environ["TRITON_INTERPRET"] = "1"

# The ranks of a test and its own process share few cores; tensors are small.
torch.set_num_threads(1)

import pytest  # noqa: E402
from ranks import Ranks  # noqa: E402

# Before tests import it: what was compared is then said where it is not equal.
pytest.register_assert_rewrite("schedule_twins")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu(count): needs that many CUDA GPUs")


def pytest_collection_modifyitems(items):
    found = torch.cuda.device_count()
    for item in items:
        if marker := item.get_closest_marker("gpu"):
            needed = marker.args[0] if marker.args else 1
            if found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {found}"))


def _pool(world_size, device="cpu"):
    ranks = Ranks(world_size, device)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks():
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks():
    yield from _pool(4)


@pytest.fixture(scope="session")
def two_gpus():
    yield from _pool(2, "cuda")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """``folders(family)``: a tiny model's Hugging Face folder and its DeepSpeed checkpoint; leave them as they are."""
    from checkpoint_folders import make

    made = {}
    return lambda family: made.get(family) or made.setdefault(family, make(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def op():
    """The compiled operator."""
    from ds_tileoverlap.op_builder.tileoverlap import TileOverlapBuilder

    return TileOverlapBuilder().load()


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """The operator emulated on the CPU."""
    from emulated_op import build

    return build(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def no_streams_and_dirty_memory(monkeypatch):
    """What ranks of the emulation, which are threads, need of torch; and memory that is never clean by chance."""
    from emulated_ranks import NO_STREAM

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: NO_STREAM)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
