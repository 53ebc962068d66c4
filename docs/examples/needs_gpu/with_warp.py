import warp as wp

import userstream as us


@wp.kernel
def increment(array: wp.array(dtype=wp.float32)):
    i = wp.tid()
    array[i] = array[i] + 1.0


array = wp.zeros(1024, dtype=wp.float32, device="cuda:0")

with us.borrow(array) as stream:  # after Warp's work on the array; Warp continues after yours
    assert us.get_stream(array) is stream

blocking = us.Stream.create(0, nonblocking=False)
with us.borrow(array, stream=blocking, activate="warp"):
    wp.launch(increment, dim=array.shape, inputs=[array], device="cuda:0")

assert (us.asnumpy(array) == 1).all()
