"""Dask, as it is: workers in processes of their own, waits on their event loops."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import userstream as us
import workers
from conftest import SIMULATED
from helpers import eventually

distributed = pytest.importorskip("distributed", reason="needs the extra `engines`")
dask = importlib.import_module("dask")
dask_workers = importlib.import_module("dask_workers")  # of docs/examples/engines

pytestmark = pytest.mark.timeout(240)  # processes start, on slow machines as well

SECONDS = 60  # a deadline that nobody is to miss


class Prepare(distributed.WorkerPlugin):
    """The plugin of the example, on the driver of the tests."""

    def __init__(self, simulated: bool) -> None:
        self.simulated = simulated

    def setup(self, worker: Any) -> None:
        workers.prepare(self.simulated)


@contextmanager
def connected(cluster: Any) -> Iterator[distributed.Client]:
    with cluster, distributed.Client(cluster) as client:
        client.register_plugin(Prepare(SIMULATED))
        yield client


def local(directory: Path, count: int) -> distributed.LocalCluster:
    return distributed.LocalCluster(
        n_workers=count,
        threads_per_worker=1,
        dashboard_address=":0",
        local_directory=str(directory),
        silence_logs=logging.CRITICAL,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[distributed.Client]:
    with connected(local(tmp_path_factory.mktemp("dask"), 2)) as client:
        yield client


@pytest.fixture
def client(cluster: distributed.Client) -> Iterator[distributed.Client]:
    yield cluster
    cluster.run(workers.let_go)


def finish(client: distributed.Client, seconds: float, **more: Any) -> dict[str, Any]:
    return client.sync(dask_workers.finish_everywhere, client, seconds, **more)


def addresses(client: distributed.Client) -> list[str]:
    return sorted(client.run(workers.process))


def wait_for_a_wait(client: distributed.Client, worker: str) -> None:
    """Wait until a stream of a worker is awaited."""
    assert eventually(lambda: client.run(workers.is_awaited, workers=[worker])[worker], SECONDS)


def test_all_is_done(client: distributed.Client) -> None:
    client.run(workers.uuid)
    assert finish(client, SECONDS) == dict.fromkeys(addresses(client))


def test_a_late_worker_is_named_and_the_others_are_not(client: distributed.Client) -> None:
    late, other = addresses(client)
    client.run(workers.uuid)
    stream = client.run(workers.hold, workers=[late])[late]
    answers = finish(client, 0.2, grace=SECONDS)
    assert answers.keys() == {late, other}
    assert answers[other] is None
    error = answers[late]
    assert type(error) is us.WaitTimeout
    assert error.streams == (stream,)
    assert error.devices == (0,)
    assert error.device_uuid == client.run(workers.uuid)[late]
    assert error.device_uuid in str(error)


def test_a_wait_leaves_the_event_loop_of_the_worker_free(client: distributed.Client) -> None:
    """`let_go` runs on that loop: a wait that blocks it would never be over."""
    late, _ = addresses(client)
    client.run(workers.hold, workers=[late])
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(finish, client, SECONDS)
        wait_for_a_wait(client, late)
        client.run(workers.let_go, workers=[late])
        assert set(answers.result(SECONDS).values()) == {None}


@pytest.mark.simulated
def test_a_failed_device_and_a_new_process_for_it(client: distributed.Client) -> None:
    failed, other = addresses(client)
    pids = client.run(workers.process)
    uuid = client.run(workers.uuid)[failed]
    client.run(workers.fail, workers=[failed])
    answers = finish(client, SECONDS)
    assert answers[other] is None
    assert type(answers[failed]) is us.WaitErrors
    (error,) = answers[failed].exceptions
    assert (error.name, error.device_uuid) == ("CUDA_ERROR_ILLEGAL_ADDRESS", uuid)
    client.restart_workers([failed], timeout=SECONDS)
    wait_for_others_than(client, {pids[failed]})
    assert set(finish(client, SECONDS).values()) == {None}
    client.run(workers.wait_async, SECONDS)


def wait_for_others_than(client: distributed.Client, gone: set[int]) -> None:
    """Wait until two workers answer, none of them a process that is gone."""

    def are_there() -> bool:
        answers = client.run(workers.process, on_error="return").values()
        pids = {pid for pid in answers if isinstance(pid, int)}
        return len(answers) == len(pids) == 2 and not pids & gone

    assert eventually(are_there, SECONDS)


def test_a_worker_that_is_killed(client: distributed.Client) -> None:
    killed, other = addresses(client)
    client.run(workers.hold, workers=[killed])
    pid = client.run(workers.process)[killed]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(finish, client, SECONDS)
        wait_for_a_wait(client, killed)
        os.kill(pid, signal.SIGKILL)
        found = answers.result(2 * SECONDS)
    assert found[other] is None
    assert isinstance(found[killed], OSError)
    assert not isinstance(found[killed], us.UserStreamError)
    wait_for_others_than(client, {pid})
    client.run(workers.wait_async, SECONDS)  # the new process was prepared as well
    assert set(finish(client, SECONDS).values()) == {None}


def test_a_worker_that_does_not_answer(client: distributed.Client) -> None:
    stopped, other = addresses(client)
    pid = client.run(workers.process)[stopped]
    os.kill(pid, signal.SIGSTOP)
    try:
        for grace in (2, 10, 40):  # a slow machine may need longer to say that all is well
            answers = finish(client, 0, grace=grace)
            assert type(answers[stopped]) is TimeoutError
            if answers[other] is None:
                break
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answers[other] is None


def test_tasks_await(client: distributed.Client) -> None:
    tasks = [client.submit(workers.wait_async, SECONDS, pure=False) for _ in range(8)]
    assert client.gather(tasks) == [None] * 8
    late, _ = addresses(client)
    stream = client.run(workers.hold, workers=[late])[late]
    with pytest.raises(us.WaitTimeout) as caught:
        client.submit(workers.wait_async, 0.1, workers=[late], pure=False).result(SECONDS)
    assert caught.value.streams == (stream,)
    assert caught.value.device_uuid == client.run(workers.uuid)[late]


def test_results_come_back(client: distributed.Client) -> None:
    info = client.submit(workers.describe_own_buffer, pure=False).result(SECONDS)
    assert (info.device_id, info.nbytes) == (0, 1024)
    assert info.device_uuid in client.run(workers.uuid).values()


def test_the_functions_of_userstream_can_be_sent(client: distributed.Client) -> None:
    answers = client.run(us.wait_all_async, timeout=SECONDS, on_error="return")
    assert list(answers.values()) == [None] * len(answers)
    with pytest.raises(TypeError, match="send a function that calls userstream there"):
        client.run(us.UserStream().wait_all_async)


def test_forkserver(tmp_path: Path) -> None:
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        with connected(local(tmp_path, 1)) as client:
            client.run(workers.wait_async, SECONDS)
            assert list(finish(client, SECONDS).values()) == [None]


@pytest.mark.gpu
@pytest.mark.multi_device
def test_a_gpu_for_each_worker(tmp_path: Path) -> None:
    """They are all device 0, so only the UUID tells which GPU was late."""
    spec = {
        ordinal: {
            "cls": distributed.Nanny,
            "options": {
                "nthreads": 1,
                "env": {"CUDA_VISIBLE_DEVICES": str(ordinal)},
                "local_directory": str(tmp_path),
            },
        }
        for ordinal in range(2)
    }
    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard": False}}
    with connected(distributed.SpecCluster(spec, scheduler)) as client:
        uuids = client.run(workers.uuid)
        assert len(set(uuids.values())) == 2
        late, other = addresses(client)
        client.run(workers.hold, workers=[late])
        answers = finish(client, 0.2, grace=SECONDS)
        assert answers[other] is None
        assert (answers[late].device, answers[late].device_uuid) == (0, uuids[late])
        client.run(workers.let_go)
