from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus.cli import main
from gradus.infer import find

sys.path.insert(0, str(Path(__file__).parent))
from small_models import LLAMA, saved


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """An image classifier, exported, and an image."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("vit")
    saved("vit", folder / "model")
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    assert main(["export", str(folder / "model"), "--to", str(folder / "out"), "--as", "torchscript"]) == 0
    Image.new("RGB", (8, 8), (9, 99, 199)).save(folder / "a.png")
    return folder


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    model = models.build(LLAMA)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    models.save(model, tmp_path / "llama")
    return find(str(tmp_path / "llama"))
