# https://github.com/rapidsai/rmm/issues/2490
"""Memory is freed on the stream it was allocated on while another stream reads it."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, N, device, finish, floats, scale

main, side = device.create_stream(), device.create_stream()
out = floats()
x = device.allocate(4 * N, stream=main)
x.fill(1, stream=main)
side.wait(main)

launch(side, ONE, scale, out, x, COUNT, TWO)  # first
if REPAIRED:
    main.wait(side)
x.close(main)  # second
finish()
