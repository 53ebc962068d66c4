import numpy
import torch
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

import userstream as us

CODE = """extern "C" __global__ void add_one(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1;
}"""
COUNT = 1 << 20
Device(0).set_current()
options = ProgramOptions(arch=f"sm_{Device(0).arch}")
kernel = Program(CODE, "c++", options).compile("cubin").get_kernel("add_one")

tensor = torch.ones(COUNT, device="cuda:0")
with us.borrow(tensor) as stream:  # after PyTorch's work on the tensor
    config = LaunchConfig(grid=COUNT // 256, block=256)
    launch(stream, config, kernel, tensor.data_ptr(), numpy.int32(COUNT))
tensor += 1  # after the kernel: PyTorch's stream waits, the host does not

assert tensor.sum().item() == 3 * COUNT
