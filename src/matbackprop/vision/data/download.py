"""Downloads of data sets and weights from their official addresses: resumed, checked, and never half-written."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matbackprop.errors import DataError
from matbackprop.vision.progress import Progress

_CHUNK = 1 << 20
ATTEMPTS = 3
"""How often a broken connection is tried."""
WAIT = 1.0
"""Seconds before the second attempt; doubled each time."""


@dataclass(frozen=True)
class Archive:
    """One file of a data set, at its official address."""

    url: str
    size: int | None = None
    """Expected number of bytes."""
    md5: str | None = None
    """Published checksum, where one is published."""
    strip: int = 0
    """Leading folders of the archive's names to leave out."""
    only: str = ""
    """Keep only names that begin with this, after stripping."""
    into: str = ""
    """Folder below the data set's to extract to."""


_COCO = "http://images.cocodataset.org"

DATASETS: dict[str, tuple[Archive, ...]] = {
    "bsds500": (
        Archive(
            "http://www.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/BSR/BSR_bsds500.tgz",
            size=70_763_455,
            strip=2,
            only="data/",
        ),
    ),
    "bsds300": (
        Archive("https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/bsds/BSDS300-images.tgz", strip=1),
        Archive("https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/bsds/BSDS300-human.tgz", strip=1),
    ),
    "coco": (
        Archive(
            f"{_COCO}/zips/train2017.zip", size=19_336_861_798, md5="cced6f7f71b7629ddf16f17bbcfab6b2", into="images"
        ),
        Archive(f"{_COCO}/zips/val2017.zip", size=815_585_330, md5="442b8da7639aecaf257c1dceb8ba8c80", into="images"),
        Archive(
            f"{_COCO}/annotations/annotations_trainval2017.zip",
            size=252_907_541,
            md5="f4bbac642086de4f52a3fdda2de5fa2c",
        ),
    ),
}
"""Data sets that can be fetched: name → archives."""


def download(
    url: str, target: str | Path, *, sha256: str | None = None, md5: str | None = None, size: int | None = None
) -> Path:
    """Download one file; an interrupted download resumes where it stopped, and the file appears only when it is whole.

    Args:
        url: http, https or file address.
        target: where it goes. A file that is there and fits the checksum is kept.
        sha256: expected SHA-256, or its first digits.
        md5: expected MD5 (older data sets publish nothing better).
        size: expected number of bytes.

    Raises:
        DataError: the address cannot be reached, or what came does not fit the checksum.
    """
    target = Path(target)
    if target.is_file():
        if _problem(target, sha256, md5, size) is None:
            return target
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    for attempt in range(ATTEMPTS):
        try:
            _fetch(url, part)
            break
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the part is already whole, or longer than the file
                part.unlink(missing_ok=True)
                continue
            if error.code < 500 or attempt == ATTEMPTS - 1:
                raise DataError(f"{url} answers {error.code} {error.reason}.") from error
        except (urllib.error.URLError, OSError, TimeoutError) as error:
            if attempt == ATTEMPTS - 1:
                reason = getattr(error, "reason", error)
                raise DataError(f"{url} cannot be reached ({reason}).") from error
        time.sleep(WAIT * 2**attempt)
    problem = _problem(part, sha256, md5, size)
    if problem is not None:
        part.unlink(missing_ok=True)
        raise DataError(f"what came from {url} is not the expected file: {problem}. It was removed; try again.")
    part.replace(target)
    return target


def _fetch(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "matbackprop"})
    if have and url.startswith("http"):
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=60) as answer:
        resumed = getattr(answer, "status", None) == 206
        left = answer.headers.get("Content-Length")
        have = have if resumed else 0
        total = have + int(left) if left is not None else None
        chunks = (total or 0) // _CHUNK
        progress = Progress(f"Downloading {part.stem} (MB)", chunks, have // _CHUNK, quiet=total is None)
        with contextlib.closing(progress), part.open("ab" if resumed else "wb") as file:
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                have += len(chunk)
                progress.advance()
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have < total:
        raise OSError(f"the connection ended after {have} of {total} bytes")


def _problem(path: Path, sha256: str | None, md5: str | None, size: int | None) -> str | None:
    """Return what is wrong with a file, or None."""
    if not path.exists():
        return "nothing came"
    actual = path.stat().st_size
    if size is not None and actual != size:
        return f"{actual} bytes instead of {size}"
    for name, expected in (("sha256", sha256), ("md5", md5)):
        if expected is None:
            continue
        with path.open("rb") as file:
            actual_digest = hashlib.file_digest(file, partial(hashlib.new, name, usedforsecurity=False)).hexdigest()
        if not actual_digest.startswith(expected.lower()):
            return f"{name} {actual_digest} instead of {expected}"
    return None


def extract(archive: str | Path, folder: str | Path, *, strip: int = 0, only: str = "") -> int:
    """Extract a zip or tar archive (see :class:`Archive` for ``strip`` and ``only``) and return the number of files.

    Raises:
        DataError: the archive is damaged, or a name in it leads out of the folder.
    """
    archive, folder = Path(archive), Path(folder)
    count = 0
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                for entry in packed.infolist():
                    if not entry.is_dir() and (target := _inside(folder, entry.filename, strip, only)):
                        with packed.open(entry) as source, target.open("wb") as out:
                            shutil.copyfileobj(source, out)
                        count += 1
        else:
            with tarfile.open(archive) as packed_tar:
                for member in packed_tar:
                    source_file = packed_tar.extractfile(member) if member.isfile() else None
                    if source_file is not None and (target := _inside(folder, member.name, strip, only)):
                        with source_file, target.open("wb") as out:
                            shutil.copyfileobj(source_file, out)
                        count += 1
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive} is damaged: {error}. Remove it and download it again.") from error
    return count


def _inside(folder: Path, name: str, strip: int, only: str) -> Path | None:
    """Return where an archive's file goes, its folder made; None where it is left out."""
    parts = Path(name).parts[strip:]
    if not parts or not "/".join(parts).startswith(only):
        return None
    target = folder.joinpath(*parts)
    if ".." in parts or Path(name).is_absolute() or not target.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"the archive holds the name {name!r}, which leads out of {folder}. Nothing more is extracted.")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def download_dataset(name: str, folder: str | Path, *, keep_archives: bool = False) -> Path:
    """Download and extract a data set of :data:`DATASETS`.

    Args:
        name: ``"bsds500"``, ``"bsds300"`` or ``"coco"``.
        folder: the data set's folder.
        keep_archives: keep the downloaded archives in ``folder/archives``.

    Raises:
        DataError: an address cannot be reached; the message says how to do it by hand.
    """
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}; choose one of {', '.join(DATASETS)}.")
    archives, folder = DATASETS[name], Path(folder)
    store = folder / "archives"
    for archive in archives:
        marker = store / (archive.url.rsplit("/", 1)[-1] + ".done")
        if marker.exists():
            continue
        target = store / archive.url.rsplit("/", 1)[-1]
        try:
            download(archive.url, target, md5=archive.md5, size=archive.size)
        except DataError as error:
            lines = "; ".join(f"{a.url} → {folder / a.into}" for a in archives)
            raise DataError(
                f"{error} By hand: fetch the archives on a machine with a network, put them into {store}, and give the "
                f"same command again; or extract them yourself ({lines})."
            ) from error
        extract(target, folder / archive.into, strip=archive.strip, only=archive.only)
        marker.touch()
        if not keep_archives:
            target.unlink()
    return folder
