"""The compiled engine: its products, its memory, and what it decodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradus import models
from gradus.infer import compiled, engines, find
from gradus.infer.checked import compare
from gradus.models.decoding import complete

sys.path.insert(0, str(Path(__file__).parent))
from small_models import INPUTS, saved


@pytest.mark.parametrize("precision, rounding", [("fp32", 1e-6), ("bf16", 2**-8), ("fp16", 2**-11), ("int8", 2**-6), ("int4", 0.15)])
@pytest.mark.parametrize("rows", [1, 3])
def test_products_with_few_rows_are_linears(precision, rounding, rows):
    torch.manual_seed(0)
    linear = nn.Linear(64, 96).requires_grad_(False)
    x = torch.randn(rows, 1, 64)
    found, wanted = compiled.linear_kind(precision, torch.device("cpu"))(linear)(x), linear(x)
    assert found.shape == wanted.shape and found.dtype == torch.float32
    assert (found - wanted).norm() <= rounding * wanted.norm()


def test_numbers_side_by_side_are_the_same_and_tied_ones_stay_tied():
    first, second = nn.Linear(5, 3), nn.Linear(5, 3, bias=False)
    second.weight = nn.Parameter(first.weight.detach())  # another parameter of the same numbers
    model = nn.Sequential(first, second, nn.BatchNorm1d(3)).double().requires_grad_(False)
    second.weight.data = first.weight.data
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compiled.pack_memory(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert first.weight.data_ptr() == second.weight.data_ptr() and all(t.data_ptr() % 64 == 0 for t in after.values())
    pages = {t.data_ptr() >> 12 for t in after.values()}
    assert max(pages) - min(pages) <= 1, "in one piece"


def test_int4_takes_int8_where_groups_do_not_divide():
    assert isinstance(compiled.linear_kind("int4", torch.device("cpu"))(nn.Linear(40, 96)), compiled.Int8)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_compiled_decodes_what_pytorch_decodes(source, precision):
    """In rooms and batches of different sizes, by two engines in one process."""
    engine, plain = engines.open(source, "compiled", precision), models.load(source.path).eval()
    rows = compare(engine, engines.open(source), INPUTS, 12)
    found = {row.name: row.value for row in rows}
    assert found["check/max_abs_delta"] < (1e-4 if precision == "fp32" else 0.1 * found["check/largest"])
    if precision == "fp32":
        for prompts, new in (([[1, 2]], 20), ([[3], [4, 5, 6], [7]], 9)):
            assert complete(engine, prompts, max_new=new) == complete(plain, prompts, max_new=new)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_compiled_decodes_past_a_window(precision, tmp_path):
    saved("gemma", tmp_path / "model", d_model=32, n_layers=3)
    source = find(str(tmp_path / "model"))
    engine, plain = engines.open(source, "compiled", precision), models.load(source.path).eval()
    found = {row.name: row.value for row in compare(engine, engines.open(source), INPUTS, 12)}
    assert found["check/max_abs_delta"] < (1e-4 if precision == "fp32" else 0.1 * found["check/largest"])
    if precision == "fp32":
        assert complete(engine, [[3], [4, 5, 6], [7]], max_new=20) == complete(plain, [[3], [4, 5, 6], [7]], max_new=20)
