"""What region classifiers can be made of, in words; without torch, so that the command line can list it at once."""

from __future__ import annotations

from typing import Literal

Head = Literal["fc", "o2p", "o2p_fc", "both"]
Function = Literal["log", "sqrt", "power"]
Support = Literal["all", "mask", "mask+all"]
Standardize = Literal["none", "scalar", "entry"]
