"""Runs that are killed or stopped lose only the steps since the last checkpoint."""

import logging
import os
import signal
import sys

import pytest

pytest.importorskip("resource", reason="needs fork, SIGKILL and limits on files")

from helpers.tiny_run import tiny_config, train
from helpers.training_faults import assert_resumes, in_process, saved_step
from matbackprop.errors import NonFiniteError
from matbackprop.vision.training.run_folder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

OPTIONS = {"checkpoint_every_steps": 2, "max_epochs": 2}


@pytest.mark.parametrize("number", [1, 2, 6, 7, 8, 9, 10, 11])
def test_kill_at_a_file_operation_of_a_checkpoint(tmp_path, number):
    """Creating, renaming, linking or removing a file; from the sixth on, a checkpoint exists."""
    run = RunFolder(tmp_path / "run")
    left = number

    def kill(event, arguments):
        nonlocal left
        changes = event in ("os.rename", "os.link", "os.remove")
        creates = event == "open" and arguments[2] is not None and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (changes or creates) and str(run.checkpoints) in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    ended = in_process(tiny_config(run.path, **OPTIONS), lambda: sys.addaudithook(kill))
    assert ended.code == -signal.SIGKILL
    done = max((m["step"] for m in run.read_metrics()), default=0)
    assert done - saved_step(run) <= 3  # a checkpoint every two steps, killed while writing the next
    assert_resumes(run, log_every=1)


def test_a_signal_at_the_end_is_handled(tmp_path):
    config = tiny_config(tmp_path / "run", **OPTIONS)

    def prepare():
        write = RunFolder.write_summary

        def killed(self, summary):
            os.kill(os.getpid(), signal.SIGTERM)
            write(self, summary)

        RunFolder.write_summary = killed

    assert in_process(config, prepare).code == 128 + signal.SIGTERM
    run = RunFolder(config.engine.run)
    assert run.read_summary()["steps"] == saved_step(run) == 12


@pytest.mark.parametrize("listening", [False, True])
def test_messages_are_printed_once(tmp_path, monkeypatch, capsys, listening):
    handlers = [logging.StreamHandler(sys.stderr)] if listening else []
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    run, _ = train(tiny_config(tmp_path / "run", max_epochs=1))
    assert capsys.readouterr().err.count("Done after 6 steps") == 1
    assert run.log_path.read_text().count("Done after 6 steps") == 1
    with pytest.raises(NonFiniteError):
        train(tiny_config(tmp_path / "bad", max_epochs=2, poison=5))
    assert "not finite" not in capsys.readouterr().err  # the caller reports the error
    assert RunFolder(tmp_path / "bad").log_path.read_text().count("not finite") == 1
