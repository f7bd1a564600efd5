"""GGUF: one file with weights, tokenizer and chat template, for llama.cpp and what is built on it (docs/export.md)."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradus import files, models
from gradus.errors import UserError, need
from gradus.infer import ModelSource, exported, gguf_tokenizer, sidecar
from gradus.models import weights
from gradus.models.values import fill
from gradus.models.weights.gguf import Layout
from gradus.models.weights.stored import Stored

FILE = "model.gguf"
# of matrices → how far what is read back may be from the model: weights, in parts of the largest of a tensor (by half a
# step of rounding; of q4_0 by one), and the perplexity of what the model itself would write
LIMITS = {"f32": (1e-4, 1e-4), "f16": (5e-4, 0.01), "bf16": (4e-3, 0.01), "q8_0": (5e-3, 0.01), "q4_0": (0.13, 0.25)}
FULL = ("wpe.weight", "mlp.gate.weight")  # that llama.cpp wants in fp32, as all vectors


@torch.no_grad()
def write(source: ModelSource, to: Path, kind: str = "f16") -> Iterator[str]:
    """Fill a folder that becomes `to`: model.gguf, and export.json with its check. kind: of LIMITS. Yields lines for
    the user. Raises UserError for a model, a tokenizer or a type that the file cannot hold, and where what is read
    back is too far from the model; nothing is then left."""
    if kind not in LIMITS:
        raise UserError(
            f"--type={kind}: {', '.join(LIMITS)} are written; "
            "K-quants and others are made of f16: llama-quantize model.gguf OUT.gguf Q4_K_M."
        )
    gguf, layout = need("gguf", "gguf", "--as gguf"), Layout(source.config)
    model = models.load_plain(source.path).eval().requires_grad_(False)
    exported.check_finite(source, model)
    told = {
        "general.type": "model", "general.name": (source.run or source.folder).resolve().name,
        "general.quantization_version": 2,
        "general.file_type": int(getattr(gguf.LlamaFileType, f"MOSTLY_{kind.upper()}", 0)),
    }  # fmt: skip
    told |= {f"{layout.arch}.{key}": value for key, value in layout.keys.items()} | gguf_tokenizer.keys(source)
    with sidecar.folder(to) as folder:
        writer = gguf.GGUFWriter(folder / FILE, layout.arch)
        types = gguf.GGUFValueType
        for key, value in told.items():
            writer.add_key_value(key, value, types.UINT32 if type(value) is int else types.get_type(value))
        writer.add_chat_template(gguf_tokenizer.chat_templates(source))
        for name, (theirs, parts) in tensors(gguf, layout, model).items():
            x = [layout.moved(theirs, part.read().float()) for part in parts.values()]
            values = (torch.stack(x) if ".experts." in theirs else x[0]).contiguous().numpy()
            qtype = type_of(gguf, theirs, values.shape, kind)
            with np.errstate(over="ignore"):  # of fp16; the check tells of it
                writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)
        if (factors := layout.frequency_factors()) is not None:
            writer.add_tensor("rope_freqs.weight", factors.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        line = check(source, model, read_back(gguf, layout, model, folder / FILE), kind)
        files.write_json(folder / exported.FILE, {"format": "gguf", "precision": kind, "graphs": {}, "told": line})
    yield f"{source.path} → {to / FILE}: {layout.arch}, {kind}, {(to / FILE).stat().st_size / 1e6:,.1f} MB"
    yield line


def tensors(gguf: Any, layout: Layout, model: nn.Module) -> dict[str, tuple[str, dict[str, Stored]]]:
    """GGUF's name → (Hugging Face's, of experts without numbers; the tensors of this name, of experts several)."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[layout.arch.upper()], layout.config.n_layers)
    found: dict[str, tuple[str, dict[str, Stored]]] = {}
    for name, stored in weights.theirs(model, {n: Stored.of(p) for n, p in model.named_parameters()}).items():
        theirs = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        found.setdefault(ours, (theirs, {}))[1][name] = stored
    return found


def type_of(gguf: Any, theirs: str, shape: tuple[int, ...], kind: str) -> Any:
    """The type of a tensor: vectors and FULL in fp32; rows that are no multiple of a block of 32 in fp16; beside q4_0
    the table of tokens and the output, on which most depends, in q8_0."""
    if len(shape) == 1 or theirs.endswith(FULL):
        kind = "f32"
    elif kind.startswith("q") and shape[-1] % 32:
        kind = "f16"
    elif kind == "q4_0" and theirs.endswith(("embed_tokens.weight", "wte.weight", "lm_head.weight")):
        kind = "q8_0"
    return gguf.GGMLQuantizationType[kind.upper()]


def read_back(gguf: Any, layout: Layout, model: nn.Module, file: Path) -> nn.Module:
    """The model with the weights of a file."""
    found, theirs = tensors(gguf, layout, model), {}
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name not in found:  # factors of frequencies
            continue
        name, parts = found[tensor.name]
        x = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for part, value in zip(parts, x if ".experts." in name else [x]):
            theirs[part] = Stored.of(layout.moved(name, value, back=True))
    read = copy.deepcopy(model)
    fill(dict(read.named_parameters()), weights.fitting(read, theirs, file)[0])
    return read


def check(source: ModelSource, model: nn.Module, read: nn.Module, kind: str) -> str:
    """What was compared, in a line. Raises UserError where they are too far apart."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(source.config.vocab_size, (4, min(64, source.config.longest or 64)), generator=draw)
    one, other = model(ids=ids).flatten(0, 1), read(ids=ids).flatten(0, 1)
    own, loss = (float(nn.functional.cross_entropy(logits, one.softmax(-1))) for logits in (one, other))
    off = {
        "weights": max(
            float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
            for a, b in zip(model.parameters(), read.parameters())
        ),
        "perplexity": math.expm1(loss - own),  # expected, of tokens that the model draws
    }
    for (what, far), limit in zip(off.items(), LIMITS[kind]):
        if not far <= limit:
            raise UserError(
                f"--as gguf --type {kind}: {what} read back differ from the model's by {far:.1e} (limit {limit:g}). "
                "Nothing was written. Use another --type."
            )
    return (
        f"checked against PyTorch in fp32, read back by gguf's reader: weights differ by {off['weights']:.1e} of a "
        f"tensor's largest, logits by {float((one - other).abs().max()):.1e} where they reach "
        f"{float(one.abs().max()):.3g}, perplexity by {off['perplexity']:+.2%}"
    )
