import numpy
from numba import cuda

import userstream as us

array = cuda.to_device(numpy.arange(6.0))
stream = us.get_stream(array)

# Your stream after numba's default stream; the host does not wait.
stream.wait(us.Stream.from_handle(us.describe(array).producer))

# Work of numba's on your stream.
host = array.copy_to_host(stream=cuda.external_stream(int(stream.handle)))

us.wait(array, timeout=60)
assert host.tolist() == [0, 1, 2, 3, 4, 5]
