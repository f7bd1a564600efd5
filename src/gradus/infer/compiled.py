"""The compiled engine: a decoding step with shapes that never change, compiled, over weights that are stored for
products with one row. Applied to the model from outside; the model's own code is what is compiled."""

from __future__ import annotations

import dataclasses
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.errors import UserError
from gradus.infer import ModelSource
from gradus.infer.engines import Torch
from gradus.layers import Cache, use_linears
from gradus.layers.small import quantize_int8
from gradus.parallel.apply import has_compiler
from gradus.parallel.device import pick_device
from gradus.parallel.precision import HALF
from gradus.torch_private import int4_pack, int4_product, int8_product
from gradus.train.machine import large_pages

CACHE_MULTIPLE = 64  # a cache's tokens: requests of nearly one length share a compiled step
LINE = 64  # bytes: where a tensor may begin
GROUP = 32  # weights that share a scale in int4
INTEGER = {  # what is computed in, on a processor
    "int8": "fp32, products of several rows in bf16, from int8 weights",
    "int4": "fp32, products in bf16, from int4 weights",
}


def one_row(x: Tensor) -> bool:
    """Whether a product becomes one compiled loop over the weights as they are stored, in which none is ever stored in
    fp32. It reads them two to three times as fast as the libraries' products with one row do."""
    return len(x) == 1 and torch.compiler.is_compiling()


class StoredLinear(nn.Module):
    """A Linear with its weight stored in fp32, bf16 or fp16, computed in fp32: what is read from memory is what takes
    the time of a product with one row."""

    def __init__(self, bias: Tensor | None, **numbers: Tensor):
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.load_numbers(**numbers)

    @classmethod
    def of(cls, linear: nn.Linear, dtype: torch.dtype = torch.float32) -> StoredLinear:
        return cls(linear.bias, **cls.numbers(linear.weight.detach().to(dtype)))

    @staticmethod
    def numbers(weight: Tensor) -> dict[str, Tensor]:
        """(out, in) -> the numbers that are stored, the same on every machine."""
        return {"weight": weight}

    def load_numbers(self, weight: Tensor) -> None:
        """Take stored numbers, as this machine computes with them."""
        self.weight = nn.Parameter(weight, requires_grad=False)  # (out, in)

    def product(self, x: Tensor) -> Tensor:
        """x: (rows, in) -> (rows, out)."""
        if one_row(x):
            return (self.weight.float() * x.float()).sum(-1)[None].to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.flatten(0, -2))
        y = y if self.bias is None else y + self.bias
        return y.unflatten(0, x.shape[:-1])


class Int8(StoredLinear):
    """8 bits a weight, with one scale for each output."""

    @staticmethod
    def numbers(weight: Tensor) -> dict[str, Tensor]:
        packed, scale = quantize_int8(weight)
        return {"packed": packed, "scale": scale.bfloat16()}

    def load_numbers(self, packed: Tensor, scale: Tensor) -> None:
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)

    def product(self, x: Tensor) -> Tensor:
        if one_row(x):
            return ((self.packed.float() * x.float()).sum(-1) * self.scale.float())[None].to(x.dtype)
        if x.device.type == "cpu" and whole_blocks(*self.packed.shape):  # with fp32 inputs ten times slower
            return int8_product(x.bfloat16(), self.packed, self.scale).to(x.dtype)
        return F.linear(x, self.packed.to(x.dtype)) * self.scale.to(x.dtype)  # becomes one kernel when compiled


class Int4(StoredLinear):
    """4 bits a weight, with a scale and a middle for every GROUP inputs."""

    @staticmethod
    def numbers(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.unflatten(1, (-1, GROUP))  # (out, groups, GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).clamp_min(1e-12)
        numbers = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).flatten(1).byte()
        middle = torch.stack((scale, low + 8 * scale), dim=-1)  # w = (number - 8) scale + middle
        scales = middle.transpose(0, 1).contiguous().bfloat16()  # (groups, out, 2)
        return {"pairs": numbers[:, ::2] << 4 | numbers[:, 1::2], "scales": scales}  # pairs: (out, in / 2)

    def load_numbers(self, pairs: Tensor, scales: Tensor) -> None:
        numbers = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1).int()  # (out, in), 0 to 15
        self.register_buffer("packed", int4_pack(numbers))
        self.register_buffer("scales", scales)

    def product(self, x: Tensor) -> Tensor:
        return int4_product(x.bfloat16(), self.packed, GROUP, self.scales).to(x.dtype)


def whole_blocks(outputs: int, inputs: int) -> bool:
    """Whether PyTorch's kernels for packed weights take this shape; others crash some of them."""
    return inputs % GROUP == 0 and outputs % 16 == 0


def linear_kind(precision: str, device: torch.device) -> Callable[[nn.Linear], nn.Module]:
    """What replaces a Linear."""
    if precision == "int8":
        return Int8.of
    if precision == "int4":
        return lambda linear: (Int4 if whole_blocks(*linear.weight.shape) else Int8).of(linear)
    if device.type != "cpu":  # its libraries have kernels for one row
        return lambda linear: linear
    return lambda linear: StoredLinear.of(linear, HALF.get(precision, torch.float32))


def other_dtype(precision: str, device: torch.device) -> str:
    """The type of everything that is no Linear's weight, and on a GPU of what is no integer."""
    return "fp32" if device.type == "cpu" else {"int8": "bf16", "int4": "bf16"}.get(precision, precision)


def pack_memory(model: nn.Module) -> None:
    """Move a model's numbers into one piece of memory of large pages. A step reads them all."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}  # of tied weights one
    tensors = [*model.parameters(), *model.buffers()]
    memory = large_pages(sum(t.nbytes + LINE for t in tensors))
    for tensor in tensors:
        key, size = (tensor.data_ptr(), tensor.shape), tensor.nbytes
        if key not in copies:
            copies[key] = memory[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            memory = memory[-(-size // LINE) * LINE :]
        tensor.data = copies[key]


class Compiled(Torch):
    """Prefill as the model is; a decoding step, or an encoder's whole pass, compiled.

    On a CPU the weights are stored as `precision` says and everything else is fp32. On a GPU everything is in fp32,
    bf16 or fp16, with bf16 beside int8 weights, and a step is one CUDA graph.
    """

    name = "compiled"
    PRECISIONS = {
        "fp32": ("causal", "cross", "both"), "bf16": ("causal", "cross"), "fp16": ("causal", "cross"),
        "int8": ("causal", "cross"), "int4": ("causal", "cross"),
    }  # fmt: skip

    def __init__(self, source: ModelSource, precision: str = "fp32"):
        device = pick_device("auto")
        on_gpu = device.type != "cpu"
        if on_gpu and precision == "int4":
            raise UserError("--engine compiled --precision int4: for CPUs only. Use --precision int8.")
        if not on_gpu and not has_compiler():
            mend = "Install g++ (or set CXX to a compiler), or use --engine torch"
            raise UserError(f"--engine compiled: torch.compile finds no C++ compiler here. {mend}.")
        rest = other_dtype(precision, device)
        super().__init__(dataclasses.replace(source, model=None), precision if source.export_info else rest)
        self.precision, self.first = precision, True
        if source.family.attention != "both":
            with torch.no_grad():
                if not source.export_info:
                    kind = linear_kind(precision, device)
                    use_linears(self.model.requires_grad_(False), lambda name, linear: kind(linear))
                if not on_gpu:
                    pack_memory(self.model)
        self.computes = rest if precision == rest else f"{rest} from {precision} weights"
        if precision in INTEGER and not on_gpu:
            self.computes = INTEGER[precision]
        # What a product reads is stored first: inside the loop over the weights it would be computed for each output.
        options = {"cpp_wrapper": True, "realize_reads_threshold": 0, "realize_opcount_threshold": 0}
        options |= {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        # A code object of its own: what is compiled belongs to the code, and these guards do not tell engines apart.
        own = types.MethodType(types.FunctionType(_step.__code__.replace(), globals(), "_step"), self.model)
        self._whole = torch.compile(self.model, dynamic=True)
        self._step = torch.compile(own, **{"mode": "reduce-overhead"} if on_gpu else {"options": options})

    def prefill(self, *args: Any, room: int | None = None, **kwargs: Any) -> Tensor:
        if room is not None:
            room = -(-room // CACHE_MULTIPLE) * CACHE_MULTIPLE
            room = min(room, self.config.longest or room)
        logits = super().prefill(*args, room=room, **kwargs)
        if room is not None:
            self.cache.fix()
        return logits

    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._timed_first(lambda: self._step(ids, positions, self.cache, self.memory))

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.source.family.attention != "both":
            return self.model(*args, **kwargs)
        return self._timed_first(lambda: self._whole(*args, **kwargs))

    def _timed_first(self, call: Callable[[], Tensor]) -> Tensor:
        """The first call of what is compiled takes long, and is shown."""
        if not self.first:
            return call()
        began, self.first = time.perf_counter(), False
        print("compiling ...", file=sys.stderr, flush=True)
        out = call()
        print(f"first call, compilation included: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        return out


def _step(
    model: nn.Module, ids: Tensor, positions: Tensor, cache: Cache, memory: tuple[Tensor, Tensor] | None
) -> Tensor:
    """What is compiled: one token a row."""
    state = {"positions": positions[:, None], "cache": cache}
    if memory is None:
        return model(ids[:, None], **state)[:, -1]
    return model.decode(ids[:, None], *memory, **state)[:, -1]
