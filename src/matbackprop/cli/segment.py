"""``matbackprop segment PICTURE…``: segment photographs with the network that comes with the package, or another."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.data.pictures import find_pictures
from matbackprop.vision.progress import track

if TYPE_CHECKING:
    from matbackprop.vision.inference import Segments


@dataclass
class Config:
    """Segment photographs: label maps, pictures with the borders drawn in, and exports for other programs.

    A picture that cannot be read is named and skipped; the exit code is then 1, and 2 where no picture could be read.
    """

    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    (
        "Pictures, folders of pictures, or patterns such as 'holiday/*.jpg'. Pictures of more than 8 bits are "
        "rescaled by their own range."
    )
    out: Path = Path("segments")
    """Folder for the results."""
    model: str = "box"
    (
        "box: the small network that comes with the package. box/accurate: the larger one, better and slower. none: "
        "merge superpixels by colour and contrast alone. Or the folder of a trained model, a run folder of "
        "'matbackprop train ncuts', or owner/name on the Hugging Face hub."
    )
    ks: tuple[int, ...] | None = None
    (
        "Numbers of regions (merge) or of clusters (cluster) in the npz file; by default the eight that were best "
        "on BSDS300's training images with the method."
    )
    method: Literal["merge", "cluster"] = "merge"
    """merge: a nested hierarchy. cluster: K-means in the spectral space, then connected components, as in the paper."""
    k: int | None = None
    (
        "Number of regions (merge) or of clusters (cluster) that the PNG files show; by default about as many "
        "regions as people would draw."
    )
    format: tuple[Literal["png", "npz", "coco", "svg", "labelme", "ucm2"], ...] = ("png", "npz")
    (
        "What to write. png: label map, colours, borders. npz: all levels and the tree of merges. coco: JSON with "
        "exact masks. svg: one path per region. labelme: polygons. ucm2: the hierarchy as a contour map for the "
        "Berkeley benchmark's tools."
    )
    frames: int | None = None
    (
        "Segment the frames of GIFs, animated WebP and PNG files, TIFFs of several pages and videos one by one: 1 "
        "for all, 2 for each second one, and so on. Otherwise the first frame alone."
    )
    side: int = 480
    """Larger photographs are segmented at this length of their longer side."""
    seed: int = 0
    """Seed of K-means."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""


def main(config: Config) -> dict[str, Any]:
    """Segment, write and print."""
    from matbackprop.vision.inference import load_segmenter, segment_frames, segment_photograph
    from matbackprop.vision.models.deep_ncuts import default_ks

    paths = find_pictures(config.images)
    ks = default_ks(config.method) if config.ks is None else config.ks
    if config.k is not None and config.k < 1:
        raise ConfigurationError(f"--k {config.k}: a number of regions is at least 1.")
    if config.k is not None and config.method == "cluster":
        ks = tuple(sorted({*ks, config.k}))
    model = None if config.model == "none" else load_segmenter(config.model, config.device)
    entries, skipped = [], []
    options: dict[str, Any] = {"method": config.method, "side": config.side, "seed": config.seed}

    def results() -> Iterator[tuple[Path, str, Segments]]:
        for path, stem in track(zip(paths, _stems(paths), strict=True), "Segmenting pictures", len(paths)):
            try:
                if config.frames is None:
                    yield path, stem, segment_photograph(path, model, ks, **options)
                    continue
                for one in segment_frames(path, model, ks, every=config.frames, **options):
                    yield path, stem + Path(one.name).stem.removeprefix(path.stem), one
            except DataError as error:
                skipped.append({"image": path.as_posix(), "reason": str(error)})
                print(f"matbackprop: skipped: {error}", file=sys.stderr)

    for path, stem, result in results():
        files = result.save(config.out, config.k, formats=config.format, stem=stem)
        count = result.count(config.k)
        entry: dict[str, Any] = {
            "image": path.as_posix(),
            "suggested": result.k,
            "confidence": result.confidence,
            "shown": count,
            "regions": [result.count(k) for k in result.ks],
            "note": result.note,
            "seconds": round(result.seconds, 3),
            **{name: file.as_posix() for name, file in files.items()},
        }
        entries.append(entry)
        shown = files.get("overlay", next(iter(files.values())))
        print(f"{path}: {_summary(result, count, config.k)} → {shown}")
    if skipped:
        print(f"matbackprop: {len(skipped)} of {len(paths)} pictures skipped.", file=sys.stderr)
    kind = "picture" if config.frames is None else "frame"
    return {
        "summary": f"{len(entries)} {kind}{'' if len(entries) == 1 else 's'} segmented → {config.out}",
        "exit_code": 0 if not skipped else 1 if entries else 2,
        "network": model is not None,
        "method": config.method,
        "ks": ks,
        "images": entries,
        "skipped": skipped,
    }


def _summary(result: Segments, count: int, k: int | None) -> str:
    words = [f"{count} region{'' if count == 1 else 's'} shown"]
    if k is not None:
        words.append(f"{result.k} suggested")
    elif result.k == 1:
        words.append("nothing in it differs")
    if result.confidence is not None:
        words.append(f"confidence {result.confidence:.2f}")
    return ", ".join([*words, *([result.note] if result.note else []), f"{result.seconds:.2f} s"])


def _stems(paths: Iterable[Path]) -> list[str]:
    """A name for each picture's results; equal names get a number."""
    seen: dict[str, int] = {}
    stems = []
    for path in paths:
        count = seen.get(path.stem, 0)
        seen[path.stem] = count + 1
        stems.append(path.stem if count == 0 else f"{path.stem}-{count + 1}")
    return stems
