"""The base of the modules: a function with the options it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn

from matbackprop.numerics import compute_dtype

__all__ = ["Operator"]


class Operator(nn.Module):
    """A function of the package and its options, under the names and with the defaults that the function has for them.

    ``class EIG(Operator, of=eigh, checks=[check_ties])`` is all that a module needs: its constructor takes the options
    of `eigh`, and calling it calls `eigh`. Every option is an attribute, a parameter if it learns. A wrong one is found
    when the module is built.

    Args of the class statement:
        of: the function.
        data: its arguments that are no options: they are given in every call.
        checks: functions of options, which they name as the function does; each raises where one does not fit.
    """

    _function: ClassVar[Callable[..., Any]]
    _options: ClassVar[inspect.Signature]
    _checks: ClassVar[Sequence[Callable[..., Any]]]

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
        """The function of the data with these options, or others in their place."""
        return self._function(*data, **{name: getattr(self, name) for name in self._options.parameters} | more)

    def forward(self, *data: Any, **more: Any) -> Any:
        """Return what the function returns for the data."""
        return self.call(*data, **more)

    def extra_repr(self) -> str:
        """The options that are not their defaults, for ``print(module)``."""
        defaults = inspect.signature(type(self)).parameters
        shown = ((name, getattr(self, name, None)) for name in defaults)
        return ", ".join(
            f"{name}={float(value.detach()):.4g}" if isinstance(value, nn.Parameter) else f"{name}={value!r}"
            for name, value in shown
            if isinstance(value, nn.Parameter) or value != defaults[name].default
        )
