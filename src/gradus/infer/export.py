"""`gradus export`: any checkpoint, of one process or of many in any layout, as files that other engines load
(docs/export.md)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from gradus import files, models
from gradus.errors import UserError
from gradus.infer import ModelSource, engines, export_gguf, exported, find, sidecar
from gradus.infer.graphs import DTYPES
from gradus.models import weights
from gradus.models.adapt import merged
from gradus.models.weights import checksums, peft


def export(
    name: str, to: Path, shard_gb: float = 5.0, kind: str = "hf", precision: str | None = None,
    opset: int | None = None, merge: bool = False, type: str | None = None,
) -> Iterator[str]:  # fmt: skip
    """Write a model to the folder `to`: in Hugging Face's layout, or as graphs (infer.exported), with its configuration
    and its tokenizer or normalisation, or as GGUF, of this type (None: f16), which holds all in one file.

    name: as `infer.find`; of a run, its best checkpoint or else its newest. precision: None: for hf as stored, else
    fp32. shard_gb: hf's largest file, in 10^9 bytes. merge: of an adapter the whole weights with its product added;
    else hf writes the adapter alone, as PEFT does, and graphs are of the merged weights. Yields lines for the user.
    Raises UserError where there is no model, or one whose logits are not finite, where a format or an option does not
    fit it, or where `to` is the folder that is read or holds something else.
    """
    source = find(name)
    graphs = kind != "hf"
    adapted = source.config.init is not None
    hf = peft.CONFIG if adapted and not merge else "config.json"
    free(source, to, exported.FILE if graphs else hf, "export" if graphs else "model")
    if source.export_info:
        raise UserError(f"{name}: an exported or quantized folder. Give the model that it was made from.")
    if opset is not None and kind not in ("onnx", "tensorrt"):
        raise UserError(f"--opset={opset}: it is ONNX's, and --as {kind} has none. Leave it out.")
    if (precision if kind == "gguf" else type) is not None:
        raise UserError(f"--as {kind}: --as gguf has --type, all others --precision. Leave the other out.")
    if merge and not adapted:
        raise UserError(f"--merge: {name} has no adapter. Leave it out.")
    if merge and graphs:
        raise UserError(f"--merge: --as {kind} writes merged weights anyway. Leave it out.")
    if not graphs:
        exported.check_finite(source)
        yield from in_hugging_face_layout(source, to, shard_gb, precision, merge, adapted)
        return
    if kind == "gguf":
        yield from export_gguf.write(source, to, type or "f16")
        return
    options = {"opset": opset} if opset else {}
    yield from exported.write(source, engines.kind(kind), to, precision or "fp32", **options)


def free(source: ModelSource, to: Path, file: str, what: str) -> None:
    """Raises UserError where the folder `to` holds something other than what an earlier call left, which has `file`."""
    read = source.folder.resolve()
    there = (to / file).is_file()
    lists = there and what != "model" and checksums.damage(to, lambda _: (), listed=checksums.names(to))
    for wrong, why in (
        (to.is_file(), "this is a file"),
        (to.resolve() in (read, *read.parents), "it holds the checkpoint that is read"),
        ((to / "training.json").is_file(), "this is a checkpoint of a run"),
        (to.is_dir() and os.listdir(to) and not there, f"it holds other files and no {what}"),
        (lists, f"all of it would be replaced, and its {lists}"),
    ):
        if wrong:
            raise UserError(f"--to={to}: {why}. Give a new folder, or an empty one.")


def in_hugging_face_layout(
    source: ModelSource, to: Path, shard_gb: float, precision: str | None, merge: bool, adapted: bool
) -> Iterator[str]:
    """config.json, model.safetensors (in shards above shard_gb) and what lies beside. One stored tensor is read at a
    time, and memory holds one shard of the result, never the model, unless it is merged."""
    dtype = None if precision is None else DTYPES[precision]
    new = not (to.is_dir() and os.listdir(to))  # else the weights alone are replaced, as a whole
    with sidecar.writing(to), files.aside(to) if new else contextlib.nullcontext(to) as folder:
        if merge:
            model = models.load(source.path).eval()
            models.save(merged(model).to(dtype), folder, shard_gb * 1e9)
        else:
            models.convert(source.path, folder, shard_gb * 1e9, dtype)
        with_tokenizer = sidecar.write(source, folder)
        checksums.write(folder)
    sizes = [file.stat().st_size for file in to.glob("*.safetensors")]
    told = f"{sum(sizes) / 1e6:,.1f} MB of weights in {len(sizes)} file{'s' * (len(sizes) > 1)}"
    yield f"{source.path} → {to}: {told}{', tokenizer' * with_tokenizer}"
    if merge:
        yield merged_line(source, model, models.load(to).eval(), precision or "fp32")
    elif adapted:
        yield f"an adapter: PEFT and transformers load it beside {models.base_of(source.config)}"
        return
    known, why = weights.loads_in_transformers(source.config)
    unknown = f"transformers does not know this architecture ({why}); gradus loads it"
    yield f"transformers loads this as {known}" if known else unknown


@torch.no_grad()
def merged_line(source: ModelSource, adapted: nn.Module, plain: nn.Module, precision: str) -> str:
    """How far the outputs of merged weights, as they were written, are from those of the adapted model, in fp32."""
    worst, largest = 0.0, 0.0
    for _, inputs in exported.drawn_inputs(source):
        outs = adapted(**inputs), plain(**inputs)
        for one, other in zip(*(out if isinstance(out, tuple) else (out,) for out in outs)):
            worst, largest = max(worst, float((one - other).abs().max())), max(largest, float(one.abs().max()))
    base = adapted.config.adapter.base
    return (
        f"merged in fp32{f' into the base as rounded to {base}' * bool(base)}, written in {precision}: "
        f"largest difference of outputs {worst:.1e} where they reach "
        f"{largest:.3g} ({worst / largest:.1e} of it)"
    )
