"""What the page shows of an analysed photograph, as plain arrays."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from matbackprop.errors import DataError
from matbackprop.vision.inference import Segments
from matbackprop.vision.inference.drawing import WHITE, draw_boundaries, paint_labels
from matbackprop.vision.inference.export import Format
from matbackprop.vision.inference.segmenting import split_region, unite_region
from matbackprop.vision.report.figures import PALETTE
from matbackprop.vision.segmentation import region_means

MAX_REGIONS = 40
MAX_SIDE = 800
SMALL = 320
"""Longest side of the pictures beside."""
MAX_PAST = 100
"""Steps that can be undone."""
MAX_NAME, MAX_NAMES = 80, 200
"""Letters of a region's name, and names that are remembered."""

Pixels = NDArray[np.uint8]


def fit_photograph(pixels: Pixels, longest: int = MAX_SIDE) -> Pixels:
    """Bring a photograph (h, w, 3) to a longest side of at most ``longest`` pixels.

    Raises:
        DataError: it is too small to segment.

    Example:
        >>> fit_photograph(np.zeros((300, 1280, 3), np.uint8)).shape
        (188, 800, 3)
    """
    height, width = pixels.shape[:2]
    if min(height, width) < 16:
        raise DataError(f"The photograph has {width}×{height} pixels; each side needs 16 or more.")
    return _shrunk(pixels, longest)


def _shrunk(pixels: Pixels, longest: int) -> Pixels:
    height, width = pixels.shape[:2]
    scale = longest / max(height, width)
    if scale >= 1:
        return pixels
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def sample_photographs(folder: Path) -> list[Path]:
    """Write scikit-image's own sample photographs to ``folder`` and return their paths."""
    import skimage.data

    paths = []
    for name in ("coffee", "chelsea", "astronaut", "rocket"):
        path = folder / f"{name}.jpg"
        if not path.exists():
            Image.fromarray(fit_photograph(getattr(skimage.data, name)())).save(path, quality=92)
        paths.append(path)
    return paths


@dataclass(frozen=True, eq=False)
class Analysis:
    """A photograph's segmentations, the space that its cells lie in, and what a visitor has done.

    Attributes:
        segments: the segmentations.
        coordinates: (n, gh, gw) leading spectral coordinates on the features' grid.
        eigenvalues: (e,) their eigenvalues, descending.
        past: partitions from first to last, of which the last one is shown: (S,) regions of the superpixels, or label
            maps after clustering.
        names: which superpixels (or cells) a region consists of → the name that it was given.
    """

    segments: Segments
    coordinates: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]
    past: tuple[NDArray[np.int32], ...] = ()
    names: Mapping[bytes, str] = field(default_factory=dict)

    @property
    def photograph(self) -> Pixels:
        """(h, w, 3) bytes."""
        return self.segments.pixels

    @property
    def shown(self) -> Segments:
        """The photograph with the partition that is shown."""
        partition = self.past[-1]
        names = [self.names.get((partition == r).tobytes(), "") for r in range(int(partition.max()) + 1)]
        return self.segments.with_regions(self._map(partition), names if any(names) else ())

    @property
    def can_edit(self) -> bool:
        """Whether regions can be divided and united: along a tree of merges."""
        return self.segments.hierarchy is not None

    def _map(self, partition: NDArray[np.int32]) -> NDArray[np.int32]:
        superpixels = self.segments.superpixels
        return partition if superpixels is None else partition[superpixels]

    def _then(self, partition: NDArray[np.int32]) -> Analysis:
        return replace(self, past=(*self.past[-MAX_PAST:], partition))

    def level(self, k: int) -> Analysis:
        """Show ``k`` regions; after clustering, the nearest number of clusters that there is."""
        tree = self.segments.hierarchy
        if tree is not None:
            return self._then(tree.levels([k])[0].astype(np.int32))
        nearest = min(self.segments.ks, key=lambda known: (abs(known - k), known))
        return self._then(self.segments.small_labels(nearest))

    def region(self, x: int, y: int) -> int:
        """The number of the region under a pixel of the photograph."""
        labels = self.shown.labels()
        return int(labels[min(max(y, 0), len(labels) - 1), min(max(x, 0), labels.shape[1] - 1)])

    def edited(self, x: int, y: int, action: str) -> Analysis:
        """Divide (``"split"``) or unite (``"merge"``) the region under a pixel of the photograph."""
        tree = self.segments.hierarchy
        if tree is None:
            return self
        change = {"split": split_region, "merge": unite_region}[action]
        return self._then(change(tree, self.past[-1], self.region(x, y)))

    def named(self, x: int, y: int, name: str) -> Analysis:
        """Give the region under a pixel a name, or take it away with an empty one; a region that changes loses it."""
        key = (self.past[-1] == self.region(x, y)).tobytes()
        names = {**self.names, key: name.strip()[:MAX_NAME]}
        return replace(self, names=dict(list(names.items())[-MAX_NAMES:]))

    def undone(self) -> Analysis:
        """Go back by one step."""
        return replace(self, past=self.past[:-1]) if len(self.past) > 1 else self

    def stage(self, photo: str, view: str = "borders") -> dict[str, Any]:
        """What the page's picture is drawn from.

        Args:
            photo: address of the photograph.
            view: ``"borders"`` or ``"mean colours"``.

        Returns:
            The photograph's address, size and description, its regions as runs of equal labels (label, length, …) in
            the order of reading, and their mean colours and names.
        """
        shown = self.shown
        labels, count = shown.labels(), shown.count()
        flat = labels.ravel()
        starts = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1])
        lengths = np.diff(starts, append=flat.size)
        colours = region_means(labels, self.photograph).round().astype(int)
        return {
            "photo": photo,
            "alt": f"The photograph {self.segments.name} divided into {counted(count)}",
            "width": labels.shape[1],
            "height": labels.shape[0],
            "runs": np.stack([flat[starts], lengths], 1).ravel().tolist(),
            "colours": colours.tolist(),
            "names": list(shown.names) or [""] * count,
            "view": view,
        }

    def mask(self, x: int, y: int) -> NDArray[np.bool_]:
        """The region under a pixel."""
        return self.shown.labels() == self.region(x, y)

    def dendrogram(self, leaves: int = MAX_REGIONS) -> str:
        """The upper part of the tree of merges as an SVG, its leaves in their mean colours, cut where it is shown.

        Height is the number of regions that are left, on a logarithmic scale, so that the cut is the slider's place.
        """
        tree = self.segments.hierarchy
        if tree is None:
            return "<p>Clusters have no tree. Choose the method <em>merge</em> to see one.</p>"
        leaves = min(leaves, tree.count)
        leaf = tree.levels([leaves])[0]
        last = leaf[tree.merges[tree.count - leaves :]].tolist()
        order = {i: [i] for i in range(leaves)}
        group = list(range(leaves))  # of each leaf
        for keep, gone in last:
            a, b = group[keep], group[gone]
            order[a] = order[a] + order.pop(b)
            for i in order[a]:
                group[i] = a
        step, high = 400 / leaves, 190.0
        scale = high / math.log(max(leaves, 2))
        place = {i: (step * (x + 0.5), high) for x, i in enumerate(order[group[0]])}
        colours = region_means(self.segments.labels(leaves), self.photograph).round().astype(int).tolist()
        box = f'y="{high:.0f}" width="{step - 1:.1f}" height="14"'
        fills = [
            f'<rect x="{x - step / 2 + 0.5:.1f}" {box} fill="rgb{tuple(colours[i])}"/>' for i, (x, _) in place.items()
        ]
        lines, group = [], list(range(leaves))
        for done, (keep, gone) in enumerate(last):
            a, b = group[keep], group[gone]
            (xa, ya), (xb, yb) = place[a], place[b]
            y = scale * math.log(leaves - 1 - done)
            lines.append(f"M{xa:.1f} {ya:.1f}V{y:.1f}H{xb:.1f}V{yb:.1f}")
            place[a] = (xa + xb) / 2, y
            group = [a if g == b else g for g in group]
        k = self.shown.count()
        cut = scale * math.log(max(min(k, leaves) - 0.5, 1))
        return (
            f'<svg viewBox="-2 -6 404 214" role="img" aria-label="Tree of merges, cut at {counted(k)}">{"".join(fills)}'
            f'<path d="{"".join(lines)}" fill="none" stroke="currentColor" stroke-width="1.3"/>'
            f'<path d="M-2 {cut:.1f}H402" stroke="#d1495b" stroke-width="2" stroke-dasharray="6 4"/></svg>'
        )

    def levels(self) -> list[tuple[Pixels, str]]:
        """Overview from coarse to fine: mean colours with borders, and the number of regions."""
        small = _shrunk(self.photograph, SMALL)
        rows, columns = (np.arange(n) * m // n for n, m in zip(small.shape, self.segments.size, strict=False))
        out = []
        for k in self.segments.ks:
            labels = self.segments.labels(k)[np.ix_(rows, columns)]
            picture = draw_boundaries(paint_labels(labels, small), labels, colour=WHITE)
            out.append((picture, counted(self.segments.count(k))))
        return out

    def export(self, folder: Path, formats: Sequence[Format]) -> Path:
        """Write files and return their archive, named after the photograph.

        Label maps, masks and polygons are those of what is shown; the levels (npz) and the contour map (ucm2, after
        merging only) are those of the whole hierarchy.
        """
        stem = Path(self.segments.name).stem
        whole = [f for f in formats if f == "npz" or (f == "ucm2" and self.can_edit)]
        one = [f for f in formats if f not in ("npz", "ucm2")]
        files = [
            path
            for segments, some in ((self.segments, whole), (self.shown, one))
            if some
            for path in segments.save(folder / stem, formats=some).values()
        ]
        with zipfile.ZipFile(folder / f"{stem}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in files:
                archive.write(path, path.name)
        return folder / f"{stem}.zip"

    def eigenvectors(self) -> list[tuple[Pixels, str]]:
        """The leading coordinates as pictures: orange above, blue below the middle."""
        out = []
        size = _shrunk(self.photograph, SMALL).shape[1::-1]
        for i, values in enumerate(self.coordinates):
            low, high = np.percentile(values, [1, 99])
            flat = high - low <= 1e-6 * np.abs(values).max()  # the first one of normalized cuts is constant
            unit = np.full(values.shape, 0.5) if flat else np.clip((values - low) / (high - low), 0, 1)
            picture = Image.fromarray(_diverging(unit)).resize(size, Image.Resampling.BICUBIC)
            out.append((np.asarray(picture), f"{i + 1}: eigenvalue {self.eigenvalues[i]:.3f}"))
        return out

    def spectrum(self) -> str:
        """The eigenvalues from the largest to the smallest as an SVG, on a logarithmic scale; drawn in no time."""
        values = np.sort(self.eigenvalues[self.eigenvalues > 0])[::-1]
        if not len(values):
            return "<p>No eigenvalue is positive.</p>"
        low, high = math.floor(math.log10(values[-1])), math.ceil(math.log10(values[0]))
        scale = 170 / max(high - low, 1)
        decades = range(high, low - 1, -max((high - low) // 6, 1))
        grid = "".join(f"M40 {scale * (high - d):.1f}H400" for d in decades)
        marks = "".join(
            f'<text x="34" y="{scale * (high - d) + 4:.1f}" text-anchor="end">1e{d}</text>' for d in decades
        )
        places = np.linspace(40, 400, len(values)) if len(values) > 1 else [40.0]
        line = " ".join(f"{x:.1f},{scale * (high - math.log10(v)):.1f}" for x, v in zip(places, values, strict=True))
        return (
            "<p>Spectrum: the eigenvalues of the features, from the largest to the smallest.</p>"
            f'<svg viewBox="-2 -8 408 204" role="img" aria-label="{len(values)} eigenvalues of the features, from '
            f'{values[0]:.3g} to {values[-1]:.3g}" font-size="11" fill="currentColor">'
            f'<path d="{grid}" stroke="currentColor" opacity="0.2"/>{marks}'
            f'<polyline points="{line}" fill="none" stroke="{PALETTE[0]}" stroke-width="2"/>'
            f'<text x="220" y="192" text-anchor="middle">index, 1 to {len(values)}</text></svg>'
        )


def counted(count: int) -> str:
    """``"1 region"``, ``"8 regions"``."""
    return f"{count} region{'' if count == 1 else 's'}"


def _diverging(unit: NDArray[np.float64]) -> Pixels:
    """Map [0, 1] to blue – light grey – orange."""
    blue, middle, orange = np.array([[26, 84, 166], [242, 242, 240], [217, 102, 18]])
    t = 2 * unit[..., None] - 1
    side = np.where(t < 0, blue, orange)
    return (middle + np.abs(t) * (side - middle)).round().astype(np.uint8)
