"""Streams on devices and drivers that lack a feature."""

from __future__ import annotations

import ast
import ctypes
import inspect
from collections.abc import Iterator

import cuda.core
import pytest

import userstream as us
from helpers import (
    pinned_memory,
)
from userstream import (
    AccessPolicyWindow,
    FlushRemoteWrites,
    WaitFlags,
    WaitValue,
    WriteValue,
)
from userstream._driver import streams as attributes
from userstream._driver import values
from userstream._engine import lane


def test_type_checkers_are_told_what_cuda_core_has() -> None:
    (told,) = (
        {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
        for kind in ast.walk(ast.parse(inspect.getsource(lane)))
        if isinstance(kind, ast.ClassDef) and kind.name == "CoreStream"
    )
    assert told <= set(dir(cuda.core.Stream))
    assert {"context", "is_closed", "record"} <= told


def test_a_device_without_windows(stream: us.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "device_attribute", lambda device, which: 0)
    with pytest.raises(us.NotSupportedError, match="no access-policy windows"):
        stream.set_attribute("access_policy_window", AccessPolicyWindow(0, 8))
    with pytest.raises(ValueError, match="has 1 memory"):
        stream.set_attribute("mem_sync_domain_map", (0, 1))


GEQ, EQ, AND, NOR, FLUSH = WaitFlags


@pytest.fixture
def pinned() -> Iterator[int]:
    with pinned_memory() as address:
        ctypes.memset(address, 0, 256)
        yield address


def test_what_the_device_lacks(
    stream: us.Stream, pinned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "device_attribute", lambda device, which: 0)
    for use, match in (
        (lambda: stream.write_value_64(pinned, 1), "64-bit values"),
        (lambda: stream.wait_value_64(pinned, 0), "64-bit values"),
        (lambda: stream.wait_value_32(pinned, 0, NOR), "NOR"),
        (lambda: stream.wait_value_32(pinned, 0, GEQ | FLUSH), "flushes"),
        (lambda: stream.batch_mem_op([WriteValue(pinned, 1, 64)]), "64-bit values"),
        (lambda: stream.batch_mem_op([WaitValue(pinned, 1, NOR)]), "NOR"),
        (lambda: stream.batch_mem_op([FlushRemoteWrites()]), "flushes"),
    ):
        with pytest.raises(us.NotSupportedError, match=f"device 0 does not support .*{match}"):
            use()
    stream.wait_value_32(pinned, 0, EQ)
    stream.sync(timeout=10)


@pytest.mark.simulated
def test_memory_that_the_device_cannot_access(
    stream: us.Stream, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "can_access", lambda address: False)
    with pytest.raises(ValueError, match="device 0 cannot access"):
        stream.write_value_32(memory, 1)
