"""What all kernels of second-order pooling are compiled with: the function g, and the form for m < d or m ≥ d."""

from __future__ import annotations

from matbackprop.cuda.compiler import Source

FUNCTIONS = {"log": 0, "sqrt": 1, "inv_sqrt": 2, "inverse": 3}
_FUNCTION = Source("pool_function.cu", **{name.upper(): number for name, number in FUNCTIONS.items()})
THIN = _FUNCTION + Source("pool_thin.cu", THIN=1)
PRIMAL = _FUNCTION + Source("pool_primal.cu", THIN=0)
