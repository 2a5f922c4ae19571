"""Folder and names of cached data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def default_cache_folder() -> Path:
    """Return ``$MATBACKPROP_CACHE``, or ``matbackprop`` in the user's cache folder."""
    chosen = os.environ.get("MATBACKPROP_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matbackprop"


def cache_key(config: Mapping[str, Any]) -> str:
    """Return a hash of a JSON object, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
