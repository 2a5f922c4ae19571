"""Configurations of the models, used by the models, the training, the command line and saved models.

Torch is not imported here, so that ``--help`` is quick.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from matbackprop.errors import ConfigurationError
from matbackprop.vision.configuration import Fraction, Positive, Width, configuration

Head = Literal["fc", "o2p", "o2p_fc", "both"]
Function = Literal["log", "sqrt", "power"]
Support = Literal["all", "mask", "mask+all"]
Affinity = Literal["identity", "lambda"]
Space = Literal["ncut", "soft"]
Variant = Literal["alexnet-relu5", "vgg16-relu4", "vgg16-relu5"]
Factor = Annotated[float, Field(ge=0, le=1e30)]
Zoom = Annotated[float, Field(ge=1, le=4)]


@configuration
class RegionModelConfig:
    """The network (matbackprop.vision.models.deep_o2p.RegionClassifier)."""

    head: Head = "o2p_fc"
    """fc: AlexNet. o2p: DeepO2P. o2p_fc: DeepO2P-FC. both: first and second order."""
    backbone: str = "alexnet"
    """alexnet, vgg16, efficientnet-lite2, tiny-vit, hf:NAME, timm:NAME, torchvision:NAME, or module:Class."""
    weights: str = "imagenet"
    """Starting weights: imagenet, none or a safetensors file for the backbone; or a saved model (see --from)."""
    taps: tuple[str, ...] = ()
    (
        "Maps to pool, such as pool5 (6×6) or relu5 (13×13) of AlexNet; their descriptors are concatenated. Default: "
        "the backbone's last map."
    )
    average: bool = False
    """In fc and both, use the average of the last map over the support instead of fully connected layers."""
    two_views: bool = False
    """Use two views of a region, unmodified and with the mean color around it; their channels are concatenated."""
    frozen: bool = False
    """Freeze the backbone and the projections: descriptors are computed once, only the head is trained."""
    train_from: str | None = None
    """Freeze the backbone up to this map; later layers are trained."""
    hidden: Width = 4096
    """Width of the fully connected layers."""
    dropout: Fraction = 0.5
    """Dropout after each fully connected layer."""
    input_dropout: Fraction = 0.0
    """Dropout before the first fully connected layer, or of the average."""
    vector_dropout: Fraction = 0.0
    """Dropout of the pooled descriptor."""
    function: Function = "log"
    """Matrix function of the pooling."""
    power: float = 0.5
    """Exponent of the matrix power."""
    learn_power: bool = False
    """Train the exponent."""
    eps: Factor = 1e-3
    """Regularizer ε of the pooling."""
    feature_scale: Factor = 0.01
    """Factor on the features before pooling."""
    reduce: Width | None = None
    """Number of channels to project the first map to before pooling."""
    reduce_rest: Width = 96
    """Number of channels to project the other maps to, if they have more."""
    support: Support = "all"
    """Pool over all cells, inside the mask, or both."""
    vector_scale: Factor = 1.0
    """Factor on the standardized vector; the rate of the next layer scales with its square."""

    def __post_init__(self) -> None:
        if self.function == "log" and self.eps == 0:
            raise ConfigurationError("eps must be positive for function 'log', got 0.")
        if self.learn_power and self.function != "power":
            raise ConfigurationError(f"learn_power needs function 'power', got {self.function!r}.")
        if len(set(self.taps)) < len(self.taps):
            raise ConfigurationError(f"taps contains a map twice: {', '.join(self.taps)}. List each map once.")
        if self.head == "fc" and self.taps:
            raise ConfigurationError("head 'fc' does not pool. Remove taps.")
        if self.average and self.head not in ("fc", "both"):
            raise ConfigurationError(f"average needs head 'fc' or 'both', got {self.head!r}.")


@configuration
class NCutsModelConfig:
    """The network (matbackprop.vision.models.deep_ncuts.DeepNCuts)."""

    variant: Variant = "vgg16-relu5"
    """Backbone, feature map and sizes; the fields that are not set follow from it."""
    weights: str = "imagenet"
    """Starting weights: imagenet, none or a safetensors file for the backbone; or a saved model (see --from)."""
    backbone: str | None = None
    (
        "alexnet, vgg16, efficientnet-lite2, tiny-vit, hf:NAME, timm:NAME, torchvision:NAME, or module:Class. "
        "Default: the variant's."
    )
    taps: tuple[str, ...] = ()
    """The feature map that feeds the head. Default: the variant's; for another backbone its last map."""
    head: Literal["paper", "none"] = "paper"
    """paper: Conv-ReLU, dropout, Conv-ReLU. none: the map itself."""
    hidden: Width | None = None
    """Filters of the hidden layer. Default: the variant's (256 for AlexNet, 1024 for VGG-16)."""
    channels: Width = 20
    """Output channels d, which bound the rank of W."""
    zoom: Zoom = 1.0
    """The backbone's input is the image enlarged by this factor, 1 to 4."""
    dropout: Fraction = 0.25
    """Dropout before the last layer."""
    affinity: Affinity = "identity"
    """W = FFᵀ, or FΛFᵀ with a trainable Λ, for objective j1."""
    space: Space = "ncut"
    """Space that is clustered: the normalized cut's, or the one that the soft objective trains."""
    ridge: Positive = 0.3
    """λ of the soft objective and of its space."""

    def __post_init__(self) -> None:
        if len(self.taps) > 1:
            raise ConfigurationError(f"model.taps must name exactly one feature map, got {list(self.taps)}.")

    def resolved(self) -> dict[str, Any]:
        """Return all fields, with the variant's values for those that are not set.

        Without taps, the last map of another backbone than the variant's is used: ``taps`` is empty.
        """
        variant = dict(VARIANTS[self.variant])
        if self.backbone not in (None, variant["backbone"]):
            variant["taps"] = ()
        own = {name: value for name, value in vars(self).items() if value is not None and value != ()}
        return {**variant, **own}


@configuration
class ContourModelConfig:
    """The network (matbackprop.vision.models.contours.ContourNet)."""

    backbone: str = "tiny-vit"
    """Network that computes the feature maps, as for the other systems."""
    taps: tuple[str, ...] = ("layer0", "layer1", "layer2", "layer3", "neck")
    """Feature maps to fuse, from fine to coarse."""
    weights: str = "imagenet"
    """Starting weights: imagenet, none or a safetensors file for the backbone; or a saved model (see --from)."""
    zoom: Annotated[float, Field(ge=0.5, le=4)] = 1.5
    """The backbone's input is the image enlarged by this factor, 0.5 to 4."""
    width: Width = 48
    """Channels of the fused maps."""
    stem: Width = 24
    """Channels of the stem at full resolution."""
    threshold: Fraction = 0.85
    """Contour strength at which ``segment`` cuts the hierarchy by default."""

    def __post_init__(self) -> None:
        if not self.taps:
            raise ConfigurationError("model.taps is empty. List at least one feature map of the backbone.")


VARIANTS: dict[str, dict[str, Any]] = {
    "alexnet-relu5": {"backbone": "alexnet", "taps": ("relu5",), "hidden": 256},
    "vgg16-relu4": {"backbone": "vgg16", "taps": ("relu4_1",), "hidden": 1024},
    "vgg16-relu5": {"backbone": "vgg16", "taps": ("relu5_3",), "hidden": 1024},
}
"""The models of the paper's second table, as fields of :class:`NCutsModelConfig`."""
