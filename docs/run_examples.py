"""Run the examples of the documentation: ``python docs/run_examples.py``.

On a machine with a GPU they run there, and those in ``needs_gpu/`` run too if their framework is
installed. Otherwise they run on the simulated driver. ``USERSTREAM_TEST_DRIVER=simulated`` or
``real`` decides instead. Those in ``engines/`` start processes, and run wherever the engine is
installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent / "examples"
SIMULATE = """
import runpy, sys
from userstream.testing import simulate
simulate(devices=2)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
# By that address the ranks find each other where the name of the host is not known.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
TORCHRUN += ["--nproc-per-node", "2"]
# A notebook, cell by cell, as if somebody had typed them.
NOTEBOOK = """
import json, sys
cells = {}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), cells)
"""
SECONDS = 120  # that an example may take
TWO_GPUS = ("several_gpus.py", "torchrun_deadline.py", "torchrun_nccl.py")
FRAMEWORKS = {
    "asyncio_service.py": "torch",
    "dask_workers.py": "distributed",
    "hand_over.py": "torch",
    "in_order.py": "torch",
    "inside_a_graph.py": "torch",
    "inspect_pipeline.py": "torch",
    "borrow.py": "torch",
    "load_ahead.py": "torch",
    "own_kernel.py": "torch",
    "part_of_a_gpu.py": "torch",
    "process_pool.py": "multiprocessing",
    "raw_pointer.py": "torch",
    "several_gpus.py": "torch",
    "torch_and_cupy.ipynb": "cupy",
    "torchrun_deadline.py": "torch",
    "torchrun_nccl.py": "torch",
    "with_cupy.py": "cupy",
    "with_cvcuda.py": "cvcuda",
    "with_dali.py": "nvidia.dali",
    "with_jax.py": "jax",
    "with_numba.py": "numba",
    "with_pytorch.py": "torch",
    "with_rmm.py": "rmm",
    "watch_gradients.py": "torch",
    "with_warp.py": "warp",
    "your_stream.py": "torch",
}


def is_simulated() -> bool:
    """Tell whether to use the simulated driver, as the tests do."""
    choice = os.environ.get("USERSTREAM_TEST_DRIVER")
    if choice is not None:
        return choice == "simulated"
    return not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0"))


def main() -> int:
    """Run what can run here; return the exit status."""
    simulated = is_simulated()
    print(f"on the {'simulated' if simulated else 'real'} driver", flush=True)
    prefix = ["-c", SIMULATE] if simulated else []
    anywhere = sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("first_hour/[!t]*.py")])
    failed = [path.name for path in anywhere if not _run(path, prefix)]
    failed += [path.name for path in EXAMPLES.glob("notebooks/*") if not _run(path, [])]
    for path in sorted([*EXAMPLES.glob("needs_gpu/*.*"), *EXAMPLES.glob("engines/*.py")]):
        framework = FRAMEWORKS[path.name]
        ranks = path.name.startswith("torchrun")
        if simulated and path.parent.name == "needs_gpu":
            print(f"skipped  {path.name}: needs a GPU")
        elif not _is_installed(framework):
            print(f"skipped  {path.name}: {framework} is not installed")
        elif path.name in TWO_GPUS and not simulated and _device_count() < 2:
            print(f"skipped  {path.name}: needs two GPUs")
        elif not _run(path, TORCHRUN if ranks else []):
            failed.append(path.name)
    return 1 if failed else 0


def _device_count() -> int:
    from cuda.core import Device

    return len(Device.get_all_devices())


def _is_installed(framework: str) -> bool:
    try:
        return importlib.util.find_spec(framework) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _run(path: Path, prefix: list[str]) -> bool:
    if path.suffix == ".ipynb":
        prefix = ["-c", NOTEBOOK]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    with subprocess.Popen(
        [sys.executable, *prefix, str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # unlike a kill it ends the ranks of torchrun too
            out, err = process.communicate()
            err += f"it was not done after {SECONDS} s"
    print(f"{'failed ' if process.returncode else 'ok     '}  {path.name}", flush=True)
    if process.returncode:
        print(out, err, sep="\n", flush=True)
    return process.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
