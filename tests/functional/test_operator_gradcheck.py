"""First derivatives of every operator, backward, forward and batched, at simple and at repeated spectra."""

import pytest
from torch.autograd import gradcheck

from helpers.operators import SPECTRA_OF_CASES, case_id


@pytest.mark.quick(50)
@pytest.mark.parametrize(("case", "spectrum"), SPECTRA_OF_CASES, ids=case_id)
def test_gradcheck(case, spectrum, device):
    inputs = tuple(t.requires_grad_() for t in case.inputs(spectrum, device))
    # Complex ones are checked along random directions, because the full check takes four times as long.
    fast = case.complex or case.composed
    assert gradcheck(case, inputs, check_forward_ad=True, check_batched_grad=case.traced, fast_mode=fast)
