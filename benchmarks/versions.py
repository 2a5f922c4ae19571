"""Run the tests with other versions of Python and of the packages, and write the counts:
``python benchmarks/versions.py oldest=/path/to/python 3.13=/path/to/python``.

Each interpreter has torch, the package's extras and pytest installed, in a virtual environment of its own; ``oldest``
has the lowest versions that ``pyproject.toml`` promises. Tests that compile are left out, and those that are slow. The
summary goes to ``benchmarks/results/versions.json``; entries of other names in it are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "benchmarks" / "results" / "versions.json"
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", "not compil"]
PACKAGES = [
    "torch",
    "numpy",
    "scipy",
    "pillow",
    "torchmetrics",
    "tyro",
    "shtab",
    "rich",
    "filelock",
    "lightning-fabric",
    "safetensors",
    "scikit-image",
    "tensorboard",
    "matplotlib",
    "pycocotools",
    "kornia",
    "gradio",
    "onnx",
    "onnxscript",
    "av",
]
_LIST = (
    "import importlib.metadata as m, json, platform, sys\n"
    "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
    "print(json.dumps({'python': platform.python_version(), **{n: found[n] for n in sys.argv[1:] if n in found}}))"
)


def run(python: str, targets: list[str]) -> dict[str, Any]:
    """Run the tests with an interpreter, and count."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    listed = subprocess.run([python, "-c", _LIST, *PACKAGES], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run([python, *TESTS, f"--junitxml={report}", *targets], cwd=ROOT, env=environment)
        return {"versions": json.loads(listed), **count(report)}


def count(report: Path) -> dict[str, Any]:
    """The counts of a report in JUnit's format, and the names of the tests that did not pass."""
    (suite,) = ElementTree.parse(report).getroot()
    number = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    bad = [
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        for case in suite
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = number["tests"] - number["failures"] - number["errors"] - number["skipped"]
    return {
        "passed": passed,
        "skipped": number["skipped"],
        "failed": bad,
        "seconds": round(float(suite.attrib["time"])),
    }


def main() -> int:
    """Run the tests with each interpreter; the exit code says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interpreters", nargs="+", help="name=path of a python")
    parser.add_argument("--targets", nargs="*", default=["tests"], help="tests to run")
    options = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    summary: dict[str, Any] = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    failed = False
    for name, python in (one.split("=", 1) for one in options.interpreters):
        summary[name] = {
            "command": " ".join(["python", *TESTS, *options.targets]).replace("not slow", "'not slow'"),
            "revision": git.stdout.strip(),
            "machine": f"{platform.platform()}, {os.cpu_count()} processors",
            **run(python, options.targets),
        }
        failed |= bool(summary[name]["failed"])
        OUTPUT.write_text(json.dumps(summary, indent=2) + "\n")
        print(f"{name}: {summary[name]['passed']} passed, {len(summary[name]['failed'])} failed: {OUTPUT}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
