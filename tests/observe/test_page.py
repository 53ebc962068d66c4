"""The page of an observation: what is in it, and what it shows in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import observed
import userstream as us
from browser import CHROMIUM, FIREFOX, Browser, Chromium, chromium, data_of, firefox
from helpers import checked
from internals import page_of, scripts_of_page
from observed import a_room, captured, copy, fill, handle, no_edge, watched
from userstream.testing import Pointer, kernel

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
]

PIECES = Path(us.__file__).parent / "_observe/judge/pieces"


def shown(seen: us.Observation, tmp_path: Path) -> dict[str, Any]:
    seen.save(tmp_path / "seen.html")
    return data_of((tmp_path / "seen.html").read_text())


def timeline_of(document: dict[str, Any]) -> dict[str, Any]:
    (timeline,) = document["timelines"]
    found: dict[str, Any] = timeline
    return found


def names(document: dict[str, Any]) -> list[str]:
    timeline = timeline_of(document)
    return [timeline["names"][entry[0]] for entry in timeline["entries"]]


# -- what is in it --------------------------------------------------------------------------------


def test_operations_edges_and_waits_are_told_in_their_order(tmp_path: Path) -> None:
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        room.b.wait(room.a)
        copy(room.y, room.x, room.b)
        room.b.sync()
        document = shown(seen, tmp_path)
        handles = [handle(room.a), handle(room.b)]
    timeline = timeline_of(document)
    filling, copying, waiting = timeline["entries"]
    rows = timeline["rows"]
    streams = [rows[filling[1]], rows[copying[1]]]
    assert [row["name"] for row in streams] == ["stream 1 of device 0", "stream 2 of device 0"]
    assert [row["handle"] for row in streams] == handles
    assert waiting[1] == -1  # of the host
    assert rows[waiting[2]]["name"] == "MainThread"
    assert [filling[7], copying[7], waiting[7]] == [[], [0], [1]]
    assert [entry[6] & 1 for entry in timeline["entries"]] == [0, 0, 1]
    assert filling[8] == [[room.x, observed.SIZE, 1]]
    assert copying[8] == [[room.x, observed.SIZE, 0], [room.y, observed.SIZE, 1]]
    at, *frames = timeline["stacks"][filling[3]]
    assert timeline["frames"][frames[at]][2:] == ["fill", 0]


def test_a_stream_that_only_passes_an_edge_on_is_no_gap(tmp_path: Path) -> None:
    with a_room() as room, us.observe() as seen:
        third = room.stream()
        fill(room.x, room.a)
        room.b.wait(room.a)
        third.wait(room.b)
        fill(room.x, third)
        document = shown(seen, tmp_path)
    assert timeline_of(document)["entries"][1][7] == [0]


def test_default_streams_and_contexts_have_edges_too(tmp_path: Path) -> None:
    with a_room() as room, us.observe() as seen:
        blocking = room.stream(nonblocking=False)
        fill(room.x, blocking)
        fill(room.x, observed.LEGACY)
        fill(room.x, blocking)
        with us.borrow(driver.CUdeviceptr(room.x), stream=room.a):  # after all of the device
            fill(room.x, room.a)
        document = shown(seen, tmp_path)
    found = dict(zip(range(4), timeline_of(document)["entries"], strict=False))
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
    assert [entry[6] >> 1 & 1 for entry in timeline_of(document)["entries"]] == [1, 0, 0]
    assert timeline_of(document)["entries"][1][8] == [[room.x, observed.SIZE, 1]]
    assert document["races"][0]["entries"] == [1, 2]


@kernel("shown_on_a_page")
def _any(grid: Any, block: Any, to: Pointer) -> None:
    pass


def test_what_a_kernel_does_with_a_buffer_may_not_be_known(tmp_path: Path) -> None:
    with a_room() as room:
        code = ObjectCode.from_ptx(b"any").get_kernel("shown_on_a_page")  # slow: it may be listed
        with us.observe() as seen:
            launch(room.a, LaunchConfig(grid=1, block=1), code, room.x)
            document = shown(seen, tmp_path)
    assert names(document) == ["shown_on_a_page"]
    assert timeline_of(document)["entries"][0][8] == [[room.x, 1, 2]]


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
    timeline = timeline_of(shown(seen, tmp_path))
    assert len(timeline["entries"]) == 10
    assert timeline["first"] == timeline["dropped"] >= 92
    edges = [entry[7] for entry in timeline["entries"]]
    assert edges == [[], *([number] for number in range(9))]  # none from what was dropped
    assert shown(seen, tmp_path)["races"][0]["entries"][1] < timeline["first"]
    assert timeline_of(shown(nothing, tmp_path))["entries"] == []


@pytest.mark.parametrize(("timeline", "error"), [(-1, ValueError), (True, TypeError)])
def test_what_is_no_number_of_operations_is_refused(timeline: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"timeline must be .*, not {timeline}"):
        us.observe(timeline=timeline)


def test_no_name_ends_the_element_that_it_is_in() -> None:
    hostile = "</script><script>alert(1)</script><!-- {{script}} \u2028 \udc80 &amp;"
    document = {**a_document(3), "not_seen": [hostile]}
    html = page_of(document)
    assert data_of(html)["not_seen"] == [hostile]
    assert html.lower().count("</script") == 2
    assert html.count("alert(1)") == 1
    html.encode()  # whatever the names of files are


def test_it_loads_nothing_and_runs_nothing_else() -> None:
    html = page_of(a_document(3))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]
    assert not re.search(r"(?:src|href|action)=|https?://|url\(|@import|fetch\(", html)


def test_the_pieces_are_all_used_and_their_lines_are_short() -> None:
    assert {path.name for path in PIECES.iterdir()} == {
        "page.html",
        "page.css",
        *scripts_of_page(),
    }
    for path in PIECES.iterdir():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, (path.name, number)


# -- the parts that need no screen ----------------------------------------------------------------


def a_document(count: int) -> dict[str, Any]:
    """Return a document with so many operations on three streams, and a race in the middle."""
    frames: list[list[Any]] = [["/programs/train.py", line, "step", 0] for line in range(10, 20)]
    frames += [["<frozen runpy>", 88, "_run_code", 1], ["/u/copies.py", 5, "run", 2]]
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
        "stream": "stream 1 of device 0",
        "origin": "created at train.py:5 (torch)",
        "device": 0,
        "thread": "MainThread",
        "line": frames[0][:3],
        "stack": [frames[0][:3]],
    }
    race = {
        "kind": "write after write",
        "address": 0x7F0000000000,
        "nbytes": 4096,
        "memory": "device",
        "allocated": [frames[0][:3]],
        "allocated_at": frames[0][:3],
        "framework": "torch",
        "first": operation,
        "second": {**operation, "known": "learned", "stream": "stream 2 of device 0"},
        "ordered_until": None,
        "possible": False,
        "count": 2,
        "advice": "let one wait for the other",
        "key": "race=write-write",
        "entries": [1000 + count // 2, 1000 + count // 2 + 1],
        "processes": [0],
    }
    facts = {"handle": None, "origin": ""}
    rows = [
        {"kind": "stream", "name": f"stream {each} of device 0", **facts, "origin": f"at {each}"}
        for each in range(1, 4)
    ]
    return {
        "version": 1,
        "seconds": 1.5,
        "races": [race],
        "possible": [],
        "stalls": [],
        "wrong_streams": [],
        "hangs": ["a wait timed out; work that the host does not know to be done:\n  stream 1"],
        "calls": {"cuMemsetD8Async": count},
        "streams": 3,
        "not_seen": [],
        "timelines": [
            {
                "process": {"name": "process 7", "offset": 0},
                "first": 1000,
                "dropped": 1000,
                "rows": [*rows, {"kind": "thread", "name": "MainThread", **facts}],
                "names": ["scale_rows", "cuMemcpyAsync", "cuMemsetD8Async", "cuLaunchHostFunc"],
                "frames": frames,
                "stacks": [[2, 10, 10, place, 11, 11] for place in range(10)],
                "entries": entries,
            }
        ],
    }


def of_ranks(document: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return a document in which several processes did the same, one a bit later than the other."""
    timelines = [
        {**timeline_of(document), "process": {"name": f"rank {rank}", "offset": 1500 * rank}}
        for rank in range(ranks)
    ]
    races = [{**race, "processes": [rank]} for rank in range(ranks) for race in document["races"]]
    return {**document, "timelines": timelines, "races": races}


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

assert.equal(matchText(null, null), "");
assert.equal(matchText([], null), "nothing found");
assert.equal(matchText([3, 7], null), "2 found, next with Enter");
assert.equal(matchText([3, 7], model.entries[7]), "2 of 2, next with Enter");
assert.deepEqual(
  foldedFrames(model, model.entries[3]).map(({ owner, frames }) => [owner, frames.length]),
  [["userstream", 2], [null, 1], ["Python", 2]],
);

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
for (let factor = 1; factor < 1e4; factor *= 1.7) {
  zoom(view, 1 / factor, 700);
  const texts = ticks(view).map(({ text }) => text);
  assert(texts.length >= 2 || view.perPixel <= 1, `${texts}`);
  assert.equal(new Set(texts).size, texts.length, `${texts}`);
  fit(view);
}

/* Another scale leaves where it is what was in the middle, or what was selected. */
view.scale = "order";
showAround(view, [30, 31]);
const at = (index) => toPixel(view, spanOf(view, model.entries[index])[0]);
for (const kept of [null, 28]) {
  const middle = toPlace(view, (gutter(view) + 1000) / 2);
  const index = kept ?? nearest(view, visible(view), middle).index;
  const seen = visible(view).map((entry) => entry.index);
  for (let times = 0; times < 4; times++) {
    const pixel = at(index);
    changeScale(view, [model.entries[index]]);
    assert(Math.abs(at(index) - pixel) < 1e-6, `${index} moved from ${pixel} to ${at(index)}`);
    const now = visible(view).map((entry) => entry.index);
    assert(Math.abs(now.length - seen.length) <= 3, `${now.length} of ${seen.length} are seen`);
  }
}

assert.equal(neighbour(view, model.entries[4], 1).index, 7);
assert.equal(neighbour(view, model.entries[4], -1).index, 1);
assert.equal(neighbour(view, model.entries[1], -1).index, 1);
assert.equal(neighbour(view, null, 1), visible(view)[0]);

view.scale = "time";
showAround(view, [30, 31]);
assert(toPixel(view, 30000) > gutter(view) && toPixel(view, 31700) < 1000);
"""


SEVERAL = """
const assert = require("node:assert");
const model = readModel(JSON.parse(require("node:fs").readFileSync(0, "utf8")));
const { entries } = model;
assert.deepEqual(model.rows.map((row) => row.kind), [
  "process", "thread", "stream", "stream", "stream",
  "process", "thread", "stream", "stream", "stream",
]);
const of_second = entries.filter((entry) => entry.process === 1);
assert.deepEqual(of_second.map((entry) => entry.began), [1500, 2500, 3500, 4500, 5500, 6500]);
assert.deepEqual(of_second.map((entry) => entry.index), [2, 4, 6, 8, 10, 11]);
assert.deepEqual(of_second.map((entry) => entry.lane), [7, 8, 9, 7, 8, 9]);
assert.deepEqual(of_second.map((entry) => entry.after), [[], [2], [4], [], [8], [10]]);
assert.deepEqual(of_second.map((entry) => entry.number), [1000, 1001, 1002, 1003, 1004, 1005]);
assert.deepEqual(model.races.map((race) => race.ends), [[5, 7], [8, 10]]);
assert.equal(model.first, 0);
assert.deepEqual(search(model, "stream 3 of"), [3, 6, 9, 11]);
"""


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
@pytest.mark.parametrize(
    ("scenario", "document"),
    [(SCENARIO, lambda: a_document(60)), (SEVERAL, lambda: of_ranks(a_document(6), 2))],
    ids=["one", "several"],
)
def test_the_model_and_the_view_without_a_browser(
    scenario: str, document: Callable[[], dict[str, Any]]
) -> None:
    script = "".join((PIECES / name).read_text() for name in scripts_of_page()) + scenario
    done = subprocess.run(
        ["node", "-e", script],
        input=json.dumps(document()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- in a browser ---------------------------------------------------------------------------------

# They take a minute. In the session `browsers` of noxfile.py, with axe, nothing is skipped.
REQUIRED = os.environ.get("USERSTREAM_BROWSERS") == "1"
AXE = os.environ.get("USERSTREAM_AXE")


@pytest.fixture(scope="module", params=["chromium", "firefox"])
def tab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    program, start = {"chromium": (CHROMIUM, chromium), "firefox": (FIREFOX, firefox)}[
        request.param
    ]
    if not REQUIRED:
        pytest.skip("USERSTREAM_BROWSERS=1 opens the page in Chromium and Firefox")
    assert program is not None, f"{request.param} is not installed"
    with start(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


def opened(tab: Browser, tmp_path: Path, document: dict[str, Any], width: int, **how: bool) -> Path:
    file = tmp_path / "page.html"
    file.write_text(page_of(document))
    tab.open(file, width, 800, **how)
    return file


def text(tab: Browser, selector: str) -> str:
    found: str = tab.run(f"document.querySelector({json.dumps(selector)}).innerText")
    return found


def box(tab: Browser, selector: str) -> dict[str, float]:
    """Return where an element is on the screen."""
    place = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()"
    found: dict[str, float] = tab.run(place)
    return found


def number_of_selected(tab: Browser) -> int:
    return int(text(tab, "#detail dd").replace(",", ""))


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
    tab.open(file, width, 800, dark=dark)
    assert tab.said == []
    if isinstance(tab, Chromium):
        assert tab.asked == [file.as_uri()]
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert "1 race, " in text(tab, "#summary")
    card = text(tab, ".card.race")
    assert "read after write" in card
    assert re.search(r"\n\S*observed\.py:\d", card)
    assert red_pixels(tab) > 100
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark


def test_what_gets_into_the_page_is_not_run(tab: Browser, tmp_path: Path) -> None:
    document = a_document(30)
    document["not_seen"] = ["<img src=x onerror='document.title=1'></script><script>alert(1)"]
    html = page_of(document).replace("</body>", "<script>document.title = 'ran'</script></body>")
    file = tmp_path / "hostile.html"
    file.write_text(html)
    tab.open(file, 900, 600)
    assert tab.run("document.title").startswith("Streams")
    assert tab.run("document.images.length") == 0
    if isinstance(tab, Chromium):
        assert tab.asked == [file.as_uri()]
        assert "Content Security Policy" in " ".join(tab.said)


@pytest.mark.parametrize("framework", ["torch", None])
def test_a_card_says_what_is_known(tab: Browser, tmp_path: Path, framework: str | None) -> None:
    document = a_document(30)
    document["races"][0] |= {"framework": framework, "reason": "a host function may order them"}
    edit = {"file": "train.py", "line": 31, "end": 31, "code": "    side.wait_stream(main)"}
    document["races"][0] |= {"edits": [edit], "trial": "made to happen"}
    opened(tab, tmp_path, of_ranks(document, 2), 900)
    card = text(tab, ".card.race")
    allocated = "allocated by torch\n/programs/train.py:10 in step"
    assert (allocated in card) is (framework is not None)
    assert "first: cuMemsetD8Async writes on stream 1" in card  # it is exact
    assert "second: cuMemsetD8Async writes (learned) on stream 2" in card
    for said in (
        "made to happen",
        "rank 0",
        "created at train.py:5 (torch)",
        "a host function may order them",
    ):
        assert said in card
    assert "before train.py:31\n    side.wait_stream(main)" in card
    document["races"][0]["second"] |= {
        "name": "a write of the host",
        "known": "exact",
        "stream": "the host",
    }
    opened(tab, tmp_path, document, 1400)
    assert "second: the host writes\ncreated at" in text(tab, ".card.race")


def test_a_hundred_thousand_operations_can_be_looked_through(tab: Browser, tmp_path: Path) -> None:
    opened(tab, tmp_path, a_document(100_000), 1400)
    assert "1,000 older ones were dropped" in text(tab, "#note")
    assert red_pixels(tab) > 100  # it begins at the race
    for _ in range(10):
        tab.wheel(600, 300, 800)
    tab.press("0", "t", "t", "/", *"scale_rows", "Enter")
    assert text(tab, "#matches") == "1 of 25,000, next with Enter"
    assert "scale_rows" in text(tab, "#detail h2")
    assert tab.said == []


def test_a_hundred_thousand_operations_open_within_a_second(tab: Browser, tmp_path: Path) -> None:
    file = opened(tab, tmp_path, a_document(100_000), 1400)
    took = []
    for _ in range(5):
        tab.open(file, 1400, 800)
        took.append(tab.run("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert sorted(took)[2] < 1000, took  # milliseconds


def test_what_is_selected_stays_beside_the_timeline(tab: Browser, tmp_path: Path) -> None:
    """Whether the lists beside it are scrolled, the screen is narrow, or the row is far down."""
    document = a_document(60)
    document["races"] *= 4
    document = of_ranks(document, 8)
    for width in (1400, 400):
        opened(tab, tmp_path, document, width)
        tab.press("n", "n", "n", "/", *"stream 3", "Enter", "Enter", "Enter")
        detail, canvas = box(tab, "#detail"), box(tab, "#canvas")
        assert 0 <= detail["top"] < detail["bottom"] <= 800
        assert detail["height"] > 100
        # Rows are 26, 30 and three times 42 pixels high, under 38 pixels of axes, if they are many.
        process = int(re.findall(r"process\s+rank (\d)", text(tab, "#detail"))[0])
        top = 38 + 182 * process + 26 + 30 + 2 * 42
        if width == 400:
            assert 0 <= canvas["top"] + top <= detail["top"] - 42
        else:
            assert detail["left"] >= canvas["right"]
            assert box(tab, "#found")["top"] >= detail["bottom"]


def test_a_phone_scrolls_one_way(tab: Browser, tmp_path: Path) -> None:
    document = of_ranks(a_document(60), 8)
    opened(tab, tmp_path, document, 400)
    scrolled = """[...document.querySelectorAll("*")]
        .filter((each) => each !== document.documentElement && each !== document.body)
        .filter((each) => /auto|scroll/.test(getComputedStyle(each).overflowY))
        .filter((each) => each.scrollHeight > each.clientHeight + 1)
        .map((each) => each.id)"""
    assert tab.run(scrolled) == []
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert box(tab, "#canvas")["height"] > 8 * 182  # all rows are there
    tab.wheel(200, 600, 300)
    tab.until("scrollY > 0")  # over the timeline too


def test_everything_can_be_done_with_the_keyboard(tab: Browser, tmp_path: Path) -> None:
    opened(tab, tmp_path, a_document(60), 1400)
    tab.press("?")
    assert tab.run("document.getElementById('keys').open")
    listed = tab.run("[...document.querySelectorAll('kbd')].map((each) => each.textContent)")
    assert listed == [*"np/.,", "Escape", *"t+-0?←→↑↓"]
    tab.press("Escape")
    assert not tab.run("document.getElementById('keys').open")
    tab.press("n")
    assert tab.run("document.querySelector('.card.race').classList.contains('shown')")
    tab.press(".")
    first = number_of_selected(tab)
    tab.press(".", ".")
    assert number_of_selected(tab) == first + 6  # of three streams in turn
    tab.press(",", ",")
    assert number_of_selected(tab) == first
    tab.press("/", *"train.py:12", "Enter", "Enter")
    assert number_of_selected(tab) != first
    assert re.fullmatch(r"\d of 6, next with Enter", text(tab, "#matches"))
    tab.press("Tab", "Enter")  # the button beside the search: the other scale
    assert text(tab, "#scale") == "By order"
    for _ in range(20):
        tab.press("Tab")
        if tab.run("document.activeElement.tagName") == "SUMMARY":
            break
    assert text(tab, "summary") == "2 frames of userstream"
    tab.press("Enter")
    assert tab.run("document.querySelector('details').open")
    assert "/u/copies.py:5 in run" in text(tab, "#detail")
    tab.press("Escape")
    assert tab.run("document.getElementById('detail').hidden")
    assert tab.said == []


def test_a_click_shows_an_operation_and_one_on_a_race_brings_it_in(
    tab: Browser, tmp_path: Path
) -> None:
    opened(tab, tmp_path, a_document(60), 1400)
    canvas = box(tab, "#canvas")
    x, y = canvas["left"] + 188 + 25, canvas["top"] + 38 + 15
    tab.press("+", "+")
    for _ in range(12):  # wherever it begins, there is a call in the row of the thread
        tab.click(x, y)
        if not tab.run("document.getElementById('detail').hidden"):
            break
        x += 9
    detail = text(tab, "#detail")
    assert "MainThread" in detail
    assert "/programs/train.py:" in detail
    card = box(tab, ".card.race")
    tab.click(card["left"] + 30, card["bottom"] - 8)  # on its text
    assert tab.run("document.querySelector('.card.race').classList.contains('shown')")
    assert red_pixels(tab) > 100


def test_a_print_is_light_and_has_everything(tab: Browser, tmp_path: Path) -> None:
    opened(tab, tmp_path, a_document(60), 1400, dark=True)
    watch = """(() => {
        window.addEventListener("beforeprint", () => {
            const { data } = document.getElementById("canvas").getContext("2d")
                .getImageData(400, 600, 1, 1);
            document.body.dataset.printed = [...data];
        });
    })()"""
    tab.run(watch)
    tab.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert tab.run("document.body.dataset.printed") == "255,255,255,255"  # white, as paper is
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 29)"


@pytest.mark.skipif(AXE is None, reason="USERSTREAM_AXE does not name a file of axe-core")
@pytest.mark.parametrize("keys", ["", "n.", "?"])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 400])
def test_the_rules_of_axe_hold(
    tab: Browser, tmp_path: Path, width: int, dark: bool, keys: str
) -> None:
    assert AXE is not None
    document = of_ranks(a_document(60), 2)
    document["possible"] = [{**document["races"][0], "possible": True, "reason": "a host function"}]
    opened(tab, tmp_path, document, width, dark=dark)
    tab.press(*keys)
    found = "({ violations }) => violations.map(({ id, nodes }) => [id, nodes[0].html])"
    script = f"{Path(AXE).read_text()}; return axe.run(document).then({found});"
    assert tab.run(f"(() => {{ {script} }})()") == []
