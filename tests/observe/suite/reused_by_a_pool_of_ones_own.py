# https://github.com/meta-pytorch/torchrec/pull/4231
"""A block that a side stream still copies from goes to the next tensor."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, device, finish, floats, increment, pinned

main, side = device.create_stream(), device.create_stream()
block, out = floats(), floats()
host, _ = pinned()

launch(main, ONE, increment, block, COUNT)
side.wait(main)
block.copy_to(host, stream=side)  # first
if REPAIRED:
    main.wait(side)  # what record_stream is for
block.fill(0, stream=main)  # second
finish()
