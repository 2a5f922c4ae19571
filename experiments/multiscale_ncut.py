"""The classical baseline: normalized cuts over several scales with intervening contours, after Cour, Bénézit and Shi.

Pixels are connected to near neighbors, and blocks of pixels of increasing size to farther ones. A
constraint makes every block equal to the mean of its 3×3 parts, so that all scales are cut together.
All matrices are sparse.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.signal import fftconvolve
from scipy.sparse.linalg import LinearOperator, eigsh, splu
from torch import Tensor

# The settings for images with sides of 121 to 500 pixels.
RADII = (2, 3, 7)  # in units of the layer
EDGE_SCALES = (1.0, 2.0, 4.0)
LAYER_WEIGHTS = (2000.0, 4000.0, 10000.0)
STEP = 3  # a node represents 3×3 nodes of the layer below
EDGE_FRACTION = 0.08 / np.sqrt(0.5)
INTENSITY_FRACTION = 0.12
CONTOUR_FRACTION = 0.1
NEIGHBOR_FRACTION = 0.01
ORIENTATIONS = 6


class MultiscaleGraph(NamedTuple):
    """Block-diagonal affinities W (n, n), one block per layer, the finest first, and constraints C (c, n).

    Each row of C is the mean of a coarse node's children minus the node.
    """

    affinity: sparse.csr_array
    constraint: sparse.csr_array
    grids: list[tuple[int, int]]


def multiscale_labels(image: NDArray[np.float64], ks: Sequence[int]) -> list[Tensor]:
    """Cut an image ``(c, h, w)`` into each of several numbers of segments: label maps ``(h, w)``.

    References:
        Cour, Bénézit, Shi, "Spectral segmentation with multiscale graph decomposition", CVPR 2005.
        Yu, Shi, "Multiclass spectral clustering", ICCV 2003 (discretization).
        Malik, Belongie, Leung, Shi, "Contour and texture analysis for image segmentation", IJCV 2001 (contours).
    """
    graph = multiscale_graph(image)
    grid = graph.grids[0]
    pixels = grid[0] * grid[1]
    vectors = torch.from_numpy(constrained_eigenvectors(graph, max(ks))[1][:pixels])
    labels = []
    for k in ks:
        leading = torch.nn.functional.normalize(vectors[:, :k], dim=-1)
        labels.append((leading @ yu_shi_rotation(leading)).argmax(-1).view(grid))
    return labels


def edge_energy(channel: NDArray[Any], scale: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Strength of edges ``(h, w)`` and the side of the edge of each pixel, from a quadrature pair of filters.

    The odd filter is the first derivative of a Gaussian, elongated along the edge, the even one its second
    derivative. At each pixel the orientation with the largest energy √(odd² + even²) is used. The even response
    changes its sign on the edge. ``scale`` is the Gaussian's standard deviation across the edge, in pixels.
    """
    padded = np.pad(channel, _reach(scale), mode="edge")
    best = np.full(channel.shape, -1.0)
    phase = np.zeros(channel.shape, dtype=bool)
    for angle in np.pi * np.arange(ORIENTATIONS) / ORIENTATIONS:
        odd, even = (fftconvolve(padded, kernel, mode="valid") for kernel in _quadrature_pair(scale, float(angle)))
        energy = np.hypot(odd, even)
        better = energy > best
        best[better] = energy[better]
        phase[better] = even[better] > 0
    return best, phase


def _reach(scale: float) -> int:
    return int(np.ceil(3 * 2 * scale))  # three standard deviations of the Gaussian, twice as long along the edge


def _quadrature_pair(scale: float, angle: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    reach = _reach(scale)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1].astype(np.float64)
    across, along = x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)
    bell = np.exp(-0.5 * ((across / scale) ** 2 + (along / (2 * scale)) ** 2))
    odd = -across * bell
    even = (1 - (across / scale) ** 2) * bell
    even -= bell * (even.sum() / bell.sum())  # no response to constant color
    return odd / np.abs(odd).sum(), even / np.abs(even).sum()


def intervening_contour(
    energy: NDArray[np.float64], phase: NDArray[np.bool_], start: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Affinity exp(−m²) of pairs of pixels (n, 2), where m is the strongest edge on the line between them.

    The line crosses an edge between two consecutive pixels of different phase; its strength is half the sum of their
    energies.
    """
    width = energy.shape[1]
    steps = max(int(np.abs(end - start).max(initial=1)), 1)
    strongest = np.zeros(len(start))
    energies, phases = energy.ravel(), phase.ravel()
    before = start[:, 0] * width + start[:, 1]
    for step in range(1, steps + 1):
        row, column = np.rint(start + (end - start) * (step / steps)).astype(np.int64).T
        here = row * width + column
        strength = np.where(phases[here] != phases[before], 0.5 * (energies[here] + energies[before]), 0.0)
        np.maximum(strongest, strength, out=strongest)
        before = here
    return np.exp(-(strongest**2))


def multiscale_graph(image: NDArray[np.float64]) -> MultiscaleGraph:
    """Affinities of three layers of an image and the constraints between them.

    In each layer w = min over channels of √(w_ic·w_i) + 0.1·w_ic, with w_ic the intervening contour and
    w_i = exp(−(ΔI/(0.12·std))²).
    """
    grids = [(image.shape[1], image.shape[2])]
    while len(grids) < len(RADII):
        grids.append((-(-grids[-1][0] // STEP), -(-grids[-1][1] // STEP)))
    blocks, constraints = [], []
    colors = image
    for layer, grid in enumerate(grids):
        if layer:
            parents = _children_to_parents(grids[layer - 1], grid)
            constraints.append(parents)
            colors = (parents @ colors.reshape(len(colors), -1).T).T.reshape(len(colors), *grid)
        blocks.append(LAYER_WEIGHTS[layer] * _layer_affinity(image, colors, layer))
    blocks[0] = blocks[0] + NEIGHBOR_FRACTION * blocks[0].max() * _four_neighbors(grids[0])
    affinity = sparse.csr_array(sparse.block_diag(blocks))
    return MultiscaleGraph(affinity, _stack_constraints(constraints, grids), grids)


def _layer_affinity(image: NDArray[np.float64], colors: NDArray[np.float64], layer: int) -> sparse.csr_array:
    height, width = colors.shape[1:]
    stride = STEP**layer
    rows, columns = np.mgrid[:height, :width]
    # The position of a node is the center of its block.
    place = np.stack([rows.ravel(), columns.ravel()], 1) * stride + stride // 2
    place = np.minimum(place, np.array(image.shape[1:]) - 1)
    edges = [_scaled_edges(channel, EDGE_SCALES[layer]) for channel in image]
    spread = [INTENSITY_FRACTION * float(channel.std()) for channel in image]
    number = np.arange(height * width).reshape(height, width)
    entries: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
    for dy, dx in _half_disc(RADII[layer]):
        if dy >= height or abs(dx) >= width:
            continue
        one = number[: height - dy, max(0, -dx) : width - max(0, dx)].ravel()
        two = number[dy:, max(0, dx) : width - max(0, -dx)].ravel()
        weight = np.full(one.size, np.inf)
        for channel, (energy, phase), deviation in zip(colors, edges, spread, strict=True):
            contour = intervening_contour(energy, phase, place[one], place[two])
            flat = channel.ravel()
            difference = (flat[one] - flat[two]) / deviation
            weight = np.minimum(weight, np.sqrt(contour * np.exp(-(difference**2))) + CONTOUR_FRACTION * contour)
        entries.append((one, two, weight))
    one, two, weight = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    upper = sparse.coo_array((weight, (one, two)), shape=(number.size, number.size)).tocsr()
    equal = sparse.diags(np.full(number.size, 1 + CONTOUR_FRACTION))  # a pixel and itself: no contour, no difference
    return sparse.csr_array(upper + upper.T + equal)


def _scaled_edges(channel: NDArray[np.float64], scale: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    energy, phase = edge_energy(channel, scale)
    return energy / (energy.max() * EDGE_FRACTION), phase


def _half_disc(radius: int) -> list[tuple[int, int]]:
    """Offsets within the radius, one of each pair of opposite ones, rows never negative."""
    span = range(-radius, radius + 1)
    disc = [(dy, dx) for dy in range(radius + 1) for dx in span if 0 < dy * dy + dx * dx <= radius * radius]
    return [(dy, dx) for dy, dx in disc if dy > 0 or dx > 0]


def _four_neighbors(grid: tuple[int, int]) -> sparse.csr_array:
    number = np.arange(grid[0] * grid[1]).reshape(grid)
    one = np.concatenate([number[:, :-1].ravel(), number[:-1].ravel()])
    two = np.concatenate([number[:, 1:].ravel(), number[1:].ravel()])
    upper = sparse.coo_array((np.ones(one.size), (one, two)), shape=(number.size, number.size)).tocsr()
    return sparse.csr_array(upper + upper.T)


def _children_to_parents(fine: tuple[int, int], coarse: tuple[int, int]) -> sparse.csr_array:
    """Mean over the children of every coarse node, ``(coarse, fine)``; blocks at the border may have fewer than 3×3."""
    rows, columns = np.arange(fine[0]) // STEP, np.arange(fine[1]) // STEP
    parent = (rows[:, None] * coarse[1] + columns).ravel()
    fraction = 1.0 / np.bincount(parent)[parent]
    shape = (coarse[0] * coarse[1], fine[0] * fine[1])
    return sparse.csr_array(sparse.coo_array((fraction, (parent, np.arange(parent.size))), shape=shape))


def _stack_constraints(parents: list[sparse.csr_array], grids: list[tuple[int, int]]) -> sparse.csr_array:
    sizes = [height * width for height, width in grids]
    rows = []
    for layer, mean in enumerate(parents):
        parts: list[Any] = [sparse.csr_array((sizes[layer + 1], size)) for size in sizes]
        parts[layer] = mean
        parts[layer + 1] = sparse.diags(-np.ones(sizes[layer + 1]))
        rows.append(sparse.hstack(parts))
    return sparse.csr_array(sparse.vstack(rows))


def constrained_eigenvectors(
    graph: MultiscaleGraph, count: int, *, tolerance: float = 1e-3
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The ``count`` top eigenvectors of the normalized affinity among all vectors that satisfy the constraints.

    With S = D^{−1/2}WD^{−1/2}, the constraint on z = D^{1/2}x is U z = 0, U = CD^{−1/2}; P = I − Uᵀ(UUᵀ)⁻¹U projects
    on its solutions and the eigenvectors are those of P S P. UUᵀ is sparse and factored once.

    Returns:
        Descending eigenvalues ``(count,)`` and x = D^{−1/2}z ``(n, count)``.
    """
    degree = graph.affinity.sum(1)
    inverse_root = 1 / np.sqrt(degree)
    scaling = sparse.diags(inverse_root)
    normalized = sparse.csr_array(scaling @ graph.affinity @ scaling)
    constraint = sparse.csr_array(graph.constraint @ scaling)
    size = len(degree)
    transposed = sparse.csr_array(constraint.T)
    solver = splu(sparse.csc_array(constraint @ transposed))

    def project(z: NDArray[np.float64]) -> NDArray[np.float64]:
        return z - transposed @ solver.solve(constraint @ z)

    # The initial vector satisfies the constraints, so one projection per step is enough.
    operator = LinearOperator((size, size), matvec=lambda z: project(normalized @ z), dtype=np.float64)
    start = project(np.random.default_rng(0).standard_normal(size))
    values, vectors = eigsh(operator, count, which="LA", v0=start, tol=tolerance, ncv=min(size, 2 * count + 5))
    order = np.argsort(-values)
    return values[order], vectors[:, order] * inverse_root[:, None]


def yu_shi_rotation(vectors: Tensor, *, iterations: int = 20) -> Tensor:
    """The rotation R (k, k) that brings the row-normalized eigenvectors (m, k) nearest to an indicator matrix.

    Alternates E = one-hot argmax(XR) and R = polar(XᵀE), starting from QR with column pivoting (Damle et al. 2019).

    Reference: S. Yu, J. Shi, Multiclass spectral clustering, ICCV 2003.
    """
    lengths = vectors.norm(dim=-1, keepdim=True)
    x = vectors / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    pivots = scipy.linalg.qr(x.mT.numpy(), mode="economic", pivoting=True)[2][: x.shape[-1]]
    rotation = _polar(x[torch.from_numpy(pivots.astype(np.int64))].mT)
    for _ in range(iterations):
        labels = (x @ rotation).argmax(-1)
        rotation = _polar(x.mT @ torch.nn.functional.one_hot(labels, x.shape[-1]).to(x))
    return rotation


def _polar(a: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(a)
    return u @ vh
