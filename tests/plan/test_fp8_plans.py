"""Plans of layout.precision=fp8: which products are in fp8, what that takes, and where it is refused. Oracles: closed forms, torchao's own Linear."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradus import hardware
from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.layers import capabilities
from gradus.patch import replaced
from gradus.plan import engine, trace
from gradus.plan.answer import Request, answer, serve
from gradus.plan.case import Case
from gradus.plan.step import step_time
from gradus.plan.trace import Traced, trace_recipe

sys.path[:0] = [str(Path(__file__).parent)]

from test_trace import recipe  # noqa: E402

D, KV, FF, VOCAB, LAYERS = 64, 32, 256, 512, 2
BLOCK = 2 * D * D + 2 * D * KV + 3 * D * FF  # elements of a block's linear layers: q and output, k and v, gate, up and down


def llama(precision: str, layers: int = LAYERS, **layout):
    r = recipe("llama", layers=layers, d=D, vocab=VOCAB, precision=precision, **layout)
    assert (r.model.n_kv_heads * D // r.model.n_heads, r.model.d_ff) == (KV, FF)
    return r


def products(traced: Traced, dtype: str, phase: str = "") -> float:
    """Operations of the matrix products in a dtype."""
    return sum(key.flops * n for key, n in traced.ops.items() if key.kind == "matmul" and key.dtype == dtype and phase in ("", key.phase))


def test_which_share_of_the_products_is_in_fp8():
    """Of every block's linear layers the product forward and both backward; the head's stay. As many operations as in bf16."""
    fp8, bf16 = (trace_recipe(llama(precision), target="cuda") for precision in ("fp8", "bf16"))
    inside, outside = products(fp8, "fp8"), products(fp8, "bf16")
    assert inside / outside == LAYERS * BLOCK / (D * VOCAB)
    assert inside + outside == products(bf16, "bf16") and products(bf16, "fp8") == 0
    assert products(fp8, "fp8", "backward") == 2 * products(fp8, "fp8", "forward")


def test_checkpointing_computes_the_products_again_in_fp8():
    traced = trace_recipe(llama("fp8", checkpointing="full"), target="cuda")
    assert products(traced, "fp8", "backward") == 3 * products(traced, "fp8", "forward")


def test_no_weight_of_a_block_is_kept_in_another_type():
    """bf16 keeps a copy of every linear layer's weight until the step ends; in fp8 only the head's is kept, and no copy in fp8 is. What the forward
    pass keeps for the backward pass besides is the same."""
    fp8, bf16 = (trace_recipe(llama(precision), target="cuda") for precision in ("fp8", "bf16"))
    assert bf16.memory["gathered"] - fp8.memory["gathered"] == 2 * LAYERS * BLOCK
    assert fp8.memory["activations"] == bf16.memory["activations"]


def test_rows_that_are_no_multiple_of_16_are_filled_up():
    """The weight's gradient sums over 3 × 10 rows; the input's over widths of outputs."""
    r = recipe("gpt", samples=3, layers=1, seq=10, precision="fp8")
    backward = [key.shape for key in trace_recipe(r, target="cuda").ops if key.dtype == "fp8" and key.kind == "matmul" and key.phase == "backward"]
    assert {k for _, _, _, k in backward} == {32, 64, 256}


def test_a_plan_of_many_layers_is_that_of_its_parts():
    case = Case.of(llama("fp8", layers=5), 1, "cuda")
    planned, traced = engine.plan(case), trace_recipe(llama("fp8", layers=5), target="cuda")
    in_fp8 = sum(op.flops * op.count for op in planned.work.micro if op.kind == "matmul" and op.dtype == "fp8")
    assert in_fp8 == pytest.approx(products(traced, "fp8"))
    assert planned.memory.allocated == pytest.approx(traced.peak, rel=0.01)


def test_products_are_priced_by_the_peak_in_fp8_and_casts_by_whether_they_are_compiled():
    h100 = Cluster(hardware.find("H100"), 1)

    def parts(precision: str, compiled: str = "none") -> dict[str, float]:
        work = engine.plan(Case.of(recipe("llama", samples=16, layers=2, d=4096, seq=512, precision=precision, compile=compiled), 1, "cuda")).work
        return step_time(work, h100).parts

    bf16, eager, compiled = parts("bf16"), parts("fp8"), parts("fp8", "default")
    assert 0.5 * bf16["matmul"] < eager["matmul"] < 0.9 * bf16["matmul"] and compiled["matmul"] == eager["matmul"]
    assert compiled["memory"] < bf16["memory"] < eager["memory"]  # of weights there is no copy in bf16


BARE = ("model.n_layers=2", "model.d_model=256", "model.n_heads=4", "model.d_ff=1024", "model.seq_len=256", "batch.samples=8", "layout.precision=fp8")


def test_the_answer_says_the_peak_that_utilisation_is_of():
    made = answer(Request("gpt2-small", BARE, "8xH100"))
    (mfu,) = (row for row in made.rows if row.name == "time/mfu")
    assert mfu.conditions["dtype"] == "bf16" and any("MFU and HFU are shares of the peak in bf16" in note for note in made.notes)
    assert any("layout.compile=default" in note for note in made.notes) and "in fp8" in made.headline[0]


def test_use_has_no_notes_on_training():
    assert not any("fp8" in note for note in serve(Request("gpt2-small", BARE, "H100")).notes)


@pytest.mark.parametrize("on", ["8xA100", "V100"])
def test_a_device_without_fp8_is_refused(on):
    name = hardware.cluster(on).device.name
    with pytest.raises(UserError) as e:
        answer(Request("gpt2-small", BARE, on))
    assert str(e.value) == f"layout.precision=fp8: no peak of {name} in fp8 is known. Use layout.precision=bf16."


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_torchaos_own_linear_takes_as_much(family, checkpointing):
    """In the place of the plan's: the same memory but for scalars, and the same products."""
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    r = recipe(family, precision="fp8", checkpointing=checkpointing)
    ours = trace_recipe(r, target="cuda")

    def torchaos(linear: nn.Linear, fused: bool) -> nn.Module:
        new = capabilities.fp8(linear)
        plain = new.forward
        new.forward = lambda x: plain(x.to(torch.bfloat16))  # it asks for a GPU's autocast
        return new

    with replaced(trace, "_CudaFp8", torchaos):
        theirs = trace_recipe(r, target="cuda")
    assert ours.memory == {name: pytest.approx(nbytes, abs=64) for name, nbytes in theirs.memory.items()}
    assert products(ours, "fp8") + products(ours, "bf16") == products(theirs, "bf16")  # a mode sees the products of its tensors, not what they run
