"""Read image files of common formats as upright RGB bytes. Sizes are checked before decoding.

Only formats that Pillow decodes itself are accepted. For others, such as PostScript, Pillow calls external programs
that execute the file.
"""

from __future__ import annotations

import glob
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import DataError, needs
from matbackprop.vision.files import check_file

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MAX_PIXELS = 50_000_000  #: Maximum number of pixels of an image; decoding needs less than a gigabyte.
_MAX_PIXELS = {"JPEG2000": 25_000_000, "WEBP": 40_000_000, "AVIF": 40_000_000, "HEIF": 40_000_000}  # need more memory

_KINDS = ["JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF", "PPM", "JPEG2000", "AVIF", "HEIF"]
_FILTERS = threading.Lock()  # warning filters are global
_DARK = 64  # 12-bit values in 16 bits have high bytes below 16

#: Suffixes of the images in a folder.
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".pnm",
                    ".jp2", ".avif", ".heic", ".heif")  # fmt: skip


class Picture(NamedTuple):
    """Upright RGB bytes (h, w, 3) of an image.

    ``rescaled`` is the range of values that became 0 … 255; None for 8-bit images.
    """

    pixels: NDArray[np.uint8]
    rescaled: tuple[float, float] | None = None

    @property
    def note(self) -> str:
        """Description of the conversion; empty if values were not converted."""
        if self.rescaled is None:
            return ""
        low, high = self.rescaled
        return f"values from {low:g} to {high:g} rescaled to 0–255"


def read_picture(path: str | Path) -> Picture:
    """Read an image file as upright RGB bytes.

    The EXIF orientation is applied. Gray, palette, CMYK and YCbCr images are converted to RGB. Transparent images
    are composited over white. Gray images of 16 or 32 bits and of floating point are rescaled by their range, because
    files do not record the scale of values (12 bits in 16, heights in meters, photon counts); see :attr:`Picture.note`.
    16-bit colors are reduced to their high byte; images that use only the low byte are rejected. Only the first frame
    is read.

    Args:
        path: a JPEG, PNG, TIFF, WebP, BMP, GIF, PPM, JPEG 2000 or AVIF file; HEIC if pillow-heif is installed.

    Raises:
        DataError: the file is missing, not a regular file, not an image, corrupted, or has more than
            :data:`MAX_PIXELS` pixels (fewer for some formats).
    """
    with open_picture(path) as file:
        deep = any(";16" in str(tile[3]) for tile in file.tile)
        picture = picture_of(file)
        if deep and picture.rescaled is None and picture.pixels.max() < _DARK:
            raise DataError("has 16 bits per color and uses only the low ones. Save it with 8 bits.")
    return picture


def read_mask(path: str | Path) -> NDArray[np.bool_]:
    """Read an image file as a mask (h, w), true if a pixel is neither black nor transparent."""
    with open_picture(path) as file:
        from PIL import ImageOps

        image = ImageOps.exif_transpose(file)
        if image.mode[0] in "IF1L" and not image.has_transparency_data:
            return np.asarray(image) != 0
        rgba = np.asarray(image.convert("RGBA"))
        return rgba[..., :3].any(-1) & (rgba[..., 3] > 0)


@contextmanager
def open_picture(path: str | Path) -> Iterator[ImageFile]:
    """Open an image after checking its size. All errors, also of decoding in the body, start with its path."""
    with needs("reading images needs Pillow", "'matbackprop[metrics]'"):
        from PIL import Image, UnidentifiedImageError
    path = Path(path)
    check_file(path)
    if path.suffix.lower() in (".heic", ".heif"):
        with suppress(ImportError):
            from pillow_heif import register_heif_opener

            register_heif_opener()
    Image.init()
    try:
        with _FILTERS, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            file = Image.open(path, formats=[kind for kind in _KINDS if kind in Image.OPEN])
        with file:
            largest = min(MAX_PIXELS, _MAX_PIXELS.get(file.format or "", MAX_PIXELS))
            if file.width * file.height > largest:
                raise DataError(
                    f"has {file.width}×{file.height} pixels. At most {largest / 1e6:g} million are decoded."
                )
            yield file
    except DataError as error:
        raise DataError(f"{path} {error}") from error.__cause__
    except Image.DecompressionBombError:
        raise DataError(f"{path} has too many pixels. At most {MAX_PIXELS / 1e6:g} million are decoded.") from None
    except UnidentifiedImageError:
        hint = " HEIC files need: pip install pillow-heif" if path.suffix.lower() in (".heic", ".heif") else ""
        kinds = ", ".join(kind for kind in _KINDS if kind in Image.OPEN)
        raise DataError(f"{path} is not an image. Supported: {kinds}.{hint}") from None
    except Exception as error:  # Pillow raises many exception types for corrupted files
        raise DataError(f"{path} cannot be read: {str(error).rstrip('.') or type(error).__name__}.") from error


def picture_of(image: Image) -> Picture:
    """Convert an open Pillow image to upright RGB bytes, like :func:`read_picture`. The image is modified.

    Example:
        >>> from PIL import Image
        >>> sixteen = Image.fromarray(np.array([[0, 2048, 4096]], np.uint16))
        >>> picture_of(sixteen).pixels[..., 0].tolist(), picture_of(sixteen).note
        ([[0, 128, 255]], 'values from 0 to 4096 rescaled to 0–255')
    """
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(image, in_place=True)  # avoids a copy
    if image.mode[0] in "IF":  # I, I;16, I;16B, F
        return _rescale(np.asarray(image))
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        image, alpha = clear.convert("RGB"), clear.getchannel("A")
        del clear  # 200 MB
        image = Image.composite(image, Image.new("RGB", image.size, "white"), alpha)
    return Picture(np.array(image.convert("RGB")))


def _rescale(values: NDArray[Any]) -> Picture:
    finite = np.isfinite(values)
    if not finite.any():
        raise DataError("has no finite value.")
    low, high = float(values[finite].min()), float(values[finite].max())
    unit = values.astype(np.float32)
    unit[~finite] = low
    unit = (unit - low) / (high - low or 1.0)
    return Picture(np.repeat((255 * unit).round().astype(np.uint8)[..., None], 3, -1), (low, high))


def find_pictures(sources: Iterable[str | Path]) -> list[Path]:
    """Return the paths of images in files, folders and patterns such as ``holiday/*.jpg`` or ``**/*.png``.

    Paths are sorted within each source. Files are not opened and need not exist.

    Raises:
        DataError: a folder contains no image, a pattern matches nothing, or ``sources`` is empty.
    """
    paths: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(p for p in source.iterdir() if p.suffix.lower() in PICTURE_SUFFIXES and p.name[0] != ".")
            if not inside:
                raise DataError(f"The folder {source} contains no image ({', '.join(PICTURE_SUFFIXES)}).")
            paths += inside
        elif glob.has_magic(str(source)) and not source.exists():
            matches = sorted(path for path in map(Path, glob.iglob(str(source), recursive=True)) if path.is_file())
            if not matches:
                raise DataError(f"No file matches {source}. Check the pattern.")
            paths += matches
        else:
            paths.append(source)
    if not paths:
        raise DataError("No image was given. Pass files, folders or patterns such as 'holiday/*.jpg'.")
    return paths
