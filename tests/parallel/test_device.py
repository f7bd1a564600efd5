"""Which device a layout means."""

from __future__ import annotations

import math
import runpy

import pytest
import torch

from gradus.errors import UserError
from gradus.parallel import device
from gradus.parallel.device import pick_device


def test_an_absent_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match=r"layout\.device=cuda: there is none here"):
        pick_device("cuda")


@pytest.mark.parametrize(("quota", "user", "threads"), [(2, {}, 2), (2, {"OMP_NUM_THREADS": "8"}, 8), (math.inf, {}, 8)])
def test_pytorch_takes_no_more_threads_than_a_quota_has(quota, user, threads, monkeypatch):
    number = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: number[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: number.append(number.pop() and n))
    monkeypatch.setattr("gradus.limits.cpu_quota", lambda: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(device.__file__)
    assert number == [threads]
