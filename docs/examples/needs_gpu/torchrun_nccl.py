"""Your work in order with collectives: torchrun --nproc-per-node 2 torchrun_nccl.py"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist

import userstream as us
from userstream import testing

local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
control = dist.new_group(backend="gloo")  # does not need the GPU
rank, world = dist.get_rank(), dist.get_world_size()

for _ in range(20):
    tensor = torch.full((1 << 24,), rank + 1.0, device=device)
    dist.all_reduce(tensor)  # on a stream of NCCL's; PyTorch's current stream waits for it
    total = world * (world + 1) / 2
    with us.borrow(tensor, activate=True):  # after that, and the next collective after this
        tensor *= 2
        dist.all_reduce(tensor)  # after the line above and before the line below
        tensor += 1
    dist.all_reduce(tensor)  # on PyTorch's current stream again, after your work
    assert tensor.eq((2 * total * world + 1) * world).all().item()

# A rank that is stuck: the collective of every rank waits for it on the GPU, and no host hangs.
stream = us.get_stream(tensor)
with testing.latch(stream) if rank == 1 else nullcontext():
    with us.borrow(tensor, activate=True):
        dist.all_reduce(tensor)
    try:
        us.wait(tensor, timeout=1)
    except us.WaitTimeout as error:
        print(f"rank {rank}: {error}", flush=True)
    else:
        raise AssertionError("it did not wait for the rank that is stuck")
    dist.barrier(group=control)  # stuck until every rank has seen it
us.wait(tensor, timeout=60)
dist.destroy_process_group()
