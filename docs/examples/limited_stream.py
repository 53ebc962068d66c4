from cuda.core import Device

import userstream as us

Device(0).set_current()
theirs = Device(0).create_stream()  # the stream of a framework
preprocess = us.get_stream(0, name="preprocess", sms=16)  # at the start, as it takes 1 to 2 ms

buffer = Device(0).allocate(1024, stream=theirs)
buffer.fill(1, stream=theirs)
with us.borrow(buffer, producer=theirs, name="preprocess") as stream:  # as any other user stream
    assert stream is preprocess
    buffer.fill(42, stream=stream)

assert (us.asnumpy(buffer, producer=theirs) == 42).all()
print(f"at most {preprocess.sms} of {theirs.resources.sm.sm_count} SMs")
