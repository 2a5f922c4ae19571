"""Keys of cached data."""

from matbackprop.vision.data.cache import cache_key


def test_keys_do_not_depend_on_the_order_and_do_on_every_value():
    base = {"side": 200, "crop": True, "path": "x"}
    assert cache_key(base) == cache_key(dict(reversed(base.items())))
    assert len({cache_key(base | {k: 1}) for k in base} | {cache_key(base)}) == 4
