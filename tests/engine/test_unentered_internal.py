"""Context managers that were made and never entered, which would do nothing in silence."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable

import pytest

import userstream as us
from helpers import CAI
from userstream import _unentered


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def dropped(make: Callable[[], object]) -> list[warnings.WarningMessage]:
    """Return the warnings of what a function makes, which nobody enters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
        gc.collect()
    return caught


def test_a_borrow(memory: int) -> None:
    lines = []

    def forgotten() -> object:
        lines.append(line() + 1)
        return us.borrow(CAI(memory, stream=-1))

    (warning,) = dropped(forgotten)
    assert warning.category is ResourceWarning
    assert "a borrow was never entered" in str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, lines[0])
    assert not us.streams(), "it does nothing"


def test_a_capture() -> None:
    with us.Stream.create(0) as stream:
        lines = []

        def forgotten() -> object:
            lines.append(line() + 1)
            return stream.capture()

        (warning,) = dropped(forgotten)
        assert warning.category is ResourceWarning
        assert "a capture was never entered" in str(warning.message)
        assert (warning.filename, warning.lineno) == (__file__, lines[0])


def test_a_capture_is_no_graph() -> None:
    with us.Stream.create(0) as stream:
        graph = stream.capture()
        with pytest.raises(AttributeError, match=r"'launch': write `with stream\.capture\(\) as"):
            graph.launch(stream)  # type: ignore[attr-defined]
        assert not hasattr(graph, "instantiate")
        assert not stream.is_capturing
        with graph:
            assert stream.is_capturing


def test_an_activation() -> None:
    with us.Stream.create(0) as stream:
        lines = []

        def forgotten() -> object:
            lines.append(line() + 1)
            return stream.activate()

        (warning,) = dropped(forgotten)
        assert warning.category is ResourceWarning
        assert "an activation was never entered" in str(warning.message)
        assert (warning.filename, warning.lineno) == (__file__, lines[0])


def test_what_was_entered_or_refused(memory: int) -> None:
    buffer = CAI(memory, stream=-1)

    def borrowed() -> None:
        borrow = us.borrow(buffer)
        for _ in range(2):
            with borrow:
                pass

    def refused() -> None:
        with pytest.raises(TypeError, match="stream="):
            us.borrow(buffer, stream=1.5).__enter__()  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="activate="):
            us.borrow(buffer, activate=1.5)  # type: ignore[arg-type]

    def captured() -> None:
        with us.Stream.create(0) as stream, stream.capture():
            pass

    def activated() -> None:
        with us.Stream.create(0) as stream, stream.activate():
            pass

    def not_activated() -> None:
        stream = us.Stream.create(0)
        with pytest.raises(ValueError, match="no current stream"):
            stream.activate("jax")
        activation = stream.activate()
        stream.close()
        with pytest.raises(us.ClosedError):
            activation.__enter__()

    for use in (borrowed, refused, captured, activated, not_activated):
        assert not dropped(use)


def test_nothing_is_made_for_each_block(memory: int) -> None:
    """A destructor would lose the Ctrl-C that comes in it, so none runs where all is well."""
    buffer = CAI(memory, stream=-1)
    with us.borrow(buffer):
        pass
    spare = list(_unentered.spare)
    assert spare
    for _ in range(10):
        with us.borrow(buffer), us.borrow(buffer):
            pass
    assert len(_unentered.spare) <= len(spare) + 1
    assert all(each in _unentered.spare for each in spare)
    assert all(each.code is None for each in _unentered.spare), "which would keep modules alive"
