import jax
import numpy
from cuda.core import Buffer, Device, LegacyPinnedMemoryResource

import userstream as us

array = jax.numpy.arange(1024, dtype="int32")
stream = us.get_stream(array)
info = us.describe(array)
assert (info.source, info.ordering) == ("jax.Array", "dlpack")

# The export orders your stream after JAX's work; the host does not wait.
Device(info.device_id).set_current()
capsule = array.__dlpack__(stream=int(stream.handle))

# Copy the bytes on your stream, through cuda.core.
host = LegacyPinnedMemoryResource().allocate(info.nbytes)
Buffer.from_handle(info.address, info.nbytes).copy_to(host, stream=stream)
us.wait(array, timeout=60)
del capsule  # held until your work was done
assert numpy.from_dlpack(host).view("int32").tolist() == list(range(1024))
