from cuda.core import Device

import userstream as us

Device(0).set_current()
theirs = Device(0).create_stream()  # the stream of a framework
buffer = Device(0).allocate(1024, stream=theirs)
with us.borrow(buffer, producer=theirs) as stream:  # after the work on `theirs`
    buffer.fill(42, stream=stream)  # yours: queued, and the host goes on
buffer.fill(0, stream=theirs)  # after yours, and still no wait
us.wait(buffer, timeout=10)  # until your work is done, and nobody else's
print(us.describe(buffer))
