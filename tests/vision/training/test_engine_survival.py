"""Runs that are killed or stopped lose only the steps since the last checkpoint.

The runs are forked from this process to save the time of imports.
"""

import logging
import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
import torch

from helpers.tiny_run import tiny_config, train
from matbackprop.errors import ConfigurationError, NonFiniteError
from matbackprop.vision.training.checkpoint import load_checkpoint
from matbackprop.vision.training.engine import RunInterrupted
from matbackprop.vision.training.run_folder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

OPTIONS = {"checkpoint_every_steps": 2, "max_epochs": 2}


def start(config, prepare=None):
    """Train in a forked process; its exit code is 0, or 128 + signal after an orderly stop."""

    def body():
        if prepare is not None:
            prepare()
        try:
            train(config)
        except RunInterrupted as stop:
            os._exit(128 + stop.signum)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    return process


def finish(process):
    process.join(60)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


def lines_of(run):
    """The lines of metrics without times."""
    drop = {"time", "train/steps_per_second"}
    return [{k: v for k, v in m.items() if k not in drop} for m in run.read_metrics()]


def wait_for_lines(run, count, process):
    deadline = time.monotonic() + 60
    while len(run.read_metrics()) < count and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of an undisturbed run."""
    run, _ = train(tiny_config(tmp_path_factory.mktemp("whole") / "run", **OPTIONS))
    return load_checkpoint(run.checkpoints / "last.ckpt")


def assert_same_end(run, whole):
    last = load_checkpoint(run.checkpoints / "last.ckpt")
    assert last["global_step"] == whole["global_step"] == 12
    for key, value in whole["state_dict"].items():
        assert torch.equal(value, last["state_dict"][key]), key
    assert not list(run.path.rglob(".*.tmp")), "left over from a killed process"
    # every step's line is there exactly once
    steps = [m["step"] for m in run.read_metrics() if "train/loss" in m]
    assert steps == list(range(1, 13))


def test_kill_at_random_times_during_training(tmp_path, whole):
    draw = random.Random(7)
    run = RunFolder(tmp_path / "run")
    kills = furthest = 0
    for _ in range(40):
        process = start(tiny_config(run.path, **OPTIONS, resume=True, pause=0.01))
        wait_for_lines(run, furthest + draw.randrange(1, 5), process)
        time.sleep(draw.uniform(0.0, 0.03))
        process.kill()
        code = finish(process)
        last = run.checkpoints / "last.ckpt"
        step = load_checkpoint(last)["global_step"] if last.exists() else 0
        assert step >= furthest, "a step that was saved is lost"
        furthest = step
        if code == 0 or step == 12:
            break
        kills += 1
        if kills == 8:
            break
    assert kills >= 2
    assert finish(start(tiny_config(run.path, **OPTIONS, resume=True, pause=0.01))) == 0
    assert_same_end(run, whole)


def assert_resumes_to_the_same_end(run, whole):
    last = run.checkpoints / "last.ckpt"
    step = load_checkpoint(last)["global_step"] if last.exists() else 0
    done = max((m["step"] for m in run.read_metrics()), default=0)
    assert done - step <= 3  # a checkpoint every two steps, killed while writing the next
    assert finish(start(tiny_config(run.path, **OPTIONS, resume=True))) == 0
    assert_same_end(run, whole)


@pytest.mark.parametrize("number", [1, 2, 6, 7, 8, 9, 10, 11])
def test_kill_at_a_file_operation_of_a_checkpoint(tmp_path, whole, number):
    """Creating, renaming, linking or removing a file; from the sixth on, a checkpoint is there already."""
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

    assert finish(start(tiny_config(run.path, **OPTIONS), lambda: sys.addaudithook(kill))) == -signal.SIGKILL
    assert_resumes_to_the_same_end(run, whole)


def test_kill_during_a_write(tmp_path, whole):
    run = RunFolder(tmp_path / "run")
    train(tiny_config(tmp_path / "other", **OPTIONS))
    limit = (RunFolder(tmp_path / "other").checkpoints / "last.ckpt").stat().st_size // 2

    def prepare():
        import resource

        from helpers.tiny_run import TinyModule

        original = TinyModule.training_step

        def step(self, batch):
            if self.step == 5:  # the system kills the process if a file exceeds the limit
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return original(self, batch)

        TinyModule.training_step = step

    assert finish(start(tiny_config(run.path, **OPTIONS), prepare)) == -signal.SIGXFSZ
    assert limit in [path.stat().st_size for path in run.checkpoints.iterdir()]
    assert_resumes_to_the_same_end(run, whole)


def test_a_second_process_in_the_same_folder_is_rejected(tmp_path, whole):
    run = RunFolder(tmp_path / "run")
    first = start(tiny_config(run.path, **OPTIONS, pause=0.1))
    wait_for_lines(run, 3, first)
    for options in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(ConfigurationError, match="Another process is training in"):
            train(tiny_config(run.path, **OPTIONS, **options))
    assert finish(first) == 0
    assert_same_end(run, whole)


@pytest.mark.quick(2)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["training", "validation"])
def test_signals_save_a_checkpoint(tmp_path, signum, moment):
    options = {"max_epochs": 2, "checkpoint_min_seconds": 1e9}
    undisturbed, _ = train(tiny_config(tmp_path / "whole", **options))
    run = RunFolder(tmp_path / "run")

    def prepare():
        from helpers.tiny_run import TinyModule

        hook = "training_step" if moment == "training" else "validation_step"
        original = getattr(TinyModule, hook)

        def step(self, batch):
            if self.step == (4 if moment == "training" else 6):
                os.kill(os.getpid(), signum)
            return original(self, batch)

        setattr(TinyModule, hook, step)

    assert finish(start(tiny_config(run.path, **options), prepare)) == 128 + signum
    state = load_checkpoint(run.checkpoints / "last.ckpt")
    assert state["global_step"] == (5 if moment == "training" else 6)
    log = run.log_path.read_text()
    assert signal.Signals(signum).name in log and "--resume" in log
    assert finish(start(tiny_config(run.path, **options, resume=True))) == 0
    ends = [load_checkpoint(r.checkpoints / "last.ckpt")["state_dict"] for r in (undisturbed, run)]
    for key in ends[0]:
        assert torch.equal(ends[0][key], ends[1][key])
    # an interrupted validation leaves no numbers and is repeated
    assert lines_of(undisturbed) == lines_of(run)


def test_a_signal_at_the_end_is_handled(tmp_path):
    config = tiny_config(tmp_path / "run", **OPTIONS)

    def prepare():
        write = RunFolder.write_summary

        def killed(self, summary):
            os.kill(os.getpid(), signal.SIGTERM)
            write(self, summary)

        RunFolder.write_summary = killed

    assert finish(start(config, prepare)) == 128 + signal.SIGTERM
    run = RunFolder(config.engine.run)
    assert run.read_summary()["steps"] == load_checkpoint(run.checkpoints / "last.ckpt")["global_step"] == 12


def test_a_second_signal_terminates_but_a_duplicate_does_not(tmp_path):
    from matbackprop.vision.signals import stop_on_signal

    stop = stop_on_signal()
    stop.handle(signal.SIGTERM, None)
    stop.handle(signal.SIGTERM, None)
    assert stop.signum == signal.SIGTERM
    stop._time -= 2.0
    with pytest.raises(KeyboardInterrupt):
        stop.handle(signal.SIGTERM, None)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda signum, frame: None])
def test_signal_handlers_are_restored(tmp_path, handler):
    before = signal.signal(signal.SIGTERM, handler)
    try:
        train(tiny_config(tmp_path / "run", max_epochs=1))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_before_the_first_step_reaches_the_caller(tmp_path, monkeypatch):
    from helpers.tiny_run import TinyData

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(TinyData, "train_loader", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(tmp_path / "run", max_epochs=1))


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
