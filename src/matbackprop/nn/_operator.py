"""The base of the modules: a function with the options it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from matbackprop.numerics import compute_dtype

__all__ = ["Operator"]


class Operator(nn.Module):
    """A function of the package and its options, under the names that the function has for them.

    Every option is an attribute, a parameter if it learns. A subclass checks the options that have anything to check,
    so that a wrong one is found when the module is built.
    """

    def __init__(self, function: Callable[..., Any], /, **options: Any) -> None:
        super().__init__()
        compute_dtype(options.get("precision"))
        self._function = function
        self._names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    def call(self, *data: Any, **more: Any) -> Any:
        """The function of the data with these options and more."""
        return self._function(*data, **{name: getattr(self, name) for name in self._names}, **more)

    def extra_repr(self) -> str:
        """The options that are not their defaults, for ``print(module)``."""
        defaults = inspect.signature(type(self)).parameters
        shown = ((name, getattr(self, name, None)) for name in defaults)
        return ", ".join(
            f"{name}={float(value.detach()):.4g}" if isinstance(value, nn.Parameter) else f"{name}={value!r}"
            for name, value in shown
            if isinstance(value, nn.Parameter) or value != defaults[name].default
        )
