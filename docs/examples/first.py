from cuda.core import Device

import userstream as us

Device(0).set_current()
theirs = Device(0).create_stream()  # the stream of a framework
buffer = Device(0).allocate(1024, stream=theirs)  # a tensor of any framework names it itself
with us.borrow(buffer, producer=theirs) as stream:  # the user stream, after the work on `theirs`
    buffer.fill(42, stream=stream)  # queued on your stream: the host goes on
buffer.fill(0, stream=theirs)  # after yours, and the host still did not wait
us.wait(buffer, timeout=10)  # your work is done; nobody else was waited for
print(us.describe(buffer))
