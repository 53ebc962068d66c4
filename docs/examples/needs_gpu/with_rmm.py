import rmm

import userstream as us

stream = us.get_stream(0)
buffer = rmm.DeviceBuffer(size=1024)
assert us.get_stream(buffer) is stream

info = us.describe(buffer)
assert (info.nbytes, info.ordering) == (1024, "unknown")

# Nobody tells which stream RMM's work is on. It was the default stream here.
stream.wait(us.Stream.legacy_default())
us.wait(buffer, timeout=60)
