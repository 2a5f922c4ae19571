"""--json prints one document with the documented keys; --quiet prints nothing."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.command_line import call
from matbackprop.cli import COMMANDS
from matbackprop.vision.data.shapes import write_shapes_coco

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"


def documented():
    """Command → keys of its document, from the table of the documentation."""
    table = {}
    for commands, keys in re.findall(r"^\| (`[^|]+`) \| (`[^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        own = [re.findall(r"`(\w+)`", part.split(":")[0]) for part in re.sub(r"\([^)]*\)", "", keys).split(";")]
        for name in re.findall(r"`([^`]+)`", commands):
            table[name] = {key for part in own for key in part}
    return table


@pytest.fixture
def cases(tmp_path):
    picture = np.full((40, 60, 3), 30, np.uint8)
    picture[:, 30:] = (220, 120, 20)
    Image.fromarray(picture).save(tmp_path / "photo.png")
    for folder in ("found", "truth"):
        (tmp_path / folder).mkdir()
        Image.fromarray((picture[..., 0] > 100).astype(np.uint8)).save(tmp_path / folder / "photo.png")
    return {
        "segment": (tmp_path / "photo.png", "--model", "none", "--out", tmp_path / "out", "--overwrite"),
        "evaluate segmentations": (tmp_path / "found", "--ground-truth", tmp_path / "truth", "--workers", 1),
        "data check": (write_shapes_coco(tmp_path / "coco", train=2, val=1),),
        "doctor": (),
    }


def test_every_command_has_a_row_in_the_table():
    assert documented().keys() == COMMANDS.keys()


def test_documents_have_the_keys_that_are_documented(cases, capsys):
    for name, words in cases.items():
        assert call(*name.split(), *words, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        common = {"command", "version", "exit_code", "summary"}
        assert document.keys() == documented()[name] | common, name
        assert document["command"] == name and document["exit_code"] == 0


def test_a_command_ends_with_its_summary_and_quiet_prints_nothing(cases, capsys):
    for name, words in cases.items():
        assert call(*name.split(), *words, "--json") == 0
        said = json.loads(capsys.readouterr().out)["summary"]
        assert call(*name.split(), *words) == 0
        out = capsys.readouterr().out
        assert out.rstrip().endswith(said)
        assert call(*name.split(), *words, "--quiet") == 0
        assert capsys.readouterr() == ("", ""), name


def test_errors_are_printed_to_stderr_despite_quiet(tmp_path, capsys):
    for flag in ("--quiet", "--json"):
        assert call("segment", tmp_path / "none.png", flag) == 2
        out, err = capsys.readouterr()
        assert out == "" and "none.png" in err
