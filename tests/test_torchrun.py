"""torchrun, as it is: the example of the documentation, where PyTorch is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SIMULATED
from userstream import _driver

EXAMPLES = Path(__file__).parents[1] / "docs/examples"

pytestmark = [
    # Not imported here, where other tests put a stand-in in its place.
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
    pytest.mark.skipif(
        SIMULATED and Path("/dev/nvidiactl").exists(), reason="the example would use the GPU"
    ),
    pytest.mark.multi_device,
    pytest.mark.timeout(300),
]


def torchrun(script: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_rank_knows_which_one_is_late() -> None:
    said = torchrun("engines/torchrun_deadline.py")
    uuid = _driver.device_report(1).uuid
    for rank in range(2):
        assert re.search(
            rf"rank {rank} knows: rank 1: not done within 0.5 s.*; device 1 is {uuid};", said
        ), said


@pytest.mark.gpu
def test_collectives_of_nccl() -> None:
    said = torchrun("needs_gpu/torchrun_nccl.py")
    for rank in range(2):
        assert re.search(rf"rank {rank}: not done within 1 s", said), said
