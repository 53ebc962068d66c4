"""Processes of multiprocessing: what starts them, and what comes back."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

import userstream as us
import workers
from conftest import SIMULATED
from helpers import run_python

pytestmark = pytest.mark.timeout(240)  # processes start, on slow machines as well

SECONDS = 60  # a deadline that nobody is to miss


@pytest.fixture(params=["spawn", "forkserver"])
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context(request.param)
    with ProcessPoolExecutor(1, context, workers.prepare, (SIMULATED,)) as pool:
        yield pool


def test_a_worker_process(pool: ProcessPoolExecutor) -> None:
    us.get_stream(0)  # CUDA is in use here as well
    pool.submit(workers.wait, SECONDS).result(SECONDS)
    pool.submit(us.wait_all, timeout=SECONDS).result(SECONDS)
    with pytest.raises(us.WaitTimeout) as caught:
        pool.submit(workers.wait_while_stuck, 0.05).result(SECONDS)
    error = caught.value
    assert (error.seconds, error.devices) == (0.05, (0,))
    assert error.device_uuid == pool.submit(workers.uuid).result(SECONDS)
    assert len(error.streams) == 1
    info = pool.submit(workers.describe_own_buffer).result(SECONDS)
    assert (info.nbytes, info.device_uuid) == (1024, error.device_uuid)
    with pytest.raises(TypeError, match="get_stream"):
        pool.submit(workers.wait, us.get_stream(0)).result(SECONDS)


def test_a_pool_that_forks() -> None:
    """The error arrives where the pool was made, and says what to do."""
    done = run_python(
        """
        import multiprocessing, warnings
        from concurrent.futures import ProcessPoolExecutor

        warnings.simplefilter("ignore", DeprecationWarning)  # os.fork with threads
        import userstream as us

        us.get_stream(0)
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            error = pool.submit(us.Stream.create, 0).exception(30)
        assert type(error) is us.ForkedError, error
        assert "spawn" in str(error), error
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_that_dies_in_a_wait() -> None:
    """The pool's own error, and no hang."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, workers.prepare, (SIMULATED,)) as pool:
        pid = pool.submit(workers.process).result(SECONDS)
        pool.submit(workers.hold).result(SECONDS)
        future = pool.submit(workers.wait, SECONDS)
        (child,) = (each for each in multiprocessing.active_children() if each.pid == pid)
        child.kill()
        with pytest.raises(concurrent.futures.BrokenExecutor):
            future.result(SECONDS)
