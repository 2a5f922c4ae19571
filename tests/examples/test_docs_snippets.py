"""The Python code in the README and in the documentation runs."""

import re
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
