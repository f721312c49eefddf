"""One thread per process, one seed per test, Triton interpreted where there is no GPU, and ranks that stay."""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read once, when a kernel is decorated: it must be set before the first import of triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from interpreted import make_quick
from support import ranks

if not torch.cuda.is_available():  # CUDA does not survive a fork
    ranks.START_METHOD = "forkserver"
    ranks.preload()
    make_quick()


def pytest_configure(config: pytest.Config) -> None:
    """Numpy warns of infinities and NaN inside the interpreter."""
    config.addinivalue_line("filterwarnings", r"ignore::RuntimeWarning:triton\.runtime\.interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first, so that no worker is left alone with one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Leave what is imported out of every collection of garbage, which torch.compile and Trainer ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)  # a training run leaves them on, and memory as it is
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of tokenized corpora that all tests of the job share, also those of other workers."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "corpora"


@pytest.fixture(scope="session")
def trained(cache: Path) -> Path:
    """The folder of a run of eight steps on one rank, with checkpoints after four and eight."""
    pytest.importorskip("tokenizers")
    from filelock import FileLock
    from toy_runs import pretrain

    finished, unfinished = cache.with_name("trained"), cache.with_name("training")
    cache.parent.mkdir(exist_ok=True)
    with FileLock(cache.with_name("trained.lock")):
        if not finished.exists():
            assert pretrain(cache, unfinished) == 0
            unfinished.rename(finished)
    return finished


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to be changed."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Callable]:
    """Call it with a body at the top of a module and arguments: two ranks run it, and the first failure is raised here."""
    with ranks.Pool(2, limit_seconds=200, seed=0) as pool:
        yield pool.run


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Callable]:
    """As ``ranks2``, on four ranks."""
    with ranks.Pool(4, limit_seconds=200, seed=0) as pool:
        yield pool.run
