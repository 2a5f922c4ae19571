"""Networks: backbones, DeepO2P, DeepNCuts and their weights."""
