"""Adversarial options, names and paths: one message, exit code 2, and no output files."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from helpers.command_line import call
from matbackprop.vision.training.run_folder import RunFolder

HUGE = str(10**30)
SEGMENT = "segment @/photo.png --out @/out --model none"
CLASSIFY = "classify @/photo.png"
SCORE = "evaluate segmentations @/maps --ground-truth @/maps"
TRAIN = "train o2p --preset smoke --data.generate 4 --run @/out"

CASES = [
    (f"{SEGMENT} --side 1", "side must be at least 2 pixels, got 1"),
    (f"{SEGMENT} --ks 0", "at least one positive integer, got .0"),
    ("segment", "No image was given"),
    ("segment @/*.gif", "No file matches"),
    ("segment @/missing.jpg --out @/out --model none", "missing.jpg does not exist. Pass another file"),
    (f"{SEGMENT} --threshold 3", "--threshold must be from 0 to 1, got 3"),
    (f"{SEGMENT} --threshold 0.5 --k 3", "--threshold cannot be combined with --k"),
    (f"{SEGMENT} --scales 0.5 1", "scales and mirror need a contour network"),
    (f"{SEGMENT} --k -5", "--k must be at least 1, got -5"),
    (f"{SEGMENT} --out @/photo.png", "File exists"),
    (f"{SEGMENT} --out @/photo.png/x", "Not a directory"),
    (f"{SEGMENT} --out @/{'n' * 300}", "File name too long"),
    (f"{SEGMENT} --out @/{'n/' * 1900}", "nested too deeply|File name too long"),
    (f"{SEGMENT} --model @/photo.png", "does not exist"),
    ("segment @/pipe.png --out @/out --model none", "not a regular file"),
    ("segment @/loop.png --out @/out --model none", "does not exist"),
    ("segment /dev/zero --out @/out --model none", "not a regular file"),
    ("segment @/a**b.png --out @/out --model none", "No file matches"),
    (f"{CLASSIFY} --boxes 1e308,1e308,1e308,1e308", "outside the image"),
    (f"{CLASSIFY} --boxes 1,2,3", "must be x,y,width,height"),
    (f"{CLASSIFY} --regions x.json --boxes 1,2,3,4", "cannot be combined with --boxes"),
    (f"{CLASSIFY} --boxes nan,0,1,1", "finite"),
    (f"{CLASSIFY} --masks @/black.png", "Region 0 is empty"),
    (f"{CLASSIFY} --top 0", "top must be at least 1, got 0"),
    (f"{SCORE} --tolerance nan", "tolerance"),
    (f"{SCORE} --thresholds 0", "threshold"),
    (f"{SCORE} --csv @/photo.png/x.csv", "Not a directory|File exists"),
    (f"{SCORE} --csv @/maps", "maps: Is a directory"),
    (f"{TRAIN} --seed -1", "seed is -1"),
    (f"{TRAIN} --seed {HUGE}", "seed is"),
    (f"{TRAIN} --devices 0", "from 1 to 64"),
    (f"{TRAIN} --devices 1000", "from 1 to 64"),
    (f"{TRAIN} --devices x", "auto, a number from 1 to 64, or a list"),
    (f"{TRAIN} --max-epochs 0", "max_epochs is 0"),
    (f"{TRAIN} --accumulate {HUGE}", "accumulate is"),
    (f"{TRAIN} --data.batch-size {HUGE}", "batch_size is"),
    (f"{TRAIN} --data.threads {HUGE}", "threads is"),
    (f"{TRAIN} --data.canvas 1", "canvas 1 is too small for .* of alexnet. Use at least [0-9]+ pixels"),
    (f"{TRAIN} --model.eps 0", "eps must be positive for function 'log', got 0"),
    ("train o2p --run @/photo.png/run", "photo.png.*Check the path"),
    ("demo --epochs 0 --run @/out", "epochs is 0"),
    ("demo --images 0 --run @/out", "images is 0"),
    (f"{TRAIN} --optimizer.rate 1e308", "rate is"),
    (f"{TRAIN} --model.dropout nan", "dropout is nan. Input should be"),
    (f"{TRAIN} --model.feature-scale inf", "feature_scale is inf. Input should be"),
    (f"{TRAIN} --data.jitter 100000000", "jitter is"),
    (f"{TRAIN} --config @/photo.png", "photo.png"),
    ("data check @/maps", "not a data set"),
    ("export box --out @/a.txt", "must end in .onnx"),
    ("export box --out @/a.onnx --size 1000000 1000000", "from 1 to 50000000 pixels"),
    ("export box --out @/folder.onnx", "is a folder"),
    ("export box --out @/photo.png/a.onnx", "Not a directory|File exists"),
    ("serve --port 99999", "cannot listen on 127.0.0.1, port 99999"),
    ("serve --host nobody.invalid", "cannot listen on nobody.invalid"),
]


@pytest.fixture
def folder(tmp_path):
    pixels = np.zeros((24, 32, 3), np.uint8)
    pixels[:, 16:] = 200
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    Image.fromarray(0 * pixels).save(tmp_path / "black.png")
    (tmp_path / "maps").mkdir()
    np.save(tmp_path / "maps" / "a.npy", pixels[..., 0])
    (tmp_path / "folder.onnx").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    return tmp_path


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes and links")
@pytest.mark.parametrize(("words", "said"), CASES, ids=[words[:60] for words, _ in CASES])
def test_invalid_options_are_one_message(folder, capsys, words, said):
    if words.startswith("export"):
        pytest.importorskip("onnxscript")
    before = sorted(folder.rglob("*"))
    assert call(*(word.replace("@", str(folder)) for word in words.split())) == 2
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(said, text), text
    assert "Traceback" not in text
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_cannot_be_encoded_is_printed(folder, tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    (folder / "photo.png").rename(folder / name)
    command = [sys.executable, "-m", "matbackprop", "segment", str(folder / name), "--model", "none"]
    command += ["--out", str(folder / "out"), "--format", "coco", "svg"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env={**os.environ, "PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stderr
    assert b"caf\\udce9.png: 2 regions" in done.stdout
    assert (folder / "out" / os.fsdecode(b"caf\xe9-coco.json")).is_file()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on files")
@pytest.mark.parametrize(
    ("words", "file", "limit"),
    [(f"{SCORE} --csv @/x.csv", "x.csv", 10), ("report @/run", "run/figures/curves.png", 5000)],
)
def test_a_full_disk_is_one_message_with_the_file(folder, tmp_path, words, file, limit):
    import resource

    run = RunFolder(folder / "run").create({"seed": 0})
    run.append_metrics({"step": 1, "epoch": 0, "train/loss": 0.5})
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    done = subprocess.run(
        [sys.executable, "-m", "matbackprop", *(word.replace("@", str(folder)) for word in words.split())],
        capture_output=True,
        text=True,
        env={**os.environ, "MATBACKPROP_CACHE": str(folder / "cache")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2, done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"matbackprop: error: {folder / file}") and "Free disk space" in message
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before
