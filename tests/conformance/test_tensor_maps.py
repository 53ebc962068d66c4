"""Tensor maps: which tensors can be described.

Without the bindings, whose maps are not aligned as they have to be.
"""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import INVALID_VALUE, SUCCESS, Result

Type = driver.CUtensorMapDataType
Interleave = driver.CUtensorMapInterleave
Swizzle = driver.CUtensorMapSwizzle
Promotion = driver.CUtensorMapL2promotion
Fill = driver.CUtensorMapFloatOOBfill
FLOAT = Type.CU_TENSOR_MAP_DATA_TYPE_FLOAT32
NONE = Fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
NAN = Fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA


ROOM = ctypes.create_string_buffer(256)
MAP = (ctypes.addressof(ROOM) + 63) // 64 * 64


def numbers(kind, values):
    return (kind * len(values))(*values)


def encode(address, map_address=MAP, **changes):
    wanted = {
        "type": FLOAT,
        "rank": 2,
        "size": [64, 64],
        "stride": [256],
        "box": [32, 8],
        "steps": [1, 1],
        "interleave": Interleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        "swizzle": Swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        "promotion": Promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        "fill": NONE,
        **changes,
    }
    encoded = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(map_address),
        int(wanted["type"]),
        wanted["rank"],
        ctypes.c_void_p(address),
        numbers(ctypes.c_uint64, wanted["size"]),
        numbers(ctypes.c_uint64, wanted["stride"]),
        numbers(ctypes.c_uint32, wanted["box"]),
        numbers(ctypes.c_uint32, wanted["steps"]),
        int(wanted["interleave"]),
        int(wanted["swizzle"]),
        int(wanted["promotion"]),
        int(wanted["fill"]),
    )
    return Result(encoded)


def replace(address):
    replaced = ctypes.CDLL("libcuda.so.1").cuTensorMapReplaceAddress
    return Result(replaced(ctypes.c_void_p(MAP), ctypes.c_void_p(address)))


@pytest.fixture
def tensor(make_memory):
    return make_memory(64 * 64 * 4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"box": [32, 256]},
        {"steps": [1, 8]},
        {"fill": NAN},
        {"swizzle": Swizzle.CU_TENSOR_MAP_SWIZZLE_128B},
        {"promotion": Promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B},
        {"type": Type.CU_TENSOR_MAP_DATA_TYPE_UINT8, "box": [16, 8]},
    ],
    ids=str,
)
def test_a_tensor_that_can_be_described(tensor, changes):
    assert encode(tensor, **changes) == SUCCESS


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 0},
        {"rank": 6, "size": [1] * 6, "stride": [16] * 5, "box": [4] * 6, "steps": [1] * 6},
        {"size": [0, 64]},
        {"stride": [8]},
        {"stride": [260]},
        {"box": [0, 8]},
        {"box": [32, 257]},
        {"box": [1, 8]},
        {"steps": [1, 0]},
        {"steps": [1, 9]},
        {"swizzle": Swizzle.CU_TENSOR_MAP_SWIZZLE_32B},
        {"interleave": Interleave.CU_TENSOR_MAP_INTERLEAVE_16B},
        {"type": Type.CU_TENSOR_MAP_DATA_TYPE_INT32, "fill": NAN},
    ],
    ids=str,
)
def test_a_tensor_that_cannot_be_described(tensor, changes):
    assert encode(tensor, **changes) == INVALID_VALUE


@pytest.mark.parametrize("offset", [4, 8])
def test_an_address_that_is_not_aligned(tensor, offset):
    assert encode(tensor + offset) == INVALID_VALUE


def test_the_address_is_replaced(tensor, make_memory):
    assert encode(tensor) == SUCCESS
    assert replace(make_memory(64 * 64 * 4)) == SUCCESS
    assert replace(tensor + 4) == INVALID_VALUE
