import numpy
from numba import cuda

import userstream as us

array = cuda.to_device(numpy.arange(6.0))

# After numba's work on the array; numba continues after yours. The host does not wait.
with us.borrow(array) as stream:
    # Work of numba's on your stream.
    host = array.copy_to_host(stream=cuda.external_stream(int(stream.handle)))

us.wait(array, timeout=60)
assert host.tolist() == [0, 1, 2, 3, 4, 5]
