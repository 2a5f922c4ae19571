"""The notation page lists every one-letter argument of the public functions."""

import inspect
import re
from pathlib import Path

import pytest

from matbackprop import functional, nn, spd
from matbackprop.vision import segmentation

PAGE = (Path(__file__).parents[2] / "docs" / "notation.md").read_text(encoding="utf-8")
LISTED = set(re.findall(r"`([a-z]\w*)`", PAGE)) | set(re.findall(r"\$(?:[a-z], )*([a-z])(?:, [a-z])*\$", PAGE))


def callables():
    for module in (functional, nn, spd, segmentation):
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            if inspect.isclass(value) and hasattr(value, "forward"):
                yield f"nn.{name}.forward", value.forward
            elif inspect.isfunction(value):
                yield name, value


@pytest.mark.parametrize("name, function", callables())
def test_short_arguments_are_in_the_notation(name, function):
    short = {p for p in inspect.signature(function).parameters if len(p) == 1 or p in ("lam", "eps")}
    assert short <= LISTED, f"{name} has {short - LISTED}, which docs/notation.md does not explain"
