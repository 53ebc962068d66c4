# https://github.com/dmlc/dgl/issues/4436
"""An array is used by its address, and the stream that fills it is ignored."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, increment, scale

import userstream as us

theirs, mine = device.create_stream(), device.create_stream()
x, y = floats(), floats()
interface = {"data": (int(x.handle), False), "stream": int(theirs.handle)}

launch(theirs, ONE, increment, x, COUNT)  # first
address, _ = interface["data"]
if REPAIRED:
    mine.wait(us.Stream.from_handle(interface["stream"]))
launch(mine, ONE, scale, y, address, COUNT, TWO)  # second
finish()
