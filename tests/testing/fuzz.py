"""Calls every function of the simulated driver with drawn arguments: handles that live, that are
gone and that are of something else, and odd numbers. ``fuzz.py SEED LOG THREADS``; a program of its
own, as it may crash. The file LOG tells the last call of each thread then.

Pointers are real or NULL, as no driver survives others, and there is room for what they lead to.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from testing.signatures import Declarations, Type, Variable, fold, read
from userstream import testing

CALLS = 1000
EACH, ROOM = 4, 4096  # elements of an array, and the bytes that it has
OUTPUTS = 16
DEEPEST = 3
LINE = 256  # of the log
# Far from everything else: what lies beside it is never mapped.
SCRATCH, SCRATCH_SIZE = 0x7E9000000000, 1 << 20
FIXED_UNLESS_TAKEN = 0x100000  # MAP_FIXED_NOREPLACE

SMALL = (0, 1, 2, 3, 4, 5, 8)
NUMBERS = (*SMALL, 7, 16, 32, 64, 100, 256, 512, 1000, 4096, 65536, 2 << 20, (2 << 20) + 1)
ODD_NUMBERS = (1 << 31, (1 << 32) - 1, 1 << 40, (1 << 40) + 1, 1 << 63, (1 << 64) - 1)
GARBAGE = (1, 2, 3, 16, 0xFFF, 1 << 46, (1 << 63) + 8, (1 << 64) - 1)
TEXTS = (b"", b"fuzz", b"fuzz_all", b"counter", b"nothing", b"_Z4fuzzPii", b"cuInit", b"0:1:0")
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 counter[4];
.visible .entry fuzz(.param .u64 a, .param .u32 b) .maxntid 128, 1, 1
{ .shared .align 4 .b8 s[1024]; ret; }
.visible .entry fuzz_all(.param .align 8 .b8 a[24], .param .u8 b) { ret; }
"""
COUNT = re.compile(r"(num|count|n(?=[A-Z]))(?!Bytes)|.*(Count|Size|Sizes|Length|Levels|len)$")
NODES = {  # CUgraphNodeType, and the member of CUgraphNodeParams that it has
    0: "kernel",
    1: "memcpy",
    2: "memset",
    3: "host",
    4: "graph",
    6: "eventWait",
    7: "eventRecord",
    10: "alloc",
    11: "free",
    12: "memOp",
    13: "conditional",
}
# A wait that nothing ends, and a loop without an end, would only tell that the driver is patient.
CHOSEN: dict[tuple[str, str], tuple[int, ...]] = {
    ("cuStreamWaitValue32", "flags"): (3, 4, 1 << 31),
    ("cuStreamWaitValue32", "value"): (0,),
    ("cuStreamWaitValue64", "flags"): (3, 4, 1 << 31),
    ("cuStreamWaitValue64", "value"): (0,),
    ("cuGraphConditionalHandleCreate", "defaultLaunchValue"): (0,),
}
# The declarations have names of C, which for these stand for another version than the newest.
SIGNATURES = {
    "cuCtxGetDevice": ("cuCtxGetDevice", 2000),
    "cuCtxSynchronize": ("cuCtxSynchronize", 2000),
    "cuGraphInstantiate": ("cuGraphInstantiateWithFlags", 11040),
    "cuLaunchHostFunc": ("cuLaunchHostFunc", 10000),
    "cuStreamGetCtx": ("cuStreamGetCtx", 9020),
}
WRITES = (2, 3, 5, 6, 7, 99)  # CUstreamBatchMemOpType, without those that wait


@testing.kernel("fuzz")
def fuzz(grid: Any, block: Any, a: testing.Pointer, b: np.int32) -> None: ...


@testing.kernel("fuzz_all")
def fuzz_all(grid: Any, block: Any, *arguments: testing.Pointer) -> None: ...


def declarations() -> Declarations:
    found = read("cydriver.pxd")
    subject = found.aliases["CUgraphNodeParams"].name
    fold(found, subject, 3, len(found.members[subject]) - 1)
    return found


def map_scratch() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED_UNLESS_TAKEN
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    assert libc.mmap(SCRATCH, SCRATCH_SIZE, protection, flags, -1, 0) == SCRATCH


class Fuzzer:
    """Draws calls, and keeps the handles that they give."""

    def __init__(self, seed: int, handles: dict[str, list[int]], log: memoryview) -> None:
        self.random = random.Random(seed)
        self.declared = declarations()
        self.handles = handles  # by the name of their type; of all threads
        self.log = log
        self.kept: list[object] = []  # what the arguments of a call lead to
        self.function = ""
        self.has_arrays = False
        self.depth = 0  # of structures that lead to structures
        self.results = {int(each) for each in driver.CUresult}
        no_op = ctypes.CDLL(None).getpid  # as a callback of any type
        self.callback = ctypes.cast(no_op, ctypes.c_void_p).value
        self.functions = self._find()

    def _find(self) -> dict[str, Any]:
        found = {}
        for name, parameters in self.declared.functions.items():
            symbol, version = SIGNATURES.get(name, (name, driver.CUDA_VERSION))
            result, address, _ = driver.cuGetProcAddress(
                symbol.encode(), version, driver.cuuint64_t(0)
            )
            # A name that is unknown is no error, and has no address.
            if result == driver.CUresult.CUDA_SUCCESS and int(address):
                types = [self.declared.class_of(each.type) for each in parameters]
                found[name] = ctypes.CFUNCTYPE(ctypes.c_int, *types)(int(address))
        return found

    # ---- values -------------------------------------------------------------

    def number(self, name: str) -> int:
        chosen = CHOSEN.get((self.function, name))
        if chosen:
            return self.random.choice(chosen)
        if self.has_arrays and COUNT.match(name):
            return self.random.choice(SMALL)
        roll = self.random.random()
        if roll < 0.6:
            return self.random.choice(SMALL)
        return self.random.choice(NUMBERS if roll < 0.95 else ODD_NUMBERS)

    def address(self) -> int:
        known = self.handles.get("CUdeviceptr")
        roll = self.random.random()
        if known and roll < 0.7:
            return (self.random.choice(known) + self.random.choice((0, 0, 0, 1, 8, 512))) % (
                1 << 64
            )
        return self.scratch() if roll < 0.85 else self.random.choice((0, *GARBAGE))

    def scratch(self) -> int:
        """Memory of the host, often close to its end."""
        return SCRATCH + self.random.choice((0, 0, 4096, 4104, SCRATCH_SIZE - 64))

    def handle(self, name: str) -> int:
        if name == "CUdeviceptr":
            return self.address()
        roll = self.random.random()
        known = self.handles.get(name)
        if known and roll < 0.85:
            return self.random.choice(known)
        if roll < 0.93:
            return self.random.choice((0, 1, 2))
        others = self.handles.get(self.random.choice(list(self.handles or [""])))
        return self.random.choice(others) if others and roll < 0.97 else self.random.choice(GARBAGE)

    def array(self, given: Type, name: str) -> int:
        """The address of an array; its last elements are zero."""
        element = self.declared.class_of(given)
        buffer = ctypes.create_string_buffer(ROOM)
        size = max(ctypes.sizeof(element), 1)
        self.depth += 1
        for index in range(min(EACH, ROOM // size // 2)):
            value = self.value(given, name)
            ctypes.memmove(ctypes.addressof(buffer) + index * size, ctypes.byref(value), size)
        self.depth -= 1
        self.kept.append(buffer)
        return ctypes.addressof(buffer)

    def pointer(self, given: Type, name: str) -> int | None:
        if self.random.random() < 0.06 or self.depth == DEEPEST:
            return None
        if given == Type("void", 1) or given == Type("char", 1):
            if name in ("image", "fatCubin", "code"):
                return self.text(self.image())
            return self.text(self.random.choice(TEXTS)) if given.name == "char" else self.scratch()
        return self.array(Type(given.name, given.stars - 1), name)

    def text(self, content: bytes) -> int:
        buffer = ctypes.create_string_buffer(content, ROOM)
        self.kept.append(buffer)
        return ctypes.addressof(buffer)

    def image(self) -> bytes:
        """PTX, sometimes with a few characters changed; or nothing that is known."""
        if self.random.random() < 0.2:
            return b"any"
        image = bytearray(PTX)
        for _ in range(self.random.choice((0, 0, 1, 5))):
            image[self.random.randrange(len(image))] = self.random.randrange(1, 256)
        return bytes(image)

    def value(self, given: Type, name: str) -> Any:
        found = self.declared.resolved(given)
        kind = self.declared.class_of(given)
        if found.stars:
            return kind(self.pointer(found, name))
        if found.name in self.declared.callbacks:
            return kind(self.random.choice((None, self.callback, self.callback)))
        if self.declared.is_handle(found.name):
            return kind(self.handle(found.name))
        if found.name in self.declared.members:
            return self.structure(found.name)
        if found.name == "CUdevice_v1" or given.name == "CUdevice":
            return kind(self.random.choice((0, 0, 0, 1, 1, 2, -1)))
        if given.name == "CUstreamBatchMemOpType":
            return kind(self.random.choice(WRITES))
        if kind in (ctypes.c_float, ctypes.c_double):
            return kind(self.random.choice((0, 1, -1, 0.5, float("nan"))))
        if kind is ctypes.c_char:
            return kind(self.random.randrange(256))
        return kind(self.number(name))

    def structure(self, name: str) -> Any:
        made = self.declared.class_of(Type(name))()
        members = self.declared.members[name]
        if name in self.declared.unions:
            members = [self.random.choice(members)] if members else []
        for member in members:
            self.set(made, member)
        if name == "CUgraphNodeParams_st":
            made.type = self.random.choice(list(NODES))
            self.set(
                made.union,
                next(
                    each
                    for each in self.declared.members[f"{name}_union"]
                    if each.name == NODES[made.type]
                ),
            )
        return made

    def set(self, made: Any, member: Variable) -> None:
        if member.name.startswith("reserved") or member.name == "pad":
            return
        if not member.length:
            setattr(made, member.name, self.value(member.type, member.name))
            return
        array = getattr(made, member.name)
        if isinstance(array, bytes):
            setattr(made, member.name, self.random.choice((b"", b"userstream")))
            return
        for index in range(min(member.length, OUTPUTS)):
            array[index] = self.value(member.type, member.name)

    # ---- calls --------------------------------------------------------------

    def call(self) -> None:
        name = self.function = self.random.choice(list(self.functions))
        parameters = self.declared.functions[name]
        self.has_arrays = any(self.declared.resolved(each.type).stars for each in parameters)
        self.kept = []
        values = [self.value(each.type, each.name) for each in parameters]
        before = [self.outputs(each, value) for each, value in zip(parameters, values, strict=True)]
        self.note(name, values)
        result = self.functions[name](*values)
        assert result in self.results, (name, result)
        assert result != driver.CUresult.CUDA_ERROR_UNKNOWN, name
        if result == 0:
            for parameter, value, old in zip(parameters, values, before, strict=True):
                self.keep(parameter, set(self.outputs(parameter, value)) - set(old))

    def note(self, name: str, values: list[Any]) -> None:
        shown = ", ".join(str(getattr(each, "value", each)) for each in values)
        self.log[:] = f"{name}({shown})\n".encode()[:LINE].ljust(LINE)

    def outputs(self, parameter: Variable, value: Any) -> list[int]:
        """The handles in the array that a parameter leads to."""
        found = self.declared.resolved(parameter.type)
        if found.stars != 1 or not self.declared.is_handle(found.name) or not value.value:
            return []
        return list((ctypes.c_uint64 * OUTPUTS).from_address(value.value))

    def keep(self, parameter: Variable, handles: set[int]) -> None:
        known = self.handles.setdefault(parameter.type.name, [])
        for handle in sorted(handles):
            if len(known) < 24:
                known.append(handle)
            else:
                known[self.random.randrange(len(known))] = handle

    def run(self) -> None:
        for count in range(CALLS):
            if count % 50 == 0:  # otherwise most calls would only tell that there is no context
                _, context = driver.cuDevicePrimaryCtxRetain(self.random.randrange(2))
                driver.cuCtxSetCurrent(context)
            if count % 200 == 0:
                testing.reset()
            self.call()


def main() -> None:
    seed, path, threads = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.chdir(Path(path).parent)
    testing.simulate(2, driver_version=driver.CUDA_VERSION, memory=1 << 26)
    driver.cuInit(0)
    map_scratch()
    handles: dict[str, list[int]] = {"CUdeviceptr": [SCRATCH]}
    with open(path, "wb") as file:
        file.truncate(LINE * threads)
    with open(path, "r+b") as file:
        log = memoryview(mmap.mmap(file.fileno(), LINE * threads))
    errors = []

    def run(number: int) -> None:
        try:
            part = log[LINE * number : LINE * (number + 1)]
            Fuzzer(seed * 100 + number, handles, part).run()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(1, threads)]
    for worker in workers:
        worker.start()
    run(0)
    for worker in workers:
        worker.join()
    for error in errors:
        raise error


if __name__ == "__main__":
    main()
