import tempfile
from collections import deque

import numpy as np
from cuda.core import Device

import userstream as us

AHEAD, STEPS, SIZE = 2, 10, 1 << 20
Device(0).set_current()
theirs = Device(0).create_stream()  # the stream of a framework
result = Device(0).allocate(SIZE, stream=theirs)  # which each step writes anew


def step(number):
    result.fill(number, stream=theirs)  # your pipeline


places = [us.pinned_empty(SIZE, np.uint8) for _ in range(AHEAD)]
copies = deque()  # those under way, the oldest first
with tempfile.TemporaryFile() as file:
    for number in range(STEPS):
        step(number)
        if len(copies) == AHEAD:
            copies.popleft().result(timeout=60).tofile(file)  # the GPU goes on meanwhile
        place = places[number % AHEAD]  # what was copied there is in the file
        copies.append(us.asnumpy_async(result, out=place, producer=theirs))
    for copy in copies:
        copy.result(timeout=60).tofile(file)
    file.seek(0)
    found = np.fromfile(file, np.uint8).reshape(STEPS, SIZE)

assert (found == np.arange(STEPS, dtype=np.uint8)[:, np.newaxis]).all()
