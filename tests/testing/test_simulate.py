"""simulate(): settings, bad use, and what programs find in the simulated driver."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from cuda.bindings import driver

from testing.programs import check, run
from userstream import testing

START = "from userstream import testing; testing.simulate({}); "


@pytest.fixture(autouse=True)
def _all_devices_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_public_names():
    assert testing.__all__ == sorted(testing.__all__)
    for name in testing.__all__:
        assert getattr(testing, name).__module__ == "userstream.testing"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"devices": -1}, ValueError),
        ({"devices": 17}, ValueError),
        ({"devices": 2.0}, TypeError),
        ({"devices": True}, TypeError),
        ({"devices": "2"}, TypeError),
        ({"driver_version": 13}, ValueError),
        ({"driver_version": "13.0"}, TypeError),
        ({"driver_version": 14000}, ValueError),
        ({"memory": 0}, ValueError),
        ({"memory": -1}, ValueError),
        ({"memory": 1.5}, TypeError),
        ({"memory": 1 << 60}, ValueError),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        testing.simulate(**arguments)


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_loaded_driver_is_refused(tmp_path):
    """A library by the driver's name, in the place of a real driver."""
    path = tmp_path / "libcuda.so.1"
    subprocess.run(
        [
            "cc",
            "-shared",
            "-x",
            "c",
            "-",
            "-o",
            str(path),
            "-Wl,-soname,libcuda.so.1",
        ],
        input="int cuInit(unsigned flags) { return (int)flags; }",
        text=True,
        check=True,
    )
    done = run(
        f"import ctypes; ctypes.CDLL({str(path)!r}); "
        "from userstream import testing; testing.simulate()"
    )
    message = done.stderr.splitlines()[-1]
    assert message.startswith(
        f"RuntimeError: this process has already loaded a CUDA driver ({path})"
    )
    assert "call simulate() before the first driver call" in message


def test_threads_may_start_it_at_once():
    check(
        """
import threading
from userstream import testing
errors = []
def start():
    try:
        testing.simulate(3)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=start) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
from cuda.bindings import driver
assert driver.cuInit(0)[0] == 0
assert driver.cuDeviceGetCount()[1] == 3
"""
    )


def test_cuda_core_may_be_imported_before():
    check(
        "import cuda.core; "
        + START.format("")
        + "assert len(cuda.core.Device.get_all_devices()) == 2",
        fresh=True,
    )


@pytest.mark.parametrize("version", [12000, 12040, 12090, 13000, 13020])
def test_the_version_of_the_driver(version):
    check(
        START.format(f"driver_version={version}")
        + "from cuda.bindings import driver; "
        + f"assert driver.cuDriverGetVersion()[1] == {version}; "
        + "assert driver.cuInit(0)[0] == 0; "
        + "context = driver.cuDevicePrimaryCtxRetain(0)[1]; driver.cuCtxSetCurrent(context); "
        + "result, stream = driver.cuStreamCreate(1); "
        + "assert driver.cuStreamSynchronize(stream)[0] == 0"
    )


def test_functions_newer_than_the_driver_are_not_found():
    check(
        START.format("driver_version=12040")
        + """
from cuda.bindings import driver
assert driver.cuInit(0)[0] == 0
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
stream = driver.cuStreamCreate(1)[1]
try:
    driver.cuStreamGetDevice(stream)
except RuntimeError as error:
    assert "cuStreamGetDevice" in str(error), error
else:
    raise AssertionError("cuStreamGetDevice came with CUDA 12.8")
"""
    )


def test_no_devices():
    check(
        START.format("devices=0")
        + "from cuda.bindings import driver; "
        + "assert driver.cuInit(0)[0].name == 'CUDA_ERROR_NO_DEVICE'"
    )


def test_sixteen_devices():
    check(
        START.format("16")
        + "from cuda.core import Device; devices = Device.get_all_devices(); "
        + "assert len(devices) == 16; assert len({device.uuid for device in devices}) == 16"
    )


def test_the_memory_of_a_device():
    check(
        START.format("memory=1 << 20")
        + """
from cuda.bindings import driver
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
assert driver.cuDeviceTotalMem(0)[1] == 1 << 20
assert driver.cuMemAlloc((1 << 20) + 1)[0].name == 'CUDA_ERROR_OUT_OF_MEMORY'
result, address = driver.cuMemAlloc(1 << 20)
assert result == 0
assert driver.cuMemAlloc(1)[0].name == 'CUDA_ERROR_OUT_OF_MEMORY'
assert driver.cuMemFree(address)[0] == 0
assert driver.cuMemAlloc(1)[0] == 0
"""
    )


def test_cuda_core_works_on_it():
    """Streams, events, memory, graphs: what the documentation shows."""
    check(
        START.format("")
        + """
import numpy as np
from cuda.core import Device, LegacyPinnedMemoryResource
device = Device(1)
device.set_current()
stream, other = device.create_stream(), device.create_stream()
event = stream.record()
other.wait(event)
other.wait(stream)
event.sync()
buffer = device.allocate(1024, stream=stream)
host = LegacyPinnedMemoryResource().allocate(1024)
import ctypes
array = (np.arange(1024) % 251).astype(np.uint8)
ctypes.memmove(int(host.handle), array.ctypes.data, 1024)
host.copy_to(buffer, stream=stream)
back = LegacyPinnedMemoryResource().allocate(1024)
buffer.copy_to(back, stream=stream)
stream.sync()
assert (np.from_dlpack(back).view(np.uint8) == array).all()
builder = device.create_graph_builder().begin_building()
buffer.fill(7, stream=builder)
graph = builder.end_building().complete()
graph.launch(stream)
buffer.copy_to(back, stream=stream)
stream.sync()
assert (np.from_dlpack(back).view(np.uint8) == 7).all()
"""
    )


@pytest.mark.parametrize("call", ["inject('cuInit', 1)", "calls('cuInit')", "async_error(1, 700)"])
def test_faults_need_the_simulated_driver(call):
    done = run(f"from userstream import testing; testing.{call}")
    message = done.stderr.splitlines()[-1]
    assert message.startswith("RuntimeError: ")
    assert "needs the simulated driver: call userstream.testing.simulate()" in message


def test_reset_without_the_simulated_driver_does_nothing():
    check("from userstream import testing; testing.reset()")


def test_copies_with_attributes():
    """Of CUDA 13.2: neither the legacy stream nor a capture takes them."""
    if not hasattr(driver, "cuMemcpyWithAttributesAsync"):
        pytest.skip("needs cuda-bindings 13.2")
    check(
        START.format("1, driver_version=13020")
        + """
from cuda.bindings import driver
def ok(answer):
    assert answer[0] == 0, answer
    return answer[-1]
ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
stream, source, target = ok(driver.cuStreamCreate(1)), *(ok(driver.cuMemAlloc(64)) for _ in "12")
attributes = driver.CUmemcpyAttributes()
attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
def copy(stream):
    return driver.cuMemcpyWithAttributesAsync(target, source, 64, attributes, stream)[0].name
assert copy(stream) == "CUDA_SUCCESS"
for legacy in (0, 1):
    assert copy(driver.CUstream(legacy)) == "CUDA_ERROR_INVALID_VALUE"
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(2)))
assert copy(stream) == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
assert driver.cuStreamEndCapture(stream)[0].name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
"""
    )


def test_nodes_of_any_type_in_the_versions_of_cuda_13_4():
    """The context of a kernel node is that of its function. `observe` follows them, too."""
    if not hasattr(driver, "cuGraphAddNode_v3"):
        pytest.skip("needs cuda-bindings 13.4")
    check(
        START.format("2, driver_version=13050")
        + """
import userstream as us
from cuda.bindings import driver
def ok(answer):
    assert answer[0] == 0, answer
    return answer[-1]
ok(driver.cuInit(0))
contexts = [ok(driver.cuDevicePrimaryCtxRetain(device)) for device in range(2)]
ok(driver.cuCtxSetCurrent(contexts[0]))
memory = ok(driver.cuMemAlloc(64))
fill = driver.CUgraphNodeParams()
fill.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
fill.memset.dst, fill.memset.elementSize, fill.memset.ctx = memory, 1, contexts[0]
fill.memset.width, fill.memset.height, fill.memset.value = 4, 1, 7
with us.observe() as seen:
    stream, graph = ok(driver.cuStreamCreate(1)), ok(driver.cuGraphCreate(0))
    node = ok(driver.cuGraphAddNode_v3(graph, [], None, 0, fill))
    fill.memset.value = 8
    ok(driver.cuGraphNodeSetParams_v2(node, fill))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuMemsetD8Async(memory, 0, 4, ok(driver.cuStreamCreate(1))))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuCtxSynchronize())
assert [race.kind for race in seen.races] == ["write after write"], str(seen)
assert seen.not_seen == ()
testing.kernel("anything")(lambda grid, block: None)
module = ok(driver.cuModuleLoadData(b"any"))
launch = driver.CUgraphNodeParams()
launch.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
launch.kernel.func = ok(driver.cuModuleGetFunction(module, b"anything"))
launch.kernel.gridDimX = launch.kernel.gridDimY = launch.kernel.gridDimZ = 1
launch.kernel.blockDimX = launch.kernel.blockDimY = launch.kernel.blockDimZ = 1
for context, answer in zip(contexts, ["CUDA_SUCCESS", "CUDA_ERROR_INVALID_CONTEXT"]):
    launch.kernel.ctx = context
    result, node = driver.cuGraphAddNode_v3(graph, [], None, 0, launch)
    assert result.name == answer, result
ok(driver.cuGraphAddNode(graph, [], None, 0, launch))
"""
    )


def test_importing_starts_nothing():
    check(
        "import sys; from userstream import testing; from userstream.testing import _simulated; "
        "assert not _simulated.is_simulated(); "
        "assert 'libcuda' not in open('/proc/self/maps').read()",
        fresh=True,
    )


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_examples_run(version):
    """Each example in the documentation of the public names, in one process."""
    if not sys.version.startswith(version):
        pytest.skip(f"this is Python {sys.version.split()[0]}")
    check(
        """
import doctest
from userstream import testing
for name in ("simulate", "inject", "async_error", "calls", "reset", "latch"):
    thing = getattr(testing, name)
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder(recurse=False).find(thing, name):
        runner.run(example)
    assert runner.summarize(verbose=False).attempted > 0, name
    assert runner.failures == 0, name
"""
    )


def test_nvml_needs_its_own_initialization():
    """Save for the question for the version of the driver, which initializes nothing."""
    check("""
import ctypes
from userstream import testing
testing.simulate(2)
nvml = ctypes.CDLL(testing.library_path() + "/libnvidia-ml.so.1")
number = ctypes.c_int()
uninitialized = 1
assert nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) == 0
assert number.value >= 12000
assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) == uninitialized
assert nvml.nvmlInit_v2() == 0
assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0
assert number.value == 2
assert nvml.nvmlShutdown() == 0
assert nvml.nvmlShutdown() == uninitialized
""")
