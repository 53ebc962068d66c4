"""A headless Chromium, told what to do through a pipe: no driver and no package is needed.

And what a page has embedded, for which no browser is needed either.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)
# It reads from 3 and writes to 4.
_BEGIN = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.closerange(5, 256)
os.execv(sys.argv[3], sys.argv[3:])
"""


def data_of(html: str) -> dict[str, Any]:
    """Return what is embedded, found as a browser finds it: until the first end tag."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', html, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


class Browser:
    """One tab."""

    def __init__(self, to: int, back: BinaryIO) -> None:
        self._to = to
        self._back = back
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.said: list[str] = []  # errors and warnings of the console, and of the policy
        self.asked: list[str] = []  # addresses that were asked for
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Load a file, and wait until it has been painted."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=path.as_uri())
        # A page before this one may have been complete as well.
        complete = (
            f"document.readyState === 'complete' && location.href === {json.dumps(path.as_uri())}"
        )
        self.until(complete)
        self.painted()

    def painted(self) -> None:
        """Wait for the next picture."""
        frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.run(frame)

    def run(self, script: str) -> Any:
        """Evaluate an expression; return its value."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + 60
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.painted()

    def wheel(self, x: float, y: float, delta: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta)
        self.painted()

    def screenshot(self, path: Path) -> None:
        """Write what is seen into a PNG."""
        shot = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._back.read(1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(parameters["request"]["url"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start one with an empty profile."""
    assert PROGRAM is not None
    read_there, to = os.pipe()
    back, write_there = os.pipe()
    command = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", _BEGIN, str(read_there), str(write_there), *command],
        pass_fds=(read_there, write_there),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_there)
    os.close(write_there)
    try:
        with open(back, "rb", buffering=0) as answers:
            yield Browser(to, answers)
    finally:
        os.close(to)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
