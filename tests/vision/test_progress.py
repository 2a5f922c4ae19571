"""Lines that say how far a long piece of work is."""

import io

import pytest

from matbackprop.vision import processes as progress
from matbackprop.vision.processes import Progress, track


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("listening", [False, True])
def test_without_a_terminal_there_is_a_line_every_half_minute(clock, monkeypatch, capsys, caplog, listening):
    if listening:
        caplog.set_level("INFO", logger="matbackprop")
    else:
        monkeypatch.setattr(progress.log, "hasHandlers", lambda: False)
    for _ in track(range(100), "Preparing images", 100):
        clock[0] += 1.0
    lines = (caplog.messages if listening else capsys.readouterr().err.splitlines())[:2]
    assert lines == [
        "Preparing images: 30 of 100, about 70 s left",
        "Preparing images: 60 of 100, about 40 s left",
    ]


def test_on_a_terminal_one_line_is_rewritten_and_removed(clock, monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    for _ in track(range(3), "Preparing images", 3):
        clock[0] += 60.0
    text = terminal.getvalue()
    assert "\r" in text and "\n" not in text
    assert "1 of 3, about 2 min left" in text and text.endswith(" \r")


def test_parts_that_were_done_before_say_nothing_about_the_speed(clock):
    work = Progress("Training", 100, done=90)
    clock[0] += 10.0
    work.advance()
    assert work.line(clock[0]) == "Training: 91 of 100, about 90 s left".replace("90 s", "2 min")
