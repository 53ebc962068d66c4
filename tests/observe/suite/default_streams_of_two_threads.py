# https://github.com/NVIDIA/cuda-python/issues/133
"""With default streams per thread, one thread uses what another one has only queued."""

import threading

from cuda.bindings import driver
from kit import REPAIRED, N, device, finish, floats

x, y = floats(), floats()
PER_THREAD = driver.CUstream(driver.CU_STREAM_PER_THREAD)


def produce() -> None:
    device.set_current()
    driver.cuMemsetD8Async(x.handle, 1, 4 * N, PER_THREAD)  # first
    if REPAIRED:
        driver.cuStreamSynchronize(PER_THREAD)


producer = threading.Thread(target=produce)
producer.start()
producer.join()
driver.cuMemcpyAsync(y.handle, x.handle, 4 * N, PER_THREAD)  # second
finish()
