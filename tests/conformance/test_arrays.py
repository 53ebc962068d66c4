"""CUDA arrays, mipmapped arrays, textures and surfaces."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda.bindings import driver

from conformance.support import INVALID_HANDLE, INVALID_VALUE, SUCCESS, finishes, ok

Format = driver.CUarray_format
U8, U32, FLOAT = (
    Format.CU_AD_FORMAT_UNSIGNED_INT8,
    Format.CU_AD_FORMAT_UNSIGNED_INT32,
    Format.CU_AD_FORMAT_FLOAT,
)
LAYERED, SURFACE, CUBEMAP = 1, 2, 4
HOST, DEVICE, ARRAY = (
    driver.CUmemorytype.CU_MEMORYTYPE_HOST,
    driver.CUmemorytype.CU_MEMORYTYPE_DEVICE,
    driver.CUmemorytype.CU_MEMORYTYPE_ARRAY,
)


def shape(width=8, height=0, depth=0, element=U8, channels=1, flags=0):
    descriptor = driver.CUDA_ARRAY3D_DESCRIPTOR()
    descriptor.Width, descriptor.Height, descriptor.Depth = width, height, depth
    descriptor.Format, descriptor.NumChannels, descriptor.Flags = element, channels, flags
    return descriptor


@pytest.fixture
def make_array():
    made = []

    def make(*args, **kwargs):
        made.append(ok(driver.cuArray3DCreate(shape(*args, **kwargs))))
        return made[-1]

    yield make
    for array in made:
        driver.cuArrayDestroy(array)


# ---- making -----------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [
        {"width": 8},
        {"width": 8, "height": 4},
        {"width": 8, "height": 4, "depth": 2},
        {"width": 8, "element": FLOAT, "channels": 4},
        {"width": 8, "height": 4, "depth": 3, "flags": LAYERED},
        {"width": 8, "depth": 3, "flags": LAYERED},
        {"width": 8, "height": 8, "depth": 6, "flags": CUBEMAP},
        {"width": 8, "height": 4, "flags": SURFACE},
    ],
    ids=str,
)
def test_an_array_is_what_was_asked_for(make_array, wanted):
    found = ok(driver.cuArray3DGetDescriptor(make_array(**wanted)))
    assert found.Width == wanted["width"]
    assert found.Height == wanted.get("height", 0)
    assert found.Depth == wanted.get("depth", 0)
    assert found.Format == wanted.get("element", U8)
    assert found.NumChannels == wanted.get("channels", 1)
    assert found.Flags == wanted.get("flags", 0)


@pytest.mark.parametrize(
    "wanted",
    [
        {"width": 0},
        {"channels": 3},
        {"channels": 0},
        {"width": 8, "depth": 2},
        {"width": 131073},
        {"width": 16385, "height": 1, "depth": 1},
        {"width": 8, "height": 4, "depth": 6, "flags": CUBEMAP},
        {"width": 8, "height": 8, "depth": 5, "flags": CUBEMAP},
        {"width": 8, "height": 8, "flags": LAYERED},
    ],
    ids=str,
)
def test_an_array_that_cannot_be(wanted):
    assert driver.cuArray3DCreate(shape(**wanted))[0] == INVALID_VALUE


def test_an_array_of_two_dimensions():
    descriptor = driver.CUDA_ARRAY_DESCRIPTOR()
    descriptor.Width, descriptor.Height, descriptor.Format, descriptor.NumChannels = 8, 4, U8, 2
    array = ok(driver.cuArrayCreate(descriptor))
    found = ok(driver.cuArrayGetDescriptor(array))
    assert (found.Width, found.Height, found.NumChannels) == (8, 4, 2)
    ok(driver.cuArrayDestroy(array))


# ---- copies -----------------------------------------------------------------


def side(copy, which, kind, value, **more):
    setattr(copy, f"{which}MemoryType", kind)
    names = {HOST: "Host", DEVICE: "Device", ARRAY: "Array"}
    setattr(copy, f"{which}{names[kind]}", value)
    for name, number in more.items():
        setattr(copy, f"{which}{name}", number)


def copy_2d(width, height, source, destination):
    copy = driver.CUDA_MEMCPY2D()
    copy.WidthInBytes, copy.Height = width, height
    side(copy, "src", *source[:2], **(source[2] if len(source) > 2 else {}))
    side(copy, "dst", *destination[:2], **(destination[2] if len(destination) > 2 else {}))
    return driver.cuMemcpy2D(copy)[0]


def test_a_line_there_and_back(make_array):
    array, source, target = make_array(8), np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    ok(driver.cuMemcpyHtoA(array, 0, source, 8))
    ok(driver.cuMemcpyAtoH(target, array, 0, 8))
    assert (source == target).all()


def test_part_of_a_line(make_array):
    array, source, target = make_array(8), np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    ok(driver.cuMemcpyHtoA(array, 0, source, 8))
    ok(driver.cuMemcpyAtoH(target, array, 4, 4))
    assert target.tolist() == [4, 5, 6, 7, 0, 0, 0, 0]


@pytest.mark.parametrize(("offset", "size"), [(0, 9), (8, 1), (1, 8)])
def test_more_than_a_line(make_array, offset, size):
    array, source = make_array(8), np.zeros(16, np.uint8)
    assert driver.cuMemcpyHtoA(array, offset, source, size)[0] == INVALID_VALUE


def test_from_one_array_to_another_through_a_device(make_array, memory):
    first, second = make_array(8), make_array(8)
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    ok(driver.cuMemcpyHtoA(first, 0, source, 8))
    ok(driver.cuMemcpyAtoD(memory, first, 0, 8))
    ok(driver.cuMemcpyDtoA(second, 0, memory, 8))
    ok(driver.cuMemcpyAtoA(first, 0, second, 4, 4))
    ok(driver.cuMemcpyAtoH(target, first, 0, 8))
    assert target.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]


def test_a_rectangle_there_and_back(make_array):
    array = make_array(8, 4)
    source = np.arange(32, dtype=np.uint8).reshape(4, 8)
    target = np.zeros((4, 8), np.uint8)
    assert copy_2d(8, 4, (HOST, source.ctypes.data), (ARRAY, array)) == SUCCESS
    assert copy_2d(8, 4, (ARRAY, array), (HOST, target.ctypes.data)) == SUCCESS
    assert (source == target).all()


def test_a_part_of_a_rectangle(make_array):
    array = make_array(8, 4)
    source = np.arange(32, dtype=np.uint8).reshape(4, 8)
    target = np.zeros((2, 3), np.uint8)
    assert copy_2d(8, 4, (HOST, source.ctypes.data), (ARRAY, array)) == SUCCESS
    part = (ARRAY, array, {"XInBytes": 2, "Y": 1})
    assert copy_2d(3, 2, part, (HOST, target.ctypes.data, {"Pitch": 3})) == SUCCESS
    assert (target == source[1:3, 2:5]).all()


@pytest.mark.parametrize("more", [{"XInBytes": 1}, {"Y": 1}])
def test_more_than_a_rectangle(make_array, more):
    array, source = make_array(8, 4), np.zeros((4, 8), np.uint8)
    assert copy_2d(8, 4, (HOST, source.ctypes.data), (ARRAY, array, more)) == INVALID_VALUE


def test_an_array_on_a_stream(make_array, stream, pinned):
    array = make_array(8)
    ctypes.memset(pinned, 9, 8)
    ok(driver.cuMemcpyHtoAAsync(array, 0, pinned, 8, stream))
    ok(driver.cuMemcpyAtoHAsync(pinned + 8, array, 0, 8, stream))
    assert finishes(stream)
    assert set(ctypes.string_at(pinned + 8, 8)) == {9}


def test_a_cuboid_there_and_back(make_array):
    array = make_array(4, 3, 2)
    source = np.arange(24, dtype=np.uint8)
    target = np.zeros(24, np.uint8)
    copy = driver.CUDA_MEMCPY3D()
    copy.WidthInBytes, copy.Height, copy.Depth = 4, 3, 2
    side(copy, "src", HOST, source.ctypes.data, Pitch=4, Height=3)
    side(copy, "dst", ARRAY, array)
    ok(driver.cuMemcpy3D(copy))
    back = driver.CUDA_MEMCPY3D()
    back.WidthInBytes, back.Height, back.Depth = 4, 3, 2
    side(back, "src", ARRAY, array)
    side(back, "dst", HOST, target.ctypes.data, Pitch=4, Height=3)
    ok(driver.cuMemcpy3D(back))
    assert (source == target).all()


# ---- mipmapped arrays ---------------------------------------------------------


@pytest.fixture
def make_mipmapped():
    made = []

    def make(levels, **wanted):
        made.append(ok(driver.cuMipmappedArrayCreate(shape(**wanted), levels)))
        return made[-1]

    yield make
    for mipmapped in made:
        driver.cuMipmappedArrayDestroy(mipmapped)


@pytest.mark.parametrize(("level", "size"), [(0, (16, 8)), (1, (8, 4)), (3, (2, 1)), (4, (1, 1))])
def test_each_level_is_half_as_large(make_mipmapped, level, size):
    mipmapped = make_mipmapped(5, width=16, height=8)
    found = ok(driver.cuArray3DGetDescriptor(ok(driver.cuMipmappedArrayGetLevel(mipmapped, level))))
    assert (found.Width, found.Height) == size


def test_there_are_no_more_levels_than_halves(make_mipmapped):
    mipmapped = make_mipmapped(20, width=16, height=8)
    assert driver.cuMipmappedArrayGetLevel(mipmapped, 4)[0] == SUCCESS
    assert driver.cuMipmappedArrayGetLevel(mipmapped, 5)[0] == INVALID_VALUE


def test_a_level_is_an_array(make_mipmapped):
    level = ok(driver.cuMipmappedArrayGetLevel(make_mipmapped(2, width=16), 1))
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    ok(driver.cuMemcpyHtoA(level, 0, source, 8))
    ok(driver.cuMemcpyAtoH(target, level, 0, 8))
    assert (source == target).all()


# ---- textures and surfaces ----------------------------------------------------


def resource_of(array):
    resource = driver.CUDA_RESOURCE_DESC()
    resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
    resource.res.array.hArray = array
    return resource


def test_a_texture_of_an_array(make_array):
    array = make_array(8, 4, element=FLOAT)
    sampling = driver.CUDA_TEXTURE_DESC()
    texture = ok(driver.cuTexObjectCreate(resource_of(array), sampling, None))
    assert int(texture)
    found = ok(driver.cuTexObjectGetResourceDesc(texture))
    assert int(found.res.array.hArray) == int(array)
    ok(driver.cuTexObjectDestroy(texture))


@pytest.mark.parametrize(("offset", "result"), [(0, SUCCESS), (4, INVALID_VALUE)])
def test_a_texture_of_memory_that_is_aligned(make_memory, offset, result):
    resource = driver.CUDA_RESOURCE_DESC()
    resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
    resource.res.linear.devPtr = driver.CUdeviceptr(make_memory(1024) + offset)
    resource.res.linear.format, resource.res.linear.numChannels = FLOAT, 1
    resource.res.linear.sizeInBytes = 256
    found, texture = driver.cuTexObjectCreate(resource, driver.CUDA_TEXTURE_DESC(), None)
    assert found == result
    if found == SUCCESS:
        ok(driver.cuTexObjectDestroy(texture))


def test_a_surface_of_an_array(make_array):
    array = make_array(8, 4, flags=SURFACE)
    surface = ok(driver.cuSurfObjectCreate(resource_of(array)))
    assert int(ok(driver.cuSurfObjectGetResourceDesc(surface)).res.array.hArray) == int(array)
    ok(driver.cuSurfObjectDestroy(surface))


def test_an_array_that_is_not_for_it_has_a_surface(make_array):
    surface = ok(driver.cuSurfObjectCreate(resource_of(make_array(8, 4))))
    ok(driver.cuSurfObjectDestroy(surface))


@pytest.mark.parametrize("destroy", [driver.cuArrayDestroy, driver.cuMipmappedArrayDestroy])
def test_nothing_is_no_array(destroy):
    assert destroy(0)[0] in (INVALID_HANDLE, INVALID_VALUE)
