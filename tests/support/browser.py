"""Headless browsers, told what to do through a pipe or a socket: no package is needed.

And what a page has embedded, for which no browser is needed either.
"""

from __future__ import annotations

import abc
import base64
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
_SECONDS = 60  # until a browser has to have done something

# Of keys that no character names: the number for Chromium, the character for Firefox (WebDriver).
_KEYS = {
    "Tab": (9, "\ue004"),
    "Enter": (13, "\ue007"),
    "Shift": (16, "\ue008"),
    "Escape": (27, "\ue00c"),
    "ArrowLeft": (37, "\ue012"),
    "ArrowUp": (38, "\ue013"),
    "ArrowRight": (39, "\ue014"),
    "ArrowDown": (40, "\ue015"),
}


def data_of(html: str) -> dict[str, Any]:
    """Return what is embedded, found as a browser finds it: until the first end tag."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', html, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


class Browser(abc.ABC):
    """One tab."""

    said: list[str]  # errors and warnings of scripts, and of the policy, since the page was opened

    def open(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Load a file, and wait until it has been painted."""
        self._resize(width, height)
        self._colours(dark=dark)
        self._navigate(path.as_uri())
        # A page before this one may have been complete as well.
        self.until(
            f"document.readyState === 'complete' && location.href === {json.dumps(path.as_uri())}"
        )
        self.painted()

    def painted(self) -> None:
        """Wait for the next picture."""
        frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.run(f"{frame}.then(() => null)")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other: characters, or names as in ``KeyboardEvent.key``."""
        for key in keys:
            self._press(key)
        self.painted()

    @abc.abstractmethod
    def run(self, script: str) -> Any:
        """Evaluate an expression, and wait for it if it is a promise; return its value."""

    @abc.abstractmethod
    def click(self, x: float, y: float) -> None: ...

    @abc.abstractmethod
    def wheel(self, x: float, y: float, delta: float) -> None: ...

    @abc.abstractmethod
    def screenshot(self, path: Path) -> None:
        """Write what is seen into a PNG."""

    @abc.abstractmethod
    def pdf(self, path: Path) -> None:
        """Print into a PDF."""

    @abc.abstractmethod
    def _resize(self, width: int, height: int) -> None: ...

    @abc.abstractmethod
    def _colours(self, *, dark: bool) -> None: ...

    @abc.abstractmethod
    def _navigate(self, address: str) -> None: ...

    @abc.abstractmethod
    def _press(self, key: str) -> None: ...


# -- Chromium -------------------------------------------------------------------------------------

_CHROMIUM_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
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


class Chromium(Browser):
    """A tab of Chromium, by the DevTools protocol."""

    def __init__(self, to: int, back: BinaryIO) -> None:
        self._to = to
        self._back = back
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.said = []
        self.asked: list[str] = []  # addresses that were asked for
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def run(self, script: str) -> Any:
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.painted()

    def wheel(self, x: float, y: float, delta: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta)
        self.painted()

    def screenshot(self, path: Path) -> None:
        shot = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        printed = self._call("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(printed["data"]))

    def _resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def _colours(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def _navigate(self, address: str) -> None:
        self.said.clear()
        self.asked.clear()
        self._call("Page.navigate", url=address)

    def _press(self, key: str) -> None:
        code, _ = _KEYS.get(key, (0, ""))
        text = {"text": "\r" if key == "Enter" else key} if not code or key == "Enter" else {}
        told = {"key": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", **told, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **told)

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
def chromium(profile: Path) -> Iterator[Chromium]:
    """Start Chromium with an empty profile."""
    assert CHROMIUM is not None
    read_there, to = os.pipe()
    back, write_there = os.pipe()
    command = [CHROMIUM, *_CHROMIUM_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    command = [sys.executable, "-c", _BEGIN, str(read_there), str(write_there), *command]
    with _process(command, pass_fds=(read_there, write_there)):
        os.close(read_there)
        os.close(write_there)
        try:
            with open(back, "rb", buffering=0) as answers:
                yield Chromium(to, answers)
        finally:
            os.close(to)


# -- Firefox --------------------------------------------------------------------------------------

_FIREFOX_PREFERENCES = {
    "marionette.port": 0,  # any: it writes the one that it took into its profile
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.update.disabledForTesting": True,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
}
_MESSAGES = """
    Services.console.getMessageArray()
        .filter((each) => each instanceof Ci.nsIScriptError && each.sourceName.startsWith("file:"))
        .map((each) => each.errorMessage)
"""


class Firefox(Browser):
    """A tab of Firefox, by the Marionette protocol: commands of WebDriver over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._rest = b""
        self._next()  # which protocol it is
        self._call("WebDriver:NewSession")
        # Windows of Firefox are no narrower otherwise.
        self._as_firefox("document.documentElement.style.minWidth = '0'")

    @property
    def said(self) -> list[str]:  # type: ignore[override] # asked for when it is read
        found: list[str] = self._as_firefox(_MESSAGES)
        return found

    def run(self, script: str) -> Any:
        # Scripts run in a sandbox: what a page declares is not seen there, but its document is.
        return self._call("WebDriver:ExecuteScript", script=f"return ({script})", args=[])["value"]

    def click(self, x: float, y: float) -> None:
        point = {"type": "pointerMove", "x": round(x), "y": round(y), "origin": "viewport"}
        press, release = ({"type": f"pointer{kind}", "button": 0} for kind in ("Down", "Up"))
        self._act("pointer", point, press, release)
        self.painted()

    def wheel(self, x: float, y: float, delta: float) -> None:
        place = {"x": round(x), "y": round(y), "origin": "viewport"}
        self._act("wheel", {"type": "scroll", **place, "deltaX": 0, "deltaY": round(delta)})
        self.painted()

    def screenshot(self, path: Path) -> None:
        shot = self._call("WebDriver:TakeScreenshot", full=False)
        path.write_bytes(base64.b64decode(shot["value"]))

    def pdf(self, path: Path) -> None:
        printed = self._call("WebDriver:Print", background=True)
        path.write_bytes(base64.b64decode(printed["value"]))

    def _resize(self, width: int, height: int) -> None:
        for _ in range(2):  # by the difference between the window and what it shows
            outer = self.run("[outerWidth - innerWidth, outerHeight - innerHeight]")
            self._call("WebDriver:SetWindowRect", width=width + outer[0], height=height + outer[1])
        self.until(f"innerWidth === {width} && innerHeight === {height}")

    def _colours(self, *, dark: bool) -> None:
        scheme = "layout.css.prefers-color-scheme.content-override"
        self._as_firefox(f"Services.prefs.setIntPref('{scheme}', {0 if dark else 1})")

    def _navigate(self, address: str) -> None:
        self._as_firefox("Services.console.reset()")
        self._call("WebDriver:Navigate", url=address)

    def _press(self, key: str) -> None:
        value = _KEYS[key][1] if key in _KEYS else key
        self._act("key", *({"type": f"key{kind}", "value": value} for kind in ("Down", "Up")))

    def _act(self, device: str, *actions: dict[str, Any]) -> None:
        source = {"type": device, "id": device, "actions": list(actions)}
        self._call("WebDriver:PerformActions", actions=[source])
        self._call("WebDriver:ReleaseActions")

    def _as_firefox(self, script: str) -> Any:
        """Evaluate an expression with the rights of the browser itself."""
        self._call("Marionette:SetContext", value="chrome")
        try:
            return self.run(script)
        finally:
            self._call("Marionette:SetContext", value="content")

    def _call(self, command: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = json.dumps([0, number, command, parameters]).encode()
        self._connection.sendall(b"%d:%s" % (len(message), message))
        _, answered, error, result = self._next()
        assert (answered, error) == (number, None), (command, error)
        return result

    def _next(self) -> Any:
        while b":" not in self._rest:
            self._receive()
        length, _, self._rest = self._rest.partition(b":")
        while len(self._rest) < int(length):
            self._receive()
        message, self._rest = self._rest[: int(length)], self._rest[int(length) :]
        return json.loads(message)

    def _receive(self) -> None:
        data = self._connection.recv(1 << 16)
        assert data, "the browser has ended"
        self._rest += data


@contextmanager
def firefox(profile: Path) -> Iterator[Firefox]:
    """Start Firefox with an empty profile."""
    assert FIREFOX is not None
    profile.mkdir(exist_ok=True)
    preferences = (
        f"user_pref({json.dumps(name)}, {json.dumps(value)});\n"
        for name, value in _FIREFOX_PREFERENCES.items()
    )
    (profile / "user.js").write_text("".join(preferences))
    flags = ("--headless", "--no-remote", "--marionette", "--remote-allow-system-access")
    with _process([FIREFOX, *flags, "--profile", str(profile)]):
        port = profile / "MarionetteActivePort"
        end = time.monotonic() + _SECONDS
        while not (port.exists() and port.read_text()):
            assert time.monotonic() < end, "Firefox does not begin"
            time.sleep(0.05)
        with socket.create_connection(("127.0.0.1", int(port.read_text())), _SECONDS) as connection:
            yield Firefox(connection)


@contextmanager
def _process(command: list[str], pass_fds: tuple[int, ...] = ()) -> Iterator[None]:
    """Run a browser, and end it with all of its processes."""
    process = subprocess.Popen(
        command,
        pass_fds=pass_fds,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
