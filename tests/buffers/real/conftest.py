"""Fixtures of the tests with the real frameworks, on a real GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest

from helpers import device_current, framework


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    return framework("torch")


@pytest.fixture(scope="module")
def cupy() -> ModuleType:
    return framework("cupy")


@pytest.fixture(scope="module")
def jax() -> ModuleType:
    return framework("jax")


@pytest.fixture(scope="module")
def numba_cuda() -> ModuleType:
    return framework("numba.cuda")


@pytest.fixture(scope="module")
def rmm() -> ModuleType:
    return framework("rmm")


@pytest.fixture(scope="module")
def dali() -> ModuleType:
    return framework("nvidia.dali")


@pytest.fixture(autouse=True)
def _current_context() -> Iterator[None]:
    """Make a context current before a framework, on its first use, makes one current."""
    with device_current(0):
        yield
        gc.collect()  # also undoes what destructors of frameworks make current
