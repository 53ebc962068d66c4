from cuda.core import Device

import userstream as us

Device(0).set_current()
stream = us.get_stream()  # the user stream of the current device
buffer = Device(0).allocate(1024, stream=stream)  # or a tensor of any framework
assert us.get_stream(buffer) is stream  # found from the buffer, in every thread
buffer.fill(42, stream=stream)  # queued on your stream: the host goes on
us.wait(buffer, timeout=10)  # your work is done; nobody else was waited for
print(us.describe(buffer))
