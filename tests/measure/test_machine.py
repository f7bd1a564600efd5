"""What `gradus env` prints of this machine."""

from __future__ import annotations

import json

import torch

from gradus import cli
from gradus.train import machine


def test_env_prints_what_is_there_and_nothing_else(capsys):
    assert cli.main(["env"]) == 0
    said = capsys.readouterr().out
    assert machine.cpu_name() in said and torch.__version__.partition("+")[0] in said
    assert "N/A" not in said and "None" not in said
    if not torch.cuda.is_available():
        assert "GPU " not in said and "nccl" not in said
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["host"] == machine.describe()["host"]
    assert f"{found['memory_bytes'] / 2**30:.1f} GiB" in said, "of 2^30 bytes"
