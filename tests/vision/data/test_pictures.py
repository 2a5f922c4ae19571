"""Reading every kind of picture; one-line errors for other files."""

import os
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from matbackprop.errors import DataError
from matbackprop.vision.data import pictures
from matbackprop.vision.data.pictures import find_pictures, read_mask, read_picture

RAMP = np.linspace(0, 1, 12).reshape(3, 4)
COLOR = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def saved(tmp_path, image, name, **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


@pytest.mark.parametrize(
    "values, name",
    [
        ((RAMP * 65535).astype(np.uint16), "gray.png"),
        ((RAMP * 65535).astype(np.uint16), "gray.tif"),
        ((RAMP * 4095).astype(np.uint16), "twelve.png"),
        ((RAMP * 1e6).astype(np.int32), "integers.tif"),
        (RAMP.astype(np.float32), "unit.tif"),
        ((RAMP * 900 - 400).astype(np.float32), "meters.tif"),
    ],
)
def test_high_bit_depths_are_rescaled_by_their_range(tmp_path, values, name):
    read = read_picture(saved(tmp_path, Image.fromarray(values), name))
    assert read.pixels.shape == (3, 4, 3) and read.pixels.dtype == np.uint8
    low, high = float(values.min()), float(values.max())
    np.testing.assert_allclose(read.pixels[..., 0], 255 * (values - low) / (high - low), atol=0.501)
    assert (read.pixels == read.pixels[..., :1]).all()
    assert read.rescaled == (low, high) and "rescaled" in read.note


def test_constant_pictures_of_high_bit_depth_and_nonfinite_values(tmp_path):
    flat = read_picture(saved(tmp_path, Image.fromarray(np.full((4, 4), 900, np.uint16)), "flat.png"))
    assert np.ptp(flat.pixels) == 0
    holes = np.array([[np.nan, 1.0], [np.inf, 3.0]], np.float32)
    read = read_picture(saved(tmp_path, Image.fromarray(holes), "holes.tif"))
    assert read.pixels[..., 0].tolist() == [[0, 0], [0, 255]] and read.rescaled == (1, 3)
    with pytest.raises(DataError, match=r"empty\.tif has no finite value"):
        read_picture(saved(tmp_path, Image.fromarray(np.full((2, 2), np.nan, np.float32)), "empty.tif"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation):
    turns = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: np.rot90,
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path, Image.fromarray(COLOR), "turned.png", exif=exif)
    np.testing.assert_array_equal(read_picture(path).pixels, turns[orientation](COLOR))


def test_gray_palette_alpha_and_cmyk_become_rgb(tmp_path):
    image = Image.fromarray(COLOR)
    gray = read_picture(saved(tmp_path, image.convert("L"), "gray.png")).pixels
    assert gray.shape == COLOR.shape and np.ptp(gray, axis=-1).max() == 0
    two = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    assert read_picture(saved(tmp_path, two, "two.png")).pixels[0, :, 0].tolist() == [0, 255]
    palette = image.quantize(256)
    np.testing.assert_array_equal(
        read_picture(saved(tmp_path, palette, "palette.png")).pixels, np.asarray(palette.convert("RGB"))
    )
    cmyk = read_picture(saved(tmp_path, Image.new("CMYK", (3, 2), (255, 0, 0, 0)), "cmyk.tif")).pixels
    assert cmyk[0, 0].tolist() == [0, 255, 255]
    assert all(read_picture(tmp_path / n).rescaled is None for n in ("gray.png", "two.png", "palette.png", "cmyk.tif"))


def test_transparent_pixels_are_white_and_half_transparent_ones_half(tmp_path):
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = 0, 128, 255
    read = read_picture(saved(tmp_path, Image.fromarray(rgba), "alpha.png")).pixels
    assert read[0, :, 0].tolist() == [255, 127, 0]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    read = read_picture(saved(tmp_path, palette, "palette.png", transparency=0)).pixels
    assert read[0].tolist() == [[255, 255, 255], [40, 50, 60]]


@pytest.mark.parametrize("mode", ["1", "L", "I;16", "P", "RGB", "RGBA"])
def test_a_mask_is_true_at_nonzero_pixels(tmp_path, mode):
    inside = np.array([[0, 1, 1], [0, 0, 1]], bool)
    image = Image.fromarray(inside.astype(np.uint8))
    if mode == "RGBA":  # white, and transparent outside
        image = Image.merge("RGBA", [Image.new("L", (3, 2), 255)] * 3 + [Image.fromarray(inside * np.uint8(200))])
    elif mode == "I;16":
        image = Image.fromarray(inside.astype(np.uint16))
    elif mode == "P":
        image.putpalette([0, 0, 0, 9, 0, 0])
    else:
        image = Image.fromarray(inside * np.uint8(7 if mode != "1" else 255)).convert(mode)
    np.testing.assert_array_equal(read_mask(saved(tmp_path, image, "mask.png")), inside)


def png_of(width, height, bits=8, rows=b""):
    """Write a color PNG; without rows, the size in its header is wrong."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    head = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        parts.append(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    return b"".join(parts)


@pytest.mark.parametrize("largest, readable", [(65535, True), (4095, False)])
def test_colors_of_16_bits_are_read_unless_only_their_low_bits_are_used(tmp_path, largest, readable):
    values = np.linspace(0, largest, 24).reshape(2, 4, 3).astype(">u2")
    path = tmp_path / "deep.png"
    path.write_bytes(png_of(4, 2, bits=16, rows=b"".join(b"\0" + row.tobytes() for row in values)))
    if readable:
        np.testing.assert_array_equal(read_picture(path).pixels, values >> 8)
    else:
        with pytest.raises(DataError, match=r"deep\.png has 16 bits per color"):
            read_picture(path)


@pytest.mark.parametrize("side", [9_500, 60_000])
def test_too_many_pixels_are_rejected_before_anything_is_decoded(tmp_path, monkeypatch, side):
    monkeypatch.setattr(pictures, "picture_of", lambda image: pytest.fail("decoded"))
    (tmp_path / "bomb.png").write_bytes(png_of(side, side))
    with pytest.raises(DataError, match=r"bomb\.png has .* At most 50 million are decoded"):
        read_picture(tmp_path / "bomb.png")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_unreadable_files_are_reported_with_the_reason(tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.jpg").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "run.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    for name, reason in (
        ("missing.png", "does not exist"),
        (".", "is a folder"),
        ("text.png", "is not an image"),
        ("empty.jpg", "is not an image"),
        ("run.eps", "is not an image"),
        ("pipe.png", "is not a regular file"),
    ):
        with pytest.raises(DataError, match=reason) as error:
            read_picture(tmp_path / name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["cut.png", "cut.jpg", "cut.tif", "cut.webp", "cut.gif", "cut.bmp"])
def test_a_truncated_file_is_one_line(tmp_path, name):
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (80, 80, 3), dtype=np.uint8))
    path = saved(tmp_path, noise, name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=name) as error:
        read_picture(path)
    assert "\n" not in str(error.value)


def test_reading_in_threads_keeps_the_warning_filters(tmp_path):
    path = saved(tmp_path, Image.fromarray(COLOR), "photo.png")
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        assert len({p.pixels.tobytes() for p in pool.map(read_picture, [path] * 200)}) == 1
    assert warnings.filters == before


def test_folders_and_patterns_expand_to_their_pictures(tmp_path):
    for name in ("b.JPG", "a.png", "notes.txt", ".hidden.png"):
        (tmp_path / name).touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.png").touch()
    names = [p.relative_to(tmp_path).as_posix() for p in find_pictures([tmp_path, tmp_path / "**" / "*.png"])]
    assert names == ["a.png", "b.JPG", "a.png", "deep/c.png"]
    assert find_pictures(["not_there.png"]) == [Path("not_there.png")]
    with pytest.raises(DataError, match="No file matches"):
        find_pictures([tmp_path / "*.gif"])
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="contains no image"):
        find_pictures([tmp_path / "none"])
    with pytest.raises(DataError, match="No image was given"):
        find_pictures([])


@pytest.mark.parametrize("name", ["a.jp2", "a.webp", "a.avif"])
def test_formats_with_large_decoders_have_lower_limits(tmp_path, monkeypatch, name):
    if f".{name.split('.')[1]}" not in Image.registered_extensions():
        pytest.skip("Pillow was built without this format")
    path = saved(tmp_path, Image.fromarray(np.zeros((64, 64, 3), np.uint8)), name)
    assert read_picture(path).pixels.shape == (64, 64, 3)
    kind = Image.registered_extensions()[path.suffix]
    monkeypatch.setitem(pictures._MAX_PIXELS, kind, 4000)
    with pytest.raises(DataError, match=r"has 64×64 pixels. At most 0.004 million"):
        read_picture(path)
