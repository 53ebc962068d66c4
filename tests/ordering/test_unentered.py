"""Warnings about context managers that were created and never entered."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable

import pytest

import userstream as us
from helpers import CAI, run_python


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def dropped(make: Callable[[], object]) -> list[warnings.WarningMessage]:
    """Return the warnings about the context manager that a function creates and nobody enters."""
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
    assert warning.category is RuntimeWarning
    assert "a borrow was never entered" in str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, lines[0])
    assert not us.streams(), "it does nothing"


def test_it_is_shown_without_any_option() -> None:
    done = run_python(
        """
        import userstream as us

        class Array:
            __cuda_array_interface__ = {}

        us.borrow(Array())
        """,
    )
    assert done.returncode == 0
    assert "RuntimeWarning: a borrow was never entered, so it did nothing" in done.stderr


def test_a_capture() -> None:
    with us.Stream.create(0) as stream:
        lines = []

        def forgotten() -> object:
            lines.append(line() + 1)
            return stream.capture()

        (warning,) = dropped(forgotten)
        assert warning.category is RuntimeWarning
        assert "a capture was never entered" in str(warning.message)
        assert (warning.filename, warning.lineno) == (__file__, lines[0])


def test_a_capture_is_not_a_graph() -> None:
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
        assert warning.category is RuntimeWarning
        assert "an activation was never entered" in str(warning.message)
        assert (warning.filename, warning.lineno) == (__file__, lines[0])


def test_no_warning_about_a_block_that_was_entered_or_refused(memory: int) -> None:
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
