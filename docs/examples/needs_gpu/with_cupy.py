import cupy

import userstream as us

array = cupy.ones(1 << 20)
stream = us.get_stream(array)

# Your stream after CuPy's work on the array; the host does not wait.
stream.wait(cupy.cuda.get_current_stream())

# Work of CuPy's on your stream.
with cupy.cuda.Stream.from_external(stream):
    doubled = array * 2

us.wait(array, timeout=60)  # for that work, and not for the device
assert us.describe(array).source == "cupy.ndarray"
assert float(doubled.sum()) == 2 << 20
