"""Export segmentations as label maps, COCO, LabelMe, SVG and ultrametric contour maps."""

from __future__ import annotations

import json
import os
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import ConfigurationError
from matbackprop.vision.files import atomic_file, atomic_write, read_json
from matbackprop.vision.segmentation import region_means

if TYPE_CHECKING:
    from matbackprop.vision.inference.segmenting import Segments

Format = Literal["png", "npz", "coco", "svg", "labelme", "ucm2", "contours"]
#: Format → kind of file → end of the file name.
SUFFIXES: dict[Format, dict[str, str]] = {
    "png": {"labels": ".png", "colors": "-colors.png", "overlay": "-overlay.png"},
    "npz": {"levels": ".npz"},
    "coco": {"coco": "-coco.json"},
    "svg": {"svg": ".svg"},
    "labelme": {"labelme": ".json"},
    "ucm2": {"ucm2": "-ucm2.mat"},
    "contours": {"contours": "-contours.png"},
}
FORMATS = tuple(SUFFIXES)

_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up in (x, y): clockwise if y points down


def outlines(labels: NDArray[np.integer]) -> list[list[NDArray[np.int64]]]:
    """Trace the outlines of every region along pixel edges.

    Args:
        labels: (h, w) with consecutive labels from 0.

    Returns:
        For each region, a list of closed outlines (n, 2) of corners (x, y), clockwise around the region and
        counterclockwise around its holes. Parts that touch at a corner have separate outlines.

    Example:
        >>> outlines(np.array([[0, 1], [0, 1]]))[1][0].tolist()
        [[1, 0], [2, 0], [2, 2], [1, 2]]
    """
    height, width = labels.shape
    framed = np.full((height + 2, width + 2), -1, dtype=np.int64)
    framed[1:-1, 1:-1] = labels
    inner = framed[1:-1, 1:-1]
    # Directed edges above, right of, below and left of a pixel, with the region on their right.
    neighbors = (framed[:-2, 1:-1], framed[1:-1, 2:], framed[2:, 1:-1], framed[1:-1, :-2])
    starts = ((0, 0), (1, 0), (1, 1), (0, 1))
    leaving: list[dict[tuple[int, int], list[int]]] = [defaultdict(list) for _ in range(int(labels.max()) + 1)]
    for direction, (other, (dx, dy)) in enumerate(zip(neighbors, starts, strict=True)):
        ys, xs = np.nonzero(inner != other)
        for region, x, y in zip(inner[ys, xs].tolist(), (xs + dx).tolist(), (ys + dy).tolist(), strict=True):
            leaving[region][x, y].append(direction)
    return [_loops(edges) for edges in leaving]


def _loops(leaving: dict[tuple[int, int], list[int]]) -> list[NDArray[np.int64]]:
    """Join edges (start → directions) into closed loops, turning right at crossings, and keep only the corners."""
    loops = []
    while leaving:
        start, directions = next(iter(leaving.items()))
        edge = first = (start, directions[0])
        walked: list[tuple[tuple[int, int], int]] = []
        while not walked or edge != first:
            walked.append(edge)
            (x, y), direction = edge
            end = x + _STEPS[direction][0], y + _STEPS[direction][1]
            edge = end, next(d for d in ((direction + turn) % 4 for turn in (1, 0, 3)) if d in leaving[end])
        for place, direction in walked:
            leaving[place].remove(direction)
            if not leaving[place]:
                del leaving[place]
        corners = [place for i, (place, direction) in enumerate(walked) if direction != walked[i - 1][1]]
        loops.append(np.array(corners, dtype=np.int64))
    return loops


def to_coco(result: Segments, k: int | None = None) -> dict[str, Any]:
    """Return the regions as a COCO data set of one image, with exact masks and one category per name."""
    from pycocotools import mask as coco

    names = [name or "region" for name in result.names or ("",) * result.count(k)]
    categories = list(dict.fromkeys(names))
    labels = np.asfortranarray(result.labels(k))  # the order of COCO
    height, width = labels.shape
    annotations = []
    for region, name in enumerate(names):
        code = coco.encode((labels == region).view(np.uint8))
        annotations.append(
            {
                "id": region + 1,
                "image_id": 1,
                "category_id": categories.index(name) + 1,
                "segmentation": {"size": [height, width], "counts": code["counts"].decode()},
                "area": int(coco.area(code)),
                "bbox": coco.toBbox(code).tolist(),
                "iscrowd": 0,
            }
        )
    return {
        "images": [{"id": 1, "file_name": result.name, "width": width, "height": height}],
        "annotations": annotations,
        "categories": [{"id": i + 1, "name": name} for i, name in enumerate(categories)],
    }


def merge_coco(files: Iterable[Path]) -> dict[str, Any]:
    """Merge COCO files written by :func:`save`."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    names: dict[str, int] = {}
    for number, file in enumerate(files, 1):
        content = read_json(file, limit=1 << 30)
        categories = {c["id"]: names.setdefault(c["name"], len(names) + 1) for c in content["categories"]}
        images += [image | {"id": number} for image in content["images"]]
        for one in content["annotations"]:
            changes = {"id": len(annotations) + 1, "image_id": number, "category_id": categories[one["category_id"]]}
            annotations.append(one | changes)
    categories_list = [{"id": i, "name": name} for name, i in names.items()]
    return {"images": images, "annotations": annotations, "categories": categories_list}


def to_labelme(result: Segments, k: int | None = None, folder: Path = Path()) -> dict[str, Any]:
    """Return the regions as LabelMe polygons. The path of the photograph is relative to ``folder``.

    LabelMe polygons have no holes. They are sorted by decreasing area, so that later polygons cover earlier ones.
    """
    loops = [(_signed_area(loop), i, loop) for i, own in enumerate(outlines(result.labels(k))) for loop in own]
    shapes = [
        {
            "label": (result.names and result.names[region]) or f"region {region + 1}",
            "points": loop.tolist(),
            "group_id": region + 1,
            "shape_type": "polygon",
            "flags": {},
        }
        for area, region, loop in sorted(loops, key=lambda item: -item[0])
        if area > 0
    ]
    height, width = result.size
    return {
        "version": "5.5.0",
        "flags": {},
        "shapes": shapes,
        "imagePath": result.name
        if result.path is None
        else Path(os.path.relpath(result.path.resolve(), folder.resolve())).as_posix(),
        "imageData": None,
        "imageHeight": height,
        "imageWidth": width,
    }


def _signed_area(loop: NDArray[np.int64]) -> float:
    """Return the area, positive for a clockwise loop if y points down."""
    x, y = loop.T
    return float(0.5 * (x @ np.roll(y, -1) - y @ np.roll(x, -1)))


def to_svg(result: Segments, k: int | None = None) -> str:
    """Return an SVG document with one path per region, filled with the mean color of the region."""
    height, width = result.size
    labels = result.labels(k)
    colors = region_means(labels, result.pixels).round().astype(int).tolist()
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    ]
    for region, loops in enumerate(outlines(labels)):
        path = "".join("M" + "L".join(f"{x},{y}" for x, y in loop) + "Z" for loop in loops)
        fill = "#{:02x}{:02x}{:02x}".format(*colors[region])
        title = f"<title>{escape(result.names[region])}</title>" if result.names and result.names[region] else ""
        lines.append(f'<path id="region-{region + 1}" fill="{fill}" fill-rule="evenodd" d="{path}">{title}</path>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def output_files(folder: Path, stem: str, formats: Sequence[Format]) -> dict[str, Path]:
    """Return the files that :func:`save` writes: kind of file → path."""
    ends = [end for name, files in SUFFIXES.items() if name in formats for end in files.items()]
    return {kind: folder / f"{stem}{end}" for kind, end in ends}


def save(
    result: Segments,
    folder: str | Path = "segments",
    k: int | None = None,
    *,
    formats: Sequence[Format] = ("png", "npz"),
    stem: str | None = None,
) -> dict[str, Path]:
    """Write segmentations to files.

    Args:
        result: the segmentations.
        folder: target folder, created if it does not exist.
        k: number of regions in all formats except npz and ucm2; None for the default, :attr:`Segments.k`.
        formats: ``"png"`` (label map, ``-colors``, and borders as ``-overlay``), ``"npz"`` (``labels`` of all
            ``ks`` and the tree: ``regions``, ``merges``, ``heights``), ``"coco"``, ``"labelme"``, ``"svg"``,
            ``"ucm2"`` (the hierarchy as an ultrametric contour map, in a .mat file for the tools of the Berkeley
            benchmark), and ``"contours"`` (contour strength of each pixel, times 255, as a PNG file ``-contours``).
        stem: stem of the file names; None for the name of the photograph.

    Returns:
        Kind of file → path.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ConfigurationError(f"Unknown format {', '.join(unknown) or '(none)'}. Formats: {', '.join(FORMATS)}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = output_files(folder, Path(result.name).stem if stem is None else stem, formats)

    _write(result, k, formats, paths)
    return paths


def _write(result: Segments, k: int | None, formats: Sequence[Format], paths: Mapping[str, Path]) -> None:
    if "png" in formats:
        labels = result.labels(k)
        if labels.max() > 0xFFFF:
            raise ConfigurationError(f"{labels.max() + 1} regions do not fit into a 16-bit PNG file. Use npz or coco.")
        _write_png(paths["labels"], labels.astype(np.uint16))
        _write_png(paths["colors"], result.painted(k))
        _write_png(paths["overlay"], result.outlined(k), compress_level=3)  # twice as fast
    if "npz" in formats:
        with atomic_file(paths["levels"]) as file:
            _save_levels(file, result)
    if "coco" in formats:
        atomic_write(paths["coco"], json.dumps(to_coco(result, k)))
    if "labelme" in formats:
        atomic_write(paths["labelme"], json.dumps(to_labelme(result, k, paths["labelme"].parent), indent=2))
    if "svg" in formats:
        atomic_write(paths["svg"], to_svg(result, k))
    if "ucm2" in formats:
        from scipy.io import savemat

        with atomic_file(paths["ucm2"]) as file:
            savemat(file, {"ucm2": result.ucm().astype(np.float32)}, do_compression=True)
    if "contours" in formats:
        if result.contours is None:
            raise ConfigurationError("Clusters have no contours. Segment with a contour network instead.")
        _write_png(paths["contours"], np.round(255 * result.contours.astype(np.float32)).astype(np.uint8))


def _write_png(path: Path, pixels: NDArray[Any], **options: Any) -> None:
    from PIL import Image

    with atomic_file(path) as file:
        Image.fromarray(pixels).save(file, "PNG", **options)


def _save_levels(path: BinaryIO, result: Segments) -> None:
    """Equivalent to ``np.savez_compressed(path, labels=…, ks=…, …)``, one level at a time to save memory."""
    arrays = {"ks": np.asarray(result.ks)}
    if result.hierarchy is not None and result.regions is not None:
        tree = result.hierarchy
        arrays |= {"regions": result.regions, "merges": tree.merges, "heights": tree.heights}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("labels.npy", "w", force_zip64=True) as file:
            dtype = "<u2" if max(map(result.count, result.ks)) <= 1 << 16 else "<u4"
            head = {"descr": dtype, "fortran_order": False, "shape": (len(result.ks), *result.size)}
            np.lib.format.write_array_header_1_0(file, head)  # type: ignore[no-untyped-call]
            for k in result.ks:
                file.write(result.labels(k).astype(dtype).tobytes())
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)
