import cupy

import userstream as us

array = cupy.ones(1 << 20)

# After CuPy's work on the array; CuPy continues after yours.
# The host does not wait.
with us.borrow(array, activate=True) as stream:
    assert cupy.cuda.get_current_stream().ptr == int(stream.handle)
    doubled = array * 2  # on the user stream

assert float(doubled.sum()) == 2 << 20  # on CuPy's own stream again

us.wait(array, timeout=60)  # for your work, and not for the device
info = us.describe(array)
assert (info.source, info.ordering) == ("cupy.ndarray", "current")
