"""The command line: help of every command, errors as one message, presets, files and options."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.command_line import call
from matbackprop import cli
from matbackprop.cli import COMMANDS, main
from matbackprop.errors import DataError


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert call(*name.split(), "--help") == 0
    out = capsys.readouterr().out
    assert f"usage: matbackprop {name}" in out and ":class:" not in out
    assert len(out.splitlines()) > 5


@pytest.mark.parametrize("group", ["train", "evaluate", "data"])
def test_every_group_lists_its_commands(group, capsys):
    assert call(group) == 0
    listed = {line[2:].split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert {name for name in COMMANDS if name.split()[0] == group} <= listed
    assert not listed & {name for name in COMMANDS if name.split()[0] != group}


def test_overview_lists_everything(capsys):
    for words in ([], ["--help"], ["help"]):
        assert call(*words) == 0
        out = capsys.readouterr().out
        assert all(name in out and command.summary in out for name, command in COMMANDS.items())
        assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "o2q"], "Did you mean 'train o2p'?"),
        (["zzz"], "Commands: segment"),
        (["train", "ncuts", "smoke"], "matbackprop train ncuts --preset smoke"),
        (["train", "o2p", "--preset", "big"], "train o2p: error: argument --preset: invalid choice: 'big'"),
        (["train", "o2p", "--engine.max-epohcs", "3"], "max-epohcs"),
    ],
)
def test_unknown_commands_and_options(words, hint, capsys):
    assert call(*words) == 2
    assert hint in "".join(capsys.readouterr())


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("matbackprop 0")


def test_errors_of_the_package_are_one_line_and_exit_code_two(tmp_path, capsys, monkeypatch):
    assert call("data", "check", str(tmp_path / "nothing")) == 2
    err = capsys.readouterr().err
    assert err == (
        f"matbackprop: error: {tmp_path / 'nothing'} is not a folder. Pass the folder of a data set in the layout of "
        "BSDS or COCO.\n"
    )
    assert call("data", "check", str(tmp_path / "nothing"), "--debug") == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("MATBACKPROP_DEBUG", "1")
    assert call("data", "check", str(tmp_path / "nothing")) == 2
    assert "Traceback" in capsys.readouterr().err


def _failing(error):
    def fail(*_, **__):
        raise error

    return fail


def test_other_exceptions_end_a_command(monkeypatch, capsys):
    monkeypatch.setattr(cli, "run", _failing(KeyboardInterrupt()))
    assert call("serve") == 130
    monkeypatch.setattr(cli, "run", _failing(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        main(["serve"])
    monkeypatch.setattr(cli, "run", _failing(OSError("no file is named")))
    with pytest.raises(OSError, match="no file is named"):
        main(["serve"])
    from matbackprop.vision.signals import RunInterrupted

    monkeypatch.setattr(cli, "run", _failing(RunInterrupted(15, 7, "here")))
    assert call("serve") == 143
    assert "SIGTERM at step 7" in capsys.readouterr().err


OPTIONAL = ["numpy", "scipy", "PIL", "tyro", "rich", "pydantic", "lightning_fabric", "skimage", "matplotlib", "gradio"]


def without(modules, *words):
    """Run a command in a process where modules are not installed."""
    program = (
        "import sys\n"
        "class Without:\n"
        "    def __init__(self, finder):\n"
        "        self.finder = finder\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        absent = name.split('.')[0] in {modules!r}\n"
        "        return None if absent else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = map(Without, sys.meta_path)\n"
        "from matbackprop.cli import main\n"
        f"main({list(words)!r})\n"
    )
    return subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)


def test_doctor_needs_the_core_only():
    done = without(OPTIONAL, "doctor", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["gradients"]["right"]


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (("segment", "x.png"), "numpy", "train"),
        (("serve",), "gradio.themes", "serve"),
        (("serve",), "safetensors", "serve"),
        (("evaluate", "segmentations", "a", "--ground-truth", "b"), "tyro", "metrics"),
    ],
)
def test_a_missing_dependency_names_the_extra_to_install(words, module, extra, monkeypatch, capsys):
    monkeypatch.setattr(cli, "run", _failing(ModuleNotFoundError("x", name=module)))
    assert call(*words) == 2
    assert capsys.readouterr().err.endswith(
        f"{module.split('.')[0]} is not installed. Install it with: pip install 'matbackprop[{extra}]'\n"
    )


def test_help_in_a_narrow_terminal():
    environment = os.environ | {"COLUMNS": "5"}
    command = [sys.executable, "-m", "matbackprop", "segment", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0 and "usage" in done.stdout


@pytest.fixture
def default_signals():
    """Restore signals that a shell ignores in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_a_command_with_one_line(default_signals, monkeypatch, capsys, signum, code):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    cleaned = []

    def work(*_, **__):
        try:
            os.kill(os.getpid(), signum)
            time.sleep(10)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signum)  # the process and its group are signaled: the same signal twice
            cleaned.append(True)
            raise RuntimeError("a worker process ended early") from None

    monkeypatch.setattr(cli, "run", work)
    assert call("serve") == code
    assert capsys.readouterr().err == "matbackprop: stopped.\n"
    assert cleaned == [True]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_later_signal_ends_a_command_at_once():
    program = (
        "import os, signal, time; from matbackprop import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also if a shell ignores it
        "def work(*_, **__):\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally: time.sleep(1.1); os.kill(os.getpid(), signal.SIGINT); time.sleep(30)\n"
        "cli.run = work; cli.main(['demo'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("words", [("train", "o2p"), ("train", "ncuts")])
def test_help_of_long_commands_loads_no_heavy_modules(words):
    program = (
        "import sys; from matbackprop import cli\n"
        f"try: cli.main([*{words!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'lightning_fabric', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stderr == "[]\n" and "--data.root" in done.stdout


def parse(*words):
    from matbackprop.cli.train import parse as parse_train

    return parse_train("o2p", list(words), "matbackprop train o2p")


def test_preset_then_file_then_options(tmp_path):
    from matbackprop.vision.training.config import RECIPES

    recipe = RECIPES["o2p"]
    assert parse("--preset", "paper").config == recipe.preset("paper")
    assert parse().config == recipe.preset(next(iter(recipe.presets)))
    file = tmp_path / "c.toml"
    file.write_text("[engine]\nseed = 5\nmax_epochs = 7\n[optimizer]\nrate = 0.125\n")
    chosen = parse("--preset", "paper", "--config", str(file), "--engine.max-epochs", "9")
    assert chosen.preset == "paper"
    assert chosen.config.engine.seed == 5
    assert chosen.config.engine.max_epochs == 9
    assert chosen.config.optimizer.rate == 0.125
    expected = recipe.preset("paper")
    assert chosen.config.model == expected.model


def test_data_check(tmp_path, capsys):
    from matbackprop.vision.data.shapes import write_shapes_coco

    root = write_shapes_coco(tmp_path / "coco", train=2, val=1)
    assert call("data", "check", str(root)) == 0
    assert "no problems" in capsys.readouterr().out
    bad = next((root / "images" / "train").iterdir())
    bad.write_bytes(b"nonsense")
    assert call("data", "check", str(root)) == 1
    out = capsys.readouterr().out
    assert f"bad: {bad}" in out and "1 problem\n" in out
    assert call("data", "check", str(root), "--json") == 1
    actual = json.loads(capsys.readouterr().out)
    assert actual["layout"] == "coco" and actual["problems"][0]["path"] == str(bad)


def test_data_download(tmp_path, capsys, monkeypatch):
    from matbackprop.vision.data import download as downloads

    monkeypatch.delenv("MATBACKPROP_DATA", raising=False)
    assert call("data", "download", "bsds500") == 2
    assert "No folder to download to" in capsys.readouterr().err
    asked = []
    monkeypatch.setattr(downloads, "download_dataset", lambda *a, **k: asked.append(a) or a[1])
    monkeypatch.setenv("MATBACKPROP_DATA", str(tmp_path))
    assert call("data", "download", "bsds500") == 0
    assert asked == [("bsds500", tmp_path / "BSDS500")]
    monkeypatch.setattr(downloads, "download_dataset", _failing(DataError("cannot be reached. By hand: fetch it")))
    assert call("data", "download", "coco", "--folder", str(tmp_path)) == 2
    assert "By hand" in capsys.readouterr().err


def test_data_download_of_weights(tmp_path, capsys, monkeypatch):
    from matbackprop.vision.models.backbones import published

    asked = []
    monkeypatch.setattr(published, "download_weights", lambda name, folder: asked.append((name, folder)) or folder)
    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path))
    assert call("data", "download", "tiny-vit") == call("data", "download", "vgg16", "--folder", str(tmp_path)) == 0
    assert asked == [("tiny-vit", tmp_path / "weights"), ("vgg16", tmp_path)]


def test_doctor(capsys):
    assert call("doctor") == 0
    out = capsys.readouterr().out
    for word in ("versions", "devices", "data", "gradients", " ok"):
        assert word in out
    assert "WRONG" not in out
    assert call("doctor", "--json") == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["gradients"]["right"] is True
    assert max(actual["gradients"]["relative errors"].values()) < 1e-6


def test_doctor_detects_wrong_gradients(capsys, monkeypatch):
    import torch

    import matbackprop

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 1.0

        @staticmethod
        def backward(ctx, g):
            return 1.001 * g

    original = matbackprop.matrix_log
    monkeypatch.setattr(matbackprop, "matrix_log", lambda a: Wrong.apply(original(a)))
    assert call("doctor") == 1
    assert "WRONG" in capsys.readouterr().out


def test_help_texts_have_no_extra_line_breaks():
    """tyro keeps a break before a line that starts with a sign."""
    for path in Path(cli.__file__).parents[1].rglob("*.py"):
        assert not re.search(r"\n +#: .*\n +#: \W", path.read_text(encoding="utf-8")), path
