"""``CONTRIBUTING.md``: its layers are those, and adding a framework takes no more than it says."""

from __future__ import annotations

import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import userstream as us
from helpers import fill
from internals import add_framework
from project.test_architecture import LAYERS

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_layers() -> None:
    layout, _ = PAGE.split("## Tests")
    items = re.findall(r"^\d+\. (.*?)(?::|$)", layout, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(items)) == LAYERS


class Array:
    """An array of Frame: without any protocol."""

    __module__ = "frame.arrays"

    def __init__(self, pointer: int, shape: tuple[int, ...], stream: us.Stream) -> None:
        self.device, self.pointer, self.shape = 0, pointer, shape
        self.size = self.nbytes = math.prod(shape)
        self.dtype = np.dtype("u1")
        self.stream = stream.handle


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Add the framework as the page says."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    module = types.ModuleType("userstream._buffers.frame")
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    add_framework(monkeypatch, "frame", "frame")
    return module


@pytest.mark.usefixtures("frame")
def test_a_framework_in_one_file(producer: us.Stream, memory: int) -> None:
    array: Any = Array(memory, (4, 64), producer)
    info = us.describe(array)
    assert (info.source, info.device_id, info.memory) == ("frame.Array", 0, "device")
    assert (info.shape, info.strides, info.nbytes) == ((4, 64), (64, 1), 256)
    assert (info.producer, info.ordering) == (int(producer.handle), "exact")
    with us.borrow(array) as stream:
        assert stream is us.get_stream(array)
        fill(stream, memory, 7)
    fill(producer, memory + 64, 9, 192)  # after the borrow
    assert us.asnumpy(array).tolist() == [[7] * 64] + [[9] * 64] * 3
    us.copyto(array, np.arange(256, dtype="u1").reshape(4, 64))
    assert us.asnumpy(array)[3, 63] == 255


def test_it_is_refused_without_the_file(producer: us.Stream, memory: int) -> None:
    with pytest.raises(us.UnsupportedBufferError):
        us.describe(Array(memory, (256,), producer))


def test_the_page_about_the_inside_names_what_exists() -> None:
    """Each file in its table exists, and defines the names that follow the file."""
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "inside.md").read_text()
    table = page.split("## Where to look\n")[1]
    package = Path(us.__file__).parent
    for named in re.findall(r"`([\w/]+/[\w/.]+)`", table):
        if not named.startswith("testing/driver") and not named.endswith(".c"):
            assert (package / named).is_file(), named
    listed = r"`([\w/]+\.(?:py|c))`: ((?:`[\w.]+`(?:, | and )?)+)"
    pairs = re.findall(listed, table)
    assert len(pairs) >= 7
    for named, names in pairs:
        if not (package / named).exists():  # C is not in wheels
            continue
        text = (package / named).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            last = name.rpartition(".")[2]
            in_python = rf"^\s*(?:async def|def|class) {last}\b"
            in_c = rf"^(?:\w+ )+\*?{last}\("
            defined = re.search(in_python if named.endswith(".py") else in_c, text, re.MULTILINE)
            assert defined, f"{named} does not define {name}"
