"""Take the picture of a race in the page of `observe`: ``python docs/pictures/page.py``.

It needs Chromium, and runs the program of the page "A wrong loss" on the simulated driver.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
STORY = ROOT / "docs/examples/story"


def main() -> None:
    """Take it."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from browser import chromium

    with tempfile.TemporaryDirectory() as name:
        page = Path(name) / "seen.html"
        observe = ("-m", "userstream", "observe", "--simulate", "--report", str(page))
        # 66: there are races.
        command = [sys.executable, *observe, "prefetch.py"]
        assert subprocess.run(command, cwd=STORY, check=False).returncode == 66
        with chromium(Path(name) / "profile") as tab:
            tab.open(page, 1160, 520)
            tab.press("n", "n")
            tab.screenshot(ROOT / "docs/_static/observed.png")


if __name__ == "__main__":
    main()
