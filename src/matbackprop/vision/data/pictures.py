"""The one reader of pictures: upright RGB bytes of any ordinary file, and a clear line for every other one.

Pillow decodes; this module decides what may be decoded. Only kinds that Pillow reads itself are accepted: some others
(PostScript, for example) would be handed to programs that run what is in the file.
"""

from __future__ import annotations

import glob
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import ConfigurationError, DataError, needs

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

MAX_PIXELS = 50_000_000
"""Pixels of the largest picture that is decoded; reading, segmenting and drawing it take less than a gigabyte."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_KINDS = ("JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF", "PPM", "JPEG2000")
_FILTERS = threading.Lock()  # the filters of warnings belong to all threads
_STRIP = 256  # rows
# FFmpeg recognises files by their content; a play list in them could make it open others, or addresses.
_VIDEO = {"protocol_whitelist": "file", "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegvideo"}
_DARK = 64  # 12 bits in 16 leave bytes below 16

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".pnm",
                    ".jp2")  # fmt: skip
"""Endings of the files that a folder of pictures is searched for."""
VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm", ".mpg", ".mpeg")
"""Endings of the files whose frames are read as those of a video."""


class Picture(NamedTuple):
    """A picture as the rest of the library wants it.

    Attributes:
        pixels: (h, w, 3) RGB bytes, the right way up.
        rescaled: smallest and largest value of a picture of more than 8 bits, which became 0 and 255; None for others.
    """

    pixels: NDArray[np.uint8]
    rescaled: tuple[float, float] | None = None

    @property
    def note(self) -> str:
        """What was done to the values, for people to read; empty where they were taken as they are."""
        if self.rescaled is None:
            return ""
        low, high = self.rescaled
        return f"values from {low:g} to {high:g} rescaled to 0–255"


def read_picture(path: str | Path) -> Picture:
    """Read a picture file as upright RGB bytes.

    The orientation that a camera wrote into the file (EXIF) is applied. Grey, palette, CMYK and YCbCr pictures become
    RGB; transparent ones are laid over white. Grey pictures of 16 or 32 bits and of floating point are rescaled by
    their own range, smallest value to 0 and largest to 255, because 12 bits in 16, heights in metres and counts of
    photons look alike in a file; :attr:`Picture.note` says so. Colours of 16 bits lose their low byte, so that pictures
    which use only that one are refused. Of several frames the first is read.

    Args:
        path: a JPEG, PNG, TIFF, WebP, BMP, GIF, PPM or JPEG 2000 file.

    Raises:
        DataError: there is no such file, it is not a regular file (a folder, a named pipe), no picture, cut short,
            otherwise damaged, or has more than :data:`MAX_PIXELS` pixels; those are never decoded.
    """
    with open_picture(path) as file:
        deep = any(";16" in str(tile[3]) for tile in file.tile)
        picture = picture_of(file)
        if deep and picture.rescaled is None and picture.pixels.max() < _DARK:
            raise DataError("has 16 bits per colour and uses only the low ones, which are lost; save it with 8 bits.")
    return picture


def read_frames(path: str | Path, *, every: int = 1) -> Iterator[tuple[int, Picture]]:
    """Read the frames of a GIF, an animated WebP or PNG, a TIFF of several pages, or a video, one after the other.

    Args:
        path: such a file; any other picture is its own only frame. Videos (see :data:`VIDEO_SUFFIXES`) need PyAV.
        every: 1 for all frames, 2 for each second one, and so on.

    Yields:
        The number of a frame, from 0, and the picture, as :func:`read_picture` gives it.

    Raises:
        DataError: as :func:`read_picture`; a file that is cut short gives the frames before that first.
        ConfigurationError: ``every`` is not positive.
        MissingExtraError: the file is a video, and PyAV is not installed.
    """
    if every < 1:
        raise ConfigurationError(f"every must be at least 1, got {every}.")
    if Path(path).suffix.lower() in VIDEO_SUFFIXES:
        yield from _video_frames(Path(path), every)
        return
    with open_picture(path) as file:
        for number in range(0, int(getattr(file, "n_frames", 1)), every):
            file.seek(number)
            yield number, picture_of(file.copy())


def _video_frames(path: Path, every: int) -> Iterator[tuple[int, Picture]]:
    with needs("reading videos needs PyAV", "'matbackprop[video]'"):
        import av
    if not path.is_file():
        raise DataError(f"{path} does not exist or is not a regular file; name a video.")
    try:
        with av.open(f"file:{path}", options=_VIDEO) as file:
            if not file.streams.video:
                raise DataError(f"{path} holds no video stream.")
            for number, frame in enumerate(file.decode(file.streams.video[0])):
                if frame.width * frame.height > MAX_PIXELS:  # which may change from frame to frame
                    raise DataError(f"{path} has frames of more than {MAX_PIXELS / 1e6:.0f} million pixels.")
                if number % every == 0:
                    yield number, Picture(frame.to_ndarray(format="rgb24"))
    except (av.FFmpegError, ValueError) as error:
        raise DataError(f"{path} is not a video that can be read, or cut short: {error}.") from error


def read_mask(path: str | Path) -> NDArray[np.bool_]:
    """Read a picture file as a mask (h, w): true where a pixel is neither black nor transparent.

    Raises:
        DataError: as :func:`read_picture`.
    """
    with open_picture(path) as file:
        from PIL import ImageOps

        image = ImageOps.exif_transpose(file)
        if image.mode[0] in "IF1L" and not image.has_transparency_data:
            return np.asarray(image) != 0
        rgba = np.asarray(image.convert("RGBA"))
        return rgba[..., :3].any(-1) & (rgba[..., 3] > 0)


@contextmanager
def open_picture(path: str | Path) -> Iterator[ImageFile]:
    """Open a picture whose pixels the body of the ``with`` statement decodes.

    Raises:
        DataError: as :func:`read_picture`, also for what goes wrong in the body; the message begins with the path.
    """
    with needs("reading pictures needs Pillow", "'matbackprop[metrics]'"):
        from PIL import Image, UnidentifiedImageError
    path = Path(path)
    if not path.is_file():  # opening a named pipe would wait for ever
        kind = "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
        raise DataError(f"{path} {kind}; name a picture.")
    try:
        with _FILTERS, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            file = Image.open(path, formats=_KINDS)
        with file:
            if file.width * file.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            yield file
    except DataError as error:
        raise DataError(f"{path} {error}") from error.__cause__
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(
            f"{path} has more than {MAX_PIXELS / 1e6:.0f} million pixels, the most that is decoded; shrink it first."
        ) from None
    except UnidentifiedImageError:
        raise DataError(f"{path} is not a picture that can be read; the kinds are {', '.join(_KINDS)}.") from None
    except PermissionError as error:
        raise DataError(f"{path} cannot be opened: {error.strerror}.") from None
    except Exception as error:  # a damaged file makes Pillow fail in a dozen ways, all of which mean the same
        raise DataError(f"{path} is damaged or cut short: {error}.") from error


def picture_of(image: Image) -> Picture:
    """Bring an open Pillow image to upright RGB bytes, as :func:`read_picture` does. It is turned itself.

    Raises:
        DataError: no value is finite.

    Example:
        >>> from PIL import Image
        >>> sixteen = Image.fromarray(np.array([[0, 2048, 4096]], np.uint16))
        >>> picture_of(sixteen).pixels[..., 0].tolist(), picture_of(sixteen).note
        ([[0, 128, 255]], 'values from 0 to 4096 rescaled to 0–255')
    """
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(image, in_place=True)  # and no other copy: a picture may be large
    if image.mode[0] in "IF":  # I, I;16, I;16B, F
        return _rescale(image)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    clear = image.has_transparency_data
    for rows, strip in _strips(image):
        if clear:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        pixels[rows] = np.asarray(strip if strip.mode == "RGB" else strip.convert("RGB"))
    return Picture(pixels)


def _strips(image: Image) -> Iterator[tuple[slice, Image]]:
    """Rows of an image and what they show, a few at a time: Pillow makes several copies of what it converts."""
    for top in range(0, image.height, _STRIP):
        bottom = min(top + _STRIP, image.height)
        yield slice(top, bottom), image.crop((0, top, image.width, bottom))


def _rescale(image: Image) -> Picture:
    low, high = np.inf, -np.inf
    for _, strip in _strips(image):
        values = np.asarray(strip)
        if (finite := values[np.isfinite(values)]).size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if low > high:
        raise DataError("has no finite value.")
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for rows, strip in _strips(image):
        values = np.asarray(strip)
        unit = (np.where(np.isfinite(values), values, low).astype(np.float32) - low) / (high - low or 1.0)
        pixels[rows] = (255 * unit).round().astype(np.uint8)[..., None]
    return Picture(pixels, (low, high))


def _matches(pattern: Path) -> list[Path]:
    """Files that a pattern matches, without hidden ones; ``**`` does not follow links, which may lead in circles."""
    top = Path(pattern.anchor)
    wanted = pattern.relative_to(top) / "*" if pattern.name == "**" else pattern.relative_to(top)
    try:
        paths = sorted(top.glob(str(wanted)))
    except ValueError as error:
        raise DataError(f"{pattern} is not a pattern that can be searched for: {error}.") from None
    hidden = (any(part[0] == "." and part not in pattern.parts for part in path.parts) for path in paths)
    return [path for path, skip in zip(paths, hidden, strict=True) if not skip and not path.is_dir()]


def find_pictures(sources: Iterable[str | Path]) -> list[Path]:
    """Spell out which pictures are meant by files, folders and patterns.

    Args:
        sources: a file stands for itself, a folder for the pictures directly in it (see :data:`PICTURE_SUFFIXES`), a
            pattern such as ``holiday/*.jpg`` or ``**/*.png`` for what it matches.

    Returns:
        Paths in the order of the sources, sorted within each. A file is not looked into, and need not exist.

    Raises:
        DataError: a folder holds no picture, a pattern matches nothing, or there is no source.
    """
    paths: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(p for p in source.iterdir() if p.suffix.lower() in PICTURE_SUFFIXES and p.name[0] != ".")
            if not inside:
                raise DataError(f"the folder {source} holds no picture ({', '.join(PICTURE_SUFFIXES)}).")
            paths += inside
        elif glob.has_magic(str(source)) and not source.exists():
            matches = _matches(source)
            if not matches:
                raise DataError(f"nothing matches {source}.")
            paths += matches
        else:
            paths.append(source)
    if not paths:
        raise DataError("no picture was given; name files, folders or patterns such as 'holiday/*.jpg'.")
    return paths
