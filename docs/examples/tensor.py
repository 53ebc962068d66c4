"""A stand-in for the tensors of a framework, to try the examples without one."""

import math

from cuda.core import Device


class Tensor:
    """Bytes on a GPU. Its framework works on `stream`, and has just queued `fill` there."""

    def __init__(self, shape=(2, 3, 4), fill=7, *, device=0, stream=None):
        Device(device).set_current()
        self.stream = Device(device).create_stream() if stream is None else stream
        self.memory = Device(device).allocate(math.prod(shape), stream=self.stream)
        self.memory.fill(fill, stream=self.stream)
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": "|u1",
            "strides": None,
            "data": (int(self.memory.handle), False),
            "stream": int(self.stream.handle),
        }
