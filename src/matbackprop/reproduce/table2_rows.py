"""The rows of the paper's second table, rows beyond it, and what is computed together."""

from __future__ import annotations

from dataclasses import dataclass

from matbackprop.reproduce.baselines import HUMANS

__all__ = ["GROUPS", "GROUP_OF", "NETWORKS", "ROWS", "Group", "Row"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        key: its name in files and on the command line.
        title: its name in the table.
        network: which feature maps.
        objective: what they were trained with.
        inference: how segmentations are made, ``"cluster"``, ``"merge"``, or ``""`` for a baseline's own way.
        against: the row that a paired interval compares it with, or "".
        paper: the paper's best (average) covering, or "".
        space: where clusters are sought, if not in the space that the model's configuration names.
    """

    key: str
    title: str
    network: str = "none"
    objective: str = "none"
    inference: str = ""
    against: str = ""
    paper: str = ""
    space: str | None = None

    @property
    def name(self) -> str:
        """Title and network."""
        return self.title if self.network == "none" else f"{self.title} ({self.network})"


@dataclass(frozen=True)
class Group:
    """What is computed together: one training, or none, and the rows that its model fills.

    Attributes:
        key: its name.
        rows: the rows.
        preset: the training preset, or "" for none.
        variant: the untrained network, or "" for none.
        seconds: roughly how long a training takes on a fast GPU; long ones are started first.
    """

    key: str
    rows: tuple[Row, ...]
    preset: str = ""
    variant: str = ""
    seconds: float = 1.0

    @property
    def baseline(self) -> bool:
        """Whether it is a method that knows no seed."""
        return not self.rows[0].inference


_BASELINES = {
    "one_region": ("One region", ""),
    "fixed_grids": ("Fixed grids", ""),
    "ncut_pytorch": ("ncut-pytorch, Lab and position", ""),
    "sklearn_spectral": ("scikit-learn's spectral clustering", ""),
    "multiscale_ncut": ("Multiscale NCuts with intervening contours (Cour et al.)", ".55 (.44)"),
    "felzenszwalb": ("Felzenszwalb and Huttenlocher", ""),
    HUMANS: ("Humans, leave one out", ""),
}
NETWORKS = {"alexnet-relu5": "AlexNet ReLU-5", "vgg16-relu4": "VGG-16 ReLU-4", "vgg16-relu5": "VGG-16 ReLU-5"}
_PAPER = {
    "alexnet-relu5": (".59 (.49)", ".65 (.56)"),
    "vgg16-relu4": (".65 (.56)", ".73 (.62)"),
    "vgg16-relu5": (".70 (.58)", ".74 (.63)"),
}


def _groups() -> dict[str, Group]:
    groups = [Group(key, (Row(key, title, paper=paper),)) for key, (title, paper) in _BASELINES.items()]
    groups.append(Group("lab", (Row("lab-merging", "Merging by Lab colour and contrast", inference="merge"),)))
    for name, network in NETWORKS.items():
        before, after = _PAPER[name]
        plain = Row(f"ncuts-{name}", "NCuts", network, "none", "cluster", paper=before)
        deep = Row(f"deepncuts-{name}", "DeepNCuts", network, "J2", "cluster", plain.key, after)
        span = Row(f"span-{name}", "DeepNCuts, J2's own space", network, "J2", "cluster", plain.key, space="soft")
        soft = Row(f"soft-{name}", "DeepNCuts, soft", network, "soft", "cluster", plain.key)
        groups += [
            Group(plain.key, (plain,), variant=name),
            Group(deep.key, (deep, span), preset=f"paper-{name}", seconds=20),
            Group(soft.key, (soft,), preset=f"soft-{name}", seconds=10),
        ]
    for suffix, network in (
        ("", "VGG-16, frozen"),
        ("-tuned", "VGG-16, tuned"),
        ("-lite2", "EfficientNet-Lite2, tuned"),
    ):
        groups.append(
            Group(
                f"hypercolumns{suffix}",
                (
                    Row(f"hypercolumns{suffix}", "Hypercolumns", network, "soft", "cluster", "ncuts-vgg16-relu5"),
                    Row(f"merging{suffix}", "Hypercolumns, merging", network, "soft", "merge", "lab-merging"),
                ),
                preset=f"hypercolumns{suffix}",
                seconds=15,
            )
        )
    return {group.key: group for group in groups}


GROUPS = _groups()
"""All groups by name."""
GROUP_OF = {row.key: group for group in GROUPS.values() for row in group.rows}
ROWS = {row.key: row for group in GROUPS.values() for row in group.rows}
"""All rows by name, in the order of the table."""
