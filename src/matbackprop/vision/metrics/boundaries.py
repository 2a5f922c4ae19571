"""Boundary measure of the Berkeley benchmark: thinned region boundaries matched one to one within a tolerance."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import DomainError, ShapeError
from matbackprop.vision.metrics.regions import as_label_map, size_message

#: Two boundary pixels correspond when their distance is at most this share of the image diagonal.
TOLERANCE = 0.0075

# The eight neighbours x₁ … x₈ of Guo and Hall, counter-clockwise from the east, as (row, column).
_RING = ((0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1), (1, 0), (1, 1))


def boundary_map(labels: Any) -> NDArray[np.bool_]:
    """Thin boundary pixels of a label map, as the benchmark stores them for its human maps.

    A pixel is marked where the 2×2 block of which it is the upper left corner holds two labels along one of its sides;
    the marks are then thinned to lines of one pixel.

    Args:
        labels: integers ``(h, w)``.

    Returns:
        Boundary pixels ``(h, w)``; none for a map of one region.

    Example:
        >>> boundary_map([[0, 0, 1], [0, 0, 1], [0, 0, 1]]).astype(int)
        array([[0, 1, 0],
               [0, 1, 0],
               [0, 1, 0]])
    """
    array = as_label_map(labels)
    marks = np.zeros(array.shape, dtype=bool)
    across = array[:, :-1] != array[:, 1:]
    down = array[:-1] != array[1:]
    marks[:, :-1] |= across
    marks[:-1] |= down
    marks[:-1, :-1] |= across[1:] | down[:, 1:]
    return thin_boundaries(marks)


def thin_boundaries(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Thin a mask to lines one pixel wide without breaking or shortening them beyond the algorithm's end rule.

    Guo and Hall's parallel thinning with two sub-iterations, run until nothing changes; the same as MATLAB's
    ``bwmorph(mask, 'thin', Inf)`` and ``skimage.morphology.thin``.

    Args:
        mask: booleans ``(h, w)``.

    Returns:
        The thinned mask ``(h, w)``.

    Reference: Guo, Hall, "Parallel thinning with two-subiteration algorithms", Communications of the ACM 32, 1989.
    """
    height, width = mask.shape
    padded = np.zeros((height + 2, width + 2), dtype=bool)
    padded[1:-1, 1:-1] = mask
    flat = padded.ravel()
    offsets = np.array([row * (width + 2) + column for row, column in _RING])
    weights = 1 << np.arange(8)
    points = np.flatnonzero(flat)
    changed = True
    while changed and points.size:
        changed = False
        for table in _thinning_tables():
            codes = flat[points[:, None] + offsets] @ weights
            removed = table[codes]
            if removed.any():
                changed = True
                flat[points[removed]] = False
                points = points[~removed]
    return padded[1:-1, 1:-1].copy()


@cache
def _thinning_tables() -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether a pixel goes in the first and the second sub-iteration, for each of the 256 neighbourhoods."""
    codes = np.arange(256)
    x = [((codes >> i) & 1).astype(bool) for i in range(8)]
    x.append(x[0])  # x₉ = x₁
    crossings = sum((~x[i] & (x[i + 1] | x[i + 2])).astype(int) for i in (0, 2, 4, 6))
    first = sum((x[i] | x[i + 1]).astype(int) for i in (0, 2, 4, 6))
    second = sum((x[i] | x[i + 1]).astype(int) for i in (1, 3, 5, 7))
    least = np.minimum(first, second)
    simple = (crossings == 1) & (least >= 2) & (least <= 3)
    north_east = simple & ~((x[1] | x[2] | ~x[7]) & x[0])
    south_west = simple & ~((x[5] | x[6] | ~x[3]) & x[4])
    return north_east, south_west


def match_boundaries(
    boundary: NDArray[np.bool_], truth: NDArray[np.bool_], tolerance: float = TOLERANCE
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Match the boundary pixels of two maps one to one within a tolerance, as many as possible, near ones first.

    The benchmark asks for the assignment of least total distance in which leaving a pixel out costs a hundred times the
    tolerance; so the number of pairs should be the largest possible one, and distances only decide between equally
    large matchings. Here pixels are first paired greedily in the order of their distance and then along augmenting
    paths (a maximum flow), which keep every pixel matched that was: the number of pairs, and so recall against one
    human map, is the true maximum. The benchmark's program, on a graph thinned out at random, finds up to seven pairs
    fewer. Precision against several human maps counts the union of the matched pixels, which may
    differ between largest matchings: on the benchmark's own test images it is within 0.001 of the exact assignment's.

    Args:
        boundary: pixels of the segmentation ``(h, w)``.
        truth: pixels of the human map ``(h, w)``.
        tolerance: the largest distance as a share of the image diagonal.

    Returns:
        The matched pixels of each map, two masks ``(h, w)`` with the same number of pixels.

    Raises:
        ShapeError: the maps differ in size.
        DomainError: a negative tolerance.

    Example:
        >>> one, two = np.zeros((2, 4, 100), dtype=bool)
        >>> one[1, 20:60] = two[2, 20:80] = True
        >>> [int(matched.sum()) for matched in match_boundaries(one, two, tolerance=0.02)]
        [40, 40]
    """
    if boundary.shape != truth.shape:
        raise ShapeError(size_message("the boundary map", boundary.shape, "the human one", truth.shape))
    if boundary.sum() > truth.sum():  # fewer pixels look for partners, and fewer are left to do so in vain
        second, first = match_boundaries(truth, boundary, tolerance)
        return first, second
    rows, columns = np.flatnonzero(boundary), np.flatnonzero(truth)
    candidates = _candidates(rows, truth, columns.size, tolerance)
    partner = _augment(candidates, *_greedy_matching(candidates, columns.size))
    matched, matched_truth = np.zeros(boundary.shape, dtype=bool), np.zeros(truth.shape, dtype=bool)
    matched.ravel()[rows[partner >= 0]] = True
    matched_truth.ravel()[columns[partner[partner >= 0]]] = True
    return matched, matched_truth


def _candidates(rows: NDArray[np.int64], truth: NDArray[np.bool_], columns: int, tolerance: float) -> NDArray[np.int32]:
    """The human pixel at each offset of each boundary pixel, nearest first, −1 where there is none."""
    height, width = truth.shape
    offsets, margin = _offsets(tolerance, height, width)
    index = np.full((height + 2 * margin, width + 2 * margin), -1, dtype=np.int32)
    inner = index[margin : margin + height, margin : margin + width]
    inner[truth] = np.arange(columns, dtype=np.int32)
    step = width + 2 * margin
    y, x = np.divmod(rows, width)
    centre = (y + margin) * step + (x + margin)
    return index.ravel()[centre[:, None] + (offsets[:, 0] * step + offsets[:, 1])]


def _greedy_matching(candidates: NDArray[np.int32], columns: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pair pixels in the order of distance: the partner of each boundary pixel and of each human pixel, or −1."""
    partner = np.full(len(candidates), -1, dtype=np.int32)
    inverse = np.full(columns, -1, dtype=np.int32)
    open_column = np.ones(columns + 1, dtype=bool)
    open_column[columns] = False  # where candidate −1 points
    free = np.flatnonzero((candidates >= 0).any(1))
    for column in np.ascontiguousarray(candidates.T):
        # One offset moves all pixels alike, so that no two of them ask for the same partner.
        asked = column[free]
        won = open_column[asked]
        partner[free[won]], inverse[asked[won]] = asked[won], free[won]
        open_column[asked[won]] = False
        free = free[~won]
    return partner, inverse


def _augment(
    candidates: NDArray[np.int32], partner: NDArray[np.int32], inverse: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Make a matching as large as possible by a maximum flow through the part that unmatched pixels can reach."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    free = np.flatnonzero((partner < 0) & (candidates >= 0).any(1))
    rows, columns = _reachable(candidates, inverse, free)
    open_columns = columns[inverse[columns] < 0]
    if not open_columns.size:
        return partner
    # Nodes: the source, the reached rows, the reached columns, the sink. Matched pairs are passed backwards.
    row_node, column_node = np.zeros(len(partner), dtype=np.int32), np.zeros(len(inverse), dtype=np.int32)
    row_node[rows] = 1 + np.arange(rows.size)
    column_node[columns] = 1 + rows.size + np.arange(columns.size)
    sink = 1 + rows.size + columns.size
    near = candidates[rows] >= 0
    row, column = rows[np.nonzero(near)[0]], candidates[rows][near]
    backwards = partner[row] == column
    ends = np.where(backwards, [column_node[column], row_node[row]], [row_node[row], column_node[column]])
    # In 32 bits, which is all that older versions of SciPy's maximum_flow take.
    tails = np.concatenate([np.zeros(free.size, dtype=np.int32), ends[0], column_node[open_columns]])
    heads = np.concatenate([row_node[free], ends[1], np.full(open_columns.size, sink, dtype=np.int32)])
    capacity = np.ones(tails.size, dtype=np.int32)
    flow = maximum_flow(coo_array((capacity, (tails, heads)), shape=(sink + 1, sink + 1)).tocsr(), 0, sink).flow.tocoo()
    taken = (flow.data > 0) & (flow.row > 0) & (flow.row <= rows.size)
    partner = partner.copy()
    # A row that gives its partner back always takes another one: flow only ends in open columns.
    partner[rows[flow.row[taken] - 1]] = columns[flow.col[taken] - 1 - rows.size]
    return partner


def _reachable(
    candidates: NDArray[np.int32], inverse: NDArray[np.int32], free: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns on alternating paths from free rows: any candidate, then back to the row it is matched with."""
    seen_row, seen_column = np.zeros(len(candidates), dtype=bool), np.zeros(len(inverse) + 1, dtype=bool)
    seen_row[free] = True
    frontier = free
    while frontier.size:
        new_columns = np.zeros_like(seen_column)
        new_columns[candidates[frontier]] = True
        new_columns[-1] = False  # where candidate −1 points
        new_columns &= ~seen_column
        seen_column |= new_columns
        frontier = inverse[np.flatnonzero(new_columns)].astype(np.int64)
        frontier = frontier[frontier >= 0]
        frontier = frontier[~seen_row[frontier]]
        seen_row[frontier] = True
    return np.flatnonzero(seen_row), np.flatnonzero(seen_column)


@cache
def _offsets(tolerance: float, height: int, width: int) -> tuple[NDArray[np.int64], int]:
    """Offsets (row, column) within the tolerance, nearest first, and the largest of them."""
    if tolerance < 0:
        raise DomainError(f"the tolerance is {tolerance}; it is a share of the image diagonal and not negative")
    radius = tolerance * float(np.hypot(height, width))
    margin = int(radius)
    span = np.arange(-margin, margin + 1)
    dy, dx = np.meshgrid(span, span, indexing="ij")
    square = (dy * dy + dx * dx).ravel()
    order = np.argsort(square, kind="stable")
    order = order[square[order] <= radius * radius]
    return np.stack([dy.ravel()[order], dx.ravel()[order]], axis=1), margin


def boundary_counts(
    segmentations: Sequence[Any], ground_truth: Sequence[Any], tolerance: float = TOLERANCE
) -> NDArray[np.int64]:
    """Counts of matched and of all boundary pixels of one image, from which precision and recall are pooled.

    Recall counts every human map: its matched pixels among its own. Precision counts a pixel of the segmentation as
    right when at least one human map has a partner for it.

    Args:
        segmentations: label maps ``(h, w)``.
        ground_truth: human label maps ``(h, w)``.
        tolerance: the largest distance as a share of the image diagonal.

    Returns:
        ``(t, 4)``: matched and all human pixels, matched and all pixels of the segmentation.

    Example:
        >>> maps = [np.arange(40).reshape(1, 40).repeat(30, 0) > 20]
        >>> boundary_counts(maps, maps * 2).tolist()
        [[60, 60, 30, 30]]
    """
    truths = [boundary_map(labels) for labels in ground_truth]
    total = sum(int(truth.sum()) for truth in truths)
    counts = np.zeros((len(segmentations), 4), dtype=np.int64)
    for t, labels in enumerate(segmentations):
        boundary = boundary_map(labels)
        right = np.zeros(boundary.shape, dtype=bool)
        recalled = 0
        for truth in truths:
            matched, matched_truth = match_boundaries(boundary, truth, tolerance)
            right |= matched
            recalled += int(matched_truth.sum())
        counts[t] = recalled, total, int(right.sum()), int(boundary.sum())
    return counts


def f_measure(counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Recall, precision and F = 2PR/(P + R) from counts of ``boundary_counts``.

    Args:
        counts: ``(…, 4)``.

    Returns:
        Recall, precision and F ``(…)``, each 0 where nothing is there to count.
    """
    recall = counts[..., 0] / np.maximum(counts[..., 1], 1)
    precision = counts[..., 2] / np.maximum(counts[..., 3], 1)
    return recall, precision, 2 * precision * recall / np.maximum(precision + recall, np.finfo(np.float64).tiny)


def boundary_f_measure(segmentation: Any, ground_truth: Sequence[Any], tolerance: float = TOLERANCE) -> float:
    """F-measure of the boundaries of one segmentation against the human maps of an image.

    Args:
        segmentation: labels ``(h, w)``.
        ground_truth: human label maps ``(h, w)``.
        tolerance: the largest distance as a share of the image diagonal.

    Returns:
        A number in [0, 1]; 0 where the segmentation or all human maps have no boundary.

    Example:
        >>> half = np.arange(40).reshape(1, 40).repeat(30, 0) > 20
        >>> boundary_f_measure(half, [half])
        1.0
    """
    return float(f_measure(boundary_counts([segmentation], ground_truth, tolerance))[2][0])
