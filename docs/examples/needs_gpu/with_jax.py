import jax
import numpy
from cuda.core import Buffer, Device, LegacyPinnedMemoryResource

import userstream as us

array = jax.numpy.arange(1024, dtype="int32")
info = us.describe(array)
assert (info.source, info.ordering) == ("jax.Array", "dlpack")
Device(info.device_id).set_current()
host = LegacyPinnedMemoryResource().allocate(info.nbytes)

# After JAX's work on the array, whose memory is held until yours is done. The host does not wait.
with us.borrow(array) as stream:
    Buffer.from_handle(info.address, info.nbytes).copy_to(host, stream=stream)

us.wait(array, timeout=60)
assert numpy.from_dlpack(host).view("int32").tolist() == list(range(1024))

# The wait released it, so JAX may reuse its memory.
add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
assert int(add_one(array)[0]) == 1
