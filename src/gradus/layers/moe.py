"""Mixture of experts: many feed-forward networks, of which each token takes a few."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.layers.feedforward import ACTIVATIONS, GatedFeedForward
from gradus.layers.kernels import autocast, no_autocast

# ---------------------------------------------------------------- matrix products of groups of rows
# Operators of their own: how many rows a group has is a value, which tensors without values (meta, fake) do not tell,
# and so no shape may depend on it. On a GPU they are torch.nn.functional.grouped_mm where it can do it, which does not
# wait for the device.


def has_fused(dtype: torch.dtype, device: torch.device, *widths: int) -> bool:
    """Whether torch.nn.functional.grouped_mm multiplies such matrices: in bf16, on CUDA from capability 8.0 on, in
    widths of whole 16 bytes."""
    if dtype != torch.bfloat16 or device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return all(width % 8 == 0 for width in widths)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


@torch.library.custom_op("gradus::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The first counts[0] rows of x times weights[0], the next counts[1] times weights[1], ...: (rows, d_in), (groups,
    d_in, d_out), integers (groups,) that sum to rows -> (rows, d_out). A group may have no row."""
    if len(x) and has_fused(x.dtype, x.device, *weights.shape[1:]):
        return F.grouped_mm(x.contiguous(), weights, offs=_ends(counts))
    out = x.new_empty(x.shape[0], weights.shape[2])
    sizes = counts.tolist()
    for rows, weight, result in zip(x.split(sizes), weights, out.split(sizes), strict=True):
        torch.mm(rows, weight, out=result)
    return out


@grouped_mm.register_fake
def _(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])


@torch.library.custom_op("gradus::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Of each group the rows of x, transposed, times the rows of y: (rows, d_in), (rows, d_out), (groups,) -> (groups,
    d_in, d_out). That of a group without rows is 0."""
    if len(x) and has_fused(x.dtype, x.device, x.shape[1], y.shape[1]):
        out = F.grouped_mm(x.contiguous().T, y.contiguous(), offs=_ends(counts))
        # pytorch/pytorch#172439: on some GPUs not 0 by itself
        return out.masked_fill_((counts == 0)[:, None, None], 0.0)
    out = x.new_empty(counts.shape[0], x.shape[1], y.shape[1])
    sizes = counts.tolist()
    for a, b, result in zip(x.split(sizes), y.split(sizes), out, strict=True):
        torch.mm(a.T, b, out=result)
    return out


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], x.shape[1], y.shape[1])


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor):
    x, weights, counts = ctx.saved_tensors
    to_x = grouped_mm(grad, weights.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    to_weights = grouped_outer(x, grad, counts) if ctx.needs_input_grad[1] else None
    return to_x, to_weights, None


grouped_mm.register_autograd(_backward, setup_context=_keep)


# ---------------------------------------------------------------- the layer


class ExpertLinear(nn.Module):
    """A linear layer for each expert: weight (n_experts, d_in, d_out), bias (n_experts, d_out).

    `local(parameter)` is what this process has of it; it may be replaced (parallel.expert).
    """

    local: Callable[[Tensor], Tensor] = staticmethod(lambda parameter: parameter)

    def __init__(self, n_experts: int, d_in: int, d_out: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, d_in, d_out))
        self.bias = nn.Parameter(torch.empty(n_experts, d_out)) if bias else None
        for parameter in self.parameters():  # as nn.Linear, expert by expert
            nn.init.uniform_(parameter, -(d_in**-0.5), d_in**-0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: (rows, d_in), sorted by expert, counts: (n_experts,) -> (rows, d_out)."""
        x, weight = autocast(x, self.local(self.weight))  # PyTorch casts for its own operators only
        x = grouped_mm(x, weight, counts)
        if self.bias is None:
            return x
        # (rows,); without output_size it waits for the device
        expert = torch.repeat_interleave(counts, output_size=x.shape[0])
        return x + self.local(self.bias).to(x.dtype)[expert]


class Experts(nn.Module):
    """One FeedForward, or GatedFeedForward, for each expert."""

    def __init__(self, d_model: int, d_ff: int, n_experts: int, activation: str, gated: bool, bias: bool):
        super().__init__()
        self.gate = ExpertLinear(n_experts, d_model, d_ff, bias) if gated else None
        self.up = ExpertLinear(n_experts, d_model, d_ff, bias)
        self.down = ExpertLinear(n_experts, d_ff, d_model, bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: (rows, d_model), sorted by expert, counts: (n_experts,) -> (rows, d_model)."""
        up = self.up(x, counts)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x, counts)) * up
        return self.down(hidden, counts)


class MixtureOfExperts(nn.Module):
    """Σ over the top_k likeliest experts of a token: weight · expert(x) (Shazeer et al. 2017; weights as in Jiang et
    al. 2024, section 2.1: a softmax over the chosen; with top_k=1 it is 1, and the router learns from the balance loss
    alone). An expert is a FeedForward, or with `gated` a GatedFeedForward. No token is dropped: an expert takes as many
    as choose it. The router computes in fp32 (Fedus et al. 2021, section 2.4).

    norm_top_k: False for the weights of a softmax over all experts. d_shared: the width of one more expert, gated, that
    every token takes, with `shared_gate` times a sigmoid of the token (Yang et al. 2024, section 2.2.2). sigmoid: of
    scores, in place of the softmax, and a bias of each expert that counts for the choice alone (DeepSeek-AI 2024,
    DeepSeek-V3, equations 12 to 16, without groups of experts or a factor).

    `dispatch(experts, rows, counts)` brings rows (tokens · top_k, d_model), sorted by expert, to their experts and
    back; it may be replaced from outside. `balance`: what the last forward pass left, see `keep_balance`.
    """

    def __init__(
        self, d_model: int, d_ff: int, n_experts: int, top_k: int, activation: str, gated: bool = False,
        bias: bool = False, norm_top_k: bool = True, d_shared: int | None = None,
        shared_gate: bool = True, sigmoid: bool = False,
    ):  # fmt: skip
        super().__init__()
        assert top_k <= n_experts, f"top_k={top_k} is more than n_experts={n_experts}"
        self.n_experts, self.top_k, self.norm_top_k = n_experts, top_k, norm_top_k
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = Experts(d_model, d_ff, n_experts, activation, gated, bias)
        self.shared = GatedFeedForward(d_model, d_shared, activation) if d_shared else None
        self.shared_gate = nn.Linear(d_model, 1, bias=False) if d_shared and shared_gate else None
        self.register_buffer("choice_bias", torch.zeros(n_experts) if sigmoid else None)
        self.dispatch: Callable[[Experts, Tensor, Tensor], Tensor] = Experts.__call__
        self.keeps_balance = False
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, d_model), and so the result."""
        with no_autocast(x.device):
            scores = F.linear(x.float(), self.router.weight.float())  # (batch, seq, n_experts)
        if self.choice_bias is None:
            probabilities = scores.softmax(-1)
            weights, chosen = probabilities.topk(self.top_k)  # (batch, seq, top_k)
        else:
            probabilities = scores.sigmoid()
            chosen = (probabilities + self.choice_bias).topk(self.top_k).indices
            weights = probabilities.gather(-1, chosen)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)  # equation 19, for the balance
        if self.norm_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        picks = chosen.flatten(1)  # (batch, seq · top_k)
        # (batch, n_experts)
        counts = picks.new_zeros(x.shape[0], self.n_experts).scatter_add(1, picks, torch.ones_like(picks))
        balance = balance_loss(probabilities, counts)  # kept or not: what checkpointing computes again must be the same
        if self.keeps_balance:
            self.balance = balance
        order = picks.flatten().argsort(stable=True)  # (batch · seq · top_k,), by expert
        # (batch · seq · top_k, d_model)
        out = self.dispatch(self.experts, x.flatten(0, 1)[order // self.top_k], counts.sum(0))
        out = out[order.argsort()].unflatten(0, chosen.shape)  # (batch, seq, top_k, d_model)
        out = (out * weights.unsqueeze(-1)).sum(-2).to(out.dtype)  # (batch, seq, d_model)
        if self.shared is None:
            return out
        return out + (1 if self.shared_gate is None else self.shared_gate(x).sigmoid()) * self.shared(x)


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """n_experts · Σ_i f_i · P_i of each sequence (Fedus et al. 2021, equations 4 to 6, for top_k experts and a sequence
    at a time: DeepSeek-AI 2024, equations 17 to 20). f_i is the part of the sequence's choices that fell on expert i,
    P_i the mean probability of expert i; 1 where all experts are equally loaded. Every position of the sequence counts,
    padding too.

    probabilities: (batch, seq, n_experts), counts: how often each expert was chosen, integers (batch, n_experts) ->
    (batch,), fp32.
    """
    f = counts / counts.sum(-1, keepdim=True)  # (batch, n_experts)
    return probabilities.shape[-1] * (f * probabilities.mean(1)).sum(-1)


@contextlib.contextmanager
def keep_balance(model: nn.Module) -> Iterator[list[Tensor]]:
    """After the block, the list holds the balance loss of every sequence, (batch,), from every mixture of experts in
    `model`, in their order, of the last forward pass inside. The modules keep nothing, also where a backward pass
    computes them again."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    kept: list[Tensor] = []
    for layer in layers:
        layer.keeps_balance = True
    try:
        yield kept
        kept += [layer.balance for layer in layers]
    finally:
        for layer in layers:
            layer.keeps_balance, layer.balance = False, None
