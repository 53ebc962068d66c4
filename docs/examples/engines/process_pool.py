"""Work in processes of a pool, and an error that comes back with its facts."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import userstream as us
from userstream import testing


def prepare():
    """Runs in every worker process before its first call."""
    if not Path("/dev/nvidiactl").exists():  # this example also runs without a GPU
        testing.simulate()


def work(number):
    stream = us.get_stream(0)  # of this process: nothing came with the call
    us.wait(stream, timeout=60)  # ... after you queued work on it ...
    return number


def get_stuck():
    with testing.latch(us.get_stream(0)):
        us.wait(0, timeout=0.1)


def main():
    context = multiprocessing.get_context("spawn")  # or "forkserver", never "fork"
    with ProcessPoolExecutor(2, context, initializer=prepare) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))
        error = pool.submit(get_stuck).exception(timeout=60)
        assert isinstance(error, us.WaitTimeout)
        print(f"{error.streams[0]} on {error.device_uuid} was late")


if __name__ == "__main__":  # workers import this file
    main()
