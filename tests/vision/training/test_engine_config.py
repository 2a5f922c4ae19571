"""Configurations: JSON round trips, files over presets, and errors that name the field."""

import json
from dataclasses import field
from pathlib import Path
from typing import Literal

import pytest

from matbackprop.cli import train as cli_train
from matbackprop.errors import ConfigurationError
from matbackprop.vision.configuration import configuration, from_json, merge, to_json
from matbackprop.vision.training.config import RECIPES, EngineConfig, Recipe, resolve


@configuration
class Part:
    rate: float = 0.1
    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[int, str] = (1, "a")
    maybe: int | None = None
    either: int | str = 3
    kind: Literal["x", "y"] = "x"


@configuration
class Whole:
    engine: EngineConfig = field(default_factory=EngineConfig)
    part: Part = field(default_factory=Part)
    parts: list[Part] = field(default_factory=list)


RECIPE = Recipe("whole", Whole, {"smoke": Whole(), "paper": Whole(part=Part(rate=3.0))})


def test_round_trip_through_json_text():
    config = Whole(
        EngineConfig(run=Path("a/b"), gradient_clip=2.0),
        Part(sizes=(5,), pair=(2, "b"), maybe=7, either="s", kind="y"),
        [Part(), Part(rate=1.0)],
    )
    again = from_json(Whole, json.loads(json.dumps(to_json(config))))
    assert again == config
    assert isinstance(again.engine.run, Path)
    assert isinstance(again.part.sizes, tuple)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"part": {"rat": 1.0}}, r"Unknown field 'part.rat'. Did you mean 'rate'\?"),
        ({"parts": [{"xyz": 1.0}]}, r"Unknown field 'parts.0.xyz'"),
        ({"part": {"rate": "fast"}}, "part.rate is 'fast'. Input should be a valid number"),
        ({"part": {"rate": float("nan")}}, "part.rate is nan. Input should be a finite number"),
        ({"part": {"maybe": 1.5}}, "part.maybe is 1.5. Input should be a valid integer"),
        ({"part": {"kind": "z"}}, "part.kind is 'z'. Input should be 'x' or 'y'"),
        ({"part": {"pair": [1]}}, "part.pair.1 is .*Field required"),
        ({"parts": [{}, {"rate": None}]}, r"parts.1.rate is None"),
        ({"part": 3}, "part is 3. Input should be a dictionary"),
        ({"engine": {"log_every": 0}}, "engine.log_every is 0. Input should be greater than or equal to 1"),
        ({"engine": {"max_epochs": 10**30}}, "engine.max_epochs is 10*. Input should be less than"),
        ({"engine": {"gradient_clip": -1.0}}, "gradient_clip is -1.0"),
        ({"engine": {"gradient_clip": float("inf")}}, "gradient_clip is inf"),
        ({"engine": {"devices": "0"}}, "devices is '0'. Use auto"),
        ({"engine": {"resume": True, "overwrite": True}}, "contradict"),
    ],
)
def test_wrong_data_name_the_field(data, message):
    with pytest.raises(ConfigurationError, match=message):
        from_json(Whole, data)


def test_a_configuration_holds_plain_values_only():
    with pytest.raises(ConfigurationError, match="cannot contain this value"):
        to_json({"a": object()})


def test_merge_takes_nested_and_dotted_names():
    merged = merge(Whole(), {"part.rate": 2, "engine": {"seed": 5}, "part": {"kind": "y"}})
    assert (merged.part.rate, merged.part.kind, merged.engine.seed) == (2.0, "y", 5)
    assert merged.part.sizes == (1, 2)
    assert from_json(Whole, {"engine": {"devices": 8}}).engine.devices == "8"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", "[part]\nrate = 4\nsizes = [9]\n[engine]\nseed = 2\n"),
        ("c.json", '{"part.rate": 4, "part.sizes": [9], "engine.seed": 2}'),
    ],
)
def test_a_file_overrides_a_preset(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config = resolve(RECIPE, "paper", tmp_path / name)
    assert (config.part.rate, config.part.sizes, config.engine.seed) == (4.0, (9,), 2)
    assert resolve(RECIPE, "paper").part.rate == 3.0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "[part", "is damaged"),
        ("c.json", "[1]", "instead of an object"),
        ("c.yaml", "", "ends with .toml or .json"),
        ("missing.toml", None, "does not exist"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        resolve(RECIPE, "smoke", tmp_path / name)


def test_presets_are_copied():
    one = RECIPE.preset("smoke")
    one.part.rate = 99.0
    assert RECIPE.preset("smoke").part.rate == 0.1
    with pytest.raises(ConfigurationError, match=r"no preset 'huge'\. Presets: smoke, paper"):
        RECIPE.preset("huge")


@pytest.mark.parametrize("name", ["o2p", "ncuts", "contours"])
def test_every_recipe_has_the_presets_and_they_round_trip_through_json(name):
    recipe = RECIPES[name]
    assert {"smoke", "fine-tune"} <= set(recipe.presets)
    assert recipe.name == name
    for preset, config in recipe.presets.items():
        assert recipe.preset(preset) == config
        assert isinstance(config.engine, EngineConfig)


@pytest.mark.parametrize("name", ["o2p", "ncuts", "contours"])
def test_a_data_folder_turns_generated_images_off(name, tmp_path):
    smoke = RECIPES[name].preset("smoke")
    assert smoke.data.generate > 0
    chosen = cli_train.parse(name, ["--data.root", str(tmp_path)], "train")
    assert chosen.config.data.root == tmp_path and chosen.config.data.generate == 0
    assert merge(smoke, {"data.root": str(tmp_path)}).data.generate == 0


def test_another_backbone_without_taps_takes_its_last_map():
    def taps(*words):
        return cli_train.parse("o2p", words, "train").config.model.taps

    assert taps() == ("relu5",)  # the preset's
    assert taps("--model.backbone", "vgg16") == ()
    assert taps("--model.backbone=vgg16", "--model.taps", "relu4_3") == ("relu4_3",)
