"""Refuses subinterpreters, before anything is imported that does so for a reason of its own."""

import _thread

# Python 3.11 cannot tell; there cuda.bindings refuses.
if not getattr(_thread, "_is_main_interpreter", lambda: True)():
    raise ImportError(
        "userstream cannot be imported in a subinterpreter, as NumPy and cuda.bindings cannot: "
        "use threads or processes"
    )
