"""torchrun, as it is: the example of the documentation, where PyTorch is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SIMULATED
from helpers import device_uuid

EXAMPLES = Path(__file__).parents[2] / "docs/examples"

pytestmark = [
    # Not imported here, where other tests put a stand-in in its place.
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
    pytest.mark.skipif(
        SIMULATED and Path("/dev/nvidiactl").exists(), reason="the example would use the GPU"
    ),
    pytest.mark.multi_device,
    pytest.mark.timeout(200),
]


def torchrun(script: str) -> str:
    # By this address the ranks find each other where the name of the host is not known.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    with subprocess.Popen(
        [sys.executable, *launcher, "--nproc-per-node", "2", str(EXAMPLES / script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()  # unlike a kill it ends the ranks too
            out, err = process.communicate()
            raise AssertionError("it hangs:\n" + out + err) from None
    assert process.returncode == 0, out + err
    return out


def test_every_rank_knows_which_one_is_late() -> None:
    said = torchrun("engines/torchrun_deadline.py")
    uuid = device_uuid(1)
    for rank in range(2):
        assert re.search(
            rf"rank {rank} knows: rank 1: not done within 0.5 s.*; device 1 is {uuid};", said
        ), said


@pytest.mark.gpu
def test_collectives_of_nccl() -> None:
    said = torchrun("needs_gpu/torchrun_nccl.py")
    for rank in range(2):
        assert re.search(rf"rank {rank}: not done within 1 s", said), said
