# https://github.com/bheisler/RustaCUDA/issues/41
"""A buffer is used on a stream that does not wait for its allocation."""

from kit import REPAIRED, N, device, finish

main, side = device.create_stream(), device.create_stream()
x = device.allocate(4 * N, stream=main)  # first
if REPAIRED:
    side.wait(main)
x.fill(1, stream=side)  # second
main.wait(side)
x.close(main)
finish()
