"""Published errors that need no part of Gradus to be shown: what docs/errata.md says of PyTorch and of arithmetic."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gradus.models import load
from gradus.torch_private import has_fbgemm

quantizes = pytest.mark.skipif(not has_fbgemm(), reason="this processor has no FBGEMM")


# ------------------------------------------------------------ the article on the copy task


def test_every_fortieth_step_is_the_first_of_an_epoch():
    """`i % 40 == 1`, where i starts again in each of 20 epochs of 20 batches."""
    printed = [20 * epoch + i + 1 for epoch in range(20) for i in range(20) if i % 40 == 1]
    assert printed == [20 * epoch + 2 for epoch in range(20)] and printed[-1] == 382


def test_transposed_heads_have_no_view():
    heads = torch.randn(2, 3, 5, 4).transpose(1, 2)  # (batch, seq, heads, head_dim)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        heads.view(2, 5, 12)
    assert torch.equal(heads.contiguous().view(2, 5, 12), torch.cat(heads.unbind(2), -1))


# ------------------------------------------------------------ the hands-on exercise with BERT


def test_every_replica_has_a_backward_pass_of_its_own():
    """The replicas' weights are copies within the graph, as DataParallel's are: one loss, a pass back through each."""
    model, x, passes = nn.Linear(3, 2), torch.randn(8, 3, requires_grad=True), []
    model.register_full_backward_hook(lambda module, grad_in, grad_out: passes.append(len(grad_out[0])))
    outputs = [functional_call(model, {name: p.clone() for name, p in model.named_parameters()}, (part,)) for part in x.chunk(2)]
    torch.cat(outputs).square().mean().backward()
    assert passes == [4, 4]
    weight = model.weight.grad.clone()
    model.zero_grad()
    model(x).square().mean().backward()
    torch.testing.assert_close(weight, model.weight.grad)


# ------------------------------------------------------------ the tutorial on scaling ViTs


def test_gelu_by_tanh_and_another_epsilon_are_close_and_not_the_same(tmp_path):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
    published, as_coded = ({"hidden_act": "gelu", "layer_norm_eps": 1e-6}, {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-5})
    right, other = (transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **kind)).eval() for kind in (published, as_coded))
    with torch.no_grad():
        for p in right.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    other.load_state_dict(right.state_dict())
    right.save_pretrained(tmp_path)
    images = torch.randn(4, 3, 8, 8)
    want, ours, got = right(images).logits, load(tmp_path).eval()(images), other(images).logits
    error = (got - want).abs().max() / want.abs().max()
    assert 1e-5 < error < 1e-2 and (ours - want).abs().max() < 1e-5 * want.abs().max()


def test_ceil_of_a_floored_quotient_is_the_floor():
    assert (math.ceil(10 // 4), -(-10 // 4)) == (2, 3)


def test_one_loss_over_the_interval_is_not_the_first_loss():
    """Ten classes before training: ln 10 = 2.30, printed as 0.0115."""
    loss = nn.functional.cross_entropy(torch.zeros(32, 10), torch.arange(32) % 10).item()
    assert loss == pytest.approx(math.log(10)) and loss / 200 == pytest.approx(0.0115, abs=5e-5)


def test_an_assignment_to_a_local_name_copies_nothing():
    source, target = nn.Linear(3, 3), nn.Linear(3, 3)
    before, weight = target.weight.clone(), target.weight
    weight = source.weight
    assert weight is source.weight and torch.equal(target.weight, before) and not torch.equal(target.weight, source.weight)
    target.weight.data.copy_(source.weight)
    assert torch.equal(target.weight, source.weight)


# ------------------------------------------------------------ the book chapter


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            return x + 1
        return x - 1


def test_a_traced_module_keeps_one_path_and_a_scripted_one_both():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted, traced = torch.jit.script(Branches()), torch.jit.trace(Branches(), torch.ones(2))
    assert scripted(-torch.ones(2)).tolist() == [-2, -2] == Branches()(-torch.ones(2)).tolist()
    assert traced(-torch.ones(2)).tolist() == [0, 0]


def test_the_older_checkpoint_has_no_gradient_where_inputs_have_none():
    """And a call that does not say which is warned of, or refused."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match="use_reentrant"):
            checkpoint(layer, x)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert not checkpoint(layer, x, use_reentrant=True).requires_grad
    assert checkpoint(layer, x, use_reentrant=False).requires_grad


@quantizes
def test_static_quantization_without_stubs_cannot_run():
    quantization = pytest.importorskip("torch.ao.quantization")
    x = torch.randn(8, 4)

    def converted(model: nn.Module) -> nn.Module:
        model.eval().qconfig = quantization.get_default_qconfig("fbgemm")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = quantization.prepare(model)
            prepared(x)
            return quantization.convert(prepared)

    linear = nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match="quantized::linear"):
        converted(nn.Sequential(linear))(x)
    stubs = converted(nn.Sequential(quantization.QuantStub(), linear, quantization.DeQuantStub()))
    assert (stubs(x) - linear(x)).abs().max() < 0.1


@quantizes
def test_dynamic_int8_takes_no_half_precision():
    """So "fp16, then dynamic quantization" is no one model."""
    quantization = pytest.importorskip("torch.ao.quantization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, torch.qint8)
    assert model(torch.randn(2, 4)).dtype == torch.float32
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Half"):
        model(torch.randn(2, 4).half())


def test_gradients_grow_where_nothing_sets_them_to_zero():
    weight = torch.ones(3, requires_grad=True)
    seen = []
    for _ in range(3):
        weight.sum().backward()
        seen.append(weight.grad[0].item())
    assert seen == [1, 2, 3]


# ------------------------------------------------------------ the lecture on distributed training


def test_keys_times_queries_do_not_fit_values_in_rows():
    q, k, v = torch.randn(5, 4), torch.randn(5, 4), torch.randn(5, 3)  # a row for each of 5 tokens
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        (k.T @ q).softmax(-1) @ v
    rows = (q @ k.T).softmax(-1) @ v
    columns = v.T @ (k @ q.T).softmax(0)  # tokens in columns: V softmax(Kᵀ Q)
    torch.testing.assert_close(rows, columns.T)
