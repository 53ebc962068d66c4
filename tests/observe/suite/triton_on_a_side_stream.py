# https://github.com/vllm-project/vllm/issues/13632
# needs: triton torch
"""A Triton kernel runs on the current stream, and its input comes from another one."""

import sys

import torch
import triton
import triton.language as tl

REPAIRED = "--repaired" in sys.argv
side = torch.cuda.Stream()
x, y = (torch.zeros(1 << 16, device="cuda") for _ in range(2))


@triton.jit
def scale(out, source, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(source + at) * 2 + 1)


scale[(64,)](y, x, BLOCK=1024)
torch.cuda.synchronize()
for _ in range(4):
    with torch.cuda.stream(side):
        x.add_(1)  # first
    if REPAIRED:
        torch.cuda.current_stream().wait_stream(side)
    scale[(64,)](y, x, BLOCK=1024)  # second
    torch.cuda.synchronize()
