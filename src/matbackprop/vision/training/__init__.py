"""Training: configuration, run folders, the engine, and the recipes of both systems.

Importing this package is cheap; the engine and the recipes import Lightning Fabric when they are imported themselves.
"""

from matbackprop.vision.training.config import RECIPES, EngineConfig, Recipe, from_json, get_recipe, to_json

__all__ = ["RECIPES", "EngineConfig", "Recipe", "from_json", "get_recipe", "to_json"]
