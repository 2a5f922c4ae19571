"""Progress of long operations."""

import io
import re

import pytest

from matbackprop.vision import progress
from matbackprop.vision.progress import Progress, track


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_is_printed_every_half_minute(clock, capsys):
    for _ in track(range(100), "Preparing images"):
        clock[0] += 1.0
    assert capsys.readouterr().err.splitlines()[:2] == [
        "Preparing images: 30 of 100, about 70 s left",
        "Preparing images: 60 of 100, about 40 s left",
    ]


def test_on_a_terminal_bars_are_drawn_and_removed_and_lines_stay_whole(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    for i in track(range(3), "Preparing images"):
        for _ in track(iter(range(2)), "Validating", 2):
            print(f"line {i}", file=progress.sys.stderr)
    text = terminal.getvalue()
    assert "Preparing images" in text and "0/3" in text and "Validating" in text
    plain = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]|\r", "\n", text)
    assert plain.split("\n").count("line 1") == 2


def test_parts_completed_before_do_not_count_for_the_speed(clock, capsys):
    work = Progress("Training", 100, done=90)
    clock[0] += 30.0
    work.advance("epoch 2")
    assert capsys.readouterr().err == "Training: 91 of 100, about 5 min left, epoch 2\n"
