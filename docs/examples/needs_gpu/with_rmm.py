import rmm

import userstream as us

buffer = rmm.DeviceBuffer(size=1024)
info = us.describe(buffer)
assert (info.nbytes, info.ordering) == (1024, "device")

# RMM does not tell on which stream its work is queued. Here it was the default stream.
with us.borrow(buffer, producer=us.Stream.legacy_default()) as stream:
    assert us.get_stream(buffer) is stream

us.wait(buffer, timeout=60)
