"""kernel(), duration(), Pointer: Python functions in the place of kernels."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, Program, ProgramOptions, launch
from cuda.core.graph import GraphDefinition

import userstream as us
from helpers import checked, device_current, device_memory, instantiated
from userstream import testing
from userstream.testing import Pointer, duration, kernel, latch, reset

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]

ONE = LaunchConfig(grid=1, block=1)
PATIENCE = 20


def entered(device: int) -> Any:
    return device_current(device)


def get(name: str) -> Any:
    """Return the kernel of that name, out of an image that has nothing."""
    return ObjectCode.from_ptx(b"any").get_kernel(name)


@pytest.fixture
def address(stream: us.Stream) -> Iterator[int]:
    """The address of 256 bytes, 64 floats, all 1."""
    with device_memory(0) as address:
        stream.sync(timeout=PATIENCE)
        ctypes.memmove(address, np.ones(64, np.float32).tobytes(), 256)
        yield address
        reset()
        stream.sync(timeout=PATIENCE)


def floats(address: int, count: int = 64) -> np.ndarray[Any, Any]:
    return np.frombuffer(ctypes.string_at(address, 4 * count), np.float32)


@kernel("scale")
def scale(grid, block, x: Pointer, n: np.int32, factor: np.float32):
    x.array(n, np.float32)[:] *= factor


# ---- launching --------------------------------------------------------------


def test_a_launch_calls_the_function(stream, address):
    launch(stream, ONE, get("scale"), address, np.int32(32), np.float32(3))
    stream.sync(timeout=PATIENCE)
    assert floats(address).tolist() == [3] * 32 + [1] * 32


@pytest.mark.parametrize("make", [ObjectCode.from_cubin, ObjectCode.from_ptx])
def test_any_image_has_the_kernel(stream, address, make):
    found = make(b"\x7fELF").get_kernel("scale")
    launch(stream, ONE, found, address, np.int32(64), np.float32(2))
    stream.sync(timeout=PATIENCE)
    assert (floats(address) == 2).all()


def test_a_launch_has_its_turn_in_the_stream(stream, address):
    scaled = get("scale")
    with latch(stream) as held:
        launch(stream, ONE, scaled, address, np.int32(64), np.float32(5))
        launch(stream, ONE, scaled, address, np.int32(64), np.float32(7))
        stream.wait(stream.record())
        assert (floats(address) == 1).all()
        assert not stream.is_done
        held.release()
        stream.sync(timeout=PATIENCE)
    assert (floats(address) == 35).all()


def test_what_is_launched_from_may_change_at_once(stream, address):
    """The driver copies the parameters, as a real one does."""
    factor = np.array([2], np.float32)
    values, sizes = (address, 64, factor.ctypes.data), (None, ctypes.c_int, None)
    with latch(stream) as held:
        pointers = (ctypes.c_void_p * 3)()
        x, n = ctypes.c_uint64(values[0]), ctypes.c_int32(values[1])
        pointers[:] = [ctypes.addressof(x), ctypes.addressof(n), values[2]]
        function = driver.CUfunction(int(get("scale").handle))
        arguments = 1, 1, 1, 1, 1, 1, 0, stream.handle, ctypes.addressof(pointers), 0
        checked(driver.cuLaunchKernel(function, *arguments))
        factor[0], n.value, x.value = 9, 1 << 30, 0
        held.release()
        stream.sync(timeout=PATIENCE)
    assert (floats(address) == 2).all()
    assert sizes


def test_the_function_runs_on_a_thread_of_python_and_not_on_the_callers(stream):
    seen = []

    @kernel("where")
    def where(grid, block):
        seen.append(threading.current_thread())

    launch(stream, ONE, get("where"))
    stream.sync(timeout=PATIENCE)
    assert [thread.name for thread in seen] == ["userstream-kernels"]
    assert seen[0] is not threading.current_thread()
    assert seen[0].daemon


def test_kernels_of_several_streams_run_side_by_side(stream):
    """Each waits for the others: one thread for all of them would hang."""
    meeting = threading.Barrier(6)

    @kernel("meet")
    def meet(grid, block):
        meeting.wait(PATIENCE)

    found = get("meet")
    streams = [us.Stream.create(device) for device in (0, 0, 0, 1, 1, 2)]
    for each in streams:
        launch(each, ONE, found)
    for each in streams:
        each.sync(timeout=PATIENCE)
        each.close()


def test_grid_and_block(stream):
    seen = []

    @kernel("shape")
    def shape(grid, block):
        seen.append((grid, block))

    launch(stream, LaunchConfig(grid=(2, 3), block=(4, 5, 6)), get("shape"))
    stream.sync(timeout=PATIENCE)
    assert seen == [((2, 3, 1), (4, 5, 6))]


SCALARS = [
    np.bool_(True),
    np.int8(-1),
    np.uint8(200),
    np.int16(-300),
    np.uint16(60000),
    np.int32(-70000),
    np.uint32(4_000_000_000),
    np.int64(-(1 << 40)),
    np.uint64(1 << 63),
    np.float16(1.5),
    np.float32(2.5),
    np.float64(3.25),
    np.complex64(1 + 2j),
    np.complex128(3 - 4j),
]


def test_scalars_arrive_as_they_were_passed(stream):
    seen = []

    def many(grid, block, *values):
        seen.extend(values)

    # A function of 14 parameters, as the annotations of a written one would say.
    names = [f"p{index}" for index in range(len(SCALARS))]
    space = {"many": many} | {f"t{index}": type(value) for index, value in enumerate(SCALARS)}
    typed = ", ".join(f"{name}: t{index}" for index, name in enumerate(names))
    source = f"def all_of_them(grid, block, {typed}): many(grid, block, {', '.join(names)})"
    exec(source, space)
    kernel("all_of_them")(space["all_of_them"])
    launch(stream, ONE, get("all_of_them"), *SCALARS)
    stream.sync(timeout=PATIENCE)
    assert seen == SCALARS
    assert [type(value) for value in seen] == [type(value) for value in SCALARS]


def test_python_numbers_have_the_sizes_that_cuda_core_gives_them(stream):
    seen = []

    @kernel("plain")
    def plain(grid, block, n: int, x: float, z: complex, flag: bool):
        seen.extend([n, x, z, flag])

    launch(stream, ONE, get("plain"), -3, 0.5, 1 + 2j, np.bool_(True))
    stream.sync(timeout=PATIENCE)
    assert seen == [-3, 0.5, 1 + 2j, True]
    assert [type(value) for value in seen] == [int, float, complex, bool]


PAIR = np.dtype([("first", np.int8), ("second", np.float64)], align=True)


def test_structures_are_passed_by_value(stream):
    seen = []

    @kernel("pair")
    def pair(grid, block, n: np.int8, value: PAIR):
        seen.append((n, value["first"], value["second"]))

    value = np.array((3, 4.5), PAIR)
    n = np.array(7, np.int8)
    pointers = (ctypes.c_void_p * 2)(n.ctypes.data, value.ctypes.data)
    found = get("pair")
    assert [tuple(info) for info in found.arguments_info] == [(0, 1), (8, 16)]
    function = driver.CUfunction(int(found.handle))
    arguments = 1, 1, 1, 1, 1, 1, 0, stream.handle, ctypes.addressof(pointers), 0
    checked(driver.cuLaunchKernel(function, *arguments))
    stream.sync(timeout=PATIENCE)
    assert seen == [(7, 3, 4.5)]


def test_what_an_expression_of_the_program_names(stream, address):
    """NVRTC gives the mangled name of a function of C++; the bare one is enough."""
    launch(stream, ONE, get("_Z5scalePfif"), address, np.int32(64), np.float32(2))
    launch(stream, ONE, get("_Z5scaleIfEvPT_if"), address, np.int32(64), np.float32(2))
    stream.sync(timeout=PATIENCE)
    assert (floats(address) == 4).all()
    with pytest.raises(Exception, match="NOT_FOUND"):
        get("_Z6scale2Pfif")


NVRTC = """
extern "C" __global__ void scale(float *x, int n, float factor) {}
template <class T> __global__ void scale_any(T *x, int n, T factor) {}
"""


def test_what_nvrtc_compiles(stream, address):
    """It needs no GPU, and no driver."""
    seen = []

    @kernel("scale_any")
    def scale_any(grid, block, x: Pointer, n: np.int32, factor: np.float32):
        seen.append((int(x), n, factor))

    options = ProgramOptions(arch="sm_90")
    try:
        compiled = Program(NVRTC, "c++", options).compile(
            "cubin", name_expressions=["scale_any<float>"]
        )
    except Exception as error:
        if "nvrtc" not in str(error).lower():
            raise
        pytest.skip("NVRTC is not installed")
    for name in ("scale", "scale_any<float>"):
        found = compiled.get_kernel(name)
        launch(stream, ONE, found, address, np.int32(64), np.float32(2))
    stream.sync(timeout=PATIENCE)
    assert (floats(address) == 2).all()
    assert seen == [(address, 64, 2)]


def test_a_captured_kernel_runs_at_each_launch_of_the_graph(stream, address):
    with stream.capture() as graph:
        launch(stream, ONE, get("scale"), address, np.int32(64), np.float32(2))
    assert (floats(address) == 1).all()
    launched = instantiated(graph)
    for _ in range(3):
        launched.launch(stream)
    stream.sync(timeout=PATIENCE)
    assert (floats(address) == 8).all()


def test_a_node_of_a_graph_of_cuda_core(stream, address):
    definition = GraphDefinition()
    with entered(0):
        node = definition.launch(ONE, get("scale"), address, np.int32(64), np.float32(2))
        node.launch(ONE, get("scale"), address, np.int32(32), np.float32(3))
    graph = instantiated(definition)
    graph.launch(stream)
    graph.launch(stream)
    stream.sync(timeout=PATIENCE)
    assert floats(address).tolist() == [36] * 32 + [4] * 32
    assert node.grid == (1, 1, 1)


def test_a_kernel_that_fails_in_a_graph(stream, address):
    with stream.capture() as definition:
        launch(stream, ONE, get("scale"), 0, np.int32(64), np.float32(2))
        launch(stream, ONE, get("scale"), address, np.int32(64), np.float32(2))
    instantiated(definition).launch(stream)
    with pytest.raises(us.DriverError, match=r"ILLEGAL_ADDRESS(?s:.*)no memory"):
        stream.sync(timeout=PATIENCE)
    assert (floats(address) == 1).all()


def test_a_cooperative_launch(stream, address):
    config = LaunchConfig(grid=4, block=64, is_cooperative=True)
    launch(stream, config, get("scale"), address, np.int32(64), np.float32(2))
    stream.sync(timeout=PATIENCE)
    assert (floats(address) == 2).all()


def test_how_many_blocks_fit():
    fit = get("scale").occupancy
    assert fit.max_active_blocks_per_multiprocessor(1024, 0) == 2
    assert fit.max_active_blocks_per_multiprocessor(33, 0) == 32
    assert fit.max_active_blocks_per_multiprocessor(32, 48 << 10) == 4
    assert fit.max_active_blocks_per_multiprocessor(32, 1 << 20) == 0
    assert fit.available_dynamic_shared_memory_per_block(2, 128) == 48 << 10
    assert tuple(fit.max_potential_block_size(0, 0)) == (264, 1024)
    assert tuple(fit.max_potential_block_size(0, 100)) == (4224, 64)


def test_a_function_that_takes_what_the_image_says(stream):
    seen = []

    @kernel("test.<locals>.takes_all")
    def takes_all(grid, block, *arguments: Pointer):
        seen.extend(argument.address for argument in arguments)

    name = b"_ZN4test12_3clocals_3e9takes_allE"
    head = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry "
    image = head + name + b"(.param .u64 a, .param .u8 b, .param .u32 c) { ret; }"
    found = ObjectCode.from_ptx(image).get_kernel(name)
    launch(stream, ONE, found, np.uint64(1 << 40), np.uint8(7), np.uint32(1 << 20))
    stream.sync(timeout=PATIENCE)
    assert seen == [1 << 40, 7, 1 << 20]


def test_a_surface_is_written_to_its_array(stream):
    @kernel("invert")
    def invert(grid, block, surface: testing.Texture):
        surface.array()[1, 2] = 9

    with entered(0):
        shape = driver.CUDA_ARRAY3D_DESCRIPTOR()
        shape.Width, shape.Height, shape.NumChannels = 4, 2, 1
        shape.Format = driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
        shape.Flags = 2  # CUDA_ARRAY3D_SURFACE_LDST
        array = checked(driver.cuArray3DCreate(shape))
        resource = driver.CUDA_RESOURCE_DESC()
        resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
        resource.res.array.hArray = array
        surface = checked(driver.cuSurfObjectCreate(resource))
        launch(stream, ONE, get("invert"), np.uint64(int(surface)))
        stream.sync(timeout=PATIENCE)
        row = np.zeros(8, np.uint8)
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_ARRAY
        copy.srcArray = array
        copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.dstHost, copy.dstPitch = row.ctypes.data, 4
        copy.WidthInBytes, copy.Height = 4, 2
        checked(driver.cuMemcpy2D(copy))
        checked(driver.cuSurfObjectDestroy(surface))
        checked(driver.cuArrayDestroy(array))
    assert [at for at in range(8) if row[at] == 9] == [6]


def test_a_number_that_is_no_texture(stream):
    @kernel("no_texture")
    def no_texture(grid, block, texture: testing.Texture):
        texture.array()

    launch(stream, ONE, get("no_texture"), np.uint64(12345))
    with pytest.raises(us.DriverError, match="is no texture or surface object"):
        stream.sync(timeout=PATIENCE)


def test_a_default_stream(address):
    with entered(0):
        default = us.Stream.legacy_default()
        launch(default, ONE, get("scale"), address, np.int32(64), np.float32(2))
        default.sync(timeout=PATIENCE)
    assert (floats(address) == 2).all()


# ---- what fails -------------------------------------------------------------


def test_an_exception_is_a_fault_of_the_kernel(stream, address):
    @kernel("broken")
    def broken(grid, block):
        raise KeyError("mine")

    with us.Stream.create(0) as other, us.Stream.create(1) as elsewhere:
        with latch(stream) as held:
            launch(stream, ONE, get("broken"))
            launch(stream, ONE, get("scale"), address, np.int32(64), np.float32(2))
            held.release()
        with pytest.raises(us.DriverError) as raised:
            stream.sync(timeout=PATIENCE)
        assert raised.value.name == "CUDA_ERROR_LAUNCH_FAILED"
        for text in ("the kernel 'broken' raised KeyError", 'raise KeyError("mine")', __file__):
            assert text in str(raised.value)
        assert "userstream/testing" not in str(raised.value)
        with pytest.raises(us.DriverError, match="mine"):  # its context is lost
            other.sync(timeout=PATIENCE)
        elsewhere.sync(timeout=PATIENCE)
        assert (floats(address) == 1).all(), "what was queued behind it is dropped"
        reset()
        other.sync(timeout=PATIENCE)
        launch(stream, ONE, get("scale"), address, np.int32(64), np.float32(2))
        stream.sync(timeout=PATIENCE)
        assert (floats(address) == 2).all()


def test_cuda_core_tells_the_traceback_too(stream):
    @kernel("broken for cuda.core")
    def broken(grid, block):
        raise KeyError("mine")

    with entered(0):
        plain = Device(0).create_stream()
        launch(plain, ONE, get("broken for cuda.core"))
        with pytest.raises(Exception, match=r'(?s)LAUNCH_FAILED.*raise KeyError\("mine"\)'):
            plain.sync()
    reset()
    assert checked(driver.cuGetErrorName(driver.CUresult(719))) == b"CUDA_ERROR_LAUNCH_FAILED"
    assert checked(driver.cuGetErrorString(driver.CUresult(719))) == b"unspecified launch failure"


def test_an_assertion_is_one_of_the_device(stream):
    @kernel("asserts")
    def asserts(grid, block, n: np.int32):
        assert n == 3, "n is wrong"

    launch(stream, ONE, get("asserts"), np.int32(3))
    stream.sync(timeout=PATIENCE)
    launch(stream, ONE, get("asserts"), np.int32(4))
    with pytest.raises(us.DriverError, match=r"CUDA_ERROR_ASSERT.*(?s:.*)n is wrong"):
        stream.sync(timeout=PATIENCE)


@pytest.mark.parametrize(
    ("offset", "count", "name", "text"),
    [
        (0, 65, "ILLEGAL_ADDRESS", "allocation of 256 bytes has 256 from there"),
        (128, 33, "ILLEGAL_ADDRESS", "has 128 from there"),
        (256, 1, "ILLEGAL_ADDRESS", "no memory"),
        (0, 1 << 62, "ILLEGAL_ADDRESS", "256 from there"),
        (2, 1, "MISALIGNED_ADDRESS", "not a multiple of 4"),
    ],
)
def test_a_pointer_is_checked_against_its_allocation(stream, address, offset, count, name, text):
    @kernel("reads")
    def reads(grid, block, x: Pointer):
        x.array(count, np.float32).sum()

    launch(stream, ONE, get("reads"), address + offset)
    with pytest.raises(us.DriverError, match=f"CUDA_ERROR_{name}(?s:.*){text}"):
        stream.sync(timeout=PATIENCE)


def test_a_fault_that_the_function_catches_is_one_all_the_same(stream):
    @kernel("catches")
    def catches(grid, block, x: Pointer):
        try:
            x.array(1, np.float32)
        except Exception:
            return

    launch(stream, ONE, get("catches"), 0)
    with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS"):
        stream.sync(timeout=PATIENCE)


def test_memory_that_was_freed(stream):
    with entered(0):
        gone = int(checked(driver.cuMemAlloc(256)))
        checked(driver.cuMemFree(gone))
    launch(stream, ONE, get("scale"), gone, np.int32(64), np.float32(2))
    with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS"):
        stream.sync(timeout=PATIENCE)


@pytest.mark.multi_device
def test_memory_of_another_device_needs_access(stream):
    with device_memory(1) as there:
        launch(stream, ONE, get("scale"), there, np.int32(64), np.float32(2))
        with pytest.raises(us.DriverError, match=r"ILLEGAL_ADDRESS(?s:.*)no access"):
            stream.sync(timeout=PATIENCE)
        reset()


def test_host_memory_needs_to_be_page_locked(stream):
    pinned = us.pinned_empty(4, np.float32) if hasattr(us, "pinned_empty") else None
    pageable = np.ones(4, np.float32)
    launch(stream, ONE, get("scale"), pageable.ctypes.data, np.int32(4), np.float32(2))
    with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS"):
        stream.sync(timeout=PATIENCE)
    assert (pageable == 1).all()
    reset()
    if pinned is not None:
        pinned[:] = 1
        launch(stream, ONE, get("scale"), pinned.ctypes.data, np.int32(4), np.float32(2))
        stream.sync(timeout=PATIENCE)
        assert (pinned == 2).all()


def test_a_pointer_that_is_kept(stream, address):
    kept: list[Pointer] = []

    @kernel("keeps")
    def keeps(grid, block, x: Pointer):
        kept.append(x)

    launch(stream, ONE, get("keeps"), address)
    stream.sync(timeout=PATIENCE)
    with pytest.raises(RuntimeError, match=r"the launch to which .* belongs is over"):
        kept[0].array(1, np.float32)


def test_a_pointer(stream, address):
    seen = []

    @kernel("looks")
    def looks(grid, block, x: Pointer, null: Pointer):
        seen.extend([repr(x), x.address, int(x), hex(x), bool(x), bool(null)])
        seen.append(null.array(0, np.float32).shape)
        for shape, dtype in ((-1, "f4"), ("ab", "f4"), (1, object), (1, "S"), (1.5, "f4")):
            with pytest.raises((ValueError, TypeError)):
                x.array(shape, dtype)

    launch(stream, ONE, get("looks"), address, 0)
    stream.sync(timeout=PATIENCE)
    text = f"<userstream.testing.Pointer x: {address:#x}>"
    assert seen == [text, address, address, hex(address), True, False, (0,)]


def test_a_name_that_nothing_stands_for():
    advice = r"@userstream\.testing\.kernel\('scael'\).*known:.*'scale'"
    with pytest.raises(Exception, match=rf"CUDA_ERROR_NOT_FOUND \(.*{advice}"):
        get("scael")
    checked(driver.cuDriverGetVersion())  # the next call: the text is over
    assert checked(driver.cuGetErrorName(driver.CUresult(500))) == b"CUDA_ERROR_NOT_FOUND"


def test_no_parameters_are_refused(stream):
    with pytest.raises(Exception, match=r"INVALID_VALUE \(the kernel 'scale' takes 3 parameters"):
        launch(stream, ONE, get("scale"))
    stream.sync(timeout=PATIENCE)


@pytest.mark.parametrize("given", [1, 2])
@pytest.mark.parametrize("garbage", [0, 0x10])
def test_too_few_parameters_are_refused(stream, given, garbage):
    """What lies where the addresses of the others should be is garbage, and not looked at."""
    values = (ctypes.c_uint64 * 3)(1 << 40, 4)
    places = [ctypes.addressof(values) + 8 * i for i in range(given)]
    addresses = (ctypes.c_void_p * 3)(*places, *[garbage] * (3 - given))
    function = driver.CUfunction(int(get("scale").handle))
    shape = (1,) * 6
    arguments = 0, stream.handle, ctypes.addressof(addresses), 0
    (status,) = driver.cuLaunchKernel(function, *shape, *arguments)
    assert status == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    text = checked(driver.cuGetErrorName(status)).decode()
    assert f"has no readable address for number {given + 1}" in text
    stream.sync(timeout=PATIENCE)


@pytest.mark.parametrize(
    "config",
    [
        LaunchConfig(grid=1, block=1025),
        LaunchConfig(grid=1, block=(32, 32, 2)),
        LaunchConfig(grid=1, block=(1, 1, 65)),
        LaunchConfig(grid=(1, 65536), block=1),
        LaunchConfig(grid=1, block=1, shmem_size=49153),
    ],
    ids=repr,
)
def test_a_shape_that_no_gpu_takes_is_refused(stream, config):
    with pytest.raises(Exception, match="INVALID_VALUE"):
        launch(stream, config, get("scale"), 1 << 40, np.int32(4), np.float32(1))


def test_garbage_that_is_collected_in_a_kernel_does_not_hang(stream):
    """Freeing memory waits for the device, and thus for the kernel in whose thread it is."""

    class Owner:
        def __init__(self):
            with entered(0):
                self.address = checked(driver.cuMemAlloc(64))

        def __del__(self):
            driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
            driver.cuMemFree(self.address)
            driver.cuDevicePrimaryCtxRelease(0)
            driver.cuCtxSetCurrent(driver.CUcontext(0))

    owners = [Owner()]
    address = int(owners[0].address)

    @kernel("collects")
    def collects(grid, block):
        owners.clear()

    launch(stream, ONE, get("collects"))
    stream.sync(timeout=PATIENCE)
    with entered(0):
        assert driver.cuMemFree(address)[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE


# ---- registering ------------------------------------------------------------


def bad(source: str) -> Any:
    space: dict[str, Any] = {"np": np, "Pointer": Pointer, "driver": driver}
    exec(compile(source, "a test", "exec", dont_inherit=True), space)
    return space["f"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def f(): ...", "takes grid and block first"),
        ("def f(grid, x: Pointer): ...", "takes grid and block first"),
        ("def f(grid, block, x): ...", "'x' has no annotation: annotate a pointer with testing"),
        ("def f(grid, block, x: np.ndarray): ...", "'x' cannot be a ndarray"),
        ("def f(grid, block, x: str): ...", "cannot be a str"),
        ("def f(grid, block, x: list): ...", "cannot be a list"),
        ("def f(grid, block, x: None): ...", "cannot be a None"),
        ("def f(grid, block, x: np.floating): ...", "cannot be a floating"),
        ("def f(grid, block, x: np.datetime64): ...", "cannot be a datetime64"),
        ("def f(grid, block, x: driver.CUtensorMap): ...", "tensor maps .* are not simulated"),
        ("def f(grid, block, *x: np.int32): ...", "which each argument is"),
        ("def f(grid, block, y: Pointer, *x: Pointer): ...", "by position"),
        ("def f(grid, block, *, x: np.int32): ...", "by position"),
        ("def f(grid, block, x: 'npp.int32'): ...", "'npp.int32' of 'x' cannot be looked up"),
        ("async def f(grid, block): ...", "no coroutine"),
        ("def f(grid, block): yield", "no generator"),
    ],
)
def test_functions_that_can_stand_for_no_kernel(source, text):
    with pytest.raises(TypeError, match=text):
        kernel("f")(bad(source))
    with pytest.raises(Exception, match="NOT_FOUND"):
        get("f")


@pytest.mark.parametrize(
    ("name", "error"),
    [(scale, TypeError), (b"scale", TypeError), ("", ValueError), ("a\0", ValueError)],
)
def test_names_that_no_kernel_has(name, error):
    with pytest.raises(error, match="named"):
        kernel(name)


def test_the_function_stays_what_it_was():
    assert scale.__name__ == "scale"
    assert callable(scale)


def test_two_functions_of_modules_cannot_stand_for_one_kernel():
    with pytest.raises(ValueError, match=r"\.scale stands for the kernel 'scale' already.*\.other"):

        @kernel("scale")
        def other(grid, block): ...

    kernel("scale")(scale)  # as when its module is loaded again


def test_a_local_function_gives_way_to_another_tests(stream):
    seen = []

    def one_test():
        @kernel("local")
        def local(grid, block):
            seen.append("one")

    def another_test():
        @kernel("local")
        def local(grid, block):
            seen.append("another")

    one_test()
    another_test()
    launch(stream, ONE, get("local"))
    stream.sync(timeout=PATIENCE)
    assert seen == ["another"]


def test_a_redefinition_holds_for_later_launches(stream):
    seen = []

    def define(value):
        def again(grid, block):
            seen.append(value)

        return kernel("again")(again)

    define(1)
    with latch(stream) as held:
        launch(stream, ONE, get("again"))
        define(2)
        launch(stream, ONE, get("again"))
        held.release()
        stream.sync(timeout=PATIENCE)
    assert seen == [1, 2]


def test_functions_that_were_replaced_are_let_go(stream):
    import weakref

    def define():
        def forgotten(grid, block): ...

        return weakref.ref(kernel("forgotten")(forgotten))

    first = define()
    launch(stream, ONE, get("forgotten"))
    stream.sync(timeout=PATIENCE)
    define()
    define()
    gc.collect()
    assert first() is None


# ---- duration ---------------------------------------------------------------


def milliseconds(stream: us.Stream, *launches: Any) -> float:
    with entered(0):
        events = [checked(driver.cuEventCreate(0)) for _ in range(2)]
        checked(driver.cuEventRecord(events[0], stream.handle))
        for each in launches:
            launch(stream, ONE, each)
        checked(driver.cuEventRecord(events[1], stream.handle))
        stream.sync(timeout=PATIENCE)
        elapsed = checked(driver.cuEventElapsedTime(*events))
        for event in events:
            checked(driver.cuEventDestroy(event))
    return float(elapsed)


@kernel("nothing")
def nothing(grid, block): ...


@pytest.mark.parametrize("named", ["nothing", nothing])
def test_a_kernel_takes_the_time_that_it_is_given(stream, named):
    duration(named, 0.05)
    assert milliseconds(stream, get("nothing"), get("nothing")) >= 100
    duration(named, 0)


def test_the_effect_comes_at_the_end(stream, address):
    duration("scale", 60)
    launch(stream, ONE, get("scale"), address, np.int32(64), np.float32(2))
    with pytest.raises(us.WaitTimeout):
        stream.sync(timeout=0.05)
    assert (floats(address) == 1).all()
    testing.async_error(stream, 700)  # is queued behind it
    with us.Stream.create(0) as other:
        testing.async_error(other, 700)  # and this one ends it
        with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS"):
            stream.sync(timeout=PATIENCE)
    assert (floats(address) == 1).all()


def test_reset_forgets_durations(stream):
    duration("nothing", 60)
    reset()
    assert milliseconds(stream, get("nothing")) < 60_000


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("nothing", -1), ValueError, "0 or more"),
        (("nothing", float("inf")), ValueError, "finite"),
        (("nothing", float("nan")), ValueError, "finite"),
        (("nothing", "1"), TypeError, "number"),
        (("nothing", True), TypeError, "number"),
        (("nobody", 1), ValueError, "'nobody' is not known as a kernel.*'nothing'"),
        ((print, 1), ValueError, "not known as a kernel"),
        ((3, 1), TypeError, "its name or the function"),
    ],
)
def test_bad_durations(arguments, error, text):
    with pytest.raises(error, match=text):
        duration(*arguments)
