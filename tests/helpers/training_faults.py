"""Faults that training must survive.

``FAULTS`` maps a name to a function ``fault(folder, draw)``, which trains the tiny system in ``folder``, injects the
fault at a random moment, and asserts that only the steps since the last checkpoint are lost, that a resumed run is
bitwise equal to an undisturbed one, with the same lines of metrics, and that errors suggest a fix.
``python -m benchmarks faults`` repeats them many times.
"""

import ctypes
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from helpers.tiny_run import TinyData, assert_equal_tensors, at_step, last_checkpoint, lines, tiny_config, train
from helpers.two_processes import run_two
from matbackprop.errors import CheckpointError, ConfigurationError, WorkerError
from matbackprop.vision.signals import RunInterrupted, interrupt_on_signal
from matbackprop.vision.training.run_folder import RunFolder
from matbackprop.vision.workers import parallel_map

OPTIONS = {"checkpoint_every_steps": 2, "max_epochs": 2, "log_every": 3}
STEPS = 12
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVED = "last.ckpt"


@dataclass
class Ended:
    """Outcome of training in a separate process."""

    code: int
    said: str


def in_process(config, prepare=lambda: None, meanwhile=lambda process, run: None) -> Ended:
    """Train in a forked process after calling ``prepare()`` there; call ``meanwhile(process, run)`` here."""
    said = Path(mkdtemp()) / "said"

    def body():
        os.setsid()
        prepare()
        code = 0
        try:
            train(config)
        except RunInterrupted as stop:
            said.write_text(str(stop))
            code = 128 + stop.signum
        except BaseException as error:
            said.write_text(f"{type(error).__name__}: {error}")
            code = 2
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    meanwhile(process, RunFolder(config.engine.run))
    process.join(60)
    assert process.exitcode is not None, "the process hangs"
    return Ended(process.exitcode, said.read_text() if said.exists() else "")


def wait_for_step(process, run, step):
    """Wait until the run has written a line of metrics of ``step`` or later."""
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        if step == 0 or any(m["step"] >= step for m in run.read_metrics()):
            return
        time.sleep(0.001)


@cache
def undisturbed(**options):
    """State and lines of metrics of an undisturbed run."""
    run, _ = train(tiny_config(Path(mkdtemp()) / "run", **(OPTIONS | options)))
    return last_checkpoint(run), lines(run)


def assert_resumes(run, **options):
    """Resume to the end and compare with an undisturbed run."""
    ended = in_process(tiny_config(run.path, **(OPTIONS | options), resume=True))
    assert ended.code == 0, ended.said
    whole, whole_lines = undisturbed(**{k: v for k, v in options.items() if k != "pause"})
    last = last_checkpoint(run)
    assert last["global_step"] == whole["global_step"] == STEPS
    assert_equal_tensors(whole["state_dict"], last["state_dict"])
    for one, two in zip(whole["optimizer"]["state"].values(), last["optimizer"]["state"].values(), strict=True):
        assert torch.equal(one["momentum_buffer"], two["momentum_buffer"])
    assert lines(run) == whole_lines
    assert not list(run.path.rglob("*.tmp")), "half-written files are left"


def saved_step(run):
    return last_checkpoint(run)["global_step"] if (run.checkpoints / "last.ckpt").exists() else 0


def killed(folder, draw):
    """SIGKILL at random moments, several times: no saved step is lost."""
    run, saved = RunFolder(folder / "run"), 0

    def kill(process, run):
        wait_for_step(process, run, saved + draw.randrange(5))
        time.sleep(draw.uniform(0, 0.03))
        process.kill()

    for _ in range(draw.randrange(2, 6)):
        ended = in_process(tiny_config(run.path, **OPTIONS, pause=0.005, resume=True), meanwhile=kill)
        assert ended.code in (0, -signal.SIGKILL), ended.said
        assert saved_step(run) >= saved
        saved = saved_step(run)
    assert_resumes(run, pause=0.005)


def killed_while_saving(folder, draw):
    """SIGKILL between two writes of a checkpoint."""
    run = RunFolder(folder / "run")
    number = draw.randrange(1, 150)

    def prepare():
        save, left = torch.save, [number]

        class Killing:
            def __init__(self, file):
                self.file = file

            def write(self, data):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return self.file.write(data)

            def flush(self):
                self.file.flush()

        torch.save = lambda content, file: save(content, Killing(file))

    assert in_process(tiny_config(run.path, **OPTIONS), prepare).code == -signal.SIGKILL
    assert_resumes(run)


def interrupted(folder, draw):
    """SIGTERM, SIGINT or SIGHUP in a training or validation step."""
    signum, hook = draw.choice(SIGNALS), draw.choice(["training_step", "validation_step"])
    interrupt(folder, signum, hook, draw.randrange(STEPS) if hook == "training_step" else draw.choice([6, STEPS]))


def interrupt(folder, signum, hook, step):
    run = RunFolder(folder / "run")

    def prepare():
        at_step(step, lambda: os.kill(os.getpid(), signum), hook)

    ended = in_process(tiny_config(run.path, **OPTIONS, checkpoint_min_seconds=1e9), prepare)
    assert ended.code == 128 + signum and SAVED in ended.said and "--resume" in ended.said
    log = run.log_path.read_text()
    assert signal.Signals(signum).name in log and "--resume" in log
    assert saved_step(run) == step + (hook == "training_step"), "a step is lost"
    assert_resumes(run, checkpoint_min_seconds=1e9)


def interrupted_while_preparing(folder, draw):
    """SIGTERM, SIGINT or SIGHUP before the first step: the process ends, and the run starts from the beginning."""
    run, signum = RunFolder(folder / "run"), draw.choice(SIGNALS)

    def prepare():
        def stuck(self):
            os.kill(os.getpid(), signum)
            time.sleep(60)

        interrupt_on_signal().__enter__()  # as every command does
        TinyData.train_loader = stuck

    started = time.monotonic()
    ended = in_process(tiny_config(run.path, **OPTIONS), prepare)
    assert ended.code == 2 and ended.said.startswith("KeyboardInterrupt")
    assert time.monotonic() - started < 30
    assert_resumes(run)


def read_only_folder(folder, draw):
    """The folder of the run or of its checkpoints is read-only: an error names it, and nothing is lost."""
    run = RunFolder(folder / "run")
    _killed_at(run, draw.randrange(1, STEPS))
    locked = draw.choice([run.path, run.checkpoints])
    before = saved_step(run)
    locked.chmod(0o555)
    ended = in_process(tiny_config(run.path, **OPTIONS, pause=0.005, resume=True), _drop_privileges)
    locked.chmod(0o755)
    assert ended.code == 2 and ended.said.startswith(PermissionError.__name__) and str(locked) in ended.said
    assert saved_step(run) == before
    assert_resumes(run, pause=0.005)


def _drop_privileges():
    """Drop all capabilities (Linux's capset), so that file modes apply to root too."""
    assert ctypes.CDLL(None, use_errno=True).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0


def disk_full(folder, draw):
    """The disk is full while a checkpoint is written: the previous checkpoint stays."""
    run, limit = RunFolder(folder / "run"), draw.choice([500, 5000, 6000, 8000])

    def prepare():
        save = torch.save
        left = [draw.randrange(1, 5)]

        def saving(*arguments):
            left[0] -= 1
            if left[0] == 0:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return save(*arguments)

        torch.save = saving

    ended = in_process(tiny_config(run.path, **OPTIONS), prepare)
    assert ended.code == 2 and re.match(r"OSError: .*'.*\.ckpt'", ended.said), ended.said
    assert not [p for p in run.checkpoints.iterdir() if p.suffix == ".tmp"]
    saved_step(run)  # nothing is damaged
    assert_resumes(run)


def damaged_checkpoint(folder, draw):
    """The end of the last checkpoint is missing: an error names it, and no file changes."""
    run, _ = train(tiny_config(folder / "run", **OPTIONS))
    path = run.checkpoints / "last.ckpt"
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])
    before = run.metrics_path.read_bytes()
    ended = in_process(tiny_config(run.path, **OPTIONS, resume=True))
    assert ended.code == 2 and ended.said.startswith(CheckpointError.__name__) and "last.ckpt is damaged" in ended.said
    assert run.metrics_path.read_bytes() == before


def _killed_at(run, step):
    def kill(process, run):
        wait_for_step(process, run, step)
        process.kill()

    in_process(tiny_config(run.path, **OPTIONS, pause=0.005), meanwhile=kill)


def two_runs_in_one_folder(folder, draw):
    """A second process is rejected, and the first is not affected."""
    run, step = RunFolder(folder / "run"), draw.randrange(1, 4)

    def second(process, run):
        wait_for_step(process, run, step)
        for options in ({"resume": True}, {"overwrite": True}, {}):
            ended = in_process(tiny_config(run.path, **OPTIONS, pause=0.1, **options))
            assert ended.code == 2 and ended.said.startswith(ConfigurationError.__name__)
            assert "Another process is training in" in ended.said

    assert in_process(tiny_config(run.path, **OPTIONS, pause=0.1), meanwhile=second).code == 0
    assert_resumes(run, pause=0.1)


def one_process_of_two_killed(folder, draw):
    """One of two processes is killed: the other ends by itself, and both resume exactly."""
    options = {**OPTIONS, "items": 48, "devices": "2", "guard_every": 2}
    run, victim, step = RunFolder(folder / "run"), draw.randrange(2), draw.randrange(2, STEPS)

    def prepare(rank):
        at_step(step, lambda: rank == victim and os.kill(os.getpid(), signal.SIGKILL))

    codes = run_two(tiny_config(run.path, **options), prepare)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] not in (0, None)
    assert saved_step(run) >= step - 2
    assert run_two(tiny_config(run.path, **options, resume=True)) == [0, 0]
    assert run_two(tiny_config(folder / "whole", **options)) == [0, 0]
    ends = [last_checkpoint(RunFolder(folder / name)) for name in ("run", "whole")]
    assert_equal_tensors(ends[0]["state_dict"], ends[1]["state_dict"])
    assert lines(run) == lines(RunFolder(folder / "whole"))


def worker_killed(folder, draw):
    """A worker process is killed: an error gives the reason, and the work can be repeated."""

    def kill():
        while not (workers := multiprocessing.active_children()):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.3))
        draw.choice(workers).kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        list(parallel_map(time.sleep, [0.02] * 60, workers=2))
        raise AssertionError("no error was raised")
    except WorkerError as error:
        assert "SIGKILL" in str(error)
    finally:
        thread.join()
    assert len(list(parallel_map(time.sleep, [0.001] * 60, workers=2))) == 60


FAULTS = {
    function.__name__: function
    for function in (
        killed,
        killed_while_saving,
        interrupted,
        interrupted_while_preparing,
        read_only_folder,
        disk_full,
        damaged_checkpoint,
        two_runs_in_one_folder,
        worker_killed,
        one_process_of_two_killed,
    )
}


def inject(name, folder, seed):
    """Inject one fault; the seed determines its details."""
    FAULTS[name](Path(folder), random.Random(f"{name}-{seed}"))
