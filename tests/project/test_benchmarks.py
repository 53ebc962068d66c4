"""The arithmetic of the benchmarks, and that one case that fails costs no other."""

from __future__ import annotations

import json
import math
import os
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import userstream as us
from benchmarks import __main__ as command
from benchmarks import chart, harness, observing, ordering, report, table, waiting
from benchmarks.harness import Comparison, Comparisons, Run, Skipped
from benchmarks.limits import (
    Limit,
    Spread,
    at_least,
    at_most,
    at_most_added,
    compared,
    no_more_than,
    significant,
    verdict,
)
from helpers import array, reclaim, untraced
from userstream import testing

SAMPLES = {"ours": [1.0, 2.0, 3.0], "peer": [4.0, 4.0, 4.0], "other": [8.0, 2.0, 8.0]}


def test_the_spread() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (at_most(1, "peer"), [0.25, 0.5, 0.75]),
        (at_most(1, "peer", "other"), [0.25, 1.0, 0.75]),  # the fastest in each round
        (at_most_added(1, "peer"), [-3.0, -2.0, -1.0]),
        (no_more_than(1), [1.0, 2.0, 3.0]),
    ],
)
def test_what_a_limit_is_about(limit: Limit, found: list[float]) -> None:
    assert compared(SAMPLES, limit) == found


def test_beside_nothing() -> None:
    assert math.isnan(compared({"ours": [1.0], "peer": [0.0]}, at_most(1, "peer"))[0])


@pytest.mark.parametrize(
    ("limit", "found", "said"),
    [
        (at_most(0.25, "peer", stretch=0.2), 0.26, "missed"),
        (at_most(0.25, "peer", stretch=0.2), 0.25, "met"),
        (at_most(0.25, "peer", stretch=0.2), 0.2, "stretch met"),
        (at_most(0.25, "peer"), 0.1, "met"),
        (at_most(0.25, "peer"), math.nan, "missed"),
        (at_least(0.97, "peer"), 0.96, "missed"),
        (at_least(0.97, "peer"), 0.97, "met"),
        (no_more_than(0), 1, "missed"),
        (Limit(None, ("peer",)), 9.0, None),
    ],
)
def test_the_verdict(limit: Limit, found: float, said: str | None) -> None:
    assert verdict(found, limit) == said


@pytest.mark.parametrize(
    ("value", "text"), [(1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (0, "0"), (-5.5, "-5.50")]
)
def test_three_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_quantities() -> None:
    values = [2.5, 1.5e-3, 2.5e-7, 0.0]
    assert [table.quantity(value, "s") for value in values] == [
        "2.50 s",
        "1.50 ms",
        "250 ns",
        "0 ns",
    ]
    assert table.quantity(0.5, "share") == "50.0%"
    assert table.quantity(3, "MiB") == "3.00 MiB"


def test_calls_take_turns() -> None:
    done: list[str] = []
    comparison = Comparison(
        "turns",
        {name: lambda name=name: done.append(name) or 1.0 for name in "ab"},
        rounds=3,
        before=lambda: done.append("-"),
        returns=True,
    )
    assert harness.measure(comparison, Run()) == {"a": [[1.0] * 3], "b": [[1.0] * 3]}
    assert "".join(done) == "-a-b" + "-a-b" + "-b-a" + "-a-b"  # once for nothing, then in turns


def test_so_many_calls_are_timed_as_one() -> None:
    calls: list[None] = []
    comparison = Comparison("timed", {"ours": lambda: calls.append(None)}, number=50, rounds=2)
    (samples,) = harness.measure(comparison, Run())["ours"]
    assert len(samples) == 2
    assert len(calls) == 1 + 2 * 50
    assert all(sample >= 0 for sample in samples)


def test_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr(harness, "time", types.SimpleNamespace(perf_counter=clock.__next__))
    assert harness.timed(lambda: None, 50) == 10 / 50
    assert harness.timed(lambda: None) == 10


def test_several_measures() -> None:
    comparison = Comparison(
        "both",
        {"ours": lambda: (1.0, 10.0), "peer": lambda: (4.0, 5.0)},
        (at_most(0.5, "peer"), no_more_than(9, measure=1)),
        rounds=2,
        measures=(("late", "s"), ("events", "")),
        returns=True,
    )
    late, events = report.rows_of(
        "a.case", comparison, harness.measure(comparison, Run()), judged=True
    )
    assert (late["name"], events["name"]) == ("both, late", "both, events")
    (ratio,) = late["compared"]
    assert (ratio["median"], ratio["limit"], ratio["verdict"]) == (0.25, 0.5, "met")
    own, beside = events["compared"]
    assert (own["kind"], own["median"], own["verdict"]) == ("value", 10.0, "missed")
    assert (beside["median"], beside["verdict"], "limit" in beside) == (2.0, None, False)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Cases of which one fails half way, and one is left out."""

    def works(_: Run) -> Comparisons:
        yield Comparison("works", {"ours": lambda: 1.0}, rounds=1, returns=True)

    def fails(run: Run) -> Comparisons:
        yield from works(run)
        raise ValueError("half way")

    def skips(_: Run) -> Iterator[Comparison]:
        raise Skipped("no such framework")
        yield

    cases = {"a.fails": fails, "a.skips": skips, "a.works": works}
    monkeypatch.setattr(harness, "cases", cases)
    return cases


def test_a_failure_costs_no_other_case(
    made_up: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    result = command.measure(list(made_up), Run(simulated=True), file)
    assert [row["case"] for row in result["rows"]] == ["a.fails", "a.works"]
    assert list(result["failed"]) == ["a.fails"]
    assert result["skipped"] == {"a.skips": "no such framework"}
    assert json.loads(file.read_text()) == result
    printed = capsys.readouterr().out
    assert "failed  a.fails: ValueError: half way" in printed
    assert "skipped a.skips: no such framework" in printed


def test_a_case_that_hangs_costs_no_other(
    made_up: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = us.get_stream(0)

    def hangs(_: Run) -> Comparisons:
        with testing.latch(stream):
            yield Comparison("hangs", {"ours": lambda: us.wait(stream)}, rounds=1)

    monkeypatch.setitem(made_up, "a.hangs", hangs)
    monkeypatch.setattr(command, "SECONDS", 3)
    with untraced():
        result = command.measure(["a.hangs", "a.works"], Run(simulated=True), tmp_path / "r.json")
    assert "not done after 3 s" in result["failed"]["a.hangs"]
    assert [row["case"] for row in result["rows"]] == ["a.works"]
    us.wait(stream, timeout=20)  # nothing holds it


def test_what_was_measured_is_written_at_once(
    made_up: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "results.json"
    written: list[int] = []

    def looks(run: Run) -> Comparisons:
        yield from made_up["a.works"](run)
        written.append(len(json.loads(file.read_text())["rows"]))

    monkeypatch.setitem(made_up, "a.looks", looks)
    command.measure(["a.looks"], Run(simulated=True), file)
    assert written == [1]
    shown = command.redrawn([json.loads(file.read_text())], targets=False)
    assert list(shown) == capsys.readouterr().out.splitlines()


def test_the_table_is_narrow() -> None:
    slow = dict.fromkeys(("x" * 80, "peer"), lambda: 0.999)
    limit = at_most(0.25, "peer", stretch=0.2)
    comparison = Comparison(
        "wide", slow, (limit,), returns=True, rounds=2, driver=ordering.EDGE * 2
    )
    rows = report.rows_of("a.case", comparison, harness.measure(comparison, Run()), judged=True)
    times = dict.fromkeys(ordering.EDGE, 1e-6)
    lines = [line for row in rows for line in table.block(row, times, targets=True)]
    assert max(map(len, lines)) <= table.WIDTH
    assert any("1.00 ≤ 0.25 [0.20] MISSED" in line for line in lines)
    assert any(line.endswith(" 1.00") for row in rows for line in table.block(row, times))
    assert any("of that 8.00 µs (0%)" in line and "4*cuStreamIsCapturing" in line for line in lines)


def test_the_chart_shows_what_is_slower_than_a_peer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def row(case: str, name: str, ratio: float) -> dict[str, Any]:
        found = {"kind": "ratio", "against": ["peer"], "median": ratio}
        calls = {"ours": {"median": ratio * 2e-6}, "peer": {"median": 2e-6}}
        return {"case": case, "name": name, "unit": "s", "calls": calls, "compared": [found]}

    faster, slower = row("a.case", "faster", 0.5), row("a.case", "slower", 2.0)
    where = {"simulated": False, "gpus": ["GPU"], "driver": "1", "date": "2026-01-01"}
    colours = {}
    for rows in ([faster], [faster, slower], [faster, row("growth.case", "of itself", 2.0)]):
        chart.draw(tmp_path / "chart.svg", {"rows": rows, "where": where})
        drawn = (tmp_path / "chart.svg").read_text()
        names = {each["name"] for each in rows if f">{each['name']}<" in drawn}
        colours[frozenset(names)] = chart.SLOWER in drawn
        assert ">2.00 µs  peer<" in drawn  # beside userstream's own time
        assert ">1.00 µs<" in drawn
    assert colours == {frozenset({"faster"}): False, frozenset({"faster", "slower"}): True}


MEASURED = (
    "cuStreamIsCapturing",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamQuery",
    "cuCtxGetCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemcpyAsync",
)


def driver_calls(call: Callable[[], object]) -> Counter[str]:
    """Count the calls of the functions whose share is shown."""
    call()  # makes events and streams
    us.wait(0)
    reclaim(us.get_stream(0))  # of an earlier test: the next call would look after them
    testing.reset()
    call()
    return Counter({name: testing.calls(name) for name in MEASURED if testing.calls(name)})


@pytest.mark.simulated
def test_the_share_of_the_driver_is_that_of_these_calls(
    producer: us.Stream, memory: int, torch: Any
) -> None:
    buffer = array(memory, producer)
    us.get_stream(buffer)
    assert driver_calls(lambda: us.wait(buffer)) == Counter(waiting.DRIVER)
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    assert driver_calls(lambda: us.acquire(tensor)) == Counter(ordering.EDGE)
    borrowed = driver_calls(ordering.borrowing(tensor))
    for name, count in Counter(ordering.EDGE * 2).items():
        assert borrowed[name] == count


def test_five_lines_are_a_case() -> None:
    from benchmarks import __doc__ as text

    (code,) = re.findall(r"^    @case\n.*", text or "", re.DOTALL | re.MULTILINE)
    assert len(code.strip().splitlines()) <= 6
    compile("".join(line[4:] for line in code.splitlines(keepends=True)), "the example", "exec")


# -- observing ------------------------------------------------------------------------------------


@pytest.fixture
def any_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provide a stand-in for PyTorch that accepts any call, and observe on the simulated driver."""
    stands_for_it = "import sys, unittest.mock as mock\nsys.modules[__name__] = mock.MagicMock()\n"
    (tmp_path / "torch.py").write_text(stands_for_it)
    paths = [str(tmp_path), str(Path(us.__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    ours = observing.COMMANDS["us.observe"]
    monkeypatch.setitem(observing.COMMANDS, "us.observe", [*ours, "--simulate"])
    monkeypatch.setattr(Run, "need", lambda _run, name: name)


@pytest.mark.simulated
@pytest.mark.parametrize("case", ["launch", "training"])
def test_a_program_is_timed_in_each_way(any_torch: None, case: str) -> None:
    run = Run(quick=True)
    (comparison,) = harness.cases[f"observing.{case}"](run)
    samples = harness.measure(comparison, run)
    assert list(samples) == ["us.observe", "bare", "TORCH_CUDA_SANITIZER=1"]
    assert all(seconds > 0 for ((seconds,),) in samples.values())


def test_a_program_that_fails_is_not_taken_for_a_quick_one() -> None:
    with pytest.raises(RuntimeError, match=r"bare: .*there is no GPU"):
        observing.seconds("bare", "raise SystemExit('there is no GPU')")
