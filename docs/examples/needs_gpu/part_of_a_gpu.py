from statistics import median

import numpy as np
import torch
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

import userstream as us

CODE = """extern "C" __global__ void busy(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
}"""
Device(0).set_current()
options = ProgramOptions(arch=f"sm_{Device(0).arch}")
busy = Program(CODE, "c++", options).compile("cubin").get_kernel("busy")
blocks = 8 * Device(0).properties.multiprocessor_count

weights = torch.randn(1024, 1024, device="cuda:0")
whole = us.get_stream(0)
part = us.get_stream(0, name="part", sms=16)


def saturate(stream, kernels):
    for _ in range(kernels):  # each has 8 blocks for every SM of the GPU
        launch(stream, LaunchConfig(grid=blocks, block=1024), busy, np.int64(100_000))


def step():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    x = weights
    for _ in range(4):
        x = torch.relu(x @ weights)
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end)


def steps(stream=None):
    if stream is not None:
        saturate(stream, 400)
    times = [step() for _ in range(20)]
    us.wait_for_device(0, timeout=60)
    return median(times)


for stream in (None, whole, part):  # kernels are loaded here, at their first launch
    steps(stream)
print(f"a step alone: {steps():.0f} µs")
print(f"beside the user stream: {steps(whole):.0f} µs")
print(f"beside a user stream of {part.sms} SMs: {steps(part):.0f} µs")
