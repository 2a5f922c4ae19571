"""Measurements, records of missing and failing peers, result files, and the page."""

import time

import pytest
import torch

from benchmarks.speed import measure as running
from benchmarks.speed.measure import (
    Record,
    Results,
    describe_machine,
    load_results,
    machine_name,
    measure,
    save_results,
)
from benchmarks.speed.page import TITLES, format_record, write_page
from benchmarks.speed.peers import need
from benchmarks.speed.suites import SUITES
from benchmarks.speed.suites.entry import Entry
from matbackprop.errors import DataError

CPU = torch.device("cpu")


def test_measure_counts_calls_and_orders_quartiles():
    calls = []
    timing = measure(lambda: calls.append(time.sleep(0.002)), CPU, seconds=0.03)
    assert 3 <= timing.repeats <= 50
    assert len(calls) == timing.repeats + 2
    assert 2 <= timing.low_ms <= timing.median_ms <= timing.high_ms


def test_measure_runs_a_long_call_once():
    calls = []
    timing = measure(lambda: calls.append(time.sleep(0.03)), CPU, seconds=0.005)
    assert timing.repeats == 1 and len(calls) == 2
    assert timing.low_ms == timing.median_ms == timing.high_ms >= 30


def test_measure_is_not_misled_by_a_long_first_call():
    pauses = iter([0.03])
    timing = measure(lambda: time.sleep(next(pauses, 0)), CPU, seconds=0.005)
    assert timing.repeats >= 3 and timing.median_ms < 30


def test_measure_reports_memory():
    timing = measure(lambda: torch.ones(20_000_000).add_(1), CPU, seconds=0.01)
    assert timing.peak_mb > 40


def _entry(build, kind="time"):
    return Entry("case", "method", build, kind=kind, parameters={"n": 3}, note="a note")


def test_records_of_all_outcomes():
    good = running.run_entry("suite", _entry(lambda device: lambda: None), CPU, 0.01)
    assert (good.status, good.note, good.parameters) == ("ok", "a note", {"n": 3})
    assert good.median_ms is not None and good.median_ms >= 0 and good.error is None

    def missing(device):
        return need("a_package_that_nobody_has")

    gone = running.run_entry("suite", _entry(missing), CPU, 0.01)
    assert gone.status == "missing" and "a_package_that_nobody_has" in gone.note

    def incomplete():
        raise ImportError("the peer needs another package")

    half = running.run_entry("suite", _entry(lambda device: incomplete), CPU, 0.01)
    assert half.status == "missing" and "another package" in half.note

    broken = running.run_entry("suite", _entry(lambda device: lambda: 1 / 0), CPU, 0.01)
    assert broken.status == "failed" and "ZeroDivisionError" in broken.note

    error = running.run_entry("suite", _entry(lambda device: lambda: 0.25, "error"), CPU, 0.01)
    assert error.error == 0.25 and error.median_ms is None
    nan = running.run_entry("suite", _entry(lambda device: lambda: float("nan"), "error"), CPU, 0.01)
    assert nan.error == "nan"


def _results(*records):
    return Results(
        {**describe_machine(CPU), "device": "Test CPU", "threads": 1},
        "python -m benchmarks speed",
        "",
        "2026-01-01",
        [*records],
    )


def test_results_round_trip_and_keep_other_suites(tmp_path):
    first = Record("pooling", "a", "matbackprop", median_ms=1.0, low_ms=1.0, high_ms=2.0, repeats=3, peak_mb=0.0)
    path = save_results(_results(first, Record("ncuts", "b", "matbackprop", error="nan")), tmp_path)
    assert path.name == "test-1-threads.json"
    again = Record("pooling", "a", "matbackprop", status="failed", note="why")
    save_results(_results(again), tmp_path)
    actual = load_results(path)
    assert sorted((r.suite, r.status) for r in actual.records) == [("ncuts", "ok"), ("pooling", "failed")]
    assert actual.machine["device"] == "Test CPU"


def test_machine_names():
    machine = {"device": "Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz", "kind": "cpu", "threads": 6}
    assert machine_name(machine) == "intel-core-i7-8700k-6-threads"
    assert machine_name({"device": "NVIDIA A100-SXM4-80GB", "kind": "cuda", "threads": 6}) == "nvidia-a100-sxm4-80gb"


def _times(suite, case, method, ms, **parameters):
    return Record(
        suite, case, method, parameters=parameters, median_ms=ms, low_ms=ms, high_ms=ms, repeats=3, peak_mb=5.0
    )


def test_page_shows_losses_and_missing_peers(tmp_path):
    records = [
        _times("pooling", "log", "matbackprop", 4.0),
        _times("pooling", "log", "rival", 2.0),
        Record("pooling", "log", "absent", status="missing", note="absent is not installed"),
        *(
            _times("functions", f"eigh {n}", "matbackprop", n / 10, n=n, dtype="float32", function="eigh", batch=2)
            for n in (4, 8)
        ),
        Record("inverse-root", "relative error", "rival", error="nan", parameters={"function": "error"}),
    ]
    save_results(_results(*records), tmp_path / "results")
    (tmp_path / "results" / "faults.json").write_text('{"survived": 200}')  # a summary of another kind
    (tmp_path / "docs").mkdir()
    page = write_page(tmp_path / "results", tmp_path / "docs" / "benchmarks.md")
    text = page.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| log |"))
    assert '**<span title="2–2">2</span>**' in row and row.count("**") == 2 and "missing" in row
    assert "absent is not installed" in text and "| nan |" in text
    figures = sorted(p.name for p in (tmp_path / "docs" / "_static" / "benchmarks").iterdir())
    assert figures == ["test-1-threads-eigh-float32.svg"]
    assert all(f"_static/benchmarks/{name}" in text for name in figures)
    drawn = {p: p.read_bytes() for p in (tmp_path / "docs").rglob("*.*") if p.is_file()}
    write_page(tmp_path / "results", page)
    assert all(p.read_bytes() == before for p, before in drawn.items())


def test_page_without_results(tmp_path):
    with pytest.raises(DataError, match=r"No results in .*benchmarks speed --output"):
        write_page(tmp_path, tmp_path / "page.md")


def test_line_of_a_time_and_of_an_error():
    line = format_record(_times("pooling", "log", "matbackprop", 0.1234))
    assert "0.123 ms (0.123–0.123), 5 MB" in line
    assert "error 1.0e-09" in format_record(Record("inverse-root", "x", "y", error=1e-9))


def test_every_suite_is_on_the_page():
    assert list(SUITES) == list(TITLES)
