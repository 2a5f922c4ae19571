"""Model configurations. Torch is not imported here, so that ``--help`` is fast."""

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
    """Architecture of the region classifier."""

    head: Head = "o2p_fc"  #: fc: AlexNet. o2p: DeepO2P. o2p_fc: DeepO2P-FC. both: first and second order.
    #: alexnet, vgg16, efficientnet-lite2, tiny-vit, hf:NAME, timm:NAME, torchvision:NAME, or module:Class.
    backbone: str = "alexnet"
    #: Starting weights: imagenet, none or a safetensors file for the backbone; or a saved model (see --from).
    weights: str = "imagenet"
    #: Maps to pool, such as pool5 (6×6) or relu5 (13×13) of AlexNet; their descriptors are concatenated. Default: the
    #: last map of the backbone.
    taps: tuple[str, ...] = ()
    #: For the heads fc and both, average the last map over the support instead of using fully connected layers.
    average: bool = False
    #: Concatenate the channels of two views of a region: unmodified, and with the mean color as background.
    two_views: bool = False
    #: Freeze the backbone and the projections. Descriptors are computed once, and only the head is trained.
    frozen: bool = False
    train_from: str | None = None  #: Freeze the backbone up to this map; later layers are trained.
    hidden: Width = 4096  #: Width of the fully connected layers.
    dropout: Fraction = 0.5  #: Dropout after each fully connected layer.
    input_dropout: Fraction = 0.0  #: Dropout before the first fully connected layer, or after averaging.
    vector_dropout: Fraction = 0.0  #: Dropout of the pooled descriptor.
    function: Function = "log"  #: Matrix function of the pooling.
    power: float = 0.5  #: Exponent of the matrix power.
    learn_power: bool = False  #: Train the exponent.
    eps: Factor = 1e-3  #: Regularizer ε of the pooling.
    feature_scale: Factor = 0.01  #: Factor on the features before pooling.
    reduce: Width | None = None  #: Number of channels of the first map after projection, before pooling.
    #: Number of channels of the other maps after projection. Maps with fewer channels are not projected.
    reduce_rest: Width = 96
    support: Support = "all"  #: Pool over all cells, inside the mask, or both.
    #: Factor on the standardized vector. The effective learning rate of the next layer scales with its square.
    vector_scale: Factor = 1.0

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
    """Architecture of DeepNCuts."""

    variant: Variant = "vgg16-relu5"  #: Model of the paper. It sets the defaults of backbone, feature map and sizes.
    #: Starting weights: imagenet, none or a safetensors file for the backbone; or a saved model (see --from).
    weights: str = "imagenet"
    #: alexnet, vgg16, efficientnet-lite2, tiny-vit, hf:NAME, timm:NAME, torchvision:NAME, or module:Class. Default: set
    #: by the variant.
    backbone: str | None = None
    #: Feature map that is the input of the head. Default: set by the variant; for another backbone, its last map.
    taps: tuple[str, ...] = ()
    head: Literal["paper", "none"] = "paper"  #: paper: Conv-ReLU, dropout, Conv-ReLU. none: the map itself.
    #: Filters of the hidden layer. Default: set by the variant (256 for AlexNet, 1024 for VGG-16).
    hidden: Width | None = None
    channels: Width = 20  #: Number d of output channels, which bounds the rank of W.
    zoom: Zoom = 1.0  #: Factor by which the input of the backbone is enlarged, 1 to 4.
    dropout: Fraction = 0.25  #: Dropout before the last layer.
    affinity: Affinity = "identity"  #: W = FFᵀ, or FΛFᵀ with a trainable Λ, for objective j1.
    space: Space = "ncut"  #: Space to cluster in: that of the normalized cut, or that of the soft objective.
    ridge: Positive = 0.3  #: λ of the soft objective and of its space.

    def __post_init__(self) -> None:
        if len(self.taps) > 1:
            raise ConfigurationError(f"model.taps must name exactly one feature map, got {list(self.taps)}.")

    def resolved(self) -> dict[str, Any]:
        """Return all fields, with the values of the variant for unset fields.

        If the backbone differs from the variant and taps are unset, ``taps`` is empty: the last map is used.
        """
        variant = dict(VARIANTS[self.variant])
        if self.backbone not in (None, variant["backbone"]):
            variant["taps"] = ()
        own = {name: value for name, value in vars(self).items() if value is not None and value != ()}
        return {**variant, **own}


@configuration
class ContourModelConfig:
    """Architecture of the contour network."""

    #: alexnet, vgg16, efficientnet-lite2, tiny-vit, hf:NAME, timm:NAME, torchvision:NAME, or module:Class.
    backbone: str = "tiny-vit"
    #: Feature maps to fuse, from fine to coarse.
    taps: tuple[str, ...] = ("layer0", "layer1", "layer2", "layer3", "neck")
    #: Starting weights: imagenet, none or a safetensors file for the backbone; or a saved model (see --from).
    weights: str = "imagenet"
    #: Factor by which the input of the backbone is enlarged, 0.5 to 4.
    zoom: Annotated[float, Field(ge=0.5, le=4)] = 1.5
    width: Width = 48  #: Channels of the fused maps.
    stem: Width = 24  #: Channels of the stem at full resolution.
    threshold: Fraction = 0.85  #: Contour strength at which the command segment cuts the hierarchy by default.

    def __post_init__(self) -> None:
        if not self.taps:
            raise ConfigurationError("model.taps is empty. List at least one feature map of the backbone.")


#: Models in the second table of the paper, as fields of :class:`NCutsModelConfig`.
VARIANTS: dict[str, dict[str, Any]] = {
    "alexnet-relu5": {"backbone": "alexnet", "taps": ("relu5",), "hidden": 256},
    "vgg16-relu4": {"backbone": "vgg16", "taps": ("relu4_1",), "hidden": 1024},
    "vgg16-relu5": {"backbone": "vgg16", "taps": ("relu5_3",), "hidden": 1024},
}
