"""replace_pool on classifiers of timm, torchvision and transformers, with random weights."""

import pytest

from benchmarks.architectures import STATEMENTS, Config, examine, main, names, table

REASON = "needs {}, which is not part of the test requirements"
EXPECTED = {
    "timm:resnet18": ("layer4.1", 0),
    "timm:swin_tiny_patch4_window7_224": ("norm", 0),
    "timm:hiera_tiny_224": ("blocks.11", 0),
    "timm:levit_128s": ("stages.2", 0),
    "timm:vit_betwixt_patch16_reg4_gap_256": ("norm", 4),
    "timm:deit_tiny_distilled_patch16_224": ("norm", 2),
    "timm:convnext_atto": ("norm_pre", 0),
    "timm:regnety_002": ("final_conv", 0),
    "timm:coatnet_0_224": ("norm", 0),
    "torchvision:vit_b_16": ("encoder", 1),
    "transformers:ConvNext": ("convnext.encoder.stages.3", 0),
    "transformers:Dinov2WithRegisters": ("dinov2_with_registers.layernorm", 5),
}
QUICK = ("timm:levit_128s", "timm:regnety_002", "transformers:Dinov2WithRegisters")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in EXPECTED])
def test_second_order_is_added_before_the_classifier(name):
    source = name.partition(":")[0]
    pytest.importorskip(source, reason=REASON.format(source))
    row = examine(name)
    layer, prefix = EXPECTED[name]
    assert (row["layer"], row["prefix"]) == (f"`{layer}`", str(prefix))
    assert "**no**" not in row.values()


@pytest.mark.slow
def test_a_model_that_pools_several_maps_is_rejected():
    pytest.importorskip("timm", reason=REASON.format("timm"))
    assert main(Config(("timm:coat_tiny",)))["summary"] == "1 models: 0 right, 1 refused, 0 wrong"


def test_the_table_names_forty_models_and_its_columns():
    assert len(names()) >= 40
    text = table([{"model": "timm:x", "layer": "`norm`", "prefix": "0"} | dict.fromkeys(STATEMENTS, "yes")])
    assert "| timm:x | `norm` | 0 | yes |" in text and STATEMENTS["reset"] in text
