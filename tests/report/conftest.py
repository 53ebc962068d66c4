"""Fixtures of the tests of `python -m userstream`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from userstream import __main__, testing


@pytest.fixture
def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Any]]:
    """Run the command in this process, so that faults can be injected."""
    monkeypatch.setattr(testing, "simulate", lambda: None)  # it runs already, with more devices

    def main(*arguments: str) -> tuple[int, Any]:
        status = __main__.main(["--simulate", *arguments])
        out, err = capsys.readouterr()
        assert err == ""
        return status, json.loads(out) if "--json" in arguments else out

    return main
