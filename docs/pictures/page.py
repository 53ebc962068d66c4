"""Take the picture of a race in the page of `observe`: ``python docs/pictures/page.py``.

It needs Chromium, and runs ``prefetch.py`` on the simulated driver.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from cuda.core import Device

import userstream as us
from userstream.testing import simulate

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Take it."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from browser import browser

    simulate()
    Device(0).set_current()
    program: dict[str, Any] = {}
    file = "prefetch.py"  # as the picture names it, wherever it lies
    exec(compile(Path(__file__).with_name(file).read_text(), file, "exec"), program)
    train = program["train"]
    train(4)
    with us.observe() as seen:
        train(8)
    with tempfile.TemporaryDirectory() as name, browser(Path(name) / "profile") as tab:
        seen.save(Path(name) / "page.html")
        tab.open(Path(name) / "page.html", 1160, 480)
        tab.run("document.querySelector('.card.race').click()")
        tab.painted()
        tab.screenshot(ROOT / "docs/_static/observed.png")
    us.close()


if __name__ == "__main__":
    main()
