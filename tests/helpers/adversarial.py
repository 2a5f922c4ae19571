"""Adversarial matrices: every operator on every kind of bad input, compared with mpmath.

A case is identified by a number, which determines operator, kind of matrix, dtype, scale, layout, options and
directions. The operator is called as a user would, and its value, gradient, directional derivative and second
derivative are compared with `helpers.truth`. The tolerance follows from the condition of the problem: the reference is
recomputed at inputs perturbed by rounding, and an answer may differ by 200 times the change. A new operator is one new
row of `ROWS`.
"""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

import mpmath
import numpy as np
import torch
from mpmath import mp, mpf

import matbackprop as mb
from helpers import truth
from helpers.operators import CASES
from helpers.truth import Undefined
from matbackprop import errors
from matbackprop.numerics import gram_tolerance, rank_tolerance, rounding_of_zero
from matbackprop.spd._metrics import Metric

KINDS = (
    "plain",
    "tied",
    "identity",
    "nearly tied",
    "graded",
    "singular",
    "integers",
    "zero",
    "indefinite",
    "negative",
    "diagonal",
    "outlier",
    "duplicate",
    "constant",
    "ill-conditioned",
    "not finite",
    "empty",
)
SCALES = {
    torch.float64: (1e-310, 1e-300, 1e-150, 1e-30, 1e30, 1e150, 1e300, 1.2e308),
    torch.float32: (1e-42, 1e-30, 1e-15, 1e15, 1e30, 1e38),
    torch.bfloat16: (1e-30, 1e-15, 1e15, 1e30),
    torch.float16: (1e-6, 1e-2, 1e2, 1e4),
}
LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "beside", "behind")
VERDICTS = ("exact", "undetermined", "clear error", "needless error", "unclear error", "silently wrong")

_FIX = re.compile(
    r"\b(add|pass|scale|use|choose|give|look|convert|make|raise|take|keep|end|drop|leave|detach|must|needs?|mark)\b",
    re.I,
)
_SLACK, _ROUNDING = 200, 2.0**-53


class Draw:
    """Random choices of one case; its number is the seed."""

    def __init__(self, seed: int, number: int, kind: str):
        self.rng = rng = np.random.default_rng([seed, number])
        self.kind = kind
        self.dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16], p=[0.6, 0.25, 0.1, 0.05])
        self.scale = 1.0 if rng.random() < 0.4 else float(rng.choice(SCALES[self.dtype]))
        self.layout = str(rng.choice(LAYOUTS))
        self.calm = False
        self.n = 0 if kind == "empty" else int(rng.integers(1, 6))

    def pick(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def orthogonal(self, n):
        return np.linalg.qr(self.rng.normal(size=(n, n)))[0]

    def symmetric(self, n=None, kind=None, scale=None):
        n, kind, rng = self.n if n is None else n, kind or self.kind, self.rng
        values = rng.uniform(0.5, 3, n)
        if kind == "tied":
            values = rng.choice([1.0, 2.0], n)
        elif kind == "identity":
            values = np.full(n, values[:1].sum())
        elif kind == "nearly tied":
            values = 1 + self.pick(1e-15, 1e-13, 1e-9, 1e-6) * np.arange(n)
        elif kind in ("graded", "ill-conditioned"):
            values = np.logspace(0, -self.pick(*((4, 8, 12, 15) if kind == "graded" else (3, 4, 5))), n)
        elif kind == "singular":
            values[: max(1, n // 2)] = 0
        elif kind in ("indefinite", "negative"):
            values *= -1 if kind == "negative" else rng.choice([-1.0, 1.0], n)
        elif kind == "outlier":
            values[:1] *= self.pick(1e7, 1e12)
        q = np.eye(n) if kind in ("diagonal", "identity") or rng.random() < 0.15 else self.orthogonal(n)
        a = (q * values) @ q.T
        if kind in ("integers", "duplicate"):
            v = rng.integers(-2, 3, (n, max(1, n - 1 if kind == "integers" else n // 2))).astype(float)
            a = v @ v.T
        elif kind in ("zero", "constant"):
            a = np.full((n, n), 0.0 if kind == "zero" else 1.0)
        return self.scaled(0.5 * (a + a.T), self.scale if scale is None else scale)

    @staticmethod
    def scaled(a, scale):
        """Scale the largest entry to ``scale``, unless that is 1; entries stay in the range of the dtype."""
        peak = np.abs(a).max() if a.size else 0.0
        return a if scale == 1 or peak == 0 else a / peak * scale

    def features(self, m=None, d=None, *, positive=False, kind=None):
        rng, kind = self.rng, kind or self.kind
        m = (0 if kind == "empty" else int(rng.integers(1, 6))) if m is None else m
        d = int(rng.integers(1, 5)) if d is None else d
        k = min(m, d)
        f = rng.normal(size=(m, d))
        if kind in ("tied", "nearly tied", "ill-conditioned") and m and d:
            values = np.ones(k)
            if kind == "nearly tied":
                values = values + self.pick(1e-13, 1e-9, 1e-6) * np.arange(k)
            elif kind == "ill-conditioned":
                values = np.logspace(0, -self.pick(3, 4, 5), k)
            f = (self.orthogonal(m)[:, :k] * values) @ self.orthogonal(d)[:k]
            if positive:
                f = np.eye(d)[rng.integers(0, d, m)] * 1.0 if kind == "tied" else np.abs(f)
        elif kind in ("identity", "diagonal"):
            f = np.eye(m, d) * (rng.uniform(0.5, 2, d) if kind == "diagonal" else 1)
        elif kind == "graded":
            f = f * np.logspace(0, -self.pick(4, 8, 12), d)
            f = f if rng.random() < 0.5 else f[:, ::-1] * np.logspace(0, -4, m)[:, None]
        elif kind == "singular" and k:
            r = max(1, k - 1)
            left, right = rng.normal(size=(m, r)), rng.normal(size=(r, d))
            f = np.abs(left) @ np.abs(right) if positive else left @ right
        elif kind == "integers":
            f = rng.integers(0 if positive else -2, 3, (m, d)).astype(float)
        elif kind in ("zero", "constant"):
            f = np.full((m, d), 0.0 if kind == "zero" else 1.0)
        elif kind == "outlier" and m:
            f[0] *= self.pick(1e4, 1e7)
        elif kind == "duplicate" and m:
            f[-1] = f[0]
            f[:, d // 2] = 0
        if positive and kind not in ("indefinite",):
            f = np.abs(f) * (-1 if kind == "negative" else 1)
        return self.scaled(f, self.scale)

    def held(self, *choices):
        """One of the numbers that the dtype can represent; the first for the other matrix of a batch."""
        info = torch.finfo(self.dtype)
        picked = self.pick(*(x for x in choices if info.tiny < abs(x) < info.max))
        return choices[0] if self.calm else picked

    def weights(self, m):
        w = self.rng.uniform(0.2, 2, m) * self.held(1.0, 1.0, 1e-10, 1e10)
        return w * (self.rng.random(m) > 0.2) if self.rng.random() < 0.3 and not self.calm else w

    def labels(self, m):
        labels = self.rng.integers(0, 3, m)
        if self.rng.random() < 0.3 and m > 1:
            labels[int(self.rng.integers(m))] = -1
        return labels


@dataclass(frozen=True)
class Row:
    """An operator, its inputs, and its reference.

    Args:
        name: that of a row of `helpers.operators.CASES`, or a new one.
        draw: returns the inputs as float64 arrays (or integers, which are not perturbed), and may set ``draw.options``.
        truth: takes the inputs as mpmath matrices, and the case, and returns a list of matrices.
        call: the operator; by default that of the row of the same name.
        seen: turns its outputs into tensors without a gauge freedom.
        keeps_rank: the operator has derivatives only along variations that keep the rank.
        symmetric: which inputs are symmetric matrices.
        relative: which inputs are perturbed in proportion to their entries (weights, ε).
        orders: how many derivatives are compared.
        unit: documented accuracy, as a backward error of the inputs.
        mixed: inputs and options of different scales are added.
        least: lower bound of the size that rounding is relative to (for values that are differences of larger numbers).
        composed: ``seen`` computes with outputs rounded to their dtype; so is the incoming gradient, and the condition
            number amplifies the error.
        pole: the value is unbounded near some matrices, such as an inverse near a singular matrix. Within some
            hundred roundings of these, any large number is accepted, also one beyond the range, but no small one.
        noisy: directions at the level of rounding may be dropped or not (``case.noise``).
        smooth: whether the operator is differentiable at the inputs; the reference has only directional derivatives.
        left_out: the largest direction that counts as rounding, as a fraction of the smallest that does not: the
            operator documents that it drops the former, which changes derivatives by that fraction.
        loss: documented error of the second derivative, in roundings.
        system: the condition number of the system that its derivatives solve, to a residual of ``unit``.
        condition: condition number of the features or of the system; the random directions may not reveal it.
        passes: NaN and Inf propagate, as through a permutation of entries.
    """

    name: str
    draw: Callable
    truth: Callable
    call: Callable | None = None
    seen: Callable = lambda *outs: outs
    keeps_rank: bool = False
    symmetric: tuple[int, ...] = ()
    relative: tuple[int, ...] = ()
    orders: int = 2
    unit: float = _ROUNDING
    mixed: bool = False
    least: float = 0.0
    composed: bool = False
    pole: bool = False
    noisy: bool = False
    smooth: Callable = lambda *inputs, case: True
    left_out: Callable = lambda case: 0.0
    passes: bool = False
    loss: Callable = lambda case: 0.0
    system: Callable = lambda case: 0.0
    condition: Callable = lambda case: 1.0


@dataclass
class Case:
    """One call: the row, the draw, the inputs rounded to the dtype, and the options."""

    row: Row
    draw: Draw
    arrays: list
    options: dict = field(default_factory=dict)
    noise: bool = False

    @property
    def dtype(self):
        return self.draw.dtype

    def rank_tol(self):
        return rank_tolerance(self.dtype, torch.float64, None)

    def gram_tol(self, d):
        return gram_tolerance(self.dtype, torch.float64, d, None)


# --- calling the operator --------------------------------------------------------------------------------------------


def _tensor(array, dtype):
    if array.dtype.kind == "i":
        return torch.from_numpy(array)
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(array)).to(dtype)


def _laid_out(t, layout, other):
    """The same values in another memory layout, or in a batch with another matrix."""
    if layout == "transposed" and t.ndim >= 2:
        return t.mT.contiguous().mT
    if layout == "strided" and t.ndim >= 1:
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), 7, dtype=t.dtype)
        wide[..., 1::2] = t
        return wide[..., 1::2]
    if layout == "expanded":
        return t.expand(2, *t.shape)
    if layout in ("beside", "behind"):
        return torch.stack([t, other] if layout == "beside" else [other, t])
    return t


def _slot(out, layout):
    return out if layout in ("contiguous", "transposed", "strided") else out[{"behind": 1}.get(layout, 0)]


def _as_matrix(array):
    """An array of up to two dimensions as an mpmath matrix, exactly."""
    array = np.asarray(array)
    if array.dtype.kind == "i":
        return array.tolist()
    if array.ndim == 2:
        out = mpmath.matrix(*array.shape)
        for i in range(array.shape[0]):
            for j in range(array.shape[1]):
                out[i, j] = mpf(float(array[i, j]))
        return out
    out = mpmath.matrix(array.size, 1)
    for i, value in enumerate(array.reshape(-1)):
        out[i] = mpf(float(value))
    return out


def _floats(t):
    return t.detach().double().reshape(-1).tolist()


@dataclass
class Answers:
    """Results of the operator: outputs, ⟨G, Df[V]⟩ by reverse and by forward mode, ⟨G, D²f[V, V]⟩; or errors."""

    value: object = None
    gradient: object = None
    tangent: object = None
    second: object = None
    weight: object = 0
    infinite: dict = field(default_factory=dict)  # name → (input, index of an infinite entry)


def _call(case, tensors):
    row = case.row
    call = row.call or next(c.call for c in CASES if c.name == row.name)
    out = call(*tensors, **case.options)
    out = out if isinstance(out, tuple) else (out,)
    # ``seen`` must not overflow in half precision.
    out = tuple(o.double() for o in out) if row.composed else out
    return tuple(_slot(o, case.draw.layout) for o in row.seen(*out))


def _inner(cotangents, outs):
    return sum(((g * o).sum() for g, o in zip(cotangents, outs, strict=True)), outs[0].new_zeros(()))


def evaluate(case, others, directions):
    """Call the operator in every mode; ``directions`` are arrays, None for integer inputs."""
    draw, row = case.draw, case.row
    rng = np.random.default_rng(draw.rng.integers(2**32))

    def inputs(grad):
        tensors = []
        for array, other in zip(case.arrays, others, strict=True):
            t = _laid_out(_tensor(array, draw.dtype), draw.layout, _tensor(other, draw.dtype))
            tensors.append(t.requires_grad_() if grad and t.dtype.is_floating_point else t)
        return tensors

    def lay(v, dtype=draw.dtype):
        return None if v is None else _laid_out(_tensor(v, dtype), draw.layout, _tensor(0 * v, dtype))

    answers, cotangents = Answers(), None
    try:
        with torch.no_grad():
            outs = _call(case, inputs(False))
    except Exception as error:
        answers.value = error
        return answers, None
    answers.value = [_floats(o) for o in outs]
    cotangents = [torch.from_numpy(rng.uniform(-1, 1, o.shape)).to(o.dtype) for o in outs]
    if row.orders == 0:
        return answers, cotangents
    tangents = [lay(v) for v in directions]

    def reverse():
        tensors = inputs(True)
        moving = [t for t in tensors if t.requires_grad]
        return torch.autograd.grad(_inner(cotangents, _call(case, tensors)), moving, allow_unused=True)

    def contract(gradients, moved):
        """⟨gradients, V⟩; the sum of absolute terms measures the rounding error of exact entries."""
        total = answers.weight = mpf(0)
        for g, v in zip(gradients, moved, strict=True):
            if g is None:
                continue
            for a, b in zip(_floats(g), _floats(v), strict=True):
                if b == 0 and math.isinf(a):  # overflow in an entry that is not used
                    continue
                total += mpf(a) * mpf(b) if math.isfinite(a) else mpf(abs(a))  # NaN and inf propagate
                answers.weight += abs(mpf(a) * mpf(b)) if math.isfinite(a) else 0
        return total

    def note_infinite(name, gradients):
        for i, g in zip((i for i, v in enumerate(directions) if v is not None), gradients, strict=True):
            flat = [] if g is None else _floats(_slot(g, draw.layout))
            if (k := next((k for k, x in enumerate(flat) if math.isinf(x)), None)) is not None:
                answers.infinite[name] = i, k

    moved = [v for v in tangents if v is not None]
    straight = [lay(v, torch.float64) for v in directions if v is not None]  # not rounded to the dtype
    try:
        gradients = reverse()
        answers.gradient = contract(gradients, straight)
        made_of = answers.weight
        note_infinite("gradient", gradients)
    except Exception as error:
        answers.gradient, made_of = error, mpf(0)
    try:
        with torch.autograd.forward_ad.dual_level():
            duals = [
                t if v is None else torch.autograd.forward_ad.make_dual(t.contiguous(), v.contiguous())
                for t, v in zip(inputs(False), tangents, strict=True)
            ]
            ahead = [torch.autograd.forward_ad.unpack_dual(o).tangent for o in _call(case, duals)]
            answers.tangent = contract(
                [a for a in ahead if a is not None],
                [g for g, a in zip(cotangents, ahead, strict=True) if a is not None],
            )
    except Exception as error:
        answers.tangent = error
    if row.orders > 1 and rng.random() < 0.3:
        try:
            tensors = inputs(True)
            moving = [t for t in tensors if t.requires_grad]
            first = torch.autograd.grad(
                _inner(cotangents, _call(case, tensors)), moving, create_graph=True, allow_unused=True
            )
            pairs = [(g, v) for g, v in zip(first, moved, strict=True) if g is not None and g.requires_grad]
            units = [max(abs(x) for x in _floats(v)) or 1.0 if v.numel() else 1.0 for _, v in pairs]
            if pairs:  # ⟨gradient, V⟩ must not overflow
                slope = sum((g * (v / u)).sum() * u for (g, v), u in zip(pairs, units, strict=True))
                hessian_vector = torch.autograd.grad(slope, moving, allow_unused=True)
                answers.second = contract(hessian_vector, moved)
                note_infinite("second", hessian_vector)
        except Exception as error:
            answers.second = error
    answers.weight = max(answers.weight, made_of)
    return answers, cotangents


# --- the reference ---------------------------------------------------------------------------------------------------


def _direction(case, index, array):
    """Direction of an input: None, ("add", V), or ("rotate", C, B) for (I + tC)X(I + tB) with C or B zero."""
    rng, row = case.draw.rng, case.row
    if array.dtype.kind == "i":
        return None
    if row.keeps_rank and index == 0 and array.ndim == 2:
        left = rng.uniform(-1, 1, (array.shape[0],) * 2)
        if (array == 0).all(1).any():
            left = np.diag(np.diag(left))
        right = rng.uniform(-1, 1, (array.shape[1],) * 2)
        side = rng.random() < 0.5
        return "rotate", 0.25 * side * left, 0.25 * (not side) * right
    size = float(np.abs(array).max()) if array.size else 0.0
    v = rng.uniform(-1, 1, array.shape)
    v = v * np.abs(array) if index in row.relative or rng.random() < 0.3 else v * (size or 1.0)
    v = 0.125 * v + 0.125 * v.T if index in row.symmetric else 0.25 * v
    return "add", _tensor(v, case.dtype).double().numpy().reshape(array.shape)


def _moved(x, how, t):
    if how is None or t == 0:
        return x
    if how[0] == "add":
        return x + t * _as_matrix(how[1])
    left, right = (_as_matrix(m) for m in how[1:])
    return (mpmath.eye(left.rows) + t * left) * x * (mpmath.eye(right.rows) + t * right)


def _velocity(array, how):
    if how is None or how[0] == "add":
        return None if how is None else how[1]
    x = _as_matrix(array)
    v = _as_matrix(how[1]) * x + x * _as_matrix(how[2])
    return np.array([[float(v[i, j]) for j in range(x.cols)] for i in range(x.rows)]).reshape(array.shape)


def _digits(case):
    """Decades between the numbers that are added: within each input, or between all inputs and options."""

    def logs(values):
        return [math.log10(abs(x)) for x in values if x]

    spans = [logs(np.asarray(a, float).reshape(-1).tolist()) for a in case.arrays if a.dtype.kind != "i"]
    inside = max((max(s) - min(s) for s in spans if s), default=0.0)
    if case.row.mixed:
        numbers = [x for x in case.options.values() if isinstance(x, float)]
        together = [0.0, *(2 * x for s in spans for x in s), *logs(numbers)]
        inside = max(inside, max(together) - min(together))
    return int(inside)


@dataclass
class Told:
    """The reference at one point: values, first and second directional derivatives (lists of matrices), or errors."""

    value: object
    first: object
    second: object


def tell(case, inputs, how, step):
    def at(t):
        return case.row.truth(
            *(x if h is None else _moved(x, h, t) for x, h in zip(inputs, how, strict=True)), case=case
        )

    try:
        middle = at(mpf(0))
    except ArithmeticError as error:
        return Told(error, error, error)
    try:
        if not case.row.smooth(*inputs, case=case):
            raise Undefined("derivative")
        forth, back = at(step), at(-step)
        if any(x is None for x in (*middle, *forth, *back)):
            raise Undefined("derivative")
        first = [(a - b) / (2 * step) for a, b in zip(forth, back, strict=True)]
        second = [(a - 2 * c + b) / step**2 for a, b, c in zip(forth, back, middle, strict=True)]
    except ArithmeticError as error:
        first = second = error
    return Told(middle, first, second)


def _drift(case, index, how):
    """The size of a direction as a fraction of the input; for features, of the rows that count."""
    array = case.arrays[index]
    v = _velocity(array, how)
    if index == 0 and len(case.arrays) > 2 and case.arrays[1].dtype.kind == "i":
        array = array[(case.arrays[1] >= 0) & (case.arrays[2] > 0)]
    v, x = (mpf(float(np.abs(y).max())) if y.size else mpf(0) for y in (v, array))
    return v / x if x else mpf(0)


def _slip(array, how, dtype):
    """The fraction of a direction that rounding to the dtype changes in forward mode."""
    v = _velocity(array, how)
    peak = np.abs(v).max() if v.size else 0.0
    return float(np.abs((_tensor(v, dtype).double().numpy() - v) / peak).max()) if peak else 0.0


def _pair(cotangents, matrices):
    """⟨G, M⟩ and its size without cancellation."""
    total, size = mpf(0), mpf(0)
    for g, m in zip(cotangents, matrices, strict=True):
        for a, b in zip(_floats(g), list(m), strict=True):
            total += mpf(a) * b
            size += abs(b)
    return total, size


# --- the verdict -----------------------------------------------------------------------------------------------------


def _of_error(error, judged):
    """Verdict on an error: clear if it is ours and names a fix; needless if the reference is well determined."""
    if not (type(error).__module__ == errors.__name__ and _FIX.search(str(error))):
        return "unclear error"
    return "needless error" if judged and not isinstance(error, errors.TieError) else "clear error"


def _of_number(got, expected, allowed, size, dtype, tiny):
    """Verdict on a number: "undetermined" if the tolerance exceeds half of ``size``."""
    if mpmath.isinf(got):
        beyond = (expected if got > 0 else -expected) + allowed
        return "exact" if beyond >= torch.finfo(dtype).max else "silently wrong"
    if abs(got - expected) <= allowed + tiny:  # false for NaN
        return "exact" if allowed <= size / 2 or allowed <= tiny else "undetermined"
    return "silently wrong"


def _spread(around, i, slacks):
    """Change of an entry of the reference under rounding of the inputs; None if it may not exist."""
    if any(isinstance(x, ArithmeticError) for x in around):
        return None
    return _farthest([x[i] for x in around], slacks)


def _farthest(around, slacks):
    """Largest change under perturbations, each times its slack."""
    center, *others = around
    return max(slack * abs(x - center) for slack, x in zip(slacks, others, strict=True))


def make(seed, number):
    """Build the case of a number; consecutive numbers cycle through the rows."""
    row = ROWS[number % len(ROWS)]
    kind = KINDS[(number // len(ROWS) + number) % len(KINDS)]
    draw = Draw(seed, number, kind)
    draw.options = {}
    if row.composed:  # leave a margin for ``seen`` and its gradients
        draw.scale = min(max(draw.scale, 1e-300), {torch.float64: 1e300, torch.float32: 1e30}.get(draw.dtype, 1e300))
    arrays = list(row.draw(draw))
    plain = Draw(seed, number, kind)
    plain.kind, plain.scale, plain.options = "plain" if kind != "empty" else kind, 1.0, {}
    plain.calm = True
    others = [np.asarray(a) for a in row.draw(plain)]
    others = [np.maximum(a, 0) if a.dtype.kind == "i" else a for a in others]
    arrays = [np.asarray(a) for a in arrays]
    if any(a.shape != b.shape for a, b in zip(arrays, others, strict=True)):
        others = arrays
    if kind == "not finite":
        floating = [i for i, a in enumerate(arrays) if a.dtype.kind == "f" and a.size]
        if floating:
            i = draw.pick(*floating)
            bad = arrays[i].copy()
            spot = int(draw.rng.integers(bad.size))
            bad.reshape(-1)[spot] = draw.pick(math.nan, math.inf, -math.inf)
            if i in row.symmetric:
                bad = np.where(np.isfinite(bad), bad, np.nan) if draw.rng.random() < 0.5 else bad
                bad = np.maximum(bad, bad.T) if not np.isnan(bad).any() else bad + 0 * bad.T
            arrays[i] = bad
    arrays = [a if a.dtype.kind == "i" else _tensor(a, draw.dtype).double().numpy() for a in arrays]
    return Case(row, draw, arrays, draw.options), others


def judge(seed, number):
    """Build a case, evaluate the operator, and return a record with the worst verdict."""
    case, others = make(seed, number)
    draw, row = case.draw, case.row
    record = {
        "number": number,
        "operator": row.name,
        "kind": draw.kind,
        "dtype": str(draw.dtype).removeprefix("torch."),
        "scale": draw.scale,
        "layout": draw.layout,
        "options": {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in case.options.items()},
        "shapes": [list(a.shape) for a in case.arrays],
    }
    finite = all(np.isfinite(a).all() for a in case.arrays if a.dtype.kind == "f")
    how = [_direction(case, i, a) for i, a in enumerate(case.arrays)]
    decades = _digits(case) if finite else 0
    with warnings.catch_warnings(record=True) as heard, mp.workdps(3 * (decades + 40)):
        warnings.simplefilter("always")
        directions = [
            _velocity(a, h) if finite else (None if h is None else np.zeros_like(a))
            for a, h in zip(case.arrays, how, strict=True)
        ]
        answers, cotangents = evaluate(case, others, directions)
        if not finite:
            ok = isinstance(answers.value, Exception)
            if row.passes and not ok:
                verdicts = {
                    "value": "exact"
                    if not all(math.isfinite(x) for out in answers.value for x in out)
                    else "silently wrong"
                }
            else:
                verdicts = {"value": _of_error(answers.value, False) if ok else "silently wrong"}
        else:
            verdicts = _compare(case, answers, cotangents, how, mpf(10) ** -(decades + 40), record)
    if any(issubclass(w.category, errors.NumericalWarning) for w in heard):
        verdicts = {k: "clear error" if v == "silently wrong" and k != "value" else v for k, v in verdicts.items()}
    record["verdict"] = max(verdicts.values(), key=VERDICTS.index)
    record["about"] = [k for k, v in verdicts.items() if v == record["verdict"]]
    for name in ("value", "gradient", "tangent", "second"):
        if isinstance(error := getattr(answers, name), Exception):
            record.setdefault("error", f"{name}: {type(error).__name__}: {error}"[:300])
    return record


def _is_beyond(name, case, inputs, how, cotangents, place, told, step):
    """Whether an infinite derivative really exceeds the range of the dtype.

    For a gradient and a second derivative, computes the partial derivative at an infinite entry; for a tangent, the
    largest entry.
    """
    limit = mpf(torch.finfo(case.dtype).max) * mpf("0.99")
    if name == "tangent":
        return max((truth.norm(m) for m in told), default=mpf(0)) > limit
    if place is None:
        return False
    (i, k), x = place, inputs[place[0]]
    by = step * (truth.norm(x) or 1)

    def at(way, t):
        """⟨G, f⟩ with the entry perturbed, then all inputs along the direction."""
        moved = x.copy()
        if case.arrays[i].ndim == 2:
            row, column = divmod(k, x.cols)
            moved[row, column] += way
            if i in case.row.symmetric:  # half of it on either side of the diagonal
                moved[row, column] -= way / 2
                moved[column, row] += way / 2
        else:
            moved[k] += way
        points = [*inputs[:i], moved, *inputs[i + 1 :]]
        return _pair(cotangents, case.row.truth(*map(_moved, points, how, [t] * len(how)), case=case))[0]

    try:
        if name == "gradient":
            slope = (at(by, 0) - at(-by, 0)) / (2 * by)
        else:
            slope = (at(by, step) - at(by, -step) - at(-by, step) + at(-by, -step)) / (4 * by * step)
    except ArithmeticError:
        return True  # no derivative in that direction
    return abs(slope) > limit


def _least_near_pole(case, inputs, unit, k):
    """A quarter of the smallest size of output k if eigenvalues change by 200 roundings."""
    if not case.row.symmetric:
        return mpf(0)
    sizes = []
    for factor in (-_SLACK, _SLACK):
        a = inputs[0] + factor * unit * truth.norm(inputs[0]) * mpmath.eye(inputs[0].rows)
        try:
            sizes.append(truth.norm(case.row.truth(a, *inputs[1:], case=case)[k]))
        except ArithmeticError:
            continue
    return min(sizes, default=mpf(0)) / 4


def _compare(case, answers, cotangents, how, step, record):
    row, dtype = case.row, case.dtype
    info = torch.finfo(dtype)
    inputs = [_as_matrix(a) for a in case.arrays]
    unit = max(row.unit, info.eps / 2) if row.composed else row.unit
    loose = 10 * row.unit if row.unit > _ROUNDING else 0.0
    lost = mpf(2) ** -1074  # smallest subnormal number

    def shaken(share, seed):
        rng = np.random.default_rng(seed)
        out = []
        for i, (x, a) in enumerate(zip(inputs, case.arrays, strict=True)):
            if a.dtype.kind == "i":
                out.append(x)
                continue
            noise = rng.uniform(-1, 1, a.shape)
            noise = noise + noise.T if i in row.symmetric else noise
            size = truth.norm(x)
            relative = i in row.relative
            new = x.copy()
            for k, (r, own) in enumerate(zip(noise.reshape(-1), list(x), strict=True)):
                least = (
                    share * unit * abs(own) if relative else mpmath.sign(share) * max(abs(share) * unit * size, lost)
                )
                by = mpf(float(r)) * least
                if a.ndim == 2:
                    new[k // a.shape[1], k % a.shape[1]] = own + by
                else:
                    new[k] = own + by
            out.append(new)
        return out

    # Perturb in both directions: at the edge of a domain an eigenvalue of zero is valid on one side only.
    changes = [(1, 1), (8, 2), (-8, 2)] if row.symmetric else [(1, 1), (8, 2)]
    tells = [tell(case, inputs, how, step)] + [tell(case, shaken(*change), how, step) for change in changes]
    slacks = [_SLACK / abs(share) for share, _ in changes]
    if row.noisy:
        case.noise = True
        tells.append(tell(case, inputs, how, step))
        slacks.append(2)
    center = tells[0]
    verdicts = {}
    moderate = all(
        1e-40 < abs(x) < 1e40 or x == 0 for a in case.arrays for x in np.asarray(a, float).reshape(-1).tolist()
    )
    moderate &= (not row.mixed or _digits(case) < 30) and row.condition(case) < 1e12
    moderate &= all(1e-40 < abs(x) < 1e40 or x == 0 for x in case.options.values() if isinstance(x, float))
    fits = 4 * info.tiny
    if isinstance(center.value, ArithmeticError):
        if isinstance(answers.value, Exception):
            return {"value": _of_error(answers.value, False)}
        lifted = [
            x + 32 * unit * truth.norm(x) * mpmath.eye(x.rows) if i in row.symmetric else x
            for i, x in enumerate(inputs)
        ]
        if any(not isinstance(t.value, ArithmeticError) for t in (*tells, tell(case, lifted, how, step))):
            numbers = not any(math.isnan(x) for out in answers.value for x in out)
            return {"value": "undetermined" if numbers else "silently wrong"}
        if isinstance(center.value, truth.Overflow):
            return {"value": "exact" if any(math.isinf(x) for out in answers.value for x in out) else "silently wrong"}
        record["truth"] = f"undefined: {center.value}"
        return {"value": "silently wrong"}
    # The value, output by output.
    worst, determined, bounded = "exact", True, True
    given = answers.value if not isinstance(answers.value, Exception) else None
    for k, matrix in enumerate(center.value):
        if matrix is None or any(not isinstance(t.value, ArithmeticError) and t.value[k] is None for t in tells):
            continue  # undetermined here
        around = [t.value if isinstance(t.value, ArithmeticError) else list(t.value[k]) for t in tells]
        spread = [_spread(around, i, slacks) for i in range(len(list(matrix)))]
        size = truth.norm(matrix)
        own = (256 * _ROUNDING * row.condition(case) + loose) * max(size, row.least) + 4 * info.eps * size
        allowed = None if any(s is None for s in spread) else max(spread, default=mpf(0)) + own
        least = mpf(0)
        if row.pole and allowed is not None and max(spread, default=mpf(0)) > size:
            least = _least_near_pole(case, inputs, unit, k)
            # A pole within 200 roundings: any large value is accepted.
            allowed = None if least < size else allowed
        bounded &= allowed is not None
        determined &= (
            allowed is not None and (allowed <= mpf("1e-3") * size + own) and (size == 0 or fits < size < info.max)
        )
        if given is None:
            continue
        if allowed is None and max(map(abs, given[k]), default=0.0) < least - fits:
            worst = "silently wrong"
            record["value"] = ["small near a pole", mpmath.nstr(size, 8), mpmath.nstr(least, 3)]
        for got, expected in zip(given[k], list(matrix), strict=True):
            if allowed is None:  # infinity is accepted near a pole, or if the reference overflows
                beyond = math.isinf(got) and (row.pole or mpmath.sign(got) * expected > info.max)
                verdict = "undetermined" if math.isfinite(got) or beyond else "silently wrong"
            else:
                verdict = _of_number(mpf(got), expected, allowed, max(size, row.least), dtype, fits)
            if VERDICTS.index(verdict) > VERDICTS.index(worst):
                worst = verdict
                record["value"] = [got, mpmath.nstr(expected, 8), None if allowed is None else mpmath.nstr(allowed, 3)]
    if given is None:
        return {"value": _of_error(answers.value, determined and moderate)}
    verdicts["value"] = worst
    # Derivatives, as one number each.
    speeds = [float(np.abs(_velocity(a, h)).max()) for h, a in zip(how, case.arrays, strict=True) if h and a.size]
    speed = max(speeds, default=0.0)
    count = sum(a.size for a in case.arrays) + 1
    slip = max((_slip(a, h, dtype) for h, a in zip(how, case.arrays, strict=True) if h), default=0.0)
    drift = max((_drift(case, i, h) for i, h in enumerate(how) if h), default=mpf(0))
    for name, order in (("gradient", "first"), ("tangent", "first"), ("second", "second")):
        got = getattr(answers, name)
        if got is None:
            continue
        told = [getattr(t, order) for t in tells]
        bad = any(isinstance(t, ArithmeticError) for t in told) or (row.pole and not bounded)
        if bad:
            if isinstance(got, Exception):
                verdicts[name] = _of_error(got, False)
            else:
                verdicts[name] = "silently wrong" if mpmath.isnan(got) else "undetermined"
            continue
        pairs = [_pair(cotangents, t) for t in told]
        sizes = [mpf(0), *(truth.norm(m) for m in center.value)]
        ordinary = max(*sizes, row.least) * drift ** (2 if name == "second" else 1)
        spread = max(_farthest([p[i] for p in pairs], slacks) for i in (0, 1))
        digits = 1e-10 if name == "second" else 1e-11  # an answer with this relative error is not called wrong
        by_digits = digits * (pairs[0][1] + ordinary)
        allowed = spread + by_digits + 8 * info.eps * (pairs[0][1] + ordinary)
        allowed += (64 * _ROUNDING + 2 * info.eps) * answers.weight
        allowed += loose * (1 + row.system(case)) ** (2 if name == "second" else 1) * (pairs[0][1] + ordinary)
        rounding = 256 * _ROUNDING + (unit if row.composed else 0)
        allowed += rounding * row.condition(case) ** (2 if name == "second" else 1) * ordinary
        allowed += 4 * row.left_out(case) * (pairs[0][1] + ordinary)
        if name == "tangent":
            allowed += 4 * slip * (pairs[0][1] + ordinary * row.condition(case))
        if name == "second":
            allowed += 64 * _ROUNDING * row.loss(case) * pairs[0][1]
        if any(not a.any() for a in case.arrays):  # error of the difference quotient
            allowed += mpf(10) ** -60
        tiny = fits * count * (mpf(speed) ** (2 if name == "second" else 1) + 1)
        if isinstance(got, Exception):
            clear = allowed <= mpf("1e-3") * abs(pairs[0][0]) and fits < abs(pairs[0][0]) < info.max
            verdicts[name] = _of_error(got, clear and moderate)
            continue
        if mpmath.isinf(got) and _is_beyond(
            name, case, inputs, how, cotangents, answers.infinite.get(name), told[0], step
        ):
            verdicts[name] = "exact"
            record.setdefault("beyond the range", []).append(name)
        elif name == "second" and not mpmath.isfinite(got) and "beyond the range" in record:
            verdicts[name] = "undetermined"  # the gradient itself overflows
        else:
            verdicts[name] = _of_number(got, pairs[0][0], allowed, pairs[0][1] + ordinary, dtype, tiny)
            error = abs(got - pairs[0][0])
            if verdicts[name] == "exact" and error > allowed + tiny - by_digits + 256 * _ROUNDING * pairs[0][1]:
                size = pairs[0][1] + ordinary
                record.setdefault("by its digits", {})[name] = mpmath.nstr(error / size, 3)
        if verdicts[name] == "silently wrong":
            record[name] = [mpmath.nstr(got, 12), mpmath.nstr(pairs[0][0], 12), mpmath.nstr(allowed, 3)]
    return verdicts


# --- the rows --------------------------------------------------------------------------------------------------------


def _of_matrix(draw):
    return (draw.symmetric(),)


def _of_matrix_and(*choices):
    """A symmetric matrix and a number as a trainable tensor."""
    return lambda draw: (draw.symmetric(), np.array(draw.held(*choices)))


def _number(*choices, name="p", **more):
    def draw_number(draw):
        for option, values in {**({name: choices} if choices else {}), **more}.items():
            draw.options[option] = draw.pick(*values)
        return (draw.symmetric(),)

    return draw_number


def _zero_tolerance(case):
    n = case.arrays[-1 if case.row.name == "whiten_by_statistics" else 0].shape[-1]
    return rounding_of_zero(case.dtype, torch.float64, max(n, 1))


def _spectral(name, value, **more):
    return Row(name, _of_matrix, lambda a, case: [value(a, case)], symmetric=(0,), **more)


def _features(draw):
    return (draw.features(),)


def _pooled(m, d, *parts):
    """Features, and by name weights, ε, an exponent."""

    def draw_pooled(draw):
        f = draw.features(0 if draw.kind == "empty" else m, d)
        more = {
            "w": lambda: draw.weights(f.shape[0]),
            "r": lambda: np.stack([draw.weights(f.shape[0])]),
            "e": lambda: np.array(draw.held(0.1, 1e-3, 1e-12, 1e-300, 1e10)),
            "p": lambda: np.array(draw.held(0.7, 0.3, -1.3, 2.0, 1e-8)),
        }
        if "e" not in parts:
            draw.options["eps"] = draw.pick(1e-3, 0.1, 1e-8, 1e-100, 1e-300, 1e8)
        return (f, *(more[part]() for part in parts))

    return draw_pooled


def _log(x):
    return mpmath.log(x)


def _logs(x):
    if x <= 0:
        raise truth.Undefined("positive")
    return mpmath.log(x)


def _powers(p):
    def g(x):
        if x <= 0:
            raise truth.Undefined("positive")
        exponent = p * mpmath.log(x)
        if exponent > 1e5:
            raise truth.Overflow
        return mpmath.exp(exponent)

    return g


def _spread_of(f, tol):
    """Singular values of F over the largest, those above a tolerance and the others."""
    peak = np.abs(f).max() if f.size else 0.0
    values = np.linalg.svd(f / peak, compute_uv=False) if peak else np.zeros(0)
    values = values / values[0] if values.size else values
    return values[values > tol], values[values <= tol]


def _scaled_rows(case, degrees):
    """The features whose span a cut uses: labeled rows, for J1 divided by the root of their degrees."""
    f, labels, *more = (np.asarray(a, float) for a in case.arrays)
    f = f / (np.abs(f).max() or 1.0) if f.size else f
    w = (more[0] if more else np.ones(len(f))) * (labels >= 0)
    w = w / (w.max() or 1.0) if w.size else w
    if degrees:
        degree = f @ (more[1] if len(more) > 1 else np.eye(f.shape[1])) @ (f.T @ w)
        w = np.where(degree > 0, w / np.where(degree > 0, degree, 1), 0)
    return f * np.sqrt(w)[:, None]


def _cut_condition(degrees):
    def condition(case):
        kept, _ = _spread_of(_scaled_rows(case, degrees), case.gram_tol(case.arrays[0].shape[1]) ** 0.5)
        return 1 / kept[-1] if kept.size else 1.0

    return condition


def _left_out(kept, left):
    """The largest dropped value over the smallest kept one."""
    return float(left[0] / kept[-1]) if left.size and kept.size else 0.0


def _left_out_of_cut(degrees):
    def left_out(case):
        return _left_out(*_spread_of(_scaled_rows(case, degrees), case.gram_tol(case.arrays[0].shape[1]) ** 0.5))

    return left_out


def _left_out_of_span(case):
    return _left_out(*_spread_of(np.asarray(case.arrays[0], float), case.rank_tol()))


def _clean(left_out):
    """Options of rows that drop small directions; differentiable if these are far below the others."""
    return {"left_out": left_out, "smooth": lambda *inputs, case: left_out(case) < 1e-6}


def _soft_condition(case):
    """Condition of the features with their ridge; of the ridge if fewer rows than channels have weight."""
    f, labels, *more = case.arrays
    if more and 0 < ((more[0] > 0) & (labels >= 0)).sum() < min(f.shape):
        return 1 / case.options["ridge"]
    kept, _ = _spread_of(_scaled_rows(case, False), 2.0**-52)
    return 1 / max(float(kept[-1]), case.options["ridge"] ** 0.5) if kept.size else 1.0


def _full_rank(a, case):
    values = truth.singular(a)[0]
    return not values or values[-1] > mpf(10) ** -14 * values[0]


def _span_condition(case):
    kept, _ = _spread_of(np.asarray(case.arrays[0], float), case.rank_tol())
    return 1 / kept[-1] if kept.size else 1.0


def _cubed_condition(case):
    return _span_condition(case) ** 3


def _field_condition(case):
    """Condition of the system: degrees over confidence."""
    _, c, w = (np.asarray(a, float) for a in case.arrays)
    if not c.size:
        return 1.0
    peak = np.abs(w).max() or 1.0
    degree = (w / peak).sum(1).max() * mpf(float(peak))
    if case.row.name.endswith("features"):
        degree = ((w / peak) @ (w / peak).sum(0)).max() * mpf(float(peak)) ** 2
    return 1 + degree / mpf(float(c.min()))


def _cancels(case):
    """λ_max/ε, by which the terms of second derivatives of pooling cancel."""
    f, *more = (np.asarray(a, float) for a in case.arrays)
    eps = case.options.get("eps") or float(next(a for a in more if a.ndim == 0))
    weight = max((float(a.max()) for a in more if a.ndim == 1 and a.size), default=1.0)
    weight = 1.0 if case.row.name.startswith("whiten") else weight
    return f.size * mpf(float(np.abs(f).max()) if f.size else 0.0) ** 2 * mpf(weight) / mpf(eps)


def _eps(case):
    return mpf(case.options.get("eps", 1e-3))


def _pairs(lam, u):
    """λ, UUᵀ, UΛUᵀ by parts that do not overflow, and the first uuᵀ."""
    top = lam.abs().amax(-1, keepdim=True) if lam.shape[-1] else lam
    unit = torch.where(top > 0, top, 1).detach()
    return lam, u @ u.mT, (u * (lam / unit).unsqueeze(-2)) @ u.mT * unit.unsqueeze(-1), u[..., :1] @ u[..., :1].mT


def _eigenpairs(a, case):
    values, u = truth.eig(a)
    return [truth.vector(values), u * u.T, truth.compose(u, values), truth.leading(values, u)]


def _triples(u, s, vh):
    """σ, UᵀU, UΣVᵀ by parts that do not overflow, and the first uuᵀ."""
    k = s.shape[-1]
    u, v = u[..., :k], vh[..., :k, :].mT
    top = s.amax(-1, keepdim=True) if k else s
    unit = torch.where(top > 0, top, 1).detach()
    product = (u * (s / unit).unsqueeze(-2)) @ v.mT * unit.unsqueeze(-1)
    return s, u @ u.mT if u.shape[-2] == k else u.mT @ u, product, u[..., :1] @ u[..., :1].mT


def _singular(a, case):
    values, u, _ = truth.singular(a)
    if not values:
        return [mpmath.matrix(0, 1), mpmath.matrix(0, 0), a, mpmath.matrix(a.rows, a.rows)]
    first = truth.columns(u, 0, 1)
    return [mpmath.matrix(values), mpmath.eye(len(values)), a, first * first.T if values[0] > 0 else None]


def _rectangle(draw):
    return (draw.features(d=draw.n or 0),) if draw.kind == "empty" else (draw.features(),)


def _tall(draw):
    d = int(draw.rng.integers(1, 4))
    return (
        draw.features(
            0 if draw.kind == "empty" else d + int(draw.rng.integers(0, 3)), 0 if draw.kind == "empty" else d
        ),
    )


def _square(draw):
    return (draw.features(draw.n, draw.n),)


def _points(draw):
    m, d = int(draw.rng.integers(2, 5)), int(draw.rng.integers(1, 4))
    m = 0 if draw.kind == "empty" else m
    return draw.features(m, d), draw.features(m, d, kind="plain"), draw.weights(m)


def _moments(x, y):
    return x.T * y if x.rows else mpmath.matrix(x.cols, x.cols)


def _labeled(objective, *names, **options):
    def call(f, labels, *more, **given):
        return objective(f, labels, num_labels=3, **dict(zip(names, more, strict=True)), **options, **given)

    return call


def _cut(*parts, positive=False):
    def draw_cut(draw):
        f = draw.features(positive=positive)
        m, d = f.shape
        more = {
            "w": lambda: draw.weights(m),
            "l": lambda: np.eye(d) + 0.25 * (lambda a: a + a.T)(draw.rng.uniform(0, 1, (d, d))),
        }
        if "ridge" in parts:
            draw.options["ridge"] = draw.pick(0.3, 1.0, 1e-3, 1e-8, 1e-14, 1e-300, 1e10)
        return (f, draw.labels(m), *(more[p]() for p in parts if p in more))

    return draw_cut


def _affinities(draw):
    f = draw.features(positive=draw.kind not in ("indefinite", "negative"))
    peak = np.abs(f).max() if f.size else 0
    f = f / peak if peak > 0 else f
    w = f @ f.T
    return (w * draw.scale,)


def _dot(a, x):
    return (a @ x.unsqueeze(-1)).squeeze(-1)


def _system(draw):
    a = draw.symmetric()
    return a, draw.rng.uniform(-1, 1, a.shape[0]) * draw.pick(1.0, 1.0, 1e-30 if draw.dtype == torch.float64 else 1.0)


def _field_of(draw):
    f = np.abs(draw.features(kind="plain" if draw.kind in ("negative", "indefinite") else None))
    return draw.rng.uniform(-1, 1, f.shape[0]), draw.rng.uniform(0.5, 2, f.shape[0]) * draw.held(1.0, 1e-4, 1e4), f


def _matrix_field(draw):
    y, c, f = _field_of(draw)
    peak = np.abs(f).max() if f.size else 0
    f = f / peak if peak > 0 else f
    return y, c, f @ f.T * draw.scale


def _samples(draw):
    """Two sets of samples of one dimension, some with fewer samples than dimensions."""
    d = int(draw.rng.integers(1, 4))
    m, k = (0, 0) if draw.kind == "empty" else draw.rng.integers(2, 6, 2).tolist()
    return draw.features(m, d), draw.features(k, d, kind=draw.pick("plain", draw.kind))


def _of_cross_product(x, y, case):
    """Whether the cross product of the centered samples has the largest rank that their numbers allow."""
    if min(x.rows, y.rows) < 2:
        return True
    values = truth.cross_singular_values(x, y)
    return values[-1] > mpf(10) ** -12 * values[0]


def _cross_condition(case):
    x, y = (a - a.mean(0) if len(a) else a for a in case.arrays)
    if min(len(x), len(y)) < 2:
        return 1.0
    x, y = (a / (np.abs(a).max() or 1.0) for a in (x, y))
    values = np.linalg.svd(x @ y.T, compute_uv=False)[: min(len(x) - 1, len(y) - 1, x.shape[1])]
    return float(values[0] / max(values[-1], 1e-16)) if values[0] else 1.0


def _triangle(a, case):
    root = mpmath.sqrt(2)
    out = [a[i, j] * (1 if i == j else root) for i in range(a.rows) for j in range(i, a.rows)]
    return [truth.vector(out)]


def _untriangle(v, case):
    n = int((math.isqrt(8 * len(v) + 1) - 1) // 2)
    out, k = mpmath.matrix(n, n), 0
    for i in range(n):
        for j in range(i, n):
            out[i, j] = out[j, i] = v[k] if i == j else v[k] / mpmath.sqrt(2)
            k += 1
    return [out]


def _clamp(a, case):
    least = mpf(case.options["least"])
    return [truth.function(a, lambda x: max(x, least))]


def _off_the_kink(a, case):
    values, least = truth.eig(a)[0], mpf(case.options["least"])
    return all(abs(x - least) > mpf(10) ** -14 * max(abs(least), *map(abs, values)) for x in values)


def _positive(a, case):
    """Whether the square root is differentiable in floating point."""
    values = truth.eig(a)[0]
    return not values or values[0] > _zero_tolerance(case) * values[-1]


def _widest_over_narrowest(case):
    """The largest eigenvalue over the smallest gap that a divided difference is divided by."""
    a = case.arrays[0]
    peak = np.abs(a).max() if a.size else 0.0
    x = np.linalg.eigvalsh(a / peak) if peak else np.zeros(0)
    gaps = np.abs(x[:, None] - x)
    gaps = gaps[gaps > 2**-7 * np.maximum(np.abs(x)[:, None], np.abs(x))]
    return float(np.abs(x).max() / gaps.min()) if gaps.size else 1.0


def _simple_top(a, case):
    values = truth.eig(a)[0]
    return len(values) < 2 or values[-1] - values[-2] > mpf(10) ** -12 * abs(values[-1])


def _of_rank(a, case):
    values, rank = truth.singular(a)[0], case.options["rank"]
    return rank == 0 or rank > len(values) or values[rank - 1] > mpf(10) ** -14 * values[0]


def _draw_clamp(draw):
    draw.options["least"] = draw.pick(0.0, 1.3, 1.3 * draw.scale, -draw.scale, 1e-3 * draw.scale)
    return (draw.symmetric(),)


def _draw_threshold(draw):
    draw.options["least"] = draw.pick(1e-4, 1.3, 1.3 * draw.scale, 1e-3 * draw.scale)
    return (draw.symmetric(),)


def _re_eig(x, least):
    return mb.spd.re_eig(x, least)


def _ranked(draw, matrix):
    draw.options["rank"] = int(draw.rng.integers(0, 1 + min(matrix.shape)))
    return (matrix,)


def _leading(a, case):
    values, u = truth.eig(a)
    n, rank = len(values), case.options["rank"]
    if 0 < rank < n and values[n - rank] == values[n - rank - 1]:
        raise truth.Undefined("a gap")
    return [truth.compose(u, [mpf(i >= n - rank) for i in range(n)])]


def _nearest(a, case):
    values, u, v = truth.singular(a)
    rank = case.options["rank"]
    if 0 < rank < len(values) and values[rank - 1] == values[rank] > 0:
        raise truth.Undefined("a gap")
    return [truth.compose(u, [s if i < rank else mpf(0) for i, s in enumerate(values)], v) if values else a]


def _pinv(a, case):
    return [truth.pinv(a, mpf(case.rank_tol())) if a.rows and a.cols else a.T]


def _rank_one_of(x, **options):
    return mb.projector(x, symmetric=True, **options)


def _without_labels(case):
    """The features alone, with all rows."""
    return Case(case.row, case.draw, [case.arrays[0], np.zeros(len(case.arrays[0]))])


def _two(draw):
    """An adversarial symmetric matrix and a second one, adversarial or ordinary, scaled or not."""
    a = draw.symmetric()
    return a, draw.symmetric(kind=draw.pick("plain", draw.kind), scale=draw.pick(1.0, draw.scale, draw.scale))


def _definite_second(draw):
    a, b = _two(draw)
    return (a, b) if draw.rng.random() < 0.7 else (b, a)


def _pencil_in_range(draw):
    """Limit the scale so that products of eigenvectors and their gradients stay in the range."""
    limit = 1e70 if draw.dtype == torch.float64 else 1e8
    draw.scale = min(max(draw.scale, 1 / limit), limit)
    return _definite_second(draw)


_FACTORED = 4 * _ROUNDING  # backward error of a Cholesky factorization


def _velocity_at(draw):
    p = draw.symmetric()
    v = draw.symmetric(kind=draw.pick("plain", "indefinite", draw.kind))
    return p, v * draw.pick(1.0, 1.0, 0.25, 1e-8, 16.0)


def _apart(a, b, *_, case):
    """Whether the matrices differ by more than rounding; the distance has a kink at equal ones."""
    return not a.rows or truth.norm(a - b) > mpf(10) ** -10 * truth.norm(a)


def _with_time(draw):
    return *_two(draw), np.array(draw.held(0.3, 0.5, 0.0, 1.0, 1.5, -0.5, 1e-8))


def _with_weights(draw):
    return *_two(draw), draw.rng.uniform(0.2, 2, 2) * draw.held(1.0, 1.0, 1e-10, 1e10)


def _largest_condition(case):
    """The larger condition number of the two matrices."""
    spectra = [np.linalg.eigvalsh(a / (np.abs(a).max() or 1.0)) for a in case.arrays[:2] if a.size]
    return max((1.0, *(float(x[-1] / max(x[0], 1e-16)) for x in spectra)))


def _root_condition(case):
    """Condition number of the Cholesky factors."""
    return _largest_condition(case) ** 0.5


def _geometry(metric):
    """The rows of a metric; the maps of the log-Euclidean metric have one derivative."""
    factored = {} if metric == "log_euclidean" else {"unit": _FACTORED, "system": _root_condition}
    both = {"symmetric": (0, 1), **factored}
    named = {
        "distance": (_two, truth.spd_distance, {**both, "smooth": _apart}),
        "geodesic": (_with_time, lambda a, b, t, metric: truth.spd_geodesic(a, b, t[0], metric), {**both}),
        "exp_map": (_velocity_at, truth.spd_exp_map, {**both, "mixed": True}),
        "log_map": (_two, truth.spd_log_map, both),
    }
    once = ("exp_map", "log_map") if metric == "log_euclidean" else ()
    rows = [
        Row(
            f"spd_{name}_{metric}",
            draw,
            lambda *inputs, case, definition=definition: [definition(*inputs, metric)],
            call=lambda *inputs, name=name: getattr(mb.spd, name)(*inputs, metric=metric),
            orders=1 if name in once else 2,
            **more,
        )
        for name, (draw, definition, more) in named.items()
    ]
    mean = Row(
        f"spd_mean_{metric}",
        _with_weights,
        lambda a, b, w, case: [truth.spd_mean_of_two(a, b, w, metric)],
        call=lambda a, b, w: mb.spd.mean(torch.stack([a, b], -3), w, metric=metric),
        symmetric=(0, 1),
        relative=(2,),
        unit=_ROUNDING if metric == "log_euclidean" else 1e-11,
        system=_largest_condition if metric == "bures_wasserstein" else lambda case: 0.0,
    )
    return [*rows, mean]


def _pencil_power(a, b, p, case):
    return [truth.pencil_function(a, b, lambda x: mpmath.exp(p[0] * mpmath.log(x)))]


def _nonzero(values):
    if any(x == 0 for x in values):
        raise Undefined("nonzero")
    return values


_PENCIL_FUNCTIONS = {
    "log": (mpmath.log, truth.positive),
    "inv_sqrt": (lambda x: 1 / mpmath.sqrt(x), truth.positive),
    "inverse": (lambda x: 1 / x, _nonzero),
}


def _pencil_by_name(draw):
    draw.options["function"] = draw.pick(*_PENCIL_FUNCTIONS)
    return _definite_second(draw)


_arctan = (torch.arctan, lambda x: 1 / (1 + x * x))

ROWS = [
    _spectral("matrix_log", lambda a, case: truth.log(a)),
    _spectral("matrix_sqrt", lambda a, case: truth.sqrt(a, _zero_tolerance(case)), smooth=_positive),
    _spectral("matrix_inv_sqrt", lambda a, case: truth.power(a, mpf(-0.5))),
    _spectral("matrix_exp", lambda a, case: truth.exp(a), mixed=True),
    _spectral("matrix_inverse", lambda a, case: truth.inverse(a), pole=True),
    Row(
        "matrix_power",
        _of_matrix_and(0.7, -1.3, 2.0, 0.5, 1e-8, 40.0),
        lambda a, p, case: [truth.power(a, p[0])],
        symmetric=(0,),
        relative=(1,),
    ),
    Row(
        "matrix_power_of_a_number",
        _number(0, 1, 2, 5, -1, -3, 0.5, -0.5, 2.5, -1.7, 1e-8, 60.5),
        lambda a, case: [
            truth.sqrt(a, _zero_tolerance(case))
            if case.options["p"] == 0.5
            else truth.power(a, case.options["p"] if isinstance(case.options["p"], int) else mpf(case.options["p"]))
        ],
        call=mb.matrix_power,
        smooth=lambda a, case: case.options["p"] != 0.5 or _positive(a, case),
        symmetric=(0,),
        pole=True,
    ),
    _spectral("matrix_cube", lambda a, case: truth.power(a, 3)),
    _spectral("matrix_power_minus_2", lambda a, case: truth.power(a, -2), pole=True),
    _spectral(
        "own_derivative",
        lambda a, case: truth.function(a, mpmath.atan),
        call=lambda a: mb.matrix_function(a, _arctan),
        mixed=True,
        orders=1,
        condition=_widest_over_narrowest,
    ),
    _spectral("own_log", lambda a, case: truth.log(a), orders=1),
    Row(
        "matrix_functions",
        _of_matrix,
        lambda a, case: [truth.sqrt(a, _zero_tolerance(case)), truth.power(a, mpf(0.3)), truth.inverse(a)],
        call=lambda a: mb.matrix_functions(a, ["sqrt", 0.3, "inverse"]),
        smooth=_positive,
        symmetric=(0,),
        pole=True,
    ),
    Row("matrix_clamp", _draw_clamp, _clamp, call=mb.matrix_clamp, smooth=_off_the_kink, symmetric=(0,), mixed=True),
    Row(
        "inverse_root",
        _number(2, 4, 1, 2.5, name="p", eps=(0.1, 0.0, 1e-8, 1e-300)),
        lambda a, case: [truth.inverse_root(a, case.options["p"], case.options["eps"], _zero_tolerance(case))],
        call=mb.inverse_root,
        smooth=_positive,
        symmetric=(0,),
        mixed=True,
    ),
    Row(
        "inverse_root_relative",
        _number(2, 4, name="p", eps=(0.1, 1e-8, 1e-14)),
        lambda a, case: [
            truth.inverse_root(a, case.options["p"], case.options["eps"], _zero_tolerance(case), relative=True)
        ],
        call=lambda a, p, eps: mb.inverse_root(a, p, eps=eps, relative=True),
        smooth=lambda a, case: _positive(a, case) and _simple_top(a, case),
        symmetric=(0,),
    ),
    Row(
        "pool_thin_log",
        _pooled(2, 4, "e"),
        lambda f, e, case: [truth.pool(f, e[0], _logs, noise=case.noise)],
        relative=(1,),
        mixed=True,
        noisy=True,
        loss=_cancels,
    ),
    Row(
        "pool_primal_log",
        _pooled(4, 3, "e"),
        lambda f, e, case: [truth.pool(f, e[0], _logs, noise=case.noise)],
        relative=(1,),
        mixed=True,
        noisy=True,
        loss=_cancels,
    ),
    Row(
        "pool_thin_sqrt_weighted",
        _pooled(3, 4, "w"),
        lambda f, w, case: [truth.pool(f, _eps(case), mpmath.sqrt, w, noise=case.noise)],
        call=lambda f, w, **o: mb.second_order_pool(f, function="sqrt", weight=w, **o),
        relative=(1,),
        mixed=True,
        noisy=True,
        loss=_cancels,
    ),
    Row(
        "pool_primal_weighted_power",
        _pooled(3, 2, "w", "e", "p"),
        lambda f, w, e, p, case: [truth.pool(f, e[0], _powers(p[0]), w, noise=case.noise)],
        relative=(1, 2, 3),
        mixed=True,
        noisy=True,
        loss=_cancels,
    ),
    Row(
        "pool_thin_weighted_power",
        _pooled(2, 3, "w", "e", "p"),
        lambda f, w, e, p, case: [truth.pool(f, e[0], _powers(p[0]), w, noise=case.noise)],
        relative=(1, 2, 3),
        mixed=True,
        noisy=True,
        loss=_cancels,
    ),
    Row(
        "pool_regions_centered",
        _pooled(3, 3, "w"),
        lambda f, w, case: [truth.pool(f, _eps(case), _logs, w, center=True, noise=case.noise)],
        call=lambda f, w, **o: mb.second_order_pool(f, weight=w.unsqueeze(-2), center=True, **o).squeeze(-3),
        relative=(1,),
        mixed=True,
        noisy=True,
        loss=_cancels,
    ),
    Row(
        "pool_by_svd",
        _pooled(4, 3),
        lambda f, case: [truth.pool(f, _eps(case), _logs, noise=case.noise)],
        mixed=True,
        unit=2.0**-26,
        orders=0,
        noisy=True,
        loss=_cancels,
    ),
    Row(
        "pool_by_eig",
        _pooled(4, 3),
        lambda f, case: [truth.pool(f, _eps(case), _logs, noise=case.noise)],
        mixed=True,
        unit=2.0**-26,
        orders=0,
        noisy=True,
        loss=_cancels,
    ),
    Row(
        "topk_eigh",
        lambda draw: (draw.symmetric(max(draw.n, 1)),),
        lambda a, case: truth.top(a),
        call=lambda a: mb.topk_eigh(a, 1),
        seen=lambda lam, v: (lam, v @ v.mT),
        symmetric=(0,),
        composed=True,
    ),
    Row("eigh", _of_matrix, _eigenpairs, seen=_pairs, symmetric=(0,), composed=True),
    *(
        Row(
            f"whiten_{name}",
            _pooled(m, d, "w"),
            lambda x, w, case: [truth.whiten(x, w, _eps(case), noise=case.noise)],
            call=lambda x, w, eps: mb.whiten(x, weight=w, eps=eps),
            relative=(1,),
            mixed=True,
            noisy=True,
            loss=_cancels,
            condition=lambda case: 1 + mpmath.sqrt(_cancels(case)),
        )
        for name, m, d in (("thin", 2, 4), ("zca", 4, 3))
    ),
    Row(
        "whiten_pca",
        _pooled(5, 3, "w"),
        lambda x, w, case: [truth.whiten(x, w, _eps(case), noise=case.noise, axes=True)],
        call=lambda x, w, eps: mb.whiten(x, weight=w, eps=eps, method="pca"),
        seen=lambda y: (y * y,),
        relative=(1,),
        unit=2.0**-26,
        orders=1,
        mixed=True,
        noisy=True,
        condition=lambda case: 1 + mpmath.sqrt(_cancels(case)),
    ),
    Row(
        "whiten_by_statistics",
        lambda draw: (draw.rng.normal(size=(3, draw.n)), draw.rng.normal(size=draw.n), *_number(eps=(0.1, 1e-8))(draw)),
        lambda x, mean, a, case: [truth.whiten_by(x, mean, a, _eps(case), _zero_tolerance(case))],
        call=lambda x, mean, a, eps: mb.whiten(x, mean=mean, covariance=a, eps=eps),
        smooth=lambda x, mean, a, case: _positive(a, case),
        symmetric=(2,),
        mixed=True,
    ),
    Row(
        "generalized_eigh",
        _pencil_in_range,
        lambda a, b, case: truth.pencil(a, b),
        condition=_root_condition,
        call=mb.generalized_eigh,
        seen=lambda lam, v: (lam, v @ v.mT, (v * lam.unsqueeze(-2)) @ v.mT, v[..., :1] @ v[..., :1].mT),
        symmetric=(0, 1),
        composed=True,
    ),
    Row(
        "generalized_matrix_function",
        lambda draw: (*_definite_second(draw), np.array(draw.held(0.7, 0.3, -1.3, 2.0, 1e-8))),
        _pencil_power,
        call=lambda a, b, p: mb.generalized_matrix_function(a, b, "power", exponent=p),
        unit=_FACTORED,
        system=_root_condition,
        symmetric=(0, 1),
        relative=(2,),
    ),
    Row(
        "generalized_matrix_function_by_name",
        _pencil_by_name,
        lambda a, b, case: [truth.pencil_function(a, b, *_PENCIL_FUNCTIONS[case.options["function"]])],
        call=mb.generalized_matrix_function,
        unit=_FACTORED,
        system=_root_condition,
        symmetric=(0, 1),
        pole=True,
    ),
    Row("svd_tall", _tall, _singular, seen=_triples, composed=True, condition=_span_condition, smooth=_full_rank),
    Row(
        "svd_wide",
        lambda draw: (_tall(draw)[0].T,),
        _singular,
        seen=_triples,
        composed=True,
        condition=_span_condition,
        smooth=_full_rank,
    ),
    Row("svd_full_tall", _tall, _singular, seen=_triples, composed=True, condition=_span_condition, smooth=_full_rank),
    Row(
        "svd_full_wide",
        lambda draw: (_tall(draw)[0].T,),
        _singular,
        seen=_triples,
        composed=True,
        condition=_span_condition,
        smooth=_full_rank,
    ),
    Row(
        "projector",
        _rectangle,
        lambda a, case: [truth.span(a, mpf(case.rank_tol()) ** 2)[0]],
        keeps_rank=True,
        condition=_span_condition,
        **_clean(_left_out_of_span),
    ),
    Row(
        "projector_symmetric",
        _of_matrix,
        lambda a, case: [truth.span(a, mpf(case.rank_tol()) ** 2)[0]],
        call=_rank_one_of,
        symmetric=(0,),
        orders=0,
    ),
    *(
        Row(
            name,
            draw,
            _pinv,
            keeps_rank=True,
            condition=_span_condition,
            loss=_cubed_condition,
            **_clean(_left_out_of_span),
        )
        for name, draw in (("pinv_tall", _tall), ("pinv_wide", lambda draw: (_tall(draw)[0].T,)))
    ),
    Row(
        "pinv_deficient",
        _of_matrix,
        _pinv,
        call=mb.pinv,
        orders=0,
        condition=_span_condition,
        **_clean(_left_out_of_span),
    ),
    Row(
        "lstsq",
        lambda draw: (*(a := _tall(draw)), draw.rng.uniform(-1, 1, (a[0].shape[0], 2))),
        lambda a, b, case: [_pinv(a, case)[0] * b],
        keeps_rank=True,
        condition=_span_condition,
        loss=_cubed_condition,
        **_clean(_left_out_of_span),
    ),
    Row(
        "spectral_projector",
        lambda draw: _ranked(draw, draw.symmetric()),
        _leading,
        call=mb.spectral_projector,
        symmetric=(0,),
    ),
    Row("polar_tall", _tall, lambda a, case: truth.polar(a, case.rank_tol()), condition=_span_condition),
    Row(
        "polar_wide",
        lambda draw: (_tall(draw)[0].T,),
        lambda a, case: truth.polar(a, case.rank_tol()),
        condition=_span_condition,
    ),
    Row("project_rotation", _square, lambda a, case: [truth.rotation(a, case.rank_tol())], condition=_span_condition),
    Row(
        "procrustes",
        _points,
        lambda x, y, w, case: (
            [truth.rotation(x.T * truth.diagonal(w) * y, case.rank_tol())]
            if x.rows
            else [truth.rotation(mpmath.matrix(x.cols, x.cols), 0)]
        ),
        relative=(2,),
    ),
    Row(
        "procrustes_with_reflections",
        lambda draw: _points(draw)[:2],
        lambda x, y, case: [truth.rotation(_moments(x, y), case.rank_tol(), reflection=True)],
    ),
    Row(
        "low_rank",
        lambda draw: _ranked(draw, draw.features()),
        _nearest,
        call=lambda a, rank: mb.low_rank(a, rank),
        smooth=_of_rank,
    ),
    Row("affinity", _features, lambda f, case: [f * f.T]),
    Row("normalized_affinity", _affinities, lambda w, case: [truth.normalized_affinity(w)], symmetric=(0,)),
    Row(
        "normalized_cut_value",
        lambda draw: (lambda w: (w, draw.labels(w.shape[0])))(_affinities(draw)[0]),
        lambda w, labels, case: [truth.cut_value(w, labels)],
        call=_labeled(mb.normalized_cut_value),
        symmetric=(0,),
        least=1.0,
    ),
    Row(
        "normalized_cut_j1",
        _cut("w", "l", positive=True),
        lambda f, labels, w, lam, case: [truth.j1(f, labels, case.gram_tol(f.cols), w, lam)],
        call=_labeled(mb.normalized_cut_j1, "weight", "lam"),
        keeps_rank=True,
        symmetric=(3,),
        relative=(2,),
        least=4.0,
        condition=_cut_condition(True),
        **_clean(_left_out_of_cut(True)),
    ),
    Row(
        "normalized_cut_j1_plain",
        _cut(positive=True),
        lambda f, labels, case: [truth.j1(f, labels, case.gram_tol(f.cols))],
        call=_labeled(mb.normalized_cut_j1),
        keeps_rank=True,
        least=4.0,
        condition=_cut_condition(True),
        **_clean(_left_out_of_cut(True)),
    ),
    Row(
        "normalized_cut_j2",
        _cut("w"),
        lambda f, labels, w, case: [truth.j2(f, labels, case.gram_tol(f.cols), w)],
        call=_labeled(mb.normalized_cut_j2, "weight"),
        keeps_rank=True,
        relative=(2,),
        least=4.0,
        condition=_cut_condition(False),
        **_clean(_left_out_of_cut(False)),
    ),
    Row(
        "normalized_cut_soft",
        _cut("ridge"),
        lambda f, labels, case: [truth.soft(f, labels, case.options["ridge"])],
        call=_labeled(mb.normalized_cut_soft),
        least=4.0,
        smooth=lambda f, *_, case: truth.norm(f) > 0,
        condition=_soft_condition,
    ),
    Row(
        "normalized_cut_soft_weighted",
        _cut("ridge", "w"),
        lambda f, labels, w, case: [truth.soft(f, labels, case.options["ridge"], w)],
        call=_labeled(mb.normalized_cut_soft, "weight"),
        relative=(2,),
        least=4.0,
        smooth=lambda f, *_, case: truth.norm(f) > 0,
        condition=_soft_condition,
    ),
    Row(
        "spectral_embedding",
        lambda draw: (draw.features(int(draw.rng.integers(2, 6)) if draw.kind != "empty" else 0, 3, positive=True),),
        lambda f, case: truth.embedding(f, 2, case.gram_tol(f.cols)),
        call=lambda f: mb.spectral_embedding(f, 2),
        seen=lambda lam, u, degree: (lam, u @ u.mT, degree),
        keeps_rank=True,
        composed=True,
        condition=lambda case: _cut_condition(True)(_without_labels(case)),
        **_clean(lambda case: _left_out_of_cut(True)(_without_labels(case))),
    ),
    Row(
        "linear_solve",
        _system,
        lambda a, b, case: [truth.solve_definite(a, b)],
        symmetric=(0,),
    ),
    Row(
        "lyapunov",
        lambda draw: (draw.symmetric(), draw.rng.uniform(-1, 1, (draw.n, draw.n))),
        lambda a, c, case: [truth.sylvester(a, a, c)],
        call=mb.lyapunov,
        symmetric=(0,),
        pole=True,
    ),
    Row(
        "linear_solve_by_lu",
        lambda draw: (draw.features(draw.n, draw.n), draw.rng.uniform(-1, 1, draw.n)),
        lambda a, b, case: [truth.solve(a, b)],
        pole=True,
    ),
    Row(
        "conjugate_gradient_solve",
        _system,
        lambda a, b, case: [truth.solve_definite(a, b)],
        call=lambda a, b: mb.conjugate_gradient_solve(lambda x, m: _dot(m, x), b, (a,)),
        symmetric=(0,),
        unit=1e-10,
    ),
    Row(
        "gaussian_crf",
        _matrix_field,
        lambda y, c, w, case: [truth.field(y, c, w)],
        call=lambda y, c, w: mb.gaussian_crf(y, c, affinity=w),
        symmetric=(2,),
        relative=(1,),
        mixed=True,
        condition=_field_condition,
    ),
    Row(
        "gaussian_crf_of_features",
        _field_of,
        lambda y, c, f, case: [truth.field(y, c, f * f.T)],
        call=lambda y, c, f: mb.gaussian_crf(y, c, features=f),
        relative=(1,),
        unit=1e-10,
        mixed=True,
        condition=_field_condition,
    ),
    Row("vectorize_symmetric", _of_matrix, _triangle, symmetric=(0,), passes=True),
    Row(
        "unvectorize_symmetric",
        lambda draw: (draw.scaled(draw.rng.normal(size=draw.n * (draw.n + 1) // 2), draw.scale),),
        _untriangle,
        passes=True,
    ),
    *(row for metric in get_args(Metric) for row in _geometry(metric)),
    Row(
        "spd_bimap",
        lambda draw: (draw.symmetric(), draw.rng.normal(size=(draw.n, 2))),
        lambda x, w, case: [w.T * truth.sym(x) * w if x.rows else mpmath.matrix(2, 2)],
        call=mb.spd.bimap,
        symmetric=(0,),
        composed=True,
        passes=True,
    ),
    Row("spd_re_eig", _draw_threshold, _clamp, call=_re_eig, smooth=_off_the_kink, symmetric=(0,), mixed=True),
    Row("spd_log_eig", _of_matrix, lambda a, case: _triangle(truth.log(a), case), symmetric=(0,)),
    Row(
        "spd_batch_norm",
        lambda draw: (*_two(draw), draw.symmetric(kind="plain", scale=1.0), *draw.rng.uniform(0.5, 2, (2, 1))),
        lambda x, m, b, v, s, case: [truth.spd_batch_norm(x, m, b, v[0], s[0], mpf(1e-5))],
        call=lambda x, m, b, v, s: mb.spd.batch_norm(x, m, bias=b, variance=v.squeeze(-1), scale=s.squeeze(-1)),
        symmetric=(0, 1, 2),
        relative=(3, 4),
    ),
    Row(
        "sylvester",
        lambda draw: (*_two(draw), draw.rng.uniform(-1, 1, (draw.n, draw.n))),
        lambda a, b, c, case: [truth.sylvester(a, b, c)],
        call=mb.sylvester,
        symmetric=(0, 1),
        pole=True,
    ),
    Row(
        "spd_frechet_distance",
        _samples,
        lambda x, y, case: [truth.frechet_distance(x, y)],
        smooth=_of_cross_product,
        condition=_cross_condition,
        orders=1,
    ),
]
