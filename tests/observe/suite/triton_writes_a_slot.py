# https://github.com/NVIDIA/TensorRT-LLM/pull/9056
# needs: triton torch
# possible: which part of a block a kernel uses is not known
"""A Triton kernel writes a slot of a buffer that a side stream copies out."""

import sys

import torch
import triton
import triton.language as tl

REPAIRED = "--repaired" in sys.argv
side = torch.cuda.Stream()
n = 1 << 16
cache, host = torch.zeros(16 * n, device="cuda"), torch.zeros(n, pin_memory=True)


@triton.jit
def write(base, slot, value, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(base + slot * n + at, value)


write[(64,)](cache, 3, 1.0, n, BLOCK=1024)
torch.cuda.synchronize()
for step in range(4):
    write[(64,)](cache, 3, step + 2.5, n, BLOCK=1024)  # first
    if REPAIRED:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(cache[3 * n : 4 * n], non_blocking=True)  # second
    torch.cuda.synchronize()
