from cuda.core import Device

import userstream as us

Device(0).set_current()
theirs = Device(0).create_stream()  # the stream of a framework
buffer = Device(0).allocate(1024, stream=theirs)
with us.borrow(buffer, producer=theirs) as stream:  # after the work on `theirs`
    buffer.fill(42, stream=stream)  # your work: queued, and the host continues
buffer.fill(0, stream=theirs)  # after your work, and still no wait
us.wait(buffer, timeout=10)  # waits for your work only
print(us.describe(buffer))
