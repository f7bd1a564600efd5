"""Engines: one interface, each checked against PyTorch in fp32, and one clear line for what cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradus import models
from gradus.errors import UserError
from gradus.infer import Encoded, compiled, engines, find
from gradus.infer.checked import checked, compare
from gradus.models.decoding import complete
from gradus.recipe.schema import BertConfig, LlamaConfig

LLAMA = LlamaConfig(vocab_size=64, n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, d_ff=96, seq_len=48, qkv_bias=True)
INPUTS = Encoded([[3, 1, 4, 1, 5], [9]], None, None)


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    model = models.build(LLAMA)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    models.save(model, tmp_path / "llama")
    return find(str(tmp_path / "llama"))


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


def test_an_engine_is_checked_once_and_told_each_time(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    checked(source, "torch", "bf16", INPUTS)
    first = capsys.readouterr().err
    assert "computes in bf16" in first and "of 48 greedy equal" in first
    monkeypatch.setattr("gradus.infer.checked.compare", lambda *_: pytest.fail("checked twice"))
    checked(source, "torch", "bf16", INPUTS)
    assert capsys.readouterr().err == first


def test_a_check_finds_what_is_wrong(source):
    right, wrong = engines.open(source), engines.open(source)
    found = {row.name: row.value for row in compare(right, right, INPUTS, 8)}
    assert found["check/max_abs_delta"] == 0 and found["check/greedy"] == 1
    wrong.decode = lambda ids, positions: -type(right).decode(wrong, ids, positions)
    found = {row.name: row.value for row in compare(wrong, right, INPUTS, 8)}
    assert found["check/max_abs_delta"] > 1 and found["check/cosine"] < 0 and found["check/greedy"] < 1


@pytest.mark.parametrize("name, precision, said", [("compild", "fp32", "Did you mean.*compiled"), ("torch", "int8", "Use --precision fp32 or bf16 or fp16")])
def test_what_cannot_be_is_one_line(source, name, precision, said):
    with pytest.raises(UserError, match=said):
        engines.open(source, name, precision)


def test_encoders_have_no_one_row(tmp_path):
    models.save(models.build(BertConfig(vocab_size=30, n_layers=1, d_model=16, n_heads=2, d_ff=32, seq_len=8)), tmp_path / "bert")
    with pytest.raises(UserError, match="not for encoders"):
        engines.open(find(str(tmp_path / "bert")), "compiled", "int8")


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
