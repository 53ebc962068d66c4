"""The page of an observation: what is in it, and what it shows in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import observed
import userstream as us
from browser import PROGRAM, Browser, browser, data_of
from helpers import checked
from observed import a_room, captured, copy, fill, handle, no_edge, watched
from userstream._observe.judge import page as page_module
from userstream._observe.judge.page import page
from userstream.testing import Pointer, kernel

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
]

PIECES = Path(page_module.__file__).parent / "pieces"


def shown(seen: us.Observation, tmp_path: Path) -> dict[str, Any]:
    seen.save(tmp_path / "seen.html")
    return data_of((tmp_path / "seen.html").read_text())


def names(document: dict[str, Any]) -> list[str]:
    timeline = document["timeline"]
    return [timeline["names"][entry[0]] for entry in timeline["entries"]]


# -- what is in it --------------------------------------------------------------------------------


def test_operations_edges_and_waits_are_told_in_their_order(tmp_path: Path) -> None:
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        room.b.wait(room.a)
        copy(room.y, room.x, room.b)
        room.b.sync()
        document = shown(seen, tmp_path)
        streams = [f"stream {handle(each):#x} of device 0" for each in (room.a, room.b)]
    timeline = document["timeline"]
    filling, copying, waiting = timeline["entries"]
    rows = [row["name"] for row in timeline["rows"]]
    assert [rows[filling[1]], rows[copying[1]]] == streams
    assert waiting[1] == -1  # of the host
    assert rows[waiting[2]] == "MainThread"
    assert [filling[7], copying[7], waiting[7]] == [[], [0], [1]]
    assert [entry[6] & 1 for entry in timeline["entries"]] == [0, 0, 1]
    assert filling[8] == [[room.x, observed.SIZE, 1]]
    assert copying[8] == [[room.x, observed.SIZE, 0], [room.y, observed.SIZE, 1]]
    at, *frames = timeline["stacks"][filling[3]]
    assert timeline["frames"][frames[at]][2] == "fill"


def test_a_stream_that_only_passes_an_edge_on_is_no_gap(tmp_path: Path) -> None:
    with a_room() as room, us.observe() as seen:
        third = room.stream()
        fill(room.x, room.a)
        room.b.wait(room.a)
        third.wait(room.b)
        fill(room.x, third)
        document = shown(seen, tmp_path)
    assert document["timeline"]["entries"][1][7] == [0]


def test_default_streams_and_contexts_have_edges_too(tmp_path: Path) -> None:
    with a_room() as room, us.observe() as seen:
        blocking = room.stream(nonblocking=False)
        fill(room.x, blocking)
        fill(room.x, observed.LEGACY)
        fill(room.x, blocking)
        with us.borrow(driver.CUdeviceptr(room.x), stream=room.a):  # after all of the device
            fill(room.x, room.a)
        document = shown(seen, tmp_path)
    found = dict(zip(range(4), document["timeline"]["entries"], strict=False))
    assert found[1][7] == [0]
    assert found[2][7] == [1]
    assert set(found[3][7]) == {1, 2}


def test_what_is_captured_is_marked_and_a_launch_is_an_operation(tmp_path: Path) -> None:
    with a_room() as room, us.observe() as seen:
        graph = captured(room, lambda: fill(room.x, room.a))
        checked(driver.cuGraphLaunch(graph, handle(room.a)))
        fill(room.x, room.b)
        document = shown(seen, tmp_path)
    assert names(document) == ["cuMemsetD8Async", "cuGraphLaunch", "cuMemsetD8Async"]
    assert [entry[6] >> 1 & 1 for entry in document["timeline"]["entries"]] == [1, 0, 0]
    assert document["timeline"]["entries"][1][8] == [[room.x, observed.SIZE, 1]]
    assert document["races"][0]["entries"] == [1, 2]


@kernel("shown_on_a_page")
def _any(grid: Any, block: Any, to: Pointer) -> None:
    pass


def test_what_a_kernel_does_with_a_buffer_may_not_be_known(tmp_path: Path) -> None:
    with a_room() as room, us.observe() as seen:
        code = ObjectCode.from_ptx(b"any").get_kernel("shown_on_a_page")
        launch(room.a, LaunchConfig(grid=1, block=1), code, room.x)
        document = shown(seen, tmp_path)
    assert names(document) == ["shown_on_a_page"]
    assert document["timeline"]["entries"][0][8] == [[room.x, 1, 2]]


def test_races_are_tied_to_their_operations(tmp_path: Path) -> None:
    seen, _ = watched(no_edge)
    document = shown(seen, tmp_path)
    first, second = document["races"][0]["entries"]
    assert [names(document)[first], names(document)[second]] == ["cuMemsetD8Async", "cuMemcpyAsync"]
    assert document["races"][0]["allocated_at"] is None  # that was before
    assert "entries" not in seen.as_dict()["races"][0]


def test_the_oldest_operations_are_dropped_and_counted(tmp_path: Path) -> None:
    with a_room() as room:
        with us.observe(timeline=10) as seen:
            no_edge(room)
            room.release()
            us.wait_for_device(0)
            for _ in range(50):
                fill(room.y, room.a)
                room.b.wait(room.a)
                fill(room.y, room.b)
                room.a.wait(room.b)
        with us.observe(timeline=0) as nothing:
            fill(room.x, room.a)
    timeline = shown(seen, tmp_path)["timeline"]
    assert len(timeline["entries"]) == 10
    assert timeline["first"] == timeline["dropped"] >= 92
    edges = [entry[7] for entry in timeline["entries"]]
    assert edges == [[], *([number] for number in range(9))]  # none from what was dropped
    assert shown(seen, tmp_path)["races"][0]["entries"][1] < timeline["first"]
    assert shown(nothing, tmp_path)["timeline"]["entries"] == []


@pytest.mark.parametrize(("timeline", "error"), [(-1, ValueError), (True, TypeError)])
def test_what_is_no_number_of_operations_is_refused(timeline: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"timeline must be .*, not {timeline}"):
        us.observe(timeline=timeline)


def test_no_name_ends_the_element_that_it_is_in() -> None:
    hostile = "</script><script>alert(1)</script><!-- {{script}} \u2028 \udc80 &amp;"
    document = {**a_document(3), "not_seen": [hostile]}
    html = page(document)
    assert data_of(html)["not_seen"] == [hostile]
    assert html.lower().count("</script") == 2
    assert html.count("alert(1)") == 1
    html.encode()  # whatever the names of files are


def test_it_loads_nothing_and_runs_nothing_else() -> None:
    html = page(a_document(3))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]
    assert not re.search(r"(?:src|href|action)=|https?://|url\(|@import|fetch\(", html)


def test_the_pieces_are_all_used_and_their_lines_are_short() -> None:
    assert {path.name for path in PIECES.iterdir()} == {
        "page.html",
        "page.css",
        *page_module._SCRIPTS,
    }
    for path in PIECES.iterdir():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, (path.name, number)


# -- the parts that need no screen ----------------------------------------------------------------


def a_document(count: int) -> dict[str, Any]:
    """Return a document with so many operations on three streams, and a race in the middle."""
    frames = [["/programs/train.py", line, "step"] for line in range(10, 20)]
    entries = []
    for number in range(count):
        after = [number - 1] if number % 3 else []
        touch = [0x7F0000000000 + number * 64, 64, number & 1]
        entries.append(
            [number % 4, number % 3, 3, number % 10, number * 1000, 700, 0, after, [touch]]
        )
    operation = {
        "name": "cuMemsetD8Async",
        "access": "write",
        "known": "exact",
        "stream": "stream 0x10 of device 0",
        "device": 0,
        "thread": "MainThread",
        "line": frames[0],
        "stack": frames[:1],
    }
    race = {
        "kind": "write after write",
        "address": 0x7F0000000000,
        "nbytes": 4096,
        "memory": "device",
        "allocated": frames[:1],
        "allocated_at": frames[0],
        "framework": "torch",
        "first": operation,
        "second": {**operation, "stream": "stream 0x11 of device 0"},
        "ordered_until": None,
        "possible": False,
        "count": 2,
        "advice": "let one wait for the other",
        "key": "race=write-after-write",
        "entries": [1000 + count // 2, 1000 + count // 2 + 1],
    }
    rows = [{"kind": "stream", "name": f"stream {0x10 + each:#x} of device 0"} for each in range(3)]
    return {
        "version": 1,
        "seconds": 1.5,
        "races": [race],
        "possible": [],
        "stalls": [],
        "calls": {"cuMemsetD8Async": count},
        "not_seen": [],
        "timeline": {
            "first": 1000,
            "dropped": 1000,
            "rows": [*rows, {"kind": "thread", "name": "MainThread"}],
            "names": ["scale_rows", "cuMemcpyAsync", "cuMemsetD8Async", "cuLaunchHostFunc"],
            "frames": frames,
            "stacks": [[0, place] for place in range(10)],
            "entries": entries,
        },
    }


SCENARIO = """
const assert = require("node:assert");
const model = readModel(JSON.parse(require("node:fs").readFileSync(0, "utf8")));
assert.deepEqual(model.rows.map((row) => row.kind), ["thread", "stream", "stream", "stream"]);
assert.deepEqual(model.entries[4].lane, 2);
assert.deepEqual(model.entries.slice(0, 4).map((entry) => entry.kind),
                 ["kernel", "copy", "fill", "signal"]);
assert.deepEqual(model.races[0].ends, [30, 31]);
assert.equal(search(model, "  "), null);
assert.equal(search(model, "SCALE_rows").length, 15);
assert.deepEqual(search(model, "train.py:12 in step").length, 6);
assert.deepEqual(search(model, "0x7f0000000041"), [1]);
assert.deepEqual(search(model, "nothing of it"), []);
assert.equal(duration(1500), "1.5 µs");
assert.equal(duration(0), "0 ns");
assert.equal(bytes(4096), "4 KiB");
assert.equal(count(1, "race"), "1 race");

const view = Object.assign(makeView(model), { width: 1000, height: 400 });
fit(view);
assert(toPixel(view, 0) > gutter(view) && toPixel(view, 60) < 1000);
const place = toPlace(view, 600);
zoom(view, 0.5, 600);
assert(Math.abs(toPlace(view, 600) - place) < 1e-9, "what is under the pointer stays there");
for (let i = 0; i < 100; i++) zoom(view, 0.5, 600);
assert(view.perPixel >= 1 / 160);
for (let i = 0; i < 100; i++) pan(view, 1e6, 1e6);
assert(toPlace(view, (1000 + gutter(view)) / 2) <= 60.001 && view.top >= 0);
fit(view);
const tops = rowTops(view);
const [begin, end] = spanOf(view, model.entries[4]).map((at) => toPixel(view, at));
assert.equal(entryAt(view, (begin + end) / 2, tops[2] + 5), model.entries[4]);
assert.equal(entryAt(view, (begin + end) / 2, tops[0] + 5), model.entries[4]);
assert.equal(entryAt(view, 3, tops[2] + 5), null);
view.scale = "time";
fit(view);
assert(toPixel(view, 59700) <= 1000 && toPixel(view, 59700) > 800);
showAround(view, [30, 31]);
assert(toPixel(view, 30000) > gutter(view) && toPixel(view, 31700) < 1000);
"""


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_the_model_and_the_view_without_a_browser() -> None:
    script = "".join((PIECES / name).read_text() for name in page_module._SCRIPTS) + SCENARIO
    done = subprocess.run(
        ["node", "-e", script],
        input=json.dumps(a_document(60)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("Chromium is not installed")
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def red_pixels(tab: Browser) -> int:
    """Return how many pixels of the timeline have the colour of races."""
    count = """(() => {
        const canvas = document.getElementById("canvas");
        const probe = document.createElement("canvas").getContext("2d");
        probe.fillStyle = getComputedStyle(canvas).getPropertyValue("--race").trim();
        probe.fillRect(0, 0, 1, 1);
        const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
        const { data } = canvas.getContext("2d").getImageData(0, 40, canvas.width, 1e3);
        let found = 0;
        for (let i = 0; i < data.length; i += 4)
            found += data[i] === r && data[i + 1] === g && data[i + 2] === b;
        return found;
    })()"""
    found: int = tab.run(count)
    return found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 400])
def test_a_browser_shows_the_race(tab: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    seen, _ = watched(no_edge)
    file = tmp_path / "seen.html"
    seen.save(file)
    tab.said.clear()
    tab.asked.clear()
    tab.open(file, width, 800, dark=dark)
    assert tab.said == []
    assert tab.asked == [file.as_uri()]
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert "1 race, " in tab.run("document.getElementById('summary').textContent")
    card = tab.run("document.querySelector('.card.race').textContent")
    assert "read after write" in card
    assert f"{observed.__file__}:" in card
    assert red_pixels(tab) > 100
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark


def test_what_gets_into_the_page_is_not_run(tab: Browser, tmp_path: Path) -> None:
    document = a_document(30)
    document["not_seen"] = ["<img src=x onerror='document.title=1'></script><script>alert(1)"]
    html = page(document).replace("</body>", "<script>document.title = 'ran'</script></body>")
    file = tmp_path / "hostile.html"
    file.write_text(html)
    tab.asked.clear()
    tab.open(file, 900, 600)
    assert tab.run("document.title").startswith("Streams")
    assert tab.run("document.images.length") == 0
    assert tab.asked == [file.as_uri()]
    assert "Content Security Policy" in " ".join(tab.said)


@pytest.mark.parametrize("framework", ["torch", None])
def test_who_allocated_the_memory_is_shown_if_that_is_known(
    tab: Browser, tmp_path: Path, framework: str | None
) -> None:
    document = a_document(30)
    document["races"][0]["framework"] = framework
    file = tmp_path / "allocated.html"
    file.write_text(page(document))
    tab.open(file, 900, 600)
    card = tab.run("document.querySelector('.card.race').textContent")
    assert ("allocated by torch/programs/train.py:10 in step" in card) is (framework is not None)


def test_a_hundred_thousand_operations_can_be_looked_through(tab: Browser, tmp_path: Path) -> None:
    file = tmp_path / "large.html"
    file.write_text(page(a_document(100_000)))
    tab.said.clear()
    tab.open(file, 1400, 800)
    assert "1,000 older ones were dropped" in tab.run("document.getElementById('note').innerText")
    assert red_pixels(tab) > 100  # it begins at the race
    for _ in range(10):
        tab.wheel(600, 300, 800)
    tab.run("document.getElementById('all').click()")
    tab.painted()
    tab.run("document.getElementById('scale').click()")
    tab.painted()
    tab.run("document.getElementById('scale').click()")
    tab.run(
        "{ const input = document.getElementById('search'); input.value = 'scale_rows';"
        " input.dispatchEvent(new Event('input'));"
        " input.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'})); }"
    )
    tab.painted()
    assert tab.run("document.getElementById('matches').textContent") == "25,000"
    assert "scale_rows" in tab.run("document.querySelector('#detail h2').textContent")
    assert tab.said == []


def test_a_click_shows_an_operation_and_one_on_a_race_brings_it_in(
    tab: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(a_document(60)))
    tab.open(file, 1400, 800)
    x, y = tab.run(
        "(() => { const { top, left } = document.getElementById('canvas').getBoundingClientRect();"
        " return [left + 188 + 25, top + 38 + 15]; })()"
    )
    tab.run("document.getElementById('in').click(); document.getElementById('in').click()")
    tab.run("document.getElementById('canvas').focus()")
    tab.painted()
    for _ in range(12):  # wherever it begins, there is a call in the row of the thread
        tab.click(x, y)
        if not tab.run("document.getElementById('detail').hidden"):
            break
        x += 9
    detail = tab.run("document.getElementById('detail').innerText")
    assert "MainThread" in detail
    assert "/programs/train.py:" in detail
    tab.run("document.querySelector('.card.race').click()")
    tab.painted()
    assert tab.run("document.querySelector('.card.race').classList.contains('shown')")
    assert red_pixels(tab) > 100
