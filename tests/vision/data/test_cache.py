"""Keys of cached data."""

from pathlib import Path

import numpy as np
import pytest

from matbackprop.errors import DataError
from matbackprop.vision.data.cache import cache_key


def test_keys_do_not_depend_on_the_order_and_do_on_every_value():
    base = {"side": 200, "crop": True, "path": "x"}
    assert cache_key(base) == cache_key(dict(reversed(base.items())))
    assert len({cache_key(base | {k: 1}) for k in base} | {cache_key(base)}) == 4


def test_configuration_hash_depends_on_values_and_not_on_types():
    plain = cache_key({"folder": "a/b", "side": 200, "scales": [1.0, 0.5]})
    assert cache_key({"folder": Path("a/b"), "side": np.int64(200), "scales": np.array([1.0, 0.5])}) == plain
    with pytest.raises(DataError, match="cannot contain set"):
        cache_key({"side": {200}})
