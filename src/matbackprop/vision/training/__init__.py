"""Training: configurations, run folders, the training loop, and recipes."""

from matbackprop.vision.configuration import from_json, to_json
from matbackprop.vision.training.config import RECIPES, EngineConfig, Recipe

__all__ = ["RECIPES", "EngineConfig", "Recipe", "from_json", "to_json"]
