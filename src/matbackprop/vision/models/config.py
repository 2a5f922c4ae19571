"""Configurations of the models: each field, its meaning and its default are written here and nowhere else.

A model takes its configuration, training and the command line hold the same object, and a saved model's ``config.json``
has its fields. Nothing heavy is imported, so that the command line can explain itself at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from matbackprop.errors import ConfigurationError

Head = Literal["fc", "o2p", "o2p_fc", "both"]
Function = Literal["log", "sqrt", "power"]
Support = Literal["all", "mask", "mask+all"]
Standardize = Literal["none", "scalar", "entry"]
Background = Literal["keep", "mask", "dim"]
Affinity = Literal["identity", "lambda"]
Space = Literal["ncut", "soft"]
Variant = Literal["alexnet-relu5", "vgg16-relu4", "vgg16-relu5", "hypercolumns"]

ADDED = {"added": True}
"""Marks fields that came after results were made: unset they mean what was meant without them."""

C = TypeVar("C")
LARGEST = 1 << 16  # channels of a layer: wider ones ask for more memory than machines have
_WIDTH = f"1 to {LARGEST}"
_LARGEST_NUMBER = 2**53  # of whole numbers without another limit: torch takes no more than 64 bits, and JSON 53


def changed(config: C, changes: dict[str, Any]) -> C:
    """A configuration with some fields changed.

    Raises:
        ConfigurationError: there is no such field; the message names those that there are.
    """
    known = [f.name for f in dataclasses.fields(config)]  # type: ignore[arg-type]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise ConfigurationError(f"{type(config).__name__} has no field {unknown[0]!r}; it has {', '.join(known)}.")
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def _choose(config: Any, **choices: Any) -> None:
    for name, kind in choices.items():
        value = getattr(config, name)
        if value is not None and value not in get_args(kind):
            raise ConfigurationError(f"unknown {name} {value!r}; choose one of {', '.join(get_args(kind))}.")


def check_ranges(where: str, config: Any, **ranges: str) -> None:
    """Raise unless numbers lie in their intervals; None passes, NaN does not, and of a tuple all must.

    Args:
        where: name of the section, for the message.
        config: its dataclass.
        ranges: field → interval, such as ``"[0, 1)"`` or ``"(0, inf)"``, or ``"1 to 9"`` for whole numbers.

    Example:
        >>> check_ranges("model", RegionModelConfig(), hidden="1 to 10")
        Traceback (most recent call last):
        matbackprop.errors.ConfigurationError: model.hidden is 4096; it must be a whole number from 1 to 10.
    """
    for name, interval in ranges.items():
        value, whole = getattr(config, name), " to " in interval
        interval = f"[{interval.replace(' to ', ', ')}]" if whole else interval
        for number in value if isinstance(value, (tuple, list)) else [] if value is None else [value]:
            if isinstance(number, int) and number > _LARGEST_NUMBER:
                interval = interval.replace("inf)", f"{_LARGEST_NUMBER}]")
            low, high = (float(end) for end in interval[1:-1].split(","))
            known = isinstance(number, int if whole else (int, float))
            above = known and (number > low or (interval[0] == "[" and number == low))
            if not above or not (number < high or (interval[-1] == "]" and number == high)):
                needed = f"be a whole number from {low:g} to {high:g}" if whole else f"lie in {interval}"
                raise ConfigurationError(f"{where}.{name} is {value}; it must {needed}.")


@dataclass
class RegionModelConfig:
    """The network (matbackprop.vision.models.deep_o2p.RegionClassifier)."""

    head: Head | Literal["sift"] = "o2p_fc"
    (
        "fc: AlexNet. o2p: DeepO2P. o2p_fc: DeepO2P-FC. both: first and second order. sift: SIFT-O2P, which is o2p "
        "on all scales of the backbone sift."
    )
    backbone: str = "alexnet"
    (
        "Network that gives the feature maps: alexnet, vgg16, efficientnet-lite2, xception, tiny-vit, pidinet, "
        "sift, hf:NAME, timm:NAME, torchvision:NAME, or module:Class of yours."
    )
    weights: str = "imagenet"
    """Starting weights of the backbone: imagenet, none, or a safetensors file."""
    taps: tuple[str, ...] = ()
    (
        "Maps that are pooled, such as pool5 (6×6) or relu5 (13×13) in AlexNet; their descriptors are put side by "
        "side. By default the backbone's last."
    )
    average: bool = field(default=False, metadata=ADDED)
    """In fc and both, take the average of the last map over the support instead of fully connected layers on it."""
    two_views: bool = field(default=False, metadata=ADDED)
    """See each region twice, as it is and with the mean colour around it; the maps' channels stand side by side."""
    frozen: bool = field(default=False, metadata=ADDED)
    """Leave the backbone and the projections as they start: descriptors are computed once, only the head learns."""
    train_from: str | None = field(default=None, metadata=ADDED)
    (
        "Leave the backbone as it starts up to this map, without jitter and mirroring: maps are computed once, what is "
        "behind them learns."
    )
    hidden: int = 4096
    """Width of the fully connected layers."""
    dropout: float = 0.5
    """Dropped after each fully connected layer."""
    input_dropout: float = 0.0
    """Dropped before the first fully connected layer, or of the average."""
    vector_dropout: float = 0.0
    """Dropped of the pooled descriptor."""
    function: Function = "log"
    """Matrix function of the pooling."""
    power: float = 0.5
    """Exponent of the matrix power."""
    learn_power: bool = False
    """Let the exponent learn."""
    eps: float = 1e-3
    """Regulariser ε of the pooling."""
    learn_eps: bool = False
    """Let ε learn."""
    feature_scale: float = 0.01
    """Factor on the features before pooling."""
    reduce: int | None = None
    """Channels that the first map is projected to before pooling."""
    reduce_rest: int = 96
    """Channels that the other maps are projected to, if they have more."""
    support: Support = "all"
    """Pool over all cells, inside the mask, or both."""
    center: bool = False
    """Subtract the mean feature before pooling."""
    standardize: Standardize = "entry"
    (
        "How the pooled vector is standardised by numbers measured at the start: one mean per entry and one "
        "deviation, one mean and one deviation for all (scalar), or not at all."
    )
    unit_norm: bool = False
    """Divide the pooled vector by its own norm first."""
    vector_scale: float = 1.0
    """Factor on the standardised vector; the rate of the layer behind it scales with its square."""
    precision: Literal["float64", "float32"] = "float64"
    """Precision inside the structured layer."""

    def __post_init__(self) -> None:
        _choose(self, head=Literal["fc", "o2p", "o2p_fc", "both", "sift"], function=Function, support=Support)
        _choose(self, standardize=Standardize, precision=Literal["float64", "float32"])
        check_ranges("model", self, hidden=_WIDTH, reduce=_WIDTH, reduce_rest=_WIDTH)
        check_ranges("model", self, dropout="[0, 1]", input_dropout="[0, 1]", vector_dropout="[0, 1]")
        check_ranges("model", self, feature_scale="[0, 1e30]", vector_scale="[0, 1e30]", eps="[0, 1e30]")
        if self.function == "log" and self.eps == 0:
            raise ConfigurationError("eps must be positive for function='log', got 0.")
        if self.learn_power and self.function != "power":
            raise ConfigurationError(f"learn_power needs function='power', got {self.function!r}.")
        self.taps = tuple(self.taps)


@dataclass
class NCutsModelConfig:
    """The network (matbackprop.vision.models.deep_ncuts.DeepNCuts)."""

    variant: Variant = "vgg16-relu5"
    """Which feature maps feed which head; the fields that are not set follow from it."""
    weights: str = "imagenet"
    """Starting weights of the backbone: imagenet, none, or a safetensors file."""
    backbone: str | None = field(default=None, metadata=ADDED)
    (
        "Network that gives the feature maps: alexnet, vgg16, efficientnet-lite2, xception, tiny-vit, pidinet, "
        "hf:NAME, timm:NAME, torchvision:NAME, or module:Class of yours; by default the variant's."
    )
    taps: tuple[str, ...] = field(default=(), metadata=ADDED)
    """Feature maps that feed the head; by default the variant's."""
    head: Literal["paper", "hypercolumn", "none"] | None = field(default=None, metadata=ADDED)
    (
        "paper: Conv-ReLU, dropout, Conv-ReLU on one map. hypercolumn: several maps, colour and position. none: "
        "the map itself. By default the variant's."
    )
    hidden: int | None = None
    """Filters of the hidden layer; by default the variant's (256 for AlexNet and hypercolumns, 1024 for VGG-16)."""
    channels: int | None = None
    """Output channels d, which bound the rank of W; by default the variant's (20, or 32 for hypercolumns)."""
    stride: int | None = field(default=None, metadata=ADDED)
    """Of the hypercolumns' grid; by default the variant's, then the finest map's."""
    boundary: bool | None = field(default=None, metadata=ADDED)
    """Also learn how likely humans separate two neighbouring superpixels, for merging; by default the variant's."""
    zoom: float = field(default=1.0, metadata=ADDED)
    """The backbone sees the image enlarged by this factor, 1 to 4."""
    kernel: int = 3
    """Size of the first new convolution of the paper's head."""
    dropout: float = 0.25
    """Dropped before the last layer."""
    affinity: Affinity = "identity"
    """W = FFᵀ, or FΛFᵀ with a learned Λ, for objective j1."""
    space: Space = "ncut"
    """Space that is clustered: the normalized cut's, or the one that the soft objective trains."""
    ridge: float = 0.3
    """λ of the soft objective and of its space."""
    cost: tuple[float, float, float, float] = (0.8, 0.4, 0.27, 0.1)
    """Exponents of spectral distance, boundary, area and colour in the price of merging two regions."""
    merge_ridge: float = 1.0
    """λ of the space in which merging compares regions."""

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ConfigurationError(f"unknown model {self.variant!r}; choose one of {', '.join(VARIANTS)}.")
        _choose(self, head=Literal["paper", "hypercolumn", "none"], affinity=Affinity, space=Space)
        check_ranges("model", self, hidden=_WIDTH, channels=_WIDTH, stride=_WIDTH, kernel=_WIDTH, zoom="[1, 4]")
        check_ranges("model", self, dropout="[0, 1]", ridge="(0, inf)", merge_ridge="(0, inf)")
        self.taps, self.cost = tuple(self.taps), tuple(self.cost)  # type: ignore[assignment]
        full = self.resolved()
        more = len(full["taps"]) != 1 or full["boundary"] or full["stride"]
        if full["head"] != "hypercolumn" and more:
            raise ConfigurationError(
                f"head {full['head']!r} takes exactly one feature map, no stride and no boundary channel; got "
                f"taps={list(full['taps'])}, stride={full['stride']}, boundary={full['boundary']}. "
                "Choose head='hypercolumn' for more."
            )

    def resolved(self) -> dict[str, Any]:
        """All fields, those that are not set taken from the variant."""
        own = {name: value for name, value in vars(self).items() if value is not None and value != ()}
        return {"stride": None, "boundary": False, **VARIANTS[self.variant], **own}


@dataclass
class ContourModelConfig:
    """The network (matbackprop.vision.models.contours.ContourNet)."""

    backbone: str = "tiny-vit"
    """Network that computes the feature maps, as for the other systems."""
    taps: tuple[str, ...] = ("layer0", "layer1", "layer2", "layer3", "neck")
    """Feature maps to fuse, from fine to coarse."""
    weights: str = "imagenet"
    """Starting weights of the backbone: imagenet, none, or a safetensors file."""
    zoom: float = 1.5
    """The backbone's input is the image enlarged by this factor, 0.5 to 4."""
    width: int = 48
    """Channels of the fused maps."""
    stem: int = 24
    """Channels of the stem at full resolution."""

    def __post_init__(self) -> None:
        check_ranges("model", self, width=_WIDTH, stem=_WIDTH, zoom="[0.5, 4]")
        self.taps = tuple(self.taps)
        if not self.taps:
            raise ConfigurationError("model.taps is empty. Name at least one feature map of the backbone.")


VARIANTS: dict[str, dict[str, Any]] = {
    "alexnet-relu5": {"backbone": "alexnet", "taps": ("relu5",), "head": "paper", "hidden": 256, "channels": 20},
    "vgg16-relu4": {"backbone": "vgg16", "taps": ("relu4_1",), "head": "paper", "hidden": 1024, "channels": 20},
    "vgg16-relu5": {"backbone": "vgg16", "taps": ("relu5_3",), "head": "paper", "hidden": 1024, "channels": 20},
    "hypercolumns": {
        "backbone": "vgg16",
        "taps": ("relu2_2", "relu3_3", "relu4_3", "relu5_3"),
        "head": "hypercolumn",
        "hidden": 256,
        "channels": 32,
        "stride": 4,
        "boundary": True,
    },
}
"""The models of the paper's second table and the extended one, as fields of :class:`NCutsModelConfig`."""
