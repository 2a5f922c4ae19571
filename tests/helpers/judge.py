"""Checker the answers of an operator on one problem against a reference in arbitrary precision.

A `Problem` is a row of a table (an operator, its inputs and its definition in mpmath), inputs, directions and a mode of
calling. The answers are the value, the gradient, the directional derivative and the second derivative. The definition
is evaluated at the inputs and at inputs perturbed by rounding; the change is the condition of the answer. An answer may
differ from the reference by 200 times that change, by the rounding of its dtype, and by the last digits of float64.
If this tolerance exceeds the answer and a thousandth of an ordinary one, the answer is undetermined, but its size must
still be that of the reference at inputs perturbed by up to 200 roundings. NaN counts as a refusal if values are not
checked, and is wrong otherwise.
"""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import mpmath
import numpy as np
import torch
from mpmath import mp, mpf

from helpers.truth import Overflow, Undefined, norm
from matbackprop import errors

VERDICTS = ("exact", "undetermined", "clear error", "needless error", "unclear error", "silently wrong")
MODES = ("eager", "unchecked", "func", "vmap", "compile")
ANSWERS = ("value", "gradient", "tangent", "second")
ROUNDING, SLACK = 2.0**-53, 200
DIGITS = {"value": 1e-12, "gradient": 1e-10, "tangent": 1e-10, "second": 1e-8}
"""Relative errors that are never called wrong."""
DETERMINED = 0.03
"""An answer is determined if its tolerance is at most this fraction of it: 10 % are noticed."""
_FIX = re.compile(
    r"\b(add|check|pass|scale|use|choose|give|look|convert|make|raise|take|keep|drop|leave|detach|must|needs?|mark|end)\b",
    re.I,
)


def as_is(*outs):
    return outs


@dataclass(frozen=True)
class Row:
    """An operator, its inputs, and its definition.

    Args:
        name: that of a row of `helpers.operators.CASES`, or a new one.
        draw: takes a `Draw` and returns the inputs as float64 or integer arrays. It may set ``draw.options``.
        truth: takes the inputs as mpmath matrices, and the problem. Returns matrices, None for undetermined ones.
        call: the operator.
        seen: turns its outputs into tensors without a gauge freedom.
        symmetric: indices of symmetric inputs.
        relative: indices of inputs that are perturbed in proportion to their entries.
        covariant: the result follows D·A·D, so that symmetric inputs are perturbed relative to their diagonal.
        rank_tol: takes a problem and returns the fraction of the largest singular value of the first input at or below
            which others count as zero. Derivatives exist only along variations that keep the rank.
        counted: takes an index, the input in mpmath, and the problem, and returns the matrix that it counts as.
        composed: ``seen`` computes with outputs rounded to their dtype.
        unit: documented backward error.
        least: lower bound of the size of intermediate results, for values that are differences.
        orders: number of derivatives.
        complex: number of leading inputs that may be complex.
        real_factor: value of a real output over that of the real matrices of twice the order.
        checks: whether the operator has the option ``check``.
        traced: whether transformations apply.
        passes: NaN and Inf propagate.
    """

    name: str
    draw: Callable
    truth: Callable
    call: Callable
    seen: Callable = as_is
    symmetric: tuple[int, ...] = ()
    relative: tuple[int, ...] = ()
    covariant: bool = False
    rank_tol: Callable | None = None
    counted: Callable = lambda i, x, problem: x
    composed: bool = False
    unit: float = ROUNDING
    least: float = 0.0
    orders: int = 2
    complex: int = 0
    real_factor: float = 1.0
    checks: bool = True
    traced: bool = True
    passes: bool = False


@dataclass
class Problem:
    """One call of an operator: inputs as arrays that their dtypes represent exactly, and partners for a batch."""

    row: Row
    arrays: list[np.ndarray]
    partners: list[np.ndarray]
    dtypes: list[torch.dtype]
    options: dict
    mode: str
    layout: str
    rng: np.random.Generator
    device: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    @property
    def is_complex(self) -> bool:
        return any(a.dtype.kind == "c" for a in self.arrays)

    @property
    def is_checked(self) -> bool:
        return self.mode == "eager"

    @cached_property
    def exact(self) -> list:
        """The inputs in mpmath; complex matrices as real ones of twice the order."""
        return [self.to_mp(a) for a in self.arrays]

    def units(self, i: int) -> np.ndarray | float:
        """The sizes that rounding of input i is relative to."""
        a = self.arrays[i]
        if i in self.row.relative:
            return np.abs(a)
        if self.row.covariant and i in self.row.symmetric and a.size:
            d = np.sqrt(np.abs(np.diagonal(a)))
            return d[:, None] * d
        return _peak(a) or min((p for p in map(_peak, self.arrays) if p), default=1.0)

    def to_mp(self, a: np.ndarray):
        if a.dtype.kind == "i":
            return a.tolist()
        if a.dtype.kind == "c":
            a = np.block([[a.real, -a.imag], [a.imag, a.real]])
        elif self.is_complex and a.ndim == 1:
            a = np.concatenate([a, a])
        columns = a.shape[1] if a.ndim == 2 else 1
        out = mpmath.matrix(a.shape[0] if a.ndim else 1, columns)
        for k, x in enumerate(a.reshape(-1).tolist()):
            out[k // columns, k % columns] = mpf(x)
        return out

    def from_mp(self, m) -> list:
        """The real and imaginary parts of a result as one list."""
        if not self.is_complex:
            return list(m)
        if m.rows == m.cols == 1:
            return [m[0] * self.row.real_factor]
        if m.cols == 1:
            return list(m)[::2]
        p, q = m.rows // 2, m.cols // 2
        return [m[i + part * p, j] for i in range(p) for j in range(q) for part in (0, 1)]

    def drops(self, least: float = 0.0) -> bool:
        """Whether a nonzero singular value of the first input, at least a fraction of the tolerance, may count as zero.

        Weights and degrees scale it, so up to 16 times the tolerance it may.
        """
        if self.row.rank_tol is None or not self.arrays[0].size:
            return False
        values, tol = np.linalg.svd(self.arrays[0], compute_uv=False), self.row.rank_tol(self)
        return any(max(64 * ROUNDING, least * tol) * values[0] < x < 16 * tol * values[0] for x in values)

    def call(self, *tensors):
        check = {"cpu": {"unchecked": False}, "cuda": {"eager": True}}[self.device].get(self.mode)
        more = {} if check is None or not self.row.checks else {"check": check}
        out = self.row.call(*tensors, **self.options, **more)
        out = out if isinstance(out, tuple) else (out,)
        if self.row.composed:  # intermediate results of ``seen`` must not overflow
            out = tuple(o.to(torch.complex128 if o.is_complex() else torch.float64) for o in out)
        return self.row.seen(*out)


# --- directions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Motion:
    """The curve X + tV of an input, or (I + tC)X with V = CX, which keeps the rank."""

    velocity: np.ndarray
    factor: np.ndarray | None = None


def motions(problem: Problem) -> list[Motion | None]:
    out, rng = [], problem.rng
    for i, (a, dtype) in enumerate(zip(problem.arrays, problem.dtypes, strict=True)):
        v = 0.25 * _uniform(rng, a.shape, a.dtype)
        if a.dtype.kind == "i":
            out.append(None)
        elif problem.row.rank_tol and i == 0 and not _has_full_rank(_counted_rows(problem), dtype):
            c = np.diag(rng.choice([-0.25, 0.25], len(a)))  # CX is exact in every dtype
            c = c if (a == 0).all(1).any() else c[rng.permutation(len(a))]
            c = c + 0j if a.dtype.kind == "c" else c
            out.append(Motion(c @ a, c))
        else:
            v = v * problem.units(i)
            v = (v + v.conj().T) / 2 if i in problem.row.symmetric else v
            out.append(Motion(rounded(v, dtype)))
    return out


def _counted_rows(problem: Problem) -> np.ndarray:
    """The rows of the first input whose label is not −1 and whose weight is not zero."""
    first, *others = problem.arrays
    kept = np.ones(first.shape[:1], dtype=bool)
    for a in others:
        if a.shape == kept.shape:
            kept &= a >= 0 if a.dtype.kind == "i" else a != 0
    return first[kept]


def _has_full_rank(a: np.ndarray, dtype: torch.dtype) -> bool:
    values = np.linalg.svd(a, compute_uv=False) if a.size else np.ones(1)
    return values[-1] > 1e3 * torch.finfo(dtype).eps * values[0]


def _uniform(rng, shape, dtype):
    x = rng.uniform(-1, 1, shape)
    return x + 1j * rng.uniform(-1, 1, shape) if dtype.kind == "c" else x


def _peak(a: np.ndarray) -> float:
    return float(np.abs(a).max()) if a.size else 0.0


def tensor(a: np.ndarray, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    if a.dtype.kind == "i":
        return torch.from_numpy(a).to(device)
    return torch.from_numpy(np.array(a)).to(device, dtype.to_complex() if a.dtype.kind == "c" else dtype)


def rounded(a: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round to a dtype."""
    t = tensor(a, dtype)
    return t.to(torch.complex128 if t.is_complex() else torch.float64).numpy().reshape(a.shape)


# --- the reference ---------------------------------------------------------------------------------------------------


@dataclass
class Truth:
    """The reference at one point: lists of lists of numbers, or the error why there are none."""

    value: object
    first: object
    second: object

    def __getitem__(self, answer: str):
        return {"value": self.value, "second": self.second}.get(answer, self.first)


def truth_at(problem: Problem, inputs: list, moved: list[Motion | None], step) -> Truth:
    inputs = [problem.row.counted(i, x, problem) for i, x in enumerate(inputs)]

    def at(t):
        out = problem.row.truth(
            *(_along(problem, x, m, t) for x, m in zip(inputs, moved, strict=True)), problem=problem
        )
        return [None if m is None else problem.from_mp(m) for m in out]

    try:
        middle = at(0)
    except ArithmeticError as error:
        return Truth(error, error, error)
    try:
        forth, back = at(step), at(-step)
        if any(m is None for m in (*middle, *forth, *back)):
            raise Undefined("derivative")
    except ArithmeticError as error:
        return Truth(middle, error, error)
    first = [[(a - b) / (2 * step) for a, b in zip(f, g, strict=True)] for f, g in zip(forth, back, strict=True)]
    second = [
        [(a - 2 * c + b) / step**2 for a, b, c in zip(f, g, m, strict=True)]
        for f, g, m in zip(forth, back, middle, strict=True)
    ]
    least = mpf(problem.row.least)
    if any(norm(m) * step**2 > step ** mpf(0.75) * max(norm(v), least) for m, v in zip(second, middle, strict=True)):
        first = second = Undefined("derivative")  # a jump, or a pole of the derivative
    return Truth(middle, first, second)


def _along(problem, x, motion, t):
    if motion is None or t == 0:
        return x
    if motion.factor is None:
        return x + t * problem.to_mp(motion.velocity)
    c = problem.to_mp(motion.factor)
    return (mpmath.eye(c.rows) + t * c) * x


def perturbed(problem: Problem, amount: float, seed: int) -> list:
    """The inputs, changed by an amount of roundings."""
    rng, row, out = np.random.default_rng(seed), problem.row, []
    for i, (a, x) in enumerate(zip(problem.arrays, problem.exact, strict=True)):
        if a.dtype.kind == "i":
            out.append(x)
            continue
        noise = _uniform(rng, a.shape, a.dtype)
        noise = noise + noise.conj().T if i in row.symmetric else noise
        out.append(x + mpf(amount) * mpf(row.unit) * problem.to_mp(noise * problem.units(i)))
    return out


def decades(problem: Problem) -> int:
    """Decades between the numbers that are added."""
    logs = [math.log10(abs(x)) for a in problem.arrays for x in np.abs(a).reshape(-1).tolist() if x]
    logs += [math.log10(abs(x)) for x in problem.options.values() if isinstance(x, float) and x]
    mixed = any(isinstance(x, float) for x in problem.options.values()) or len(problem.arrays) > 1
    return int(2 * (max(*logs, 0.0) - min(*logs, 0.0)) if mixed else max(logs) - min(logs)) if len(logs) > 1 else 0


# --- the answers -----------------------------------------------------------------------------------------------------


def answer(problem: Problem, name: str, moved: list[Motion | None], cotangents: list[np.ndarray] | None):
    """One answer as tensors: outputs, gradients of ⟨G, f⟩, a derivative of the outputs, or a Hessian-vector product."""
    if problem.mode == "compile":
        torch.compiler.reset()
    batched = problem.mode == "vmap" or problem.layout in ("beside", "behind")
    slot = 1 if problem.layout == "behind" else 0

    def place(a, partner, dtype):
        t, other = tensor(a, dtype, problem.device), tensor(partner, dtype, problem.device)
        if batched:
            return torch.stack([other, t] if slot else [t, other])
        if problem.layout == "transposed" and t.ndim == 2:
            return t.mT.contiguous().mT
        return t

    inputs = [place(*x) for x in zip(problem.arrays, problem.partners, problem.dtypes, strict=True)]
    which = [i for i, m in enumerate(moved) if m is not None]
    velocities = [place(moved[i].velocity, 0 * moved[i].velocity, problem.dtypes[i]) for i in which]
    x = [inputs[i] for i in which]

    def outputs(*moving):
        full = list(inputs) if problem.mode != "vmap" else list(fixed)
        for i, t in zip(which, moving, strict=True):
            full[i] = t
        return problem.call(*full)

    def loss(*moving):
        total = 0
        for g, o in zip(cotangents, outputs(*moving), strict=True):
            o = o[slot] if batched and problem.mode != "vmap" else o
            total = total + (torch.from_numpy(g).to(o).conj() * o).real.sum()
        return total

    def gradients(function, *moving):
        return torch.autograd.grad(function(*moving), moving, allow_unused=True, materialize_grads=True)

    places, func = tuple(range(len(which))), torch.func
    if problem.mode == "vmap":
        fixed = [None if i in which else t for i, t in enumerate(inputs)]
        integers = [i for i, t in enumerate(inputs) if i not in which]

        def mapped(function, *tensors):
            def one(given, *moving):
                for i, t in zip(integers, given, strict=True):
                    fixed[i] = t
                return function(*moving)

            return torch.vmap(one)([inputs[i] for i in integers], *tensors)

        out = {
            "value": lambda: mapped(outputs, *x),
            "gradient": lambda: mapped(func.grad(loss, places), *x),
            "tangent": lambda: mapped(lambda *t: func.jvp(outputs, t[: len(x)], t[len(x) :])[1], *x, *velocities),
            "second": lambda: mapped(
                lambda *t: func.jvp(func.grad(loss, places), t[: len(x)], t[len(x) :])[1], *x, *velocities
            ),
        }[name]()
    elif problem.mode == "func":
        out = {
            "value": lambda: outputs(*x),
            "gradient": lambda: (func.jacrev if problem.rng.random() < 0.3 and not problem.is_complex else func.grad)(
                loss, places
            )(*x),
            "tangent": lambda: func.jvp(outputs, tuple(x), tuple(velocities))[1],
            "second": lambda: func.jvp(func.grad(loss, places), tuple(x), tuple(velocities))[1],
        }[name]()
    elif name == "value":
        with torch.no_grad():
            out = (torch.compile(outputs, backend="aot_eager") if problem.mode == "compile" else outputs)(*x)
    elif name == "tangent":
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t, v) for t, v in zip(x, velocities, strict=True)]
            ahead = [torch.autograd.forward_ad.unpack_dual(o) for o in outputs(*duals)]
            out = [torch.zeros_like(o.primal) if o.tangent is None else o.tangent for o in ahead]
    else:
        x = [t.requires_grad_() for t in x]
        function = torch.compile(loss, backend="aot_eager") if problem.mode == "compile" else loss
        if name == "gradient":
            out = gradients(function, *x)
        else:
            first = torch.autograd.grad(loss(*x), x, create_graph=True, allow_unused=True, materialize_grads=True)
            # ⟨gradient, V⟩ must not overflow.
            units = [float(v.abs().max()) or 1.0 if v.numel() else 1.0 for v in velocities]
            slope = sum((g.conj() * (v / u)).real.sum() * u for g, v, u in zip(first, velocities, units, strict=True))
            out = (
                torch.autograd.grad(slope, x, allow_unused=True, materialize_grads=True)
                if slope.requires_grad
                else [torch.zeros_like(t) for t in x]
            )
    return [(t[slot] if batched else t).detach().cpu() for t in out]


def numbers(t: torch.Tensor) -> list[float]:
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double().reshape(-1).tolist()


# --- the verdict -----------------------------------------------------------------------------------------------------


@dataclass
class Checker:
    """Evaluates the reference of a problem once and judges answers."""

    problem: Problem
    moved: list
    step: object
    truths: list[Truth] = field(default_factory=list)
    note: str = ""

    def __post_init__(self):
        inputs = [self.problem.exact, *(perturbed(self.problem, by, seed) for by, seed in self.changes)]
        self.truths = [truth_at(self.problem, x, self.moved, self.step) for x in inputs]

    changes = ((1, 1), (8, 2), (-8, 2))

    def sizes(self, k: int) -> list:
        """The sizes of output k of the value at and near the inputs; 0 if there is none."""
        values = [t.value[k] for t in self.truths if not isinstance(t.value, ArithmeticError)]
        return [norm(m) for m in values if m is not None] or [mpf(0)]

    def noise(self, k: int):
        """Error of the difference quotients of output k."""
        return self.step * (max(min(self.sizes(k)), self.problem.row.least) or 1)

    @property
    def stable(self) -> float:
        """An answer near zero is judged, too, if its tolerance is at most this fraction of the size of ordinary ones.

        Not if ``seen`` combines outputs, because its terms may be large and cancel.
        """
        return 1e-3 if self.problem.row.seen is as_is else 0.0

    @cached_property
    def far(self) -> list[Truth]:
        return [truth_at(self.problem, perturbed(self.problem, by, 3), self.moved, self.step) for by in (SLACK, -SLACK)]

    def cotangents(self, name: str) -> list[np.ndarray] | None:
        """G without cancellation in ⟨G, derivative⟩, random if there is no derivative.

        Outputs of different sizes contribute equally, so that none hides the others.
        """
        truth, value = self.truths[0][name], self.truths[0].value
        if isinstance(value, ArithmeticError) or any(m is None for m in value):
            return None
        sizes = [norm(m) for m in value]
        least, lowest = min((s for s in sizes if s), default=mpf(1)), torch.finfo(self.problem.dtype).smallest_normal
        out = []
        for k, m in enumerate(value):
            size = self.problem.rng.choice([0.5, 0.625, 0.75, 0.875, 1.0], len(m))
            if sizes[k]:  # a power of two within the range of the dtype
                size = size * 2.0 ** round(math.log2(max(least / sizes[k], lowest**0.5)))
            if not isinstance(truth, ArithmeticError):
                size = size * np.array([-1.0 if x < 0 else 1.0 for x in truth[k]])
            out.append(size)
        return out

    def shaped(self, cotangents, outs):
        """Cotangents in the shape of the outputs."""
        shaped = []
        for g, o in zip(cotangents, outs, strict=True):
            g = g.reshape(*o.shape, 2) if o.is_complex() else g.reshape(o.shape)
            shaped.append(g[..., 0] + 1j * g[..., 1] if o.is_complex() else g)
        return shaped

    def spread(self, name: str, k: int):
        """How much rounding of the inputs changes output k of the reference; None if it may not exist there."""
        around = [t[name] for t in self.truths]
        if any(isinstance(t, ArithmeticError) or t[k] is None for t in around):
            return None
        changes = (max((abs(x - y) for x, y in zip(t[k], around[0][k], strict=True)), default=mpf(0)) for t in around)
        return max(c * SLACK / abs(by) for c, (by, _) in zip(list(changes)[1:], self.changes, strict=True))

    def ordinary(self, name: str, k: int):
        """The size of a derivative of output k if the function is not degenerate."""
        order = {"value": 0, "second": 2}.get(name, 1)
        ratio = [
            _peak(m.velocity) / _peak(a)
            for m, a in zip(self.moved, self.problem.arrays, strict=True)
            if m is not None and _peak(a)
        ]
        return max(min(self.sizes(k)), self.problem.row.least) * mpf(max(ratio, default=0.0)) ** order

    def factors(self, name: str, k: int):
        """The size of the terms that ``seen`` combines: the largest relative change of an output times output k."""
        parts = zip(self.truths[0][name], self.truths[0].value, strict=True)
        ratio = max((norm(m) / (norm(v) or 1) for m, v in parts if m is not None), default=mpf(0))
        return max(self.ordinary(name, k), ratio * min(self.sizes(k)))

    def tolerance(self, name: str, tensors: list[torch.Tensor] | None, k: int):
        """The reference of output k, the tolerance of its entries (None: undetermined) and its size."""
        row, info = self.problem.row, torch.finfo(tensors[0].dtype if tensors else self.problem.dtype)
        eps = max(info.eps, torch.finfo(self.problem.dtype).eps) if row.composed or not tensors else info.eps
        digits = DIGITS[name] + (10 * row.unit if row.unit > ROUNDING else 0)
        truth = self.truths[0][name][k]
        size, spread = norm(truth), self.spread(name, k)
        if spread is None:
            return truth, None, size
        own = digits * max(size, self.ordinary(name, k)) + 2 * eps * size + self.noise(k)
        own += 8 * eps * self.factors(name, k) if row.composed else 0
        return truth, spread + own, size

    def of_output(self, name: str, tensors: list[torch.Tensor], k: int) -> tuple[str, bool]:
        """The verdict on output k of the value or tangent, and whether it is determined."""
        truth, allowed, size = self.tolerance(name, tensors, k)
        got, info = numbers(tensors[k]), torch.finfo(tensors[k].dtype)
        if got == truth:
            return "exact", False
        tiny = 4 * info.tiny * (1 + mpf(max((_peak(m.velocity) for m in self.moved if m), default=0.0)))
        if allowed is None or allowed > max(size / 2 + tiny, self.stable * self.ordinary(name, k)):
            return self.of_size(name, got, k, info), False
        worst = "exact"
        for x, y in zip(got, truth, strict=True):
            beyond = math.isinf(x) and mpmath.sign(x) * y + allowed > 0.99 * mpf(info.max)
            if not beyond and not abs(mpf(x) - y) <= allowed + tiny:
                worst = "silently wrong"
        unclear_rank = self.problem.drops(1 / 16 if name == "value" else 0.0)
        if worst != "exact" and unclear_rank:
            return self.of_size(name, got, k, info), False
        return worst, not unclear_rank and allowed <= DETERMINED * size and size > tiny

    def of_size(self, name: str, got: list[float], k: int, info) -> str:
        """The verdict on an undetermined output: not NaN, and as large as near the inputs."""
        if any(map(math.isnan, got)):
            return "silently wrong"
        near = [t[name] for t in (*self.truths, *self.far)]
        sizes = [norm(t[k]) for t in near if not isinstance(t, ArithmeticError) and t[k] is not None]
        least, most = min(sizes, default=mpf(0)), max(sizes, default=mpf(0))
        has_pole = len(sizes) < len(near) or most > 1e6 * least
        size = mpf(max(map(abs, got), default=0.0))
        # A function without a derivative is not large: only a pole bounds derivatives from below.
        bounded = name == "value" or least > 1e3 * self.ordinary(name, k)
        lost = 4 * info.tiny + self.noise(k) + DIGITS[name] * self.ordinary(name, k)
        right = not bounded or 64 * size >= least - lost
        right &= has_pole or size <= 64 * (most + self.ordinary(name, k)) or 64 * most > info.max
        return "undetermined" if right else "silently wrong"

    def of_gradient(self, name: str, gradients: list[torch.Tensor], cotangents: list[np.ndarray]) -> tuple[str, bool]:
        """The verdict on ⟨gradient, V⟩ or ⟨Hessian-vector product, V⟩, and whether it is determined."""
        velocities = [m.velocity for m in self.moved if m is not None]
        total, squares, count = mpf(0), mpf(0), 1
        for t, v in zip(gradients, velocities, strict=True):
            v = np.stack([v.real, v.imag], -1) if v.dtype.kind == "c" else v
            for a, b in zip(numbers(t), v.reshape(-1).tolist(), strict=True):
                if b == 0 and math.isinf(a):
                    continue
                total += mpf(a) * mpf(b)
                squares += (mpf(a) * mpf(b)) ** 2 if math.isfinite(a) else 0
                count += 1
        truth = [t[name] for t in self.truths]
        infos = [torch.finfo(t.dtype) for t in gradients]
        eps, most = max(i.eps for i in infos), min(mpf(i.max) for i in infos)
        peak = mpf(max(_peak(v) for v in velocities))
        tiny = 4 * count * max(i.tiny for i in infos) * peak * (peak + 1 if name == "second" else 1)
        if any(isinstance(t, ArithmeticError) for t in truth):
            return _of_no_derivative(gradients), False

        def pair(t):
            return sum(
                (mpf(a) * b for g, m in zip(cotangents, t, strict=True) for a, b in zip(g, m, strict=True)), mpf(0)
            )

        def weighted(size):
            return sum((len(g) * _peak(g) * (size(k) or 0) for k, g in enumerate(cotangents)), mpf(0))

        center, *others = map(pair, truth)
        spread = max(abs(p - center) * SLACK / abs(by) for p, (by, _) in zip(others, self.changes, strict=True))
        spread = max(spread, *((self.spread(name, k) or 0) * _peak(g) for k, g in enumerate(cotangents)))
        row, ordinary = self.problem.row, weighted(lambda k: self.ordinary(name, k))
        digits = DIGITS[name] + (10 * row.unit if row.unit > ROUNDING else 0)
        allowed = spread + weighted(self.noise) + digits * max(abs(center), ordinary)
        allowed += 1.5 * eps * mpmath.sqrt(squares)
        allowed += 2 * eps * weighted(lambda k: self.factors(name, k)) if row.composed else 0
        allowed += (2.5 if name == "second" else 1) * eps * abs(center)  # common factors; a sum of rounded terms
        self.note = " ".join(mpmath.nstr(x, 8) for x in (total, center, allowed, spread))
        if total == center:
            return "exact", False
        if not mpmath.isfinite(total):  # right if an entry of the gradient is beyond the range
            least = min((float(np.abs(v[v != 0]).min()) for v in velocities if v.any()), default=1.0)
            return ("exact" if abs(center) * 1000 * count > most * least else "silently wrong"), False
        right, unclear_rank = abs(total - center) <= allowed + tiny, self.problem.drops()
        if allowed > max(abs(center) / 2 + tiny, self.stable * ordinary) or (not right and unclear_rank):
            sizes = [abs(pair(t[name])) for t in self.far if not isinstance(t[name], ArithmeticError)]
            parts = [norm(truth[0][k]) * _peak(g) for k, g in enumerate(cotangents)]
            most = 64 * max((*sizes, abs(center), *map(abs, others), ordinary, *parts))
            wrong = len(sizes) == len(self.far) and abs(total) > most + allowed
            return ("silently wrong" if wrong else "undetermined"), False
        determined = not unclear_rank and allowed <= DETERMINED * abs(center) and abs(center) > tiny
        return ("exact" if right else "silently wrong"), determined


def of_error(error: Exception, needless: bool, checked: bool) -> str:
    """Verdict on an error: clear if it is of the package and names a fix, or of LAPACK if values are not checked."""
    if isinstance(error, torch.linalg.LinAlgError) and not checked:
        return "clear error"
    if not (type(error).__module__ == errors.__name__ and _FIX.search(str(error))):
        return "unclear error"
    return "needless error" if needless else "clear error"


MUTATIONS = {
    "times 1.1": lambda t: 1.1 * t,
    "negated": lambda t: -t,
    "transposed": lambda t: t.mT if t.ndim == 2 and t.shape[0] == t.shape[1] else t,
    "a term dropped": lambda t: t - _part(t),
}


def _part(t):
    """The diagonal of a matrix, or the first entry."""
    if t.ndim == 2:
        return torch.zeros_like(t).diagonal_scatter(t.diagonal())
    return torch.cat([t.reshape(-1)[:1], 0 * t.reshape(-1)[1:]]).reshape(t.shape)


def changes_by_a_tenth(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    def size(tensors):
        return math.sqrt(sum(sum(x * x for x in numbers(t)) for t in tensors))

    return size([a - b for a, b in zip(after, before, strict=True)]) >= 0.0999 * size(before) > 0


def judge(problem: Problem, mutations: bool = False) -> dict:
    """The verdict on each answer, and how many mutated answers were called wrong."""
    names = ANSWERS[: 1 + (problem.row.orders > 0) * (problem.row.orders + 1)]
    names = names[:2] if problem.mode == "compile" else names
    verdicts, details, caught = {}, {}, {}
    finite = all(np.isfinite(a).all() for a in problem.arrays)
    span = decades(problem) if finite else 0
    with mp.workdps(3 * (span + 40)), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        moved = motions(problem) if finite else [None if a.dtype.kind == "i" else Motion(0 * a) for a in problem.arrays]
        if not finite:
            return {"verdicts": {"value": _of_not_finite(problem, moved, details)}, "details": details, "caught": {}}
        checker = Checker(problem, moved, mpf(10) ** -(span + 40))
        outs = None
        for name in names:
            verdict, determined, cotangents = None, False, None
            truth = checker.truths[0][name]
            try:
                if name in ("gradient", "second"):
                    raw = checker.cotangents(name)
                    if raw is None or outs is None:
                        continue
                    cotangents = checker.shaped(raw, outs)
                got = answer(problem, name, moved, cotangents)
                outs = got if name == "value" else outs
            except Exception as error:
                if problem.partners is not problem.arrays and problem.layout in ("beside", "behind"):
                    return judge(replace(problem, partners=problem.arrays), mutations)  # the partner may be at fault
                verdict = of_error(error, _of_refusal(checker, name) == "needless error", problem.is_checked)
                details[name] = f"{type(error).__name__}: {error}"[:300]
            else:
                if any(torch.isnan(t).any() for t in got) and not problem.is_checked:
                    verdict, details[name] = _of_refusal(checker, name), "NaN"
                elif isinstance(truth, ArithmeticError):
                    verdict = _of_undefined(checker, got) if name == "value" else _of_no_derivative(got)
                elif name in ("gradient", "second"):
                    rows = [lambda g, name=name, raw=raw: checker.of_gradient(name, g, raw)]
                else:
                    rows = [
                        lambda g, name=name, k=k: checker.of_output(name, g, k)
                        for k in range(len(truth))
                        if truth[k] is not None
                    ]
                if verdict is None:
                    found = [row(got) for row in rows]
                    verdict = max((v for v, _ in found), key=VERDICTS.index, default="exact")
                    determined = bool(found) and all(d for _, d in found)
                if verdict == "silently wrong":
                    details[name] = _describe(checker, name, got)
                    if any(torch.isinf(t).any() for t in got) and not problem.is_checked:
                        verdict = _of_refusal(checker, name)
                if mutations and verdict == "exact" and determined:
                    for kind, mutate in MUTATIONS.items():
                        changed = [mutate(t) for t in got]
                        if changes_by_a_tenth(got, changed):
                            caught[f"{name} {kind}"] = any(row(changed)[0] == "silently wrong" for row in rows)
            verdicts[name] = verdict
            if isinstance(checker.truths[0].value, ArithmeticError) or (name == "value" and outs is None):
                break
        if any(issubclass(w.category, errors.NumericalWarning) for w in heard):
            if all(v == "exact" for v in verdicts.values()) and all(_is_determined(checker, n) for n in verdicts):
                verdicts["warning"] = "needless error"
            verdicts = {k: "clear error" if v == "silently wrong" and k != "value" else v for k, v in verdicts.items()}
    return {"verdicts": verdicts, "details": details, "caught": caught}


def _of_not_finite(problem, moved, details) -> str:
    try:
        got = answer(problem, "value", moved, None)
    except Exception as error:
        details["value"] = f"{type(error).__name__}: {error}"[:300]
        return of_error(error, False, problem.is_checked)
    bad = any(not torch.isfinite(t).all() for t in got)
    if problem.row.passes:
        return "exact" if bad else "silently wrong"
    return "clear error" if bad and not problem.is_checked else "silently wrong"


def _of_refusal(checker: Checker, name: str) -> str:
    return "needless error" if _is_determined(checker, name) and _is_moderate(checker.problem) else "clear error"


def _of_undefined(checker: Checker, got: list[torch.Tensor]) -> str:
    """The verdict on numbers where the reference has none."""
    near = [t.value for t in (*checker.truths, *checker.far)]
    if not any(t.numel() for t in got):
        return "exact"
    if any(not isinstance(t, ArithmeticError) for t in near):
        found = (checker.of_size("value", numbers(t), k, torch.finfo(t.dtype)) for k, t in enumerate(got))
        return max(found, key=VERDICTS.index)
    if isinstance(near[0], Overflow) and any(torch.isinf(t).any() for t in got):
        return "exact"
    return "silently wrong"


def _of_no_derivative(got: list[torch.Tensor]) -> str:
    return "silently wrong" if any(torch.isnan(t).any() for t in got) else "undetermined"


def _is_determined(checker: Checker, name: str) -> bool:
    """Whether the reference has three digits, fits the dtype, and exists if inputs are rounded to their dtype."""
    problem, truth = checker.problem, checker.truths[0][name]
    info = torch.finfo(min(problem.dtypes, key=lambda t: torch.finfo(t).bits))
    if isinstance(truth, ArithmeticError) or any(m is None for m in truth):
        return False
    parts = [checker.tolerance(name, None, k) for k in range(len(truth))]
    if not all(a is not None and (a <= DETERMINED * s and 1e3 * info.tiny < s < info.max / 1e3) for _, a, s in parts):
        return False
    amount = 64 * max(info.eps, ROUNDING) / problem.row.unit
    near = [truth_at(problem, perturbed(problem, by, 4), checker.moved, checker.step)[name] for by in (amount, -amount)]
    return all(
        not isinstance(t, ArithmeticError) and t[k] is not None and abs(norm(t[k]) - s) < s / 2
        for t in near
        for k, (_, _, s) in enumerate(parts)
    )


def _is_moderate(problem: Problem) -> bool:
    values = [abs(x) for a in problem.arrays for x in a.reshape(-1).tolist()]
    values += [abs(x) for x in problem.options.values() if isinstance(x, float)]
    return all(1e-12 < x < 1e12 or x == 0 for x in values)


def _describe(checker: Checker, name: str, got: list[torch.Tensor]) -> list:
    truth = checker.truths[0][name]
    if isinstance(truth, ArithmeticError):
        return [f"undefined: {truth}", [numbers(t)[:6] for t in got]]
    if name in ("gradient", "second"):
        return [checker.note]
    expected = [None if m is None else [mpmath.nstr(x, 8) for x in m[:6]] for m in truth]
    return [[numbers(t)[:6] for t in got], expected]
