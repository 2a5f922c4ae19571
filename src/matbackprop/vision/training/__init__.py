"""Training: configurations, run folders, the training loop, and recipes."""

from matbackprop.vision.configuration import from_json, to_json
from matbackprop.vision.training.config import RECIPES, EngineConfig, Recipe, get_recipe

__all__ = ["RECIPES", "EngineConfig", "Recipe", "from_json", "get_recipe", "to_json"]
