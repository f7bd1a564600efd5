"""The passes of a model in use are read off the very modules: `models.decoding.Steps`, or an encoder's forward pass,
runs on tensors without values. One block of each kind runs and counts for all of its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradus import models
from gradus.layers import Attention, Cache, FeedForward, GatedFeedForward, MixtureOfExperts
from gradus.layers.capabilities import OTHER, pretending
from gradus.models.decoding import Steps
from gradus.models.family import Family
from gradus.parallel.mesh import Mesh
from gradus.parallel.pipeline import Skip
from gradus.plan.passes import Pass, Usage, active_elements
from gradus.plan.profiles import block_kinds
from gradus.plan.trace import Recorder
from gradus.recipe.schema import ModelConfig
from gradus.torch_private import EFFICIENT, FLASH, memory_id, tree_leaves


class PassTracer(Recorder):
    """Runs a model of `batch` rows, and notes what its passes compute, read and sum."""

    def __init__(self, config: ModelConfig, batch: int):
        super().__init__(Mesh.single(), {})
        self.family, self.config, self.batch = models.lookup(config.family), config, batch
        self.model = models.whole(config).eval()
        self.times = _keep_one_of_each_kind(self.model, self.family)
        self.elements = active_elements(self.model)
        self.counts: Counter = Counter()
        for block, times in self.times.items():
            block.register_forward_pre_hook(lambda *_, times=times: setattr(self, "share", times))
            block.register_forward_hook(lambda *_: setattr(self, "share", 1))
        for module in _summed(self.model, self.family):
            module.register_forward_hook(self._add_sum)

    def usage(self, tokens: int, source: int) -> Usage:
        """Arguments as of `usage_of`."""
        steps, prompt, token = Steps(self.model), self._ids(tokens), self._ids(1)
        if self.family.attention == "both":
            inputs = self._images() if self.config.reads == "images" else prompt[0]
            forward, output = self._trace(lambda: self.model(inputs))
            return Usage(self._pass(forward), None, output.shape[-1])
        if self.family.attention == "causal":
            prefill, scores = self._trace(lambda: steps.prefill(*prompt))
            if not steps.keeps:  # every token is computed anew
                return Usage(self._pass(prefill), self._pass(prefill), scores.shape[-1])
            steps.cache = self.model.new_cache(self.batch, tokens)
        else:
            prefill, scores = self._trace(lambda: steps.prefill(*token, *self._ids(source), room=tokens))
            steps.cache.length = 0  # the same token again, so that the difference is the source's part
            prefill -= self._trace(lambda: steps.decode(token[0][:, 0], token[1]))[0]
        steps.cache.fix()
        decode, _ = self._trace(lambda: steps.decode(token[0][:, 0], token[1]))
        return Usage(self._pass(prefill), self._pass(decode), scores.shape[-1], *self._cached(steps.cache))

    def _pass(self, counts: Counter) -> Pass:
        sums = [(key[1], times) for key, times in counts.items() if key[0] == "sum"]
        weights = sum(self.elements[key[1]] * times for key, times in counts.items() if key[0] == "read")
        kernels = [(*key[1:], times) for key, times in counts.items() if key[0] == "kernel"]
        return Pass(kernels, weights, sums)

    def _cached(self, cache: Cache) -> tuple[int, int]:
        """own and cross of `Usage`."""
        own = sum(layer.k.numel() + layer.v.numel() for layer in cache.layers)
        layers = zip(self.model.get_submodule(self.family.stacks[-1].blocks), cache.layers)
        cross = (self.times.get(block, 0) * sum(t.numel() for t in layer.cross or ()) for block, layer in layers)
        return own, sum(cross)

    def _ids(self, length: int) -> tuple[Tensor, Tensor]:
        """(ids (batch, length), lengths (batch,))."""
        kind = {"dtype": torch.long, "device": "meta"}
        return torch.empty(self.batch, length, **kind), torch.empty(self.batch, **kind)

    def _images(self) -> Tensor:
        c = self.config
        return torch.empty(self.batch, c.n_channels, c.image_size, c.image_size, device="meta")

    def _trace(self, call: Callable[[], Any]) -> tuple[Counter, Tensor]:
        """(counts, the first tensor that the call returns). The counts: ("kernel", kind, operations, shape) and ("sum",
        elements of an output that tensor parallelism sums) → how many; ("read", memory of a parameter) → how many are
        like it."""
        self.ops, self.counts, self.counting = {}, Counter(), True
        fused = replace(OTHER, skips_blocks=True, attention=_fused, blocks=_fused_window)
        with torch.no_grad(), pretending(fused), self:
            output = call()
        self.counts |= {("kernel", key.kind, key.flops, key.shape): n for key, n in self.ops.items() if key.flops}
        return self.counts, tree_leaves(output)[0]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function not in (torch.ops.aten.embedding.default, torch.ops.prim.device.default):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.counts |= {("read", key): self.share for key in map(memory_id, tensors) if key in self.elements}
        if function is torch.ops.aten.index.Tensor and getattr(args[1][0], "dtype", None) == torch.bool:
            # `Steps.prefill` selects a position of each row
            position = torch.empty(self.batch, dtype=torch.long, device="meta")
            args = args[0], [position] * args[1][0].dim()
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _add_sum(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        self.counts["sum", output.numel()] += self.share


def _fused(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor:
    """Attention as one kernel; PyTorch would take the plain way for tensors without values."""
    if v.shape[-1] == q.shape[-1]:
        return FLASH(q, k, v, 0.0, is_causal, False, scale=scale)[0]
    return EFFICIENT(q, k, v, None, False, 0.0, is_causal, scale=scale)[0]


def _fused_window(q: Tensor, k: Tensor, v: Tensor, blocks: Any, window: int, scale: float | None) -> Tensor:
    """Causal attention with a window as one kernel that computes no score outside of it: the first queries' triangle,
    then for each as many keys as the window has."""
    first, rest = q.tensor_split([window], dim=2)
    k, v = k[:, :, :window], v[:, :, :window]
    return torch.cat((_fused(first, k, v, is_causal=True), _fused(rest, k, v)), dim=2)


def _summed(model: nn.Module, family: Family) -> Iterator[nn.Module]:
    """The modules whose outputs tensor parallelism sums (parallel.tensor)."""
    kinds = Attention, FeedForward, GatedFeedForward, MixtureOfExperts
    rows = tuple(end for end, way in family.tensor.items() if way == "row")
    within = {m.shared for m in model.modules() if isinstance(m, MixtureOfExperts)}  # summed with the others
    for name, module in model.named_modules():
        if (isinstance(module, kinds) and module not in within) or name in family.tokens or name.endswith(rows):
            yield module


def _keep_one_of_each_kind(model: nn.Module, family: Family) -> dict[nn.Module, int]:
    """The blocks that stay in the model, with the number of blocks that each stands for."""
    times: dict[nn.Module, int] = {}
    for stack, kinds in zip(family.stacks, block_kinds(model.config)):
        blocks, first = model.get_submodule(stack.blocks), {}
        for i, block in enumerate(list(blocks)):
            kept = first.setdefault(kinds[i], block)
            times[kept] = times.get(kept, 0) + 1
            if kept is not block:
                blocks[i] = Skip()  # like one that runs
    return times
