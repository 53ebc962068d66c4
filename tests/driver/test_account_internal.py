"""The account on which a thread calls the driver, as the recorder of `observe` reads it."""

from __future__ import annotations

import ctypes
import threading

import pytest

import userstream as us
from userstream._driver import account
from userstream._engine import dispatcher, watcher


def current() -> int:
    """Return the account of the calling thread, read as the recorder reads it."""
    function = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_ubyte))(account.address())
    return function()[0]


def test_the_account_is_restored_after_a_call() -> None:
    assert current() == account.PROGRAM
    assert account.on(account.HOUSEKEEPING, lambda: (current(), 5)) == (account.HOUSEKEEPING, 5)
    assert current() == account.PROGRAM
    with pytest.raises(ZeroDivisionError):
        account.on(account.FUTURE, lambda: 1 / 0)
    assert current() == account.PROGRAM


def test_calls_nest_and_threads_have_accounts_of_their_own() -> None:
    def other() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(current()))
        thread.start()
        thread.join(10)
        return found[0]

    def outer() -> tuple[int, int, int]:
        return account.on(account.FUTURE, current), current(), other()

    expected = (account.FUTURE, account.HOUSEKEEPING, account.PROGRAM)
    assert account.on(account.HOUSEKEEPING, outer) == expected


def test_an_account_that_does_not_exist_is_refused() -> None:
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="there is no account"):
            account.on(wrong, current)
        with pytest.raises(ValueError, match="there is no account"):
            account.set_for_thread(wrong)
    with pytest.raises(TypeError):
        account.on(account.PROGRAM)
    assert current() == account.PROGRAM


def test_callbacks_and_host_functions_of_the_program_run_on_its_account() -> None:
    found: list[int] = []
    done = threading.Event()

    def look(*_: object) -> None:
        found.append(current())
        if len(found) == 3:
            done.set()

    stream = us.get_stream(0)
    stream.launch_host_func(look)
    stream.add_callback(look)
    us.completion(stream).add_done_callback(look)
    assert done.wait(10)
    assert found == [account.PROGRAM] * 3


def test_the_threads_of_userstream_poll_on_the_account_of_a_future() -> None:
    found: dict[str, int] = {}

    class Point:
        target = None
        ordered = False

        def is_done(self) -> bool:
            found[threading.current_thread().name] = current()
            return True

        def abandon(self) -> None:
            pass

    done = threading.Event()
    watcher.watch([watcher.Watch(Point(), lambda *_: done.set())])
    assert done.wait(10)
    call = dispatcher.Call(done.set)
    call.completion = Point()
    done.clear()
    dispatcher.started().launch("no stream", call, lambda _: None)
    assert done.wait(10)
    assert found == {"userstream-watcher": account.FUTURE, "userstream-dispatcher": account.FUTURE}
