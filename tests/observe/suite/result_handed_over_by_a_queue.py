# https://github.com/triton-inference-server/python_backend/issues/223
"""A worker thread hands its result over as soon as it is queued."""

import queue
import threading

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, increment, scale

mine, theirs = device.create_stream(), device.create_stream()
x, y = floats(), floats()
ready: queue.Queue[object] = queue.Queue()


def work() -> None:
    device.set_current()
    launch(theirs, ONE, increment, x, COUNT)  # first
    ready.put(theirs.record() if REPAIRED else None)


worker = threading.Thread(target=work)
worker.start()
event = ready.get()
if event is not None:
    mine.wait(event)
launch(mine, ONE, scale, y, x, COUNT, TWO)  # second
worker.join()
finish()
