"""Arrays, textures, and copies and fills of several dimensions, through cuda.bindings.runtime."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import driver, runtime

from conformance.support import ok
from conformance.test_runtime import INVALID_HANDLE, INVALID_VALUE, SUCCESS, Error, Kind, right

pytestmark = pytest.mark.usefixtures("no_runtime_error")

UNSIGNED = runtime.cudaChannelFormatKind.cudaChannelFormatKindUnsigned
SIGNED = runtime.cudaChannelFormatKind.cudaChannelFormatKindSigned
FLOAT = runtime.cudaChannelFormatKind.cudaChannelFormatKindFloat
INVALID_PITCH = Error.cudaErrorInvalidPitchValue
INVALID_CHANNELS = Error.cudaErrorInvalidChannelDescriptor
INVALID_DIRECTION = Error.cudaErrorInvalidMemcpyDirection
IN, OUT, ON_DEVICE = (
    Kind.cudaMemcpyHostToDevice,
    Kind.cudaMemcpyDeviceToHost,
    Kind.cudaMemcpyDeviceToDevice,
)


def channels(*bits, kind=UNSIGNED):
    made = runtime.cudaChannelFormatDesc()
    made.x, made.y, made.z, made.w = (*bits, 0, 0, 0, 0)[:4]
    made.f = kind
    return made


def told(found):
    return [found.x, found.y, found.z, found.w], found.f


def extent(width, height=0, depth=0):
    made = runtime.cudaExtent()
    made.width, made.height, made.depth = width, height, depth
    return made


def pitched(memory, pitch, width, height):
    made = runtime.cudaPitchedPtr()
    made.ptr, made.pitch, made.xsize, made.ysize = memory, pitch, width, height
    return made


def rows_of(array):
    """An array of NumPy with three dimensions as memory with rows."""
    return pitched(array.ctypes.data, array.strides[1], array.shape[2], array.shape[1])


def copy_of(source, target, size, kind=Kind.cudaMemcpyDefault, at=(0, 0, 0), to=(0, 0, 0)):
    made = runtime.cudaMemcpy3DParms()
    for side, name, place in ((source, "src", at), (target, "dst", to)):
        is_memory = isinstance(side, runtime.cudaPitchedPtr)
        if side is not None:
            setattr(made, f"{name}{'Ptr' if is_memory else 'Array'}", side)
        position = runtime.cudaPos()
        position.x, position.y, position.z = place
        setattr(made, f"{name}Pos", position)
    made.extent, made.kind = extent(*size), kind
    return made


@pytest.fixture
def make_array():
    made = []

    def make(described, *size, flags=0):
        made.append(right(runtime.cudaMalloc3DArray(described, extent(*size), flags)))
        return made[-1]

    yield make
    for array in made:
        right(runtime.cudaFreeArray(array))


@pytest.fixture
def array(make_array):
    """Three slices of four rows of eight floats."""
    return make_array(channels(32, kind=FLOAT), 8, 4, 3)


@pytest.fixture
def flat(make_array):
    """Four rows of eight floats."""
    return make_array(channels(32, kind=FLOAT), 8, 4)


@pytest.fixture
def numbers():
    return np.arange(96, dtype=np.float32).reshape(3, 4, 8)


@pytest.fixture
def memory():
    address = int(right(runtime.cudaMalloc(4096)))
    right(runtime.cudaMemset(address, 0, 4096))
    yield address
    right(runtime.cudaFree(address))


def contents(address, count=64):
    found = np.zeros(count, np.uint8)
    right(runtime.cudaMemcpy(found.ctypes.data, address, count, OUT))
    return found


# ---- arrays -----------------------------------------------------------------

FORMATS = {(8, SIGNED): 8, (16, SIGNED): 9, (32, SIGNED): 10, (8, UNSIGNED): 1}
FORMATS |= {(16, UNSIGNED): 2, (32, UNSIGNED): 3, (16, FLOAT): 16, (32, FLOAT): 32}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("bits", "kind"), FORMATS)
def test_the_format_of_an_array(make_array, bits, kind, count):
    array = make_array(channels(*[bits] * count, kind=kind), 8, 4)
    expected = [bits] * count + [0] * (4 - count), kind
    assert told(right(runtime.cudaGetChannelDesc(array))) == expected
    found = ok(driver.cuArray3DGetDescriptor(driver.CUarray(int(array))))
    assert (found.Width, found.Height, found.Depth) == (8, 4, 0)
    assert (int(found.Format), found.NumChannels) == (FORMATS[bits, kind], count)


@pytest.mark.parametrize(
    "described",
    [
        channels(8, 8, 8),
        channels(8, 16),
        channels(8, 0, 8),
        channels(),
        channels(0, 8),
        channels(12),
        channels(8, kind=FLOAT),
    ],
    ids=lambda each: f"{told(each)[0]} {each.f.name}",
)
def test_channels_that_no_array_has(described):
    assert runtime.cudaMallocArray(described, 8, 4, 0)[0] == INVALID_CHANNELS


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        ((8, 0, 0), 0),
        ((8, 4, 0), 0),
        ((8, 4, 2), 0),
        ((8, 0, 2), runtime.cudaArrayLayered),
        ((8, 4, 2), runtime.cudaArrayLayered),
        ((8, 4, 0), runtime.cudaArraySurfaceLoadStore),
        ((8, 4, 0), runtime.cudaArrayTextureGather),
        ((6, 6, 6), runtime.cudaArrayCubemap),
        ((6, 6, 12), runtime.cudaArrayCubemap | runtime.cudaArrayLayered),
    ],
)
def test_what_an_array_is_told_to_be(make_array, size, flags):
    array = make_array(channels(8), *size, flags=flags)
    described, found, found_flags = right(runtime.cudaArrayGetInfo(array))
    assert told(described) == ([8, 0, 0, 0], UNSIGNED)
    assert (found.width, found.height, found.depth) == size
    assert found_flags == flags


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        ((0, 0, 0), 0),
        ((0, 4, 2), 0),
        ((8, 0, 2), 0),
        ((8, 4, 0), runtime.cudaArrayLayered),
        ((8, 4, 6), runtime.cudaArrayCubemap),
        ((6, 6, 5), runtime.cudaArrayCubemap),
        ((1 << 20, 0, 0), 0),
    ],
)
def test_shapes_that_no_array_has(size, flags):
    assert runtime.cudaMalloc3DArray(channels(8), extent(*size), flags)[0] == INVALID_VALUE


def test_an_array_of_two_dimensions():
    array = right(runtime.cudaMallocArray(channels(8), 8, 4, 0))
    found = right(runtime.cudaArrayGetInfo(array))[1]
    assert (found.width, found.height, found.depth) == (8, 4, 0)
    right(runtime.cudaFreeArray(array))


def test_nothing_is_freed():
    right(runtime.cudaFreeArray(runtime.cudaArray_t(0)))
    right(runtime.cudaFreeMipmappedArray(runtime.cudaMipmappedArray_t(0)))


def test_no_array_has_no_channels():
    assert runtime.cudaGetChannelDesc(runtime.cudaArray_t(0))[0] == INVALID_HANDLE


@pytest.mark.parametrize(("asked", "levels"), [(0, 1), (1, 1), (3, 3), (100, 4)])
def test_the_levels_of_a_mipmapped_array(asked, levels):
    made = right(runtime.cudaMallocMipmappedArray(channels(8), extent(8, 4), asked, 0))
    for level in range(levels):
        found = right(
            runtime.cudaArrayGetInfo(right(runtime.cudaGetMipmappedArrayLevel(made, level)))
        )
        assert (found[1].width, found[1].height) == (8 >> level, max(4 >> level, 1))
    assert runtime.cudaGetMipmappedArrayLevel(made, levels)[0] == INVALID_VALUE
    right(runtime.cudaFreeMipmappedArray(made))


def test_the_longest_line_of_memory_that_a_texture_reads():
    driver_asked = ok(
        driver.cuDeviceGetTexture1DLinearMaxWidth(
            driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8, 1, 0
        )
    )
    assert right(runtime.cudaDeviceGetTexture1DLinearMaxWidth(channels(8), 0)) == driver_asked


# ---- copies of three dimensions ---------------------------------------------


@pytest.mark.parametrize("on_a_stream", [False, True])
def test_into_an_array_and_out_of_it(array, numbers, on_a_stream):
    found = np.zeros_like(numbers)
    for copy in (
        copy_of(rows_of(numbers), array, (8, 4, 3), IN),
        copy_of(array, rows_of(found), (8, 4, 3), OUT),
    ):
        right(runtime.cudaMemcpy3DAsync(copy, 0) if on_a_stream else runtime.cudaMemcpy3D(copy))
    right(runtime.cudaDeviceSynchronize())
    assert (found == numbers).all()


def test_a_part_of_an_array(array, numbers):
    """If an array takes part, positions are in its elements, of memory as well."""
    right(runtime.cudaMemcpy3D(copy_of(rows_of(numbers), array, (8, 4, 3))))
    found = np.zeros_like(numbers)
    copy = copy_of(array, rows_of(found), (2, 2, 1), OUT, at=(3, 1, 2), to=(4, 2, 1))
    right(runtime.cudaMemcpy3D(copy))
    assert (found[1, 2:, 4:6] == numbers[2, 1:3, 3:5]).all()
    assert np.count_nonzero(found) == 4


def test_between_arrays(array, make_array, numbers):
    other = make_array(channels(32, kind=SIGNED), 8, 4, 3)
    found = np.zeros_like(numbers)
    right(runtime.cudaMemcpy3D(copy_of(rows_of(numbers), array, (8, 4, 3), IN)))
    right(runtime.cudaMemcpy3D(copy_of(array, other, (8, 4, 3), ON_DEVICE)))
    right(runtime.cudaMemcpy3D(copy_of(other, rows_of(found), (8, 4, 3), OUT)))
    assert (found == numbers).all()


def test_between_memory_with_rows(memory):
    """Without an array the width is in bytes."""
    source = np.arange(96, dtype=np.uint8).reshape(3, 4, 8)
    copy = copy_of(rows_of(source), pitched(memory, 16, 8, 5), (6, 4, 3), IN)
    right(runtime.cudaMemcpy3D(copy))
    found = contents(memory, 240).reshape(3, 5, 16)
    assert (found[:, :4, :6] == source[:, :, :6]).all()
    assert not found[:, 4].any()
    assert not found[:, :, 6:].any()


def test_between_arrays_whose_elements_have_other_sizes(array, make_array):
    other = make_array(channels(8), 8, 4, 3)
    assert runtime.cudaMemcpy3D(copy_of(array, other, (2, 2, 1), ON_DEVICE)) == (INVALID_VALUE,)


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        ((0, 8, 4), (8, 4, 3), INVALID_PITCH),
        ((32, 8, 0), (8, 4, 3), INVALID_PITCH),
        ((32, 8, 3), (8, 4, 3), INVALID_PITCH),
        ((32, 8, 3), (8, 4, 1), INVALID_VALUE),
        ((32, 8, 0), (0, 4, 3), SUCCESS),
    ],
)
def test_memory_with_too_few_rows(array, numbers, rows, size, expected):
    copy = copy_of(pitched(numbers.ctypes.data, *rows), array, size, IN)
    assert runtime.cudaMemcpy3D(copy) == (expected,)


@pytest.mark.parametrize("size", [(9, 4, 3), (8, 5, 3), (8, 4, 4)])
def test_beyond_the_end_of_an_array(array, size):
    source = np.zeros((4, 5, 9), np.float32)
    copy = copy_of(rows_of(source), array, size, IN)
    assert runtime.cudaMemcpy3D(copy) == (INVALID_VALUE,)


def test_an_operand_is_missing_or_there_twice(array, memory, numbers):
    rows = rows_of(numbers)
    both = copy_of(rows, array, (8, 4, 3), IN)
    both.dstPtr = pitched(memory, 32, 8, 4)
    for copy in (
        copy_of(None, array, (8, 4, 3), IN),
        copy_of(rows, None, (8, 4, 3), IN),
        both,
    ):
        assert runtime.cudaMemcpy3D(copy) == (INVALID_VALUE,)


@pytest.mark.simulated  # a GPU does not say what becomes of such a node
def test_a_node_whose_array_is_gone(numbers):
    array = right(runtime.cudaMalloc3DArray(channels(32), extent(8, 4, 3), 0))
    graph = right(runtime.cudaGraphCreate(0))
    copy = copy_of(rows_of(numbers), array, (8, 4, 3), IN)
    node = right(runtime.cudaGraphAddMemcpyNode(graph, None, 0, copy))
    right(runtime.cudaFreeArray(array))
    assert runtime.cudaGraphMemcpyNodeGetParams(node)[0] == INVALID_HANDLE
    right(runtime.cudaGraphDestroy(graph))


@pytest.mark.multi_device
def test_between_devices(memory, other_context):
    there = int(right(runtime.cudaMalloc(64)))
    source = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    right(runtime.cudaMemcpy(memory, source.ctypes.data, 64, IN))
    copy = runtime.cudaMemcpy3DPeerParms()
    copy.srcPtr, copy.srcDevice = pitched(memory, 8, 8, 8), 0
    copy.dstPtr, copy.dstDevice = pitched(there, 8, 8, 8), 0
    copy.extent = extent(8, 8, 1)
    right(runtime.cudaMemcpy3DPeer(copy))
    right(runtime.cudaMemcpy3DPeerAsync(copy, 0))
    assert (contents(there) == source.ravel()).all()
    right(runtime.cudaFree(there))


# ---- rows of arrays ---------------------------------------------------------


@pytest.mark.parametrize("on_a_stream", [False, True])
def test_rows_into_an_array_and_out_of_it(flat, numbers, on_a_stream):
    """Offsets and widths are in bytes."""
    source, found = numbers[0], np.zeros((4, 8), np.float32)
    into, out = source.ctypes.data, found.ctypes.data
    if on_a_stream:
        right(runtime.cudaMemcpy2DToArrayAsync(flat, 0, 0, into, 32, 32, 4, IN, 0))
        right(runtime.cudaMemcpy2DFromArrayAsync(out, 32, flat, 8, 1, 24, 3, OUT, 0))
    else:
        right(runtime.cudaMemcpy2DToArray(flat, 0, 0, into, 32, 32, 4, IN))
        right(runtime.cudaMemcpy2DFromArray(out, 32, flat, 8, 1, 24, 3, OUT))
    right(runtime.cudaDeviceSynchronize())
    assert (found[:3, :6] == source[1:, 2:]).all()
    assert not found[3].any()


def test_rows_between_arrays(flat, make_array, numbers):
    other = make_array(channels(32, kind=FLOAT), 8, 4)
    source, found = numbers[0], np.zeros((4, 8), np.float32)
    right(runtime.cudaMemcpy2DToArray(flat, 0, 0, source.ctypes.data, 32, 32, 4, IN))
    right(runtime.cudaMemcpy2DArrayToArray(other, 4, 1, flat, 8, 0, 16, 3, ON_DEVICE))
    right(runtime.cudaMemcpy2DFromArray(found.ctypes.data, 32, other, 4, 1, 16, 3, OUT))
    assert (found[:3, :4] == source[:3, 2:6]).all()


@pytest.mark.parametrize(
    ("x", "y", "width", "height"), [(4, 0, 32, 1), (0, 1, 32, 4), (40, 0, 4, 1)]
)
def test_rows_that_an_array_does_not_have(flat, numbers, x, y, width, height):
    to_array = runtime.cudaMemcpy2DToArray
    answer = to_array(flat, x, y, numbers.ctypes.data, 32, width, height, IN)
    assert answer == (INVALID_VALUE,)


def test_the_direction_of_rows(flat, numbers):
    """An array is on a device, and so is memory that is said to be."""
    rows = numbers.ctypes.data
    for kind, expected in ((OUT, INVALID_DIRECTION), (ON_DEVICE, INVALID_VALUE)):
        answer = runtime.cudaMemcpy2DToArray(flat, 0, 0, rows, 32, 32, 4, kind)
        assert answer == (expected,)
    for kind, expected in ((IN, INVALID_DIRECTION), (ON_DEVICE, INVALID_VALUE)):
        answer = runtime.cudaMemcpy2DFromArray(rows, 32, flat, 0, 0, 32, 4, kind)
        assert answer == (expected,)


@pytest.mark.parametrize("kind", [OUT, ON_DEVICE])
def test_memory_of_the_host_that_is_said_to_be_on_a_device(memory, array, numbers, kind):
    source = numbers.ctypes.data
    assert runtime.cudaMemcpy(memory, source, 64, kind) == (INVALID_VALUE,)
    assert runtime.cudaMemcpyAsync(memory, source, 64, kind, 0) == (INVALID_VALUE,)
    assert runtime.cudaMemcpy2D(memory, 32, source, 32, 32, 4, kind) == (INVALID_VALUE,)
    copy = copy_of(rows_of(numbers), array, (8, 4, 3), kind)
    assert runtime.cudaMemcpy3D(copy) == (INVALID_VALUE,)


def test_rows_that_overlap(flat, memory, numbers):
    source = numbers.ctypes.data
    assert runtime.cudaMemcpy2DToArray(flat, 0, 0, source, 16, 32, 4, IN) == (INVALID_PITCH,)
    assert runtime.cudaMemcpy2DFromArray(source, 16, flat, 0, 0, 32, 4, OUT) == (INVALID_PITCH,)
    assert runtime.cudaMemcpy2D(memory, 16, source, 8, 10, 4, IN) == (INVALID_PITCH,)
    assert runtime.cudaMemcpy2D(memory, 8, source, 16, 10, 4, IN) == (INVALID_PITCH,)


# ---- memory of several rows -------------------------------------------------


def test_memory_of_three_dimensions():
    found = right(runtime.cudaMalloc3D(extent(10, 4, 3)))
    assert (found.xsize, found.ysize) == (10, 4)
    assert found.pitch >= 10
    right(runtime.cudaMemset3D(found, 7, extent(10, 4, 3)))
    target = np.zeros((3, 4, 10), np.uint8)
    right(runtime.cudaMemcpy3D(copy_of(found, rows_of(target), (10, 4, 3), OUT)))
    assert (target == 7).all()
    right(runtime.cudaFree(found.ptr))


@pytest.mark.parametrize("on_a_stream", [False, True])
def test_a_part_of_memory_is_filled(memory, on_a_stream):
    whole = pitched(memory, 16, 16, 4)
    if on_a_stream:
        right(runtime.cudaMemset3DAsync(whole, 5, extent(3, 2, 2), 0))
        right(runtime.cudaMemset2DAsync(memory + 32, 16, 6, 4, 2, 0))
    else:
        right(runtime.cudaMemset3D(whole, 5, extent(3, 2, 2)))
        right(runtime.cudaMemset2D(memory + 32, 16, 6, 4, 2))
    right(runtime.cudaDeviceSynchronize())
    expected = np.zeros((2, 4, 16), np.uint8)
    expected[:, :2, :3] = 5
    expected[0, 2:, :4] = 6
    assert (contents(memory, 128).reshape(2, 4, 16) == expected).all()


def test_more_rows_are_filled_than_there_are(memory):
    whole = pitched(memory, 16, 16, 3)
    assert runtime.cudaMemset3D(whole, 5, extent(10, 4, 1)) == (INVALID_VALUE,)


@pytest.mark.simulated  # an H100 refuses it, an H200 fills up to the pitch
def test_wider_rows_are_filled_than_there_are(memory):
    whole = pitched(memory, 16, 8, 4)
    assert runtime.cudaMemset3D(whole, 5, extent(10, 4, 2)) == (INVALID_VALUE,)


@pytest.mark.parametrize("size", [(0, 0), (10, 0), (0, 4)])
def test_no_rows_are_allocated(size):
    assert right(runtime.cudaMallocPitch(*size)) == (0, 0)
    found = right(runtime.cudaMalloc3D(extent(*size, 2)))
    assert int(found.ptr or 0) == 0


@pytest.mark.parametrize("size", [(0, 4), (10, 0)])
def test_no_rows_are_filled(memory, size):
    right(runtime.cudaMemset2D(memory, 16, 5, *size))
    right(runtime.cudaMemset3D(pitched(memory, 16, 16, 4), 5, extent(*size, 2)))
    right(runtime.cudaMemset3D(pitched(memory, 16, 16, 4), 5, extent(10, 4, 0)))
    right(runtime.cudaDeviceSynchronize())
    assert not contents(memory).any()


# ---- textures and surfaces --------------------------------------------------

Resource = runtime.cudaResourceType


def resource(kind, **fields):
    """A description of an array, a mipmapped array, a line of memory or rows of memory."""
    made = runtime.cudaResourceDesc()
    made.resType = Resource(kind)
    name = ("array", "mipmap", "linear", "pitch2D")[kind]
    part = getattr(made.res, name)
    for field, value in fields.items():
        setattr(part, field, value)
    setattr(made.res, name, part)
    return made


def sampling(**fields):
    made = runtime.cudaTextureDesc()
    made.readMode = runtime.cudaTextureReadMode.cudaReadModeElementType
    made.filterMode = runtime.cudaTextureFilterMode.cudaFilterModePoint
    made.addressMode = [runtime.cudaTextureAddressMode.cudaAddressModeClamp] * 3
    for field, value in fields.items():
        setattr(made, field, value)
    return made


AS_FLOAT = runtime.cudaTextureReadMode.cudaReadModeNormalizedFloat
BETWEEN = runtime.cudaTextureFilterMode.cudaFilterModeLinear


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, 1),
        ({"readMode": AS_FLOAT}, 0),
        ({"readMode": AS_FLOAT, "filterMode": BETWEEN}, 0),
        ({"normalizedCoords": 1}, 1 | 2),
        ({"readMode": AS_FLOAT, "sRGB": 1}, 16),
        ({"disableTrilinearOptimization": 1}, 1 | 32),
        ({"maxAnisotropy": 4}, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_how_a_texture_reads(make_array, fields, flags):
    array = make_array(channels(8), 8, 4)
    wanted = sampling(**fields)
    texture = right(runtime.cudaCreateTextureObject(resource(0, array=array), wanted, None))
    found = right(runtime.cudaGetTextureObjectTextureDesc(texture))
    for field in ("readMode", "filterMode", "normalizedCoords", "sRGB", "maxAnisotropy"):
        assert getattr(found, field) == getattr(wanted, field), field
    assert list(found.addressMode) == list(wanted.addressMode)
    same = ok(driver.cuTexObjectGetTextureDesc(driver.CUtexObject(int(texture))))
    assert same.flags == flags
    right(runtime.cudaDestroyTextureObject(texture))


def test_what_a_texture_reads(flat, memory):
    mipmapped = right(runtime.cudaMallocMipmappedArray(channels(32), extent(8, 4), 2, 0))
    line = {"devPtr": memory, "desc": channels(16, 16), "sizeInBytes": 256}
    rows = {"devPtr": memory, "desc": channels(8), "width": 8, "height": 4, "pitchInBytes": 64}
    for kind, fields in enumerate([{"array": flat}, {"mipmap": mipmapped}, line, rows]):
        wanted = resource(kind, **fields)
        coordinates = sampling(normalizedCoords=int(kind == 1))
        texture = right(runtime.cudaCreateTextureObject(wanted, coordinates, None))
        found = right(runtime.cudaGetTextureObjectResourceDesc(texture))
        assert found.resType == Resource(kind)
        part = getattr(found.res, ("array", "mipmap", "linear", "pitch2D")[kind])
        for field, value in fields.items():
            is_channels = field == "desc"
            got = getattr(part, field)
            assert told(got) == told(value) if is_channels else int(got) == int(value), field
        right(runtime.cudaGetTextureObjectResourceViewDesc(texture))  # a GPU tells anything
        right(runtime.cudaDestroyTextureObject(texture))
    right(runtime.cudaFreeMipmappedArray(mipmapped))


def test_a_view_of_an_array(flat):
    view = runtime.cudaResourceViewDesc()
    view.format = runtime.cudaResourceViewFormat.cudaResViewFormatFloat1
    view.width, view.height = 8, 4
    texture = right(runtime.cudaCreateTextureObject(resource(0, array=flat), sampling(), view))
    found = right(runtime.cudaGetTextureObjectResourceViewDesc(texture))
    assert (found.format, found.width, found.height) == (view.format, 8, 4)
    right(runtime.cudaDestroyTextureObject(texture))


def test_memory_that_no_texture_reads(memory):
    line = {"devPtr": memory, "desc": channels(32), "sizeInBytes": 256}
    rows = {"devPtr": memory, "desc": channels(32), "width": 8, "height": 4, "pitchInBytes": 64}
    for kind, fields, wrong in [
        (2, line, {"devPtr": memory + 4}),
        (2, line, {"sizeInBytes": 1 << 40}),
        (3, rows, {"devPtr": memory + 4}),
        (3, rows, {"pitchInBytes": 40}),
        (3, rows, {"pitchInBytes": 16}),
    ]:
        wanted = resource(kind, **{**fields, **wrong})
        assert runtime.cudaCreateTextureObject(wanted, sampling(), None)[0] == INVALID_VALUE, wrong


def test_integers_are_not_filtered(make_array):
    array = make_array(channels(8), 8, 4)
    wanted = resource(0, array=array), sampling(filterMode=BETWEEN), None
    answer = runtime.cudaCreateTextureObject(*wanted)[0]
    assert answer == Error.cudaErrorInvalidFilterSetting


@pytest.mark.parametrize("kind", [UNSIGNED, SIGNED, FLOAT])
def test_elements_of_four_bytes_are_not_normalized(make_array, kind):
    array = make_array(channels(32, kind=kind), 8, 4)
    wanted = resource(0, array=array), sampling(readMode=AS_FLOAT), None
    assert runtime.cudaCreateTextureObject(*wanted)[0] == Error.cudaErrorInvalidNormSetting


def test_a_surface(make_array):
    array = make_array(channels(32), 8, 4, flags=runtime.cudaArraySurfaceLoadStore)
    surface = right(runtime.cudaCreateSurfaceObject(resource(0, array=array)))
    found = right(runtime.cudaGetSurfaceObjectResourceDesc(surface))
    assert (found.resType, int(found.res.array.array)) == (Resource(0), int(array))
    right(runtime.cudaDestroySurfaceObject(surface))


def test_memory_is_no_surface(memory):
    line = resource(2, devPtr=memory, desc=channels(32), sizeInBytes=256)
    assert runtime.cudaCreateSurfaceObject(line)[0] == INVALID_VALUE
