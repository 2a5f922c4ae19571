"""Options and fixtures that all tests share.

Tests are isolated, including the processes that they start: they cannot connect to other machines, ``MATBACKPROP_DATA``
is unset unless they are marked ``data``, and caches are written to a temporary folder.
"""

import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from helpers.offline import sitecustomize
from helpers.signals import restore_signals


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="run the operator tests on this device (cpu or cuda)")
    parser.addoption("--dtype", default="float64", help="dtype of the inputs where a test does not need float64")
    parser.addoption("--compile-backend", default="aot_eager", help="compile every operator with this backend")


def pytest_configure(config):
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    restore_signals()
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit the environment
        _isolate(config)


def _isolate(config):
    caches = tempfile.mkdtemp(prefix="matbackprop-tests-")
    config.add_cleanup(lambda: shutil.rmtree(caches, ignore_errors=True))
    for name in (
        "MATBACKPROP_CACHE",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "TORCH_HOME",
        "MPLCONFIGDIR",
        "TORCHINDUCTOR_CACHE_DIR",
    ):
        os.environ[name] = str(Path(caches) / name.lower())
    offline = str(Path(sitecustomize.__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [offline, os.environ.get("PYTHONPATH")]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with pytest.MonkeyPatch.context() as patch:
        if not item.get_closest_marker("data"):
            patch.delenv("MATBACKPROP_DATA", raising=False)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    _mark_slow(items)
    root = os.environ.get("MATBACKPROP_DATA")
    missing = not root or not Path(root).is_dir()
    cuda = config.getoption("--device").startswith("cuda") and torch.cuda.is_available()
    for item in items:
        if missing and item.get_closest_marker("data"):
            item.add_marker(pytest.mark.skip(reason="MATBACKPROP_DATA does not name a folder with the data sets"))
        if not cuda and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs --device cuda and a CUDA device"))


def _mark_slow(items):
    """Of a test marked ``quick(n)``, mark all but n evenly spaced parametrizations as slow."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for variants in tests.values():
        (count,) = variants[0].get_closest_marker("quick").args
        kept = {len(variants) * i // count for i in range(count)}
        for index, item in enumerate(variants):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def dtype(request):
    return getattr(torch, request.config.getoption("--dtype"))


@pytest.fixture
def compile_backend(request):
    return request.config.getoption("--compile-backend")


@pytest.fixture
def data_root():
    return Path(os.environ["MATBACKPROP_DATA"])
