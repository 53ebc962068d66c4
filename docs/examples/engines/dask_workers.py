"""One deadline for the user streams of all Dask workers, and who was late or failed."""

import asyncio
from pathlib import Path

from distributed import Client, LocalCluster, WorkerPlugin

import userstream as us
from userstream import testing


class Prepare(WorkerPlugin):
    """Runs in every worker process before its first task, after a restart as well."""

    def setup(self, worker):
        if not Path("/dev/nvidiactl").exists():  # this example also runs without a GPU
            testing.simulate()


async def finish(seconds):
    """Wait for this process's user streams: on the worker's event loop, so without blocking."""
    try:
        await us.wait_all_async(timeout=seconds)
    except us.UserStreamError as error:  # an answer as well: it names the device and the stream
        return error
    return None


async def finish_everywhere(client, seconds, grace=10):
    """Return what each worker answers, within `seconds` and the `grace` for the way there and back.

    `None`: all of its work is done. A `WaitTimeout` or `WaitErrors`: which stream of which device
    was late or failed. Another exception: the worker is gone, or does not answer.
    """

    async def ask(worker):
        try:
            async with asyncio.timeout(seconds + grace):
                answers = await client.run(finish, seconds, workers=[worker], on_error="return")
        except (OSError, TimeoutError) as error:
            return error
        return answers[worker]

    workers = list(await client.nthreads())
    return dict(zip(workers, await asyncio.gather(*map(ask, workers)), strict=True))


async def use(number):
    """A task: queue work on the user stream and let the worker do other things meanwhile."""
    us.get_stream(0)  # ... queue work on it here ...
    await us.wait_async(0, timeout=60)
    return number


def main():
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster) as client:
        client.register_plugin(Prepare())
        assert client.gather(client.map(use, range(8))) == list(range(8))
        answers = client.sync(finish_everywhere, client, seconds=60)
        assert list(answers.values()) == [None, None], answers


if __name__ == "__main__":  # workers import this file
    main()
