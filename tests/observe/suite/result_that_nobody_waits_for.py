# https://github.com/vllm-project/vllm/issues/36013
# not seen: reads of the host make no driver call
"""The host uses a pinned result, and nothing waits for its copy until the end."""

from kit import REPAIRED, device, floats, pinned

stream = device.create_stream()
host, array = pinned()
x = floats()

x.copy_to(host, stream=stream)  # first
if REPAIRED:
    stream.sync()
total = float(array.sum())  # second
