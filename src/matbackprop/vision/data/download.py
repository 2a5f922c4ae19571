"""Download data sets and weights from their official URLs and verify checksums."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from matbackprop.errors import DataError, needs
from matbackprop.vision.progress import Progress


class Archive(NamedTuple):
    """Archive that contains a folder of a data set."""

    url: str
    source: str  #: Folder inside the archive.
    target: str  #: Target folder in the data set.
    md5: str | None = None  #: Published checksum.


_CHUNK = 1 << 20  # bytes
_COCO = "http://images.cocodataset.org"
_BERKELEY = "http://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping"

#: Data sets that can be downloaded: name → archives.
DATASETS: dict[str, tuple[Archive, ...]] = {
    "bsds500": (
        Archive(f"{_BERKELEY}/BSR/BSR_bsds500.tgz", "BSR/BSDS500/data", "data"),
    ),
    "coco": (
        Archive(f"{_COCO}/zips/train2017.zip", "train2017", "images/train2017", "cced6f7f71b7629ddf16f17bbcfab6b2"),
        Archive(f"{_COCO}/zips/val2017.zip", "val2017", "images/val2017", "442b8da7639aecaf257c1dceb8ba8c80"),
        Archive(
            f"{_COCO}/annotations/annotations_trainval2017.zip",
            "annotations",
            "annotations",
            "f4bbac642086de4f52a3fdda2de5fa2c",
        ),
    ),
}  # fmt: skip


class _Megabytes:
    """Progress bar with the methods that pooch calls."""

    def __init__(self, what: str) -> None:
        self.what, self.total = what, 0
        self.bar: Progress | None = None

    def update(self, size: int) -> None:
        self.bar = self.bar or Progress(self.what, self.total // _CHUNK)
        self.bar.advance()

    def reset(self) -> None:
        pass

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def download(url: str, target: str | Path, *, sha256: str | None = None, md5: str | None = None) -> Path:
    """Download a file. The target is created after the checksum is verified.

    Args:
        url: HTTP or HTTPS URL.
        target: target file. An existing file with the correct checksum is kept.
        sha256: expected SHA-256, or its first digits.
        md5: expected MD5.

    Raises:
        DataError: the download failed, or the checksum is wrong.
    """
    with needs("downloads need pooch", "'matbackprop[train]'"):
        import pooch

    target = Path(target)
    if target.is_file() and _fits(target, sha256, md5):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.part")
    bar = _Megabytes(f"Downloading {target.name}, MB")
    try:
        pooch.HTTPDownloader(progressbar=bar, chunk_size=_CHUNK, timeout=60)(url, str(partial), None)
        if not _fits(partial, sha256, md5):
            raise DataError(f"The checksum of {url} is wrong. The file was removed; try again.")
        partial.replace(target)
    except OSError as error:  # base class of the exceptions of requests
        raise DataError(
            f"{url} could not be downloaded ({type(error).__name__}). Without a network, download it on another "
            f"machine to {target} and rerun."
        ) from error
    finally:
        bar.close()
        partial.unlink(missing_ok=True)
    return target


def _fits(path: Path, sha256: str | None, md5: str | None) -> bool:
    import pooch

    checksums = {"sha256": sha256, "md5": md5}
    return all(pooch.file_hash(str(path), alg=a).startswith(e.lower()) for a, e in checksums.items() if e)


def download_dataset(name: str, folder: str | Path) -> Path:
    """Download and extract a data set of :data:`DATASETS` to a folder. Existing parts are skipped."""
    folder = Path(folder)
    for archive in DATASETS[name]:
        if (folder / archive.target).exists():
            continue
        file = folder / "archives" / archive.url.rsplit("/", 1)[-1]
        if not file.is_file() or archive.md5 is not None:
            download(archive.url, file, md5=archive.md5)
        _extract(file, archive.source, folder / archive.target)
        file.unlink()
    return folder


def _extract(archive: Path, source: str, target: Path) -> None:
    """Extract a folder of a zip or tar archive. No file is written outside ``target``."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        try:
            shutil.unpack_archive(archive, scratch, filter=None if archive.suffix == ".zip" else "data")
            target.parent.mkdir(parents=True, exist_ok=True)
            (Path(scratch) / source).rename(target)
        except (tarfile.TarError, ValueError, EOFError, OSError) as error:
            raise DataError(f"{archive} is damaged or has no folder {source}: {error}. Remove it and rerun.") from error
