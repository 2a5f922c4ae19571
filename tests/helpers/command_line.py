"""Run commands in this process."""

import pytest

from matbackprop.cli import main


def call(*words):
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return caught.value.code
