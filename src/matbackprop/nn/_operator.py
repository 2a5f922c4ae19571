"""Base class of modules that store the options of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from matbackprop.numerics import compute_dtype


class Operator(nn.Module):
    """Module that stores the options of a function, with the same names and defaults.

    ``class EIG(Operator, of=eigh, checks=[check_ties])`` defines a module whose constructor takes and checks the
    options of `eigh`. Calling the module calls `eigh`. Options are attributes; trainable ones are parameters.

    Args of the class statement:
        of: the function.
        data: names of the arguments passed in the call.
        checks: functions of options that raise an error for an invalid value.
    """

    _function: ClassVar[Callable[..., Any]]
    _options: ClassVar[inspect.Signature]
    _checks: ClassVar[Sequence[Callable[..., Any]]]
    check: bool | None
    precision: torch.dtype | None

    def __init_subclass__(
        cls,
        of: Callable[..., Any] | None = None,
        data: Sequence[str] = ("a",),
        checks: Sequence[Callable[..., Any]] = (),
    ) -> None:
        super().__init_subclass__()
        if of is None:
            return
        options = [p for p in inspect.signature(of).parameters.values() if p.name not in data]
        cls._function, cls._options, cls._checks = staticmethod(of), inspect.Signature(options), checks
        if cls.__doc__ is None:
            first = (of.__doc__ or "").partition("\n")[0]
            cls.__doc__ = f"{first}\n\nModule of :func:`~matbackprop.{of.__name__}`."
        if "__init__" not in vars(cls):
            cls.__signature__ = cls._options  # type: ignore[attr-defined]

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__()
        bound = self._options.bind(*given, **options)
        bound.apply_defaults()
        for check in self._checks:
            names = inspect.signature(check).parameters
            check(**{name: bound.arguments[name] for name in names if name in bound.arguments})
        compute_dtype(bound.arguments.get("precision"))
        for name, value in bound.arguments.items():
            setattr(self, name, value)

    def call(self, *data: Any, **more: Any) -> Any:
        """Call the function with the stored options, overridden by ``more``."""
        return self._function(*data, **{name: getattr(self, name) for name in self._options.parameters} | more)

    def forward(self, *data: Any, **more: Any) -> Any:
        return self.call(*data, **more)

    def extra_repr(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        shown = ((name, getattr(self, name, None)) for name in defaults)
        return ", ".join(
            f"{name}={float(value.detach()):.4g}" if isinstance(value, nn.Parameter) else f"{name}={value!r}"
            for name, value in shown
            if isinstance(value, nn.Parameter) or value != defaults[name].default
        )
