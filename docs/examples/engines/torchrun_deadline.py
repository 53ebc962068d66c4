"""A rank that is stuck ends the job in time: torchrun --nproc-per-node 2 torchrun_deadline.py"""

import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import userstream as us
from userstream import testing


def finish_everywhere(control, seconds):
    """Wait for the user streams of all ranks; raise on each of them what any was late with."""
    try:
        us.wait_all(timeout=seconds)
        report = None
    except us.UserStreamError as error:
        error.add_note(f"rank {dist.get_rank()}")
        report = error
    reports = [None] * dist.get_world_size()
    # Over gloo: a collective of NCCL would hang on the GPU that is stuck.
    dist.all_gather_object(reports, report, group=control)
    problems = [report for report in reports if report is not None]
    if problems:
        raise us.WaitErrors(f"{len(problems)} of {len(reports)} ranks", problems)


def main():
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    gpu = Path("/dev/nvidiactl").exists()
    if not gpu:  # this example also runs without a GPU
        testing.simulate(devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group("gloo")  # or "nccl", for the collectives of the job itself
    # Longer than any wait, and than the ranks may arrive apart: else it ends with gloo's error.
    control = dist.new_group(backend="gloo", timeout=timedelta(minutes=10))

    stream = us.get_stream(local_rank)  # ... queue work on it here ...
    finish_everywhere(control, seconds=60)

    with testing.latch(stream) if rank == 1 else nullcontext():  # the stream of rank 1 is stuck
        try:
            finish_everywhere(control, seconds=0.5)
        except us.WaitErrors as error:
            (late,) = error.exceptions
            print(f"rank {rank} knows: {late.__notes__[0]}: {late}", flush=True)
            assert late.__notes__ == ["rank 1"]
        else:
            raise AssertionError("nobody was late")
    finish_everywhere(control, seconds=60)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
