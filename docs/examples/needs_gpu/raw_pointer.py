import torch
from cuda.bindings import driver

import userstream as us

tensor = torch.zeros(1024, dtype=torch.uint8, device="cuda:0")
pointer = driver.CUdeviceptr(tensor.data_ptr())

# An address names no stream: say which one writes there.
with us.borrow(pointer, producer=torch.cuda.current_stream(0)) as stream:
    (error,) = driver.cuMemsetD8Async(pointer, 7, 1024, stream.handle)
    assert error == driver.CUresult.CUDA_SUCCESS
us.hold(tensor, stream=stream)  # nor does it keep the memory alive

assert tensor.sum().item() == 7 * 1024
