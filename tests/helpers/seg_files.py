"""BSDS300's text files of label maps, written for tests."""

from pathlib import Path

import numpy as np


def write_seg(path, labels, *, image="0", user="0"):
    """Write a label map as a BSDS300 ``.seg`` file.

    Args:
        path: the file to write.
        labels: labels ``(h, w)`` from 0.
        image: image identifier in the header.
        user: annotator identifier in the header.
    """
    height, width = labels.shape
    change = np.ones((height, width), dtype=bool)
    change[:, 1:] = labels[:, 1:] != labels[:, :-1]
    row, first = np.nonzero(change)
    last = np.append(first[1:] - 1, width - 1)
    last[np.append(row[1:] != row[:-1], True)] = width - 1
    lines = ["format ascii cr", f"image {image}", f"user {user}", f"width {width}", f"height {height}"]
    lines += [f"segments {int(labels.max()) + 1}", "gray 0", "invert 0", "flipflop 0", "data"]
    lines += [f"{labels[y, a]} {y} {a} {b}" for y, a, b in zip(row, first, last, strict=True)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="ascii")
