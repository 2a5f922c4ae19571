"""Complaints about ties that come from a GPU late: none is lost, whatever thread they come from."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from matbackprop.errors import TieError
from matbackprop.functional import _ties, raise_deferred

POLICY = _ties.TiePolicy("eigh", "raise", 1e-15, 1e-6, 1e-7, None)


class Event:
    """A stand-in for a CUDA event that has passed when told so, or when it is waited for."""

    def __init__(self, passed=False):
        self.passed = passed

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


@pytest.fixture(autouse=True)
def _empty():
    _ties._deferred.clear()
    yield
    _ties._deferred.clear()


def defer(bad, event):
    _ties._defer(event, torch.tensor(bad), POLICY)


def test_one_complaint_leaves_the_others_in_the_queue():
    for _ in range(3):
        defer(True, Event())
    raise_deferred()  # nothing has arrived yet
    for _ in range(3):
        with pytest.raises(TieError):
            raise_deferred(wait=True)
    raise_deferred(wait=True)


def test_what_is_on_its_way_does_not_hold_up_what_has_arrived():
    defer(True, Event())
    defer(True, Event(passed=True))
    with pytest.raises(TieError):
        raise_deferred()
    assert len(_ties._deferred) == 1


def test_more_complaints_than_the_queue_holds_are_not_dropped():
    defer(True, Event())
    for _ in range(_ties._MOST_DEFERRED - 1):
        defer(False, Event())
    with pytest.raises(TieError):
        defer(False, Event())


def test_threads_take_every_flag_once():
    for _ in range(200):
        defer(True, Event(passed=True))

    def collect(_):
        try:
            raise_deferred()
        except TieError:
            return 1
        return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(collect, range(300))) == 200
