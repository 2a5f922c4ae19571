"""Corrupted files for every reader, and the required outcome.

``READERS`` maps a name to a :class:`Reader`: a folder of valid files, the files among them to corrupt, and the
calls that read them, most of them commands. :func:`attack` corrupts one file, determined by a number, and runs the
calls in a separate process. Required: the files are read, or a one-line error names the bad file and the reason. A
traceback, a warning, a crash, a hang, more than a gigabyte of memory, or a half-written result is a failure.
``python -m benchmarks corrupted_files`` repeats this many times.
"""

import copy
import importlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.io import savemat

from matbackprop.cli import main
from matbackprop.errors import DataError
from matbackprop.vision.configuration import merge
from matbackprop.vision.data.shapes import write_shapes_bsds, write_shapes_coco
from matbackprop.vision.files import printable
from matbackprop.vision.training.checkpoint import load_checkpoint
from matbackprop.vision.training.config import RECIPES, resolve

for module in (
    *(f"cli.{name}" for name in ("segment", "classify", "report", "data", "evaluate", "evaluate_run", "train")),
    *(f"vision.training.{name}" for name in ("engine", "o2p", "ncuts")),
    *("vision.data.check", "vision.models.backbones.base"),
):
    importlib.import_module(f"matbackprop.{module}")  # once, not in every forked process

MEMORY = 1 << 30  # bytes above the level before the call
SECONDS = 60.0
GOOD = ("read", "refused")

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, -0.0, float("nan"), float("inf"), "", "x", "\0", "nan",
    "9" * 5000, "../../etc/passwd", "/dev/zero", "é\ud800", [], {}, [[]], [None], [[[1]]], [float("nan")] * 4,
    [1e9] * 8, {"a": {"b": []}}, [[0, 0, 1e5, 1e5, 0, 1e5]], {"size": [1, 1], "counts": "0" * 2000},
    {"size": [2**31, 2**31], "counts": [2**62]},
]  # fmt: skip
DEEP = (b"[" * 200_000, b'{"a":' * 200_000, b"[" * 50_000 + b"]" * 50_000)


def corrupt_bytes(data: bytes, draw: random.Random) -> bytes:
    """Change, remove, insert, repeat or cut bytes in a few places."""
    corrupted = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 10, 40))):
        place = draw.randrange(len(corrupted) + 1)
        many = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
        change = draw.randrange(7)
        if change == 0 and corrupted:
            corrupted[place % len(corrupted)] ^= 1 << draw.randrange(8)
        elif change == 1:
            del corrupted[place : place + draw.randrange(1, 50)]
        elif change == 2:
            corrupted[place:place] = many
        elif change == 3:
            corrupted[place : place + len(many)] = many
        elif change == 4:
            edge = draw.choice((b"\xff", b"\x00", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\xff" * 8))
            corrupted[place : place + len(edge)] = edge
        elif change == 5:
            corrupted[place:place] = corrupted[place : place + draw.randrange(1, 400)]
        elif draw.random() < 0.3:
            del corrupted[place:]
    return bytes(corrupted)


def corrupt_tree(tree: Any, draw: random.Random, values: Sequence[Any] = VALUES) -> Any:
    """Replace or remove a few values anywhere in nested lists and dictionaries."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 3, 6))):
        if draw.random() < 0.03 or not isinstance(tree, (dict, list)) or not tree:
            tree = copy.deepcopy(draw.choice(values))
            continue
        node = tree
        while True:
            key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], (dict, list)) or not node[key] or draw.random() < 0.15:
                break
            node = node[key]
        change = draw.random()
        if change < 0.2:
            del node[key]
        elif change < 0.25 and isinstance(node, list):
            node += [copy.deepcopy(node[key])] * draw.choice((1, 100))
        else:
            node[key] = copy.deepcopy(draw.choice(values))
    return tree


def corrupt_json(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.05:
        return draw.choice(DEEP)
    return json.dumps(corrupt_tree(json.loads(data), draw)).encode()


def corrupt_lines(data: bytes, draw: random.Random) -> bytes:
    """Corrupt one line of JSON among many."""
    lines = data.splitlines() or [b"{}"]
    place = draw.randrange(len(lines))
    lines[place] = corrupt_json(lines[place], draw)
    return b"\n".join(lines) + b"\n" * draw.randrange(2)


def corrupt_safetensors(data: bytes, draw: random.Random) -> bytes:
    """Corrupt the header, with a valid length, or the tensors."""
    length = int.from_bytes(data[:8], "little")
    if draw.random() < 0.3:
        from safetensors.torch import load, save

        state = load(data)
        name = draw.choice(list(state))
        state[name] = draw.choice(
            (state[name] * math.nan, state[name].to(torch.int64), torch.zeros(3), state[name].flatten()[1:])
        )
        return save({k: v.contiguous() for k, v in state.items()})
    head = json.dumps(corrupt_tree(json.loads(data[8 : 8 + length]), draw)).encode()
    claimed = draw.choice((len(head), len(head), len(head), 2**63, len(head) + 1, 0))
    return claimed.to_bytes(8, "little") + head + data[8 + length :]


def corrupt_png(data: bytes, draw: random.Random) -> bytes:
    """Corrupt the header or its size, with a valid checksum."""
    width, height, *rest = struct.unpack(">IIBBBBB", data[16:29])
    sizes = (0, 1, 3, 65_000, 2**31 - 1, 2**32 - 1, 9_459, width, height)
    if draw.random() < 0.5:
        width, height = draw.choice(sizes), draw.choice(sizes)
    else:
        rest[draw.randrange(5)] = draw.randrange(20)
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, *rest)
    return data[:12] + head + zlib.crc32(head).to_bytes(4, "big") + data[33:]


def corrupt_npz(data: bytes, draw: random.Random) -> bytes:
    """Write other arrays, or a corrupted member with a valid checksum."""
    out = BytesIO()
    if draw.random() < 0.6:
        arrays = {draw.choice(("labels", "ks", "a", "../x")): _strange_array(draw) for _ in range(draw.randrange(3))}
        np.savez_compressed(out, allow_pickle=True, **arrays)
        return out.getvalue()
    with zipfile.ZipFile(BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, corrupt_bytes(old.read(name), draw))
    return out.getvalue()


def corrupt_npy(data: bytes, draw: random.Random) -> bytes:
    out = BytesIO()
    if draw.random() < 0.5:
        np.save(out, _strange_array(draw), allow_pickle=True)
        return out.getvalue()
    shape = draw.choice(
        ("(99999, 99999)", "(-1, 4)", "(2, 2, 2, 2)", "()", "(1e9, 1)", "(True, 5)", "(3, 4" + "0" * 5000 + ")")
    )
    kind = draw.choice(("<i4", "|O", "<U9", "<f2", "|V1000000", "[('a', '<i4')]", "<i4" * 3000))
    head = f"{{'descr': '{kind}', 'fortran_order': {draw.choice((True, False, 3))}, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head) % 65536) + head + data[128:]


def _strange_array(draw: random.Random) -> np.ndarray:
    kinds: list[Callable[[], np.ndarray]] = [
        lambda: np.array(None),
        lambda: np.array([[{"a": 1}, None]], dtype=object),
        lambda: np.full((20, 30), np.nan),
        lambda: np.full((20, 30), 2**64 - 1, np.uint64),
        lambda: np.full((20, 30), -(2**63), np.int64),
        lambda: np.arange(600.0).reshape(20, 30) * 1e300,
        lambda: np.zeros((0, 5), int),
        lambda: np.zeros((2, 3, 4, 5), int),
        lambda: np.zeros((20, 30), complex),
        lambda: np.array([["a" * 999]]),
        lambda: np.zeros((4, 4), "datetime64[s]"),
        lambda: np.zeros((4, 4), [("a", int)]),
        lambda: np.zeros((3, 19, 30), np.uint8),
        lambda: np.random.default_rng(draw.randrange(99)).integers(-(2**60), 2**60, (20, 30)),
        lambda: np.zeros((9_000, 9_000), np.uint8),
        lambda: np.zeros((300, 2_000, 1_000), np.uint8),
    ]
    return draw.choice(kinds)()


def corrupt_mat(data: bytes, draw: random.Random) -> bytes:
    """Write other variables, or corrupt bytes inside a compressed variable."""
    if draw.random() < 0.5:
        cell = np.empty((1, 2), object)
        cell[:] = [[draw.choice(({"Segmentation": _savable(draw)}, _savable(draw))) for _ in range(2)]]
        name = draw.choice(("groundTruth", "segs", "ucm2", "x"))
        out = BytesIO()
        savemat(out, {name: draw.choice((cell, _savable(draw)))}, do_compression=draw.random() < 0.7)
        return out.getvalue()
    head, rest = data[:128], data[136:]
    packed = zlib.compress(corrupt_bytes(zlib.decompress(rest), draw))
    return head + struct.pack("<II", 15, len(packed)) + packed


def _savable(draw: random.Random) -> np.ndarray:
    while (array := _strange_array(draw)).dtype.kind not in "uifbc" or array.size > 81_000_000:
        pass
    return array


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def corrupt_checkpoint(data: bytes, draw: random.Random) -> bytes:
    """Write other contents with a valid checksum: corrupted values, or code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.ckpt"
        path.write_bytes(data)
        if draw.random() < 0.5:
            values = [None, 0, -1, 2**40, math.nan, "", "x", [], {}, (), torch.zeros(3), torch.tensor(math.nan), b""]
            corrupted = corrupt_tree(load_checkpoint(path), draw, values)
            torch.save(corrupted, path)
            return path.read_bytes()
    out = BytesIO()
    if draw.random() < 0.5:
        torch.save({"state_dict": _Evil()}, out)
    else:
        out.write(pickle.dumps(_Evil()) + b"\0" * 100)
    return out.getvalue()


CORRUPTIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": corrupt_json, ".jsonl": corrupt_lines, ".safetensors": corrupt_safetensors, ".png": corrupt_png,
    ".npz": corrupt_npz, ".npy": corrupt_npy, ".mat": corrupt_mat, ".ckpt": corrupt_checkpoint,
}  # fmt: skip


def corrupt(path: Path, draw: random.Random) -> str:
    """Corrupt a file and return the kind of corruption."""
    data = path.read_bytes()
    path.unlink()
    change = draw.random()
    if change < 0.08:
        kind = draw.choice(("empty", "folder", "pipe", "dangling link", "endless link", "device", "huge", "other kind"))
        make: dict[str, Callable[[], Any]] = {
            "empty": lambda: path.write_bytes(b""),
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
            "dangling link": lambda: path.symlink_to("nothing"),
            "endless link": lambda: path.symlink_to(path.name),
            "device": lambda: path.symlink_to("/dev/zero"),
            "huge": lambda: _sparse(path, data, 3 << 30),
            "other kind": lambda: path.write_bytes(
                draw.choice((b"\x89PNG\r\n\x1a\n", b"PK\x03\x04", b"%!PS", b"\x80\x04."))
            ),
        }
        make[kind]()
        return kind
    structured = CORRUPTIONS.get(path.suffix)
    if structured is not None and change < 0.65:
        path.write_bytes(structured(data, draw))
        return "structure"
    path.write_bytes(corrupt_bytes(data, draw))
    return "bytes"


def _sparse(path: Path, data: bytes, size: int) -> None:
    path.write_bytes(data)
    os.truncate(path, size)


@dataclass(frozen=True)
class Reader:
    """Valid files and the calls that read them.

    Attributes:
        make: writes valid files into a folder.
        corrupted: patterns of the files to corrupt.
        calls: functions of the folder that read the files.
        turns: relative frequency; slow readers have fewer.
    """

    make: Callable[[Path], Any]
    corrupted: tuple[str, ...]
    calls: tuple[Callable[[Path], Any], ...]
    turns: int = 8


def command(text: str) -> Callable[[Path], None]:
    """Return a call of a command; ``@`` stands for the folder."""
    return lambda folder: main([word.replace("@", str(folder)) for word in text.split()])


def _labels() -> np.ndarray:
    labels = np.zeros((20, 30), np.uint8)
    labels[5:, 10:], labels[12:, 22:] = 1, 2
    return labels


def _label_files(folder: Path) -> None:
    labels, cell = _labels(), np.empty((1, 2), object)
    for part in ("segs", "truth"):
        (folder / part).mkdir()
        cell[0, 0], cell[0, 1] = {"Segmentation": labels + 1}, {"Segmentation": labels.T.reshape(20, 30)}
        savemat(folder / part / "one.mat", {"groundTruth": cell}, do_compression=True)
        Image.fromarray(labels).save(folder / part / "three.png")
        np.savez_compressed(folder / part / "four.npz", labels=np.stack([labels, labels]), ks=np.array([3, 3]))
        np.save(folder / part / "five.npy", labels.astype(np.int32))
    Image.fromarray(labels).save(folder / "truth" / "six.png")
    contours = np.pad(np.kron(labels, np.ones((2, 2))), (0, 1)) / 3
    savemat(folder / "segs" / "six.mat", {"ucm2": contours}, do_compression=True)


def _pictures(folder: Path) -> None:
    colors = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)
    colors[:, :16] //= 2
    picture = Image.fromarray(colors)
    for suffix in ("jpg", "png", "tif", "webp", "bmp", "gif", "ppm", "jp2"):
        picture.save(folder / f"{suffix}.{suffix}")
    picture.convert("RGBA").save(folder / "clear.png")
    picture.convert("P").save(folder / "palette.png", transparency=3)
    picture.convert("CMYK").save(folder / "cmyk.jpg")
    picture.save(folder / "turned.jpg", exif=_turned())
    Image.fromarray(colors[..., 0].astype(np.uint16) * 9).save(folder / "deep.png")
    Image.fromarray(colors[..., 0].astype(np.float32)).save(folder / "float.tif")
    picture.save(folder / "packed.tif", compression="tiff_lzw")


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@cache
def _trained(recipe: str) -> Path:
    """A run folder, trained once."""
    folder = Path(tempfile.mkdtemp(prefix="corrupted-"))
    os.environ["MATBACKPROP_CACHE"] = str(folder / "cache")
    short = {"o2p": "--data.generate 6 --data.batch-size 6", "ncuts": "--data.generate 4"}[recipe]
    words = f"train {recipe} --preset smoke --accelerator cpu --max-epochs 1 --no-tensorboard {short} --run @/run"
    code = run_in_child(command(words), folder, seconds=600, memory=1 << 33)
    assert code.code == 0, code.said
    return folder


def _copy(source: Path, folder: Path) -> None:
    """Copy a folder; large files, which are never modified in place, are linked."""

    def one(old: str, new: str) -> None:
        (os.link if os.path.getsize(old) > 1 << 20 else shutil.copy2)(old, new)

    shutil.copytree(source, folder, copy_function=one, dirs_exist_ok=True)


def _run(recipe: str) -> Callable[[Path], None]:
    return lambda folder: _copy(_trained(recipe), folder)


def _model(recipe: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _copy(_trained(recipe) / "run" / "model", folder / "model")
        write_shapes_coco(folder, train=1, val=1)
        shutil.copy(next(folder.glob("images/train/*.png")), folder / "photo.png")

    return make


def _regions(folder: Path) -> None:
    _model("o2p")(folder)
    file = folder / "annotations" / "instances_train.json"
    file.write_text(file.read_text().replace(next(folder.glob("images/train/*.png")).name, "photo.png"))
    labels = np.zeros(Image.open(folder / "photo.png").size[::-1], np.uint8)
    labels[4:60, 4:60] = 255
    Image.fromarray(labels).save(folder / "mask.png")


def _coco(folder: Path) -> None:
    write_shapes_coco(folder, train=2, val=1)
    (folder / "fields.toml").write_text(f'[data]\nroot = "{folder}"\ngenerate = 0\nside = 12\ncanvas = 32\n')


def _bsds(folder: Path) -> None:
    write_shapes_bsds(folder, train=2, val=1, size=(48, 64))
    (folder / "fields.toml").write_text(f'[data]\nroot = "{folder}"\ngenerate = 0\nsplit = "final"\n')


def _prepare(name: str) -> Callable[[Path], None]:
    """Return a call that builds the system and the data of a recipe, as the command ``train`` does."""

    def build(folder: Path) -> None:
        recipe = RECIPES[name]
        config = merge(resolve(recipe, "smoke", folder / "fields.toml"), {"data.cache": str(folder / "cache")})
        try:
            recipe.module.build(config)
        except DataError as error:
            print(f"matbackprop: error: {printable(str(error))}", file=sys.stderr)
            sys.exit(2)

    return build


def _fields(folder: Path) -> None:
    _run("o2p")(folder)
    (folder / "fields.toml").write_text("engine.seed = 3\n[data]\ngenerate = 6\nside = 12\n[optimizer]\nrate = 0.1\n")
    (folder / "more.json").write_text(json.dumps({"engine": {"seed": 3}, "data": {"generate": 6}, "data.side": 12}))


CHECK = "data check @"
EVALUATE = "evaluate segmentations @/segs --ground-truth @/truth --workers 1 --csv @/out/scores.csv"
CLASSIFY = "classify @/photo.png --model @/model --device cpu"
SEGMENT = "segment @/photo.png --model @/model --side 48 --out @/out --device cpu"
READERS: dict[str, Reader] = {
    "COCO annotations": Reader(_coco, ("annotations/instances_train.json",), (command(CHECK), _prepare("o2p"))),
    "COCO images": Reader(_coco, ("images/train/*.png",), (command(CHECK), _prepare("o2p"))),
    "BSDS": Reader(
        _bsds,
        ("data/groundTruth/train/*.mat", "data/images/train/*.jpg"),
        (command(CHECK), _prepare("ncuts")),
    ),
    "segmentations": Reader(_label_files, ("segs/*", "truth/*"), (command(EVALUATE),)),
    "pictures": Reader(_pictures, ("*.*",), (lambda folder: _segment_one(folder),)),
    "segmenter": Reader(_model("ncuts"), ("model/config.json", "model/model.safetensors"), (command(SEGMENT),)),
    "classifier": Reader(_model("o2p"), ("model/config.json", "model/model.safetensors"), (command(CLASSIFY),)),
    "regions to classify": Reader(
        _regions,
        ("annotations/instances_train.json", "mask.png", "photo.png"),
        (
            command(f"{CLASSIFY} --regions @/annotations/instances_train.json"),
            command(f"{CLASSIFY} --masks @/mask.png"),
        ),
    ),
    "run folder": Reader(
        _run("ncuts"),
        ("run/*.json", "run/metrics.jsonl", "run/log.txt", "run/figures/*"),
        (command("report @/run"), command("evaluate run @/run --accelerator cpu")),
        turns=1,
    ),
    "resumed run": Reader(
        _run("o2p"),
        ("run/config.json", "run/versions.json", "run/metrics.jsonl", "run/checkpoints/*", "run/summary.json"),
        (
            command(
                "train o2p --preset smoke --accelerator cpu --max-epochs 1 --no-tensorboard --data.generate 6 "
                "--data.batch-size 6 --run @/run --resume --no-report"
            ),
        ),
        turns=2,
    ),
    "checkpoints": Reader(
        _run("o2p"), ("run/checkpoints/*",), (command("evaluate run @/run --accelerator cpu --which last"),), turns=2
    ),
    "configuration files": Reader(
        _fields,
        ("fields.toml", "more.json"),
        (
            command("evaluate run @/run --accelerator cpu --config @/fields.toml"),
            command("evaluate run @/run --accelerator cpu --config @/more.json"),
        ),
        turns=3,
    ),
}


def _segment_one(folder: Path) -> None:
    """Segment the corrupted picture, named in the file ``corrupted``."""
    name = (folder / "corrupted").read_text()
    command(f"segment @/{name} --model none --side 24 --out @/out")(folder)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call: exit code, output, time and memory."""

    code: int
    said: str
    seconds: float
    bytes: int

    def verdict(self, name: str, memory: int) -> str:
        """Return "read", "refused" or the kind of failure."""
        if self.code == -signal.SIGALRM:
            return "hang"
        if self.bytes > memory:
            return "memory"
        if self.code < 0:
            return "crash"
        if "Traceback (most recent" in self.said or self.code not in (0, 1, 2):
            return "traceback"
        if "Warning" in self.said:
            return "warning"
        if self.code == 0:
            return "read"
        return "refused" if name in self.said and len(max(self.said.splitlines(), key=len)) < 2000 else "unclear"


def run_in_child(
    call: Callable[[Path], Any], folder: Path, *, seconds: float = SECONDS, memory: int = MEMORY
) -> Outcome:
    """Run a call in a forked process with limits, and measure it."""
    said = folder / "said"
    (folder / "tmp").mkdir(exist_ok=True)
    out, into = os.pipe()
    sys.stdout.flush(), sys.stderr.flush()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            os.chdir(folder)
            virtual, before = (
                int(n) * resource.getpagesize() for n in Path("/proc/self/statm").read_text().split()[:2]
            )
            os.write(into, str(before).encode())
            os.close(into)
            resource.setrlimit(resource.RLIMIT_AS, (virtual + memory + (3 << 30),) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1), os.dup2(file, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ["MATBACKPROP_CACHE"], os.environ["TMPDIR"] = str(folder / "cache"), str(folder / "tmp")
            os.environ.pop("MATBACKPROP_DATA", None)  # use the corrupted files only
            tempfile.tempdir = None
            call(folder)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except DataError as error:
            print(f"matbackprop: error: {error}", file=sys.stderr)
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code if 0 <= code < 256 else 98)
    os.close(into)
    with os.fdopen(out) as file:
        before = int(file.read() or 0)
    hangs = False
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - started > seconds and not hangs:
            hangs = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.002)
    code = -signal.SIGALRM if hangs else os.waitstatus_to_exitcode(status)
    text = said.read_bytes()[:100_000].decode(errors="replace") if said.exists() else ""
    return Outcome(code, text, time.monotonic() - started, max(usage.ru_maxrss * 1024 - before, 0))


@dataclass(frozen=True)
class Attack:
    """Outcome of one corrupted file: the worst verdict of all calls."""

    verdict: str
    file: str
    how: str
    said: str
    seconds: float
    bytes: int


def prepare() -> None:
    """Train the models to corrupt once, before this process is forked."""
    for recipe in ("o2p", "ncuts"):
        _trained(recipe)


def attack(name: str, number: int) -> Attack:
    """Corrupt a file of a reader, determined by ``number``, and read it."""
    reader, draw = READERS[name], random.Random(f"{name} {number}")
    folder = Path(tempfile.mkdtemp(prefix="corrupted-"))
    try:
        reader.make(folder)
        files = sorted(path for pattern in reader.corrupted for path in folder.glob(pattern) if path.is_file())
        victim = draw.choice(files)
        how = corrupt(victim, draw)
        (folder / "corrupted").write_text(victim.name)
        verdicts = []
        for call in reader.calls:
            outcome = run_in_child(call, folder)
            verdict = outcome.verdict(victim.stem, MEMORY)
            if verdict == "unclear" and not victim.is_file() and str(victim.parent) in outcome.said:
                verdict = "refused"  # the message names its folder
            if verdict in GOOD:
                verdict = _left_behind(folder, outcome) or verdict
            verdicts.append((verdict, outcome))
        if name in ("COCO annotations", "BSDS") and [v for v, _ in verdicts] == ["read", "refused"]:
            verdicts[0] = ("contradiction", verdicts[0][1])
        verdict, outcome = max(verdicts, key=lambda pair: (pair[0] not in GOOD, pair[0]))
        seconds, peak = max(o.seconds for _, o in verdicts), max(o.bytes for _, o in verdicts)
        text = "\n".join(o.said for _, o in verdicts) if verdict == "contradiction" else outcome.said
        return Attack(
            verdict, str(victim.relative_to(folder)), how, text.replace(str(folder), "@")[-3000:], seconds, peak
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _left_behind(folder: Path, outcome: Outcome) -> str | None:
    """Name the files that a call should not have left."""
    if any(not path.name.startswith("torchinductor") for path in (folder / "tmp").iterdir()) or list(
        folder.rglob("*.tmp")
    ):
        return "temporary files"
    if list(folder.rglob("executed")):
        return "code executed"
    if outcome.code == 2 and (folder / "out").exists() and any((folder / "out").iterdir()):
        return "half-written"
    return None
