"""Structured matrix layers for PyTorch whose gradients are exact, finite and fast.

Importing the package is cheap: the operators, and PyTorch with them, are loaded when the first of them is used.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matbackprop import nn as nn
    from matbackprop import spd as spd
    from matbackprop.functional import *  # noqa: F403
    from matbackprop.vision.inference import classify as classify
    from matbackprop.vision.inference import segment as segment

__version__ = "0.2.0"

_MODULES = {"divided_differences", "errors", "functional", "nn", "numerics", "solvers", "spd"}

_INFERENCE = {"classify", "segment"}
"""Functions on images. They need the extra ``train``, so that ``from matbackprop import *`` excludes them."""

if not TYPE_CHECKING:  # with it, a type checker would accept any attribute

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name == "__all__":
            return [*_operators(), "__version__", "nn"]
        if name in _INFERENCE:
            try:
                value = getattr(import_module(f"{__name__}.vision.inference"), name)
            except ModuleNotFoundError as error:
                from matbackprop.errors import MissingExtraError

                raise MissingExtraError(
                    f"matbackprop.{name} needs {error.name}. Install it with: pip install 'matbackprop[train]'"
                ) from error
        elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is None and name in _operators():
            value = _operators()[name]
        else:  # also for `from matbackprop import cli`, which then imports the module and not the operators
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # found without this function from now on
        return value


def _operators() -> dict[str, object]:
    """Return the names that `matbackprop.functional` imports, the only list of public names."""
    functional = import_module(f"{__name__}.functional")
    return {name: value for name, value in vars(functional).items() if not name.startswith("_")}


def __dir__() -> list[str]:
    return sorted({*globals(), *_operators(), *_MODULES, *_INFERENCE})
