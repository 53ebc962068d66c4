# https://github.com/cupy/cupy/pull/5155
"""An array is overwritten on one stream while another one still copies it out."""

from kit import REPAIRED, device, finish, floats, pinned

main, copies = device.create_stream(), device.create_stream()
x = floats()
host, _ = pinned()

x.copy_to(host, stream=copies)  # first
if REPAIRED:
    main.wait(copies)
x.fill(0, stream=main)  # second
finish()
