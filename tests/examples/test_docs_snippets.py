"""The Python code in the README and in the documentation runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "getting_started.md"]
PAGES += sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def _blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.quick(2)
@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p)], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_code_blocks_of_a_page_run(page):
    names = {}
    for block in _blocks(page):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["segment_your_data", "classify_your_data"])
def test_the_commands_of_a_tutorial_run(name, tmp_path):
    text = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    script = f'set -e\npython() {{ "{sys.executable}" "$@"; }}\nmatbackprop() {{ python -m matbackprop "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", script + "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("*.onnx"))
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
