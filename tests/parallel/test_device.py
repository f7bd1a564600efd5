"""Which device a layout means."""

from __future__ import annotations

import pytest
import torch

from gradus.errors import UserError
from gradus.parallel.device import pick_device


def test_an_absent_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match=r"layout\.device=cuda: there is none here"):
        pick_device("cuda")
