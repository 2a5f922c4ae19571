"""``matbackprop segment IMAGE…``: segment photographs with a trained network, or by colour where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from matbackprop.errors import ConfigurationError, DataError, WeightsError

if TYPE_CHECKING:
    from PIL.Image import Image

    from matbackprop.models.deep_ncuts import DeepNCuts

__all__ = ["Config", "load_segmenter", "main"]


@dataclass
class Config:
    """Segment photographs: label maps (PNG and npz) and pictures with the borders drawn in."""

    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Pictures."""
    out: Path = Path("segments")
    """Folder for the results."""
    model: str | None = None
    """Folder of a trained model, a run folder of 'matbackprop train ncuts', or owner/name on the Hugging Face hub.
    Without one, superpixels are merged by colour and contrast alone."""
    ks: tuple[int, ...] | None = None
    """Numbers of regions (merge) or of clusters (cluster); by default the eight that were best on BSDS300's training
    images with the method."""
    method: Literal["merge", "cluster"] = "merge"
    """merge: a nested hierarchy. cluster: K-means in the spectral space, then connected components, as in the paper."""
    k: int | None = None
    """Which of the numbers the PNG and the picture show; by default the one that the spectrum suggests."""
    side: int = 480
    """Larger photographs are segmented at this length of their longer side."""
    seed: int = 0
    """Seed of K-means."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    json: bool = False
    """Print JSON."""


def load_segmenter(source: str) -> DeepNCuts:
    """Load a model from a saved folder, a run folder or the Hugging Face hub.

    Raises:
        WeightsError: there is no model of this kind.
    """
    from matbackprop.models.deep_ncuts import DeepNCuts

    folder = Path(source)
    if (folder / "model" / "config.json").exists():
        return DeepNCuts.from_pretrained(folder / "model")
    if (folder / "checkpoints").is_dir():
        from matbackprop.training.config import from_json
        from matbackprop.training.engine import load_weights
        from matbackprop.training.ncuts import NCutsModule
        from matbackprop.training.ncuts_config import NCutsConfig
        from matbackprop.training.run_folder import RunFolder

        run = RunFolder(folder)
        data = run.read_config()
        if "variant" not in data.get("model", {}):
            raise WeightsError(
                f"{folder} is a run of another recipe; train a segmenter with 'matbackprop train ncuts'."
            )
        config = from_json(NCutsConfig, data)
        config.model.weights = "none"
        module = NCutsModule(config)
        load_weights(run, module)
        return module.model.eval()
    return DeepNCuts.from_pretrained(source)


def main(config: Config) -> int:
    """Segment, write and print."""
    import torch

    from matbackprop.models.deep_ncuts import default_ks
    from matbackprop.models.photograph import segment_photograph

    if not config.images:
        raise DataError("no picture was given; name one or more files.")
    ks = default_ks(config.method) if config.ks is None else config.ks
    if config.k is not None and config.k not in ks:
        raise ConfigurationError(f"--k {config.k} is none of --ks {' '.join(map(str, ks))}; give it there too.")
    for path in config.images:  # before anything is loaded, written or said
        with _opened(path):
            pass
    model = None
    if config.model is not None:
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_segmenter(config.model).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif not config.json:
        print(
            "No model was given: merging superpixels by colour and contrast. For learned segmentations train one with "
            "'matbackprop train ncuts' and pass its run folder with --model."
        )
    config.out.mkdir(parents=True, exist_ok=True)
    found = []
    for path, stem in zip(config.images, _stems(config.images), strict=True):
        pixels = _read(path)
        result = segment_photograph(pixels, model, ks, method=config.method, side=config.side, seed=config.seed)
        shown = result.chosen if config.k is None else int(np.abs(np.asarray(result.ks) - config.k).argmin())
        entry: dict[str, Any] = {
            "image": path.as_posix(),
            "suggested": result.k,
            "confidence": round(result.confidence, 4),
            "shown": result.ks[shown],
            "regions": [int(m.max()) + 1 for m in result.labels],
            "seconds": round(result.seconds, 3),
            **_write(config.out, stem, pixels, result.labels, result.ks, shown),
        }
        found.append(entry)
        if not config.json:
            print(
                f"{path}: {entry['regions'][shown]} regions shown (suggested {result.k}, confidence "
                f"{result.confidence:.2f}), {result.seconds:.2f} s → {entry['overlay']}"
            )
    if config.json:
        print(json.dumps({"network": model is not None, "method": config.method, "images": found}, indent=2))
    return 0


def _stems(paths: tuple[Path, ...]) -> list[str]:
    """A name for each picture's results; equal names get a number."""
    seen: dict[str, int] = {}
    stems = []
    for path in paths:
        count = seen.get(path.stem, 0)
        seen[path.stem] = count + 1
        stems.append(path.stem if count == 0 else f"{path.stem}-{count + 1}")
    return stems


@contextmanager
def _opened(path: Path) -> Iterator[Image]:
    """Open a picture, which reads no more than its head."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            yield file
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the picture {path}: {error}") from error


def _read(path: Path) -> np.ndarray:
    from PIL import ImageOps

    with _opened(path) as file:
        return np.asarray(ImageOps.exif_transpose(file).convert("RGB"))


def _write(
    folder: Path, stem: str, pixels: np.ndarray, labels: np.ndarray, ks: tuple[int, ...], shown: int
) -> dict[str, str]:
    """Write all label maps as npz, the shown one as a 16-bit PNG, and the picture with borders."""
    from PIL import Image

    from matbackprop.report.figures import draw_boundaries

    paths = {
        "labels": folder / f"{stem}.png",
        "levels": folder / f"{stem}.npz",
        "overlay": folder / f"{stem}-overlay.png",
    }
    Image.fromarray(labels[shown].astype(np.uint16)).save(paths["labels"])
    np.savez_compressed(paths["levels"], labels=labels, ks=np.asarray(ks))
    drawn = np.asarray(draw_boundaries(pixels, labels[shown]))
    if drawn.dtype != np.uint8:
        drawn = (np.clip(drawn, 0, 1) * 255).round().astype(np.uint8)
    Image.fromarray(drawn).save(paths["overlay"])
    return {name: path.as_posix() for name, path in paths.items()}
