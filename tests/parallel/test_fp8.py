"""Products in fp8: which layers have them, and torchao's against the same step in bf16."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch import nn

from gradus import cli, models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.layers import capabilities
from gradus.measure.modules import modules
from gradus.parallel import check
from gradus.parallel.apply import apply
from gradus.parallel.precision import Precision
from gradus.recipe.schema import Adapter, GPTConfig, Layout, LlamaConfig

CPU = torch.device("cpu")
SMALL = {"vocab_size": 48, "n_layers": 2, "d_model": 32, "n_heads": 2, "seq_len": 15}


def asked(config: LlamaConfig | GPTConfig, frozen: str = "") -> set[str]:
    """The names of the layers that are to have products in fp8."""
    model, found = models.build(config), []

    def note(linear: nn.Linear) -> nn.Linear:
        found.append(linear)
        return linear

    for name, p in model.named_parameters():
        p.requires_grad_(name != frozen)
    with capabilities.pretending(dataclasses.replace(capabilities.CPU, fp8=note)):
        apply(model, Layout(precision="fp8"))
    return {name for name, module in model.named_modules() if module in found}


ATTENTION, GATED = {f"attention.to_{name}" for name in ("q", "k", "v", "out")}, {f"feedforward.{name}" for name in ("gate", "up", "down")}


def test_the_blocks_linear_layers_alone():
    every = {f"blocks.{i}.{name}" for i in range(2) for name in ATTENTION | GATED}
    assert asked(LlamaConfig(**SMALL)) == every  # neither head nor embeddings
    assert asked(LlamaConfig(**SMALL), frozen="blocks.0.attention.to_q.weight") == every - {"blocks.0.attention.to_q"}


def test_routers_and_experts_stay():
    assert asked(LlamaConfig(**SMALL, n_experts=16)) == {f"blocks.{i}.{name}" for i in range(2) for name in ATTENTION}


def test_widths_that_are_no_multiples_of_16_stay():
    assert asked(LlamaConfig(**SMALL | {"d_model": 40})) == set()
    assert asked(LlamaConfig(**SMALL, d_ff=72)) == {f"blocks.{i}.{name}" for i in range(2) for name in ATTENTION}


def test_in_other_layouts_it_is_not_asked_for():
    model = models.build(LlamaConfig(**SMALL))
    with capabilities.pretending(dataclasses.replace(capabilities.CPU, fp8=lambda linear: pytest.fail("asked"))):
        apply(model, Layout(precision="bf16"))


def test_a_device_without_it_is_refused(capsys):
    with pytest.raises(UserError, match=r"^layout.precision=fp8 needs a CUDA device of capability 8.9 .* Use layout.precision=bf16.$"):
        Precision("fp8", CPU)
    assert cli.main(["train", "copy-task", "layout.precision=fp8", "layout.device=cpu"]) == 2
    (line,) = " ".join(capsys.readouterr().err.split()).split("error: ")[1:]
    assert line.startswith("layout.precision=fp8 needs a CUDA device") and line.endswith("Use layout.precision=bf16.")


@pytest.mark.parametrize(("capability", "installed", "says"), [
    ((8, 0), True, "needs a CUDA device of capability 8.9"), ((8, 9), False, "needs the package torchao .*, of the extra fp8"), ((9, 0), True, None),
])  # fmt: skip
def test_a_gpu_needs_the_capability_and_the_package(capability, installed, says, monkeypatch):
    """Of a GPU that is not here: what PyTorch and Python are asked, answered as they would answer."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, "torchao", nn if installed else None)
    if says is None:
        assert Precision("fp8", torch.device("cuda")).dtype == torch.bfloat16
        return
    with pytest.raises(UserError, match=says):
        Precision("fp8", torch.device("cuda"))


@pytest.mark.parametrize("more", [{"tensor": 2}, {"pipeline": 2, "schedule": "zero_bubble"}])
def test_what_is_not_built_is_named(more):
    (line,) = check.fits(LlamaConfig(**SMALL | {"n_layers": 4}), Layout(precision="fp8", **more))
    assert line.startswith("layout.precision: cannot be combined with layout.") and ". Use layout." in line


def test_an_adapter_is_named():
    (line,) = check.fits(LlamaConfig(**SMALL).trained(Adapter(rank=4)), Layout(precision="fp8"))
    assert line.startswith("layout.precision: cannot be combined with adapter.rank=4") and line.endswith("Use layout.precision=bf16.")


def test_the_module_tree_needs_no_device_that_has_it():
    """It holds the same parameters."""
    fp8, bf16 = (modules(recipes.load("copy-task", [f"layout.precision={numbers}"])) for numbers in ("fp8", "bf16"))
    assert fp8 == bf16


# ---------------------------------------------------------------- torchao's


def step(precision: str, checkpointing: str = "none") -> tuple[float, dict[str, torch.Tensor], list[str]]:
    """(loss, gradients, the state's names) of one step. PyTorch computes scaled products in fp8 on a CPU too."""
    torch.manual_seed(0)
    model, ids = models.build(LlamaConfig(**SMALL)), torch.randint(48, (2, 15))
    with capabilities.pretending(dataclasses.replace(capabilities.CPU, fp8=capabilities.fp8)):
        numbers = Precision(precision, CPU)
        parallel = apply(model, Layout(precision=precision, checkpointing=checkpointing), device=CPU)
    with numbers.autocast():
        loss = nn.functional.cross_entropy(parallel.bare(ids).float().flatten(0, 1), ids.roll(-1, 1).flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, list(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_gradients_are_near_those_of_fp32(checkpointing):
    """2 × 15 rows: no multiple of 16. e5m2 has two bits after the point, so that a gradient may be off by an eighth; names are unchanged."""
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    (exact, right, names), (_, near, _), (fp8, found, kept) = (step(numbers, checkpointing) for numbers in ("fp32", "bf16", "fp8"))
    off, off_in_bf16 = ({name: ((g - right[name]).norm() / right[name].norm()).item() for name, g in every.items()} for every in (found, near))
    assert kept == names and found.keys() == right.keys() and all(g.dtype == torch.float32 for g in found.values())
    assert max(off.values()) < 0.3 and abs(fp8 - exact) < 0.02 * exact
    assert min(off[name] for name in off if ".to_" in name) > 2 * max(off_in_bf16.values())  # they are in fp8
