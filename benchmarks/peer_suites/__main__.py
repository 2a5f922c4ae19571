"""Run the tests of pyRiemann's geometry and of spd_learn with operators of this package.

    pip install pyriemann==0.12 spd_learn==0.2.1
    pip download --no-deps --no-binary :all: pyriemann==0.12 spd_learn==0.2.1    # then unpack both
    python -m benchmarks peer_suites pyriemann-0.12 spd_learn-0.2.1

Nothing is installed. Each suite runs twice: unmodified, and with the functions replaced by the plugins in this folder.
A test counts if it passes unmodified. The summary counts the tests that pass with functions of this package and lists
the others.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
LEFT_OUT = {"spd_learn": {"test_correctness.py": "needs mne and recordings that it downloads"}}
# The source distribution of spd_learn lacks one module of its tests.
CONSTANTS = "import torch\n\nEXAMPLE_2X2_SPD_MATRIX = torch.tensor([[10.0, 5.0], [5.0, 10.0]])\n"


def outcomes(folder: Path, plugins: list[str]) -> dict[str, str]:
    """Name of a test → its outcome."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command += [f"--junitxml={report}", "-o", "addopts=", "-W", "ignore"]
    for plugin in plugins:
        command += ["-p", plugin]
    places = [str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in places if p)}
    subprocess.run([*command, str(folder)], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        found[f"{case.get('classname')}::{case.get('name')}"] = min(kinds, default="passed")
    return found


def compare(name: str, source: Path, pattern: str, plugins: list[str]) -> dict[str, object]:
    """Run the tests of an unpacked source distribution without and with the plugins."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tests"
        folder.mkdir()
        for file in sorted((source / "tests").glob(pattern)):
            if file.name not in LEFT_OUT.get(name, {}):
                shutil.copy(file, folder)
        if name == "pyriemann":
            shutil.copy(HERE / "pyriemann_conftest.py", folder / "conftest.py")
        else:
            (folder / "__init__.py").touch()
            (folder / "constants.py").write_text(CONSTANTS, encoding="utf-8")
        theirs, ours = outcomes(folder, []), outcomes(folder, plugins)
    counted = [test for test, outcome in theirs.items() if outcome == "passed"]
    failing = sorted(test for test in counted if ours.get(test) != "passed")
    return {
        "version": version(name),
        "tests": pattern,
        "left_out": LEFT_OUT.get(name, {}),
        "pass_as_they_are": len(counted),
        "pass_with_ours": len(counted) - len(failing),
        "fail_as_they_are_and_pass_with_ours": sorted(
            t for t, o in ours.items() if o == "passed" and theirs.get(t) == "failure"
        ),
        "fail_with_ours": failing,
    }


def main() -> None:
    """Compare both suites and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pyriemann", type=Path, help="unpacked source distribution of pyRiemann")
    parser.add_argument("spd_learn", type=Path, help="unpacked source distribution of spd_learn")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "peer_suites.json")
    options = parser.parse_args()
    results = {
        "pyriemann": compare("pyriemann", options.pyriemann, "test_geometry_*.py", ["ours_in_pyriemann"]),
        "spd_learn": compare("spd_learn", options.spd_learn, "test_*.py", ["ours_in_pyriemann", "ours_in_spd_learn"]),
    }
    for name, found in results.items():
        print(f"{name} {found['version']}: {found['pass_with_ours']} of {found['pass_as_they_are']}")
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
