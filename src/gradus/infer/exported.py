"""Folders of exported graphs: writing one, checking it against the model, and the engine that runs it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradus import files, models
from gradus.data.cache import digest, keep
from gradus.errors import UserError
from gradus.infer import EXPORTED as FILE
from gradus.infer import ModelSource, read_export_info, sidecar, with_finite_weights
from gradus.infer.engines import Engine, Torch
from gradus.infer.graphs import DTYPES, Graph, graphs, lower
from gradus.limits import CONFIG_FILE, GB, read_json
from gradus.models.finite import NotFinite, finite
from gradus.models.weights import checksums

NAMES = {  # of our models' arguments → of the graphs' inputs
    "ids": "input_ids", "keep": "attention_mask", "token_types": "token_type_ids", "images": "pixel_values",
    "source": "source", "target": "input_ids", "source_keep": "encoder_attention_mask",
}  # fmt: skip


class GraphEngine(Engine):
    """An engine of exported graphs: a subclass writes them, opens the files of a folder, and runs one.

    A model that is no such folder is exported first, once, into $GRADUS_CACHE.
    """

    PRECISIONS = dict.fromkeys(("fp32", "bf16", "fp16"), ("causal", "both", "cross"))
    stand_in: type[GraphEngine] | None = None  # checks what is written where the engine itself cannot run

    def __init__(self, source: ModelSource, precision: str = "fp32", folder: Path | None = None):
        super().__init__(source, precision)
        self.folder = folder or cached_folder(source, type(self), precision)
        self.graphs = read_json(self.folder / FILE, CONFIG_FILE)["graphs"]
        self.computes = precision
        self.state: dict[str, Tensor] = {}  # keys and values by the names under which they go in
        self.mask: Tensor | None = None  # of a decoder: which of them are of real tokens
        self.open({name: self.folder / graph["file"] for name, graph in self.graphs.items()})

    @classmethod
    def write(cls, graph: Graph, folder: Path, **options: Any) -> dict[str, Any]:
        """Write a graph into a folder. Returns what is to be known of it: its `file`, and more."""
        raise NotImplementedError

    def open(self, paths: dict[str, Path]) -> None:
        """paths: graph → file. Raises UserError where this machine cannot run them."""
        raise NotImplementedError

    def call(self, graph: str, inputs: list[Tensor]) -> Sequence[Tensor]:
        """The outputs of a graph. inputs: on the engine's device. Both in the order of the graph's names."""
        raise NotImplementedError

    def run(self, graph: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of a graph by name, in their order."""
        names = self.graphs[graph]
        outputs = self.call(graph, [inputs[name].to(self.device).contiguous() for name in names["inputs"]])
        return dict(zip(names["outputs"], outputs, strict=True))

    def content(self) -> str:
        return (self.folder / checksums.FILE).read_text(encoding="utf-8")

    def weight_bytes(self) -> int:
        """Bytes of the graphs' files, and of the weights beside them."""
        parts = (path for graph in self.graphs.values() for path in self.folder.glob(f"{graph['file']}*"))
        return sum(path.stat().st_size for path in parts)

    def forward(self, **inputs: Tensor) -> Any:
        if unknown := [name for name in inputs if name not in NAMES]:
            raise UserError(f"--engine={self.name}: its graph has no {' and no '.join(unknown)}. Use --engine torch.")
        named = {NAMES[name]: value for name, value in inputs.items()}
        ids = named.get("input_ids")
        sources = (named["source"], named.get("encoder_attention_mask")) if "source" in named else ()
        if "model" in self.graphs and self.source.family.attention == "both":
            if ids is not None:
                named = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)} | named
                named["attention_mask"] = named["attention_mask"].long()
            out = tuple(self.run("model", named).values())
            return out[0] if len(out) == 1 else out
        self.begin(len(ids), *sources)
        return self.read(ids, named.get("attention_mask"))

    def begin(self, batch: int, sources: Tensor | None = None, keep: Tensor | None = None) -> None:
        """Forget what was read, and have an encoder read sources (batch, source); keep: where these are real."""
        last = list(self.graphs.values())[-1]["inputs"]
        self.mask, self.state = None, {
            name: torch.zeros(batch, shape[1], 0, shape[3], dtype=getattr(torch, dtype), device=self.device)
            for name, (dtype, *shape) in last.items() if name.startswith("past") and ".encoder." not in name
        }  # fmt: skip
        if sources is not None:
            keep = (torch.ones_like(sources) if keep is None else keep).long()
            cross = self.run("encoder", {"input_ids": sources, "attention_mask": keep})
            self.state |= {"encoder_attention_mask": keep, **pasts(cross)}

    def read(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        """The logits (batch, seq, vocab) of the next tokens, ids (batch, seq). keep: where they are real (None:
        everywhere); an encoder-decoder's answers have no padding."""
        inputs = {"input_ids": ids, **self.state}
        if "attention_mask" in self.graphs[name := list(self.graphs)[-1]]["inputs"]:
            new = (torch.ones_like(ids) if keep is None else keep).long()
            self.mask = new if self.mask is None else torch.cat((self.mask, new), dim=1)
            inputs["attention_mask"] = self.mask
        out = self.run(name, inputs)
        logits = out.pop("logits")
        self.state |= pasts(out)
        return logits

    def prefill(
        self, ids: Tensor, lengths: Tensor, sources: Tensor | None = None, source_lengths: Tensor | None = None, *,
        room: int | None = None,
    ) -> Tensor:  # fmt: skip
        if sources is None:
            self.begin(len(ids))
        elif (lengths == ids.shape[1]).all():
            self.begin(len(ids), sources, torch.arange(sources.shape[1], device=ids.device) < source_lengths[:, None])
        else:
            raise UserError(f"--engine={self.name}: prompts must all have the same length. Use --engine torch.")
        keep = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        return self.read(ids, keep)[torch.arange(len(ids), device=ids.device), lengths - 1]

    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.read(ids[:, None])[:, -1]  # a position is where attention_mask says

    def reorder(self, rows: Tensor) -> None:
        self.state = {name: tensor[rows] for name, tensor in self.state.items()}
        self.mask = None if self.mask is None else self.mask[rows]


def pasts(presents: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("present", "past_key_values"): tensor for name, tensor in presents.items()}


# ---------------------------------------------------------------- the folder


def cached_folder(source: ModelSource, kind: type[GraphEngine], precision: str) -> Path:
    """The folder of a model's graphs: the model's own where it is one, else one that is made once and kept."""
    if source.export_info:  # engines.open has looked at the rest
        return source.folder

    def make(folder: Path) -> None:
        fill(source, kind, folder, precision)
        checksums.write(folder)

    key = digest(source.content(), f"{source.config!r}", kind.name, precision, torch.__version__)
    try:
        return keep(files.cache_dir() / "exports" / key, make, "GRADUS_CACHE", whole)
    except NotFinite:
        raise
    except UserError as e:
        why = str(e).partition(" Use --as")[0].removesuffix(" Nothing was written.")
        what = f"--engine {kind.name}: {source.name} cannot be exported for it"
        raise UserError(f"{what} ({why.rstrip('.')}). Use --engine torch.") from None


def whole(folder: Path) -> bool:
    """Whether a folder of graphs is as it was written."""
    try:
        return read_export_info(folder) is not None
    except UserError:
        return False


def write(source: ModelSource, kind: type[GraphEngine], to: Path, precision: str, **options: Any) -> Iterator[str]:
    """`fill` a folder that becomes `to`. Yields lines for the user. Raises UserError where the format cannot hold the
    model, or its outputs are not the model's; nothing is then left."""
    with sidecar.folder(to) as folder:
        about, size, with_tokenizer = fill(source, kind, folder, precision, **options)
    files_of = ([graph["file"], graph.get("onnx")] for graph in about["graphs"].values())
    names = " and ".join(file for both in files_of for file in both if file and (to / file).is_file())
    yield f"{source.path} → {to}: {names}, {size / 1e6:,.1f} MB{', tokenizer' if with_tokenizer else ''}"
    yield about["told"]


@torch.no_grad()
def fill(
    source: ModelSource, kind: type[GraphEngine], folder: Path, precision: str, **options: Any
) -> tuple[dict[str, Any], int, bool]:
    """Write the graphs of a model into a folder, with its configuration and tokenizer or normalisation, check them, and
    keep the check in export.json. Returns what that says, the bytes of the graphs, whether there is a tokenizer."""
    reference = models.load_plain(source.path).eval().requires_grad_(False)
    check_finite(source, reference)
    lowered = lower(reference if precision == "fp32" else copy.deepcopy(reference), precision)
    about = {"format": kind.name, "precision": precision, "torch": torch.__version__, "graphs": {}}
    for graph in graphs(lowered):
        inputs = {name: [str(x.dtype).removeprefix("torch."), *graph.shapes[name]] for name, x in graph.inputs.items()}
        written = kind.write(graph, folder, precision=precision, **options)
        about["graphs"][graph.name] = {**written, "inputs": inputs, "outputs": graph.outputs}
    size = sum(file.stat().st_size for file in folder.iterdir())
    files.write_json(folder / FILE, about)
    about["check"] = check(source, kind, folder, precision, reference)
    about["told"] = line(about)
    files.write_json(folder / FILE, about)
    with_tokenizer = sidecar.write(source, folder)
    config = models.to_config_json(reference.config, DTYPES[precision])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return about, size, with_tokenizer


def line(about: dict[str, Any]) -> str:
    """A check in one line."""
    if isinstance(about["check"], str):
        return f"not checked: {about['check']}"
    rows = about["check"]
    worst = max(rows, key=lambda row: row["max_abs_delta"] / row["limit"])
    shapes = ", ".join(
        f"{name} {'/'.join(map(str, sorted({row[name] for row in rows})))}"
        for name in ("batch", "seq", "past") if name in rows[0]
    )  # fmt: skip
    return (
        f"checked against PyTorch in fp32: max |Δ| {worst['max_abs_delta']:.1e} where outputs reach "
        f"{worst['largest']:.3g} (limit {worst['limit']:.1e}; {shapes})"
    )


# ---------------------------------------------------------------- checking it

LIGHT = 2 * GB  # of a model in fp32 that is loaded only to see whether its logits are finite


@torch.no_grad()
def check_finite(source: ModelSource, model: nn.Module | None = None) -> None:
    """Raises NotFinite where weights, or the logits of one drawn input, are not finite. model: where it is loaded; else
    it is here, unless it is no LIGHT one."""
    if model is not None:
        with_finite_weights(source, model)
    elif 4 * models.count(source.config)["total"] > LIGHT:
        return
    steps = Torch(dataclasses.replace(source, model=model))
    inputs = {name: x.to(steps.device) for name, x in next(drawn_inputs(source))[1].items()}
    if not finite(steps(**inputs)):
        raise steps.not_finite(lambda again: again(**inputs))


def check(
    source: ModelSource, kind: type[GraphEngine], folder: Path, precision: str, model: nn.Module
) -> list[dict[str, float]] | str:
    """A row for each of `cases`, or why this machine runs none. Raises UserError where outputs are too far off."""
    try:
        engine = kind(source, precision, folder)
    except UserError as e:
        if kind.stand_in is None or precision not in kind.stand_in.PRECISIONS:
            return str(e)
        engine = kind.stand_in(source, precision, folder)
    rows = [row | {"limit": limit(precision, row["largest"])} for row in differences(engine, model)]
    for row in rows:
        if not row["max_abs_delta"] <= row["limit"]:
            at = ", ".join(f"{name} {row[name]}" for name in ("batch", "seq", "past") if name in row)
            off = f"outputs differ from PyTorch's by {row['max_abs_delta']:.1e} at {at} (limit {row['limit']:.1e})"
            raise UserError(f"--as {kind.name} --precision {precision}: {off}. Nothing was written. Use --as hf.")
    return rows


def limit(precision: str, largest: float) -> float:
    """How far outputs may be from the model's in fp32: 1e-4 of those of unit size, and that part of larger ones; in 16
    bits, 16 roundings of the largest; in int8 what `infer.checked` allows."""
    if precision == "int8":
        return largest
    part = 1e-4 if precision == "fp32" else 16 * torch.finfo(DTYPES[precision]).eps
    return part * max(1.0, largest)


def cases(source: ModelSource) -> Iterator[dict[str, int]]:
    """Sizes other than those that a graph was traced at."""
    longest = source.config.longest
    n = 9 if longest is None else min(9, longest - 3)
    for batch in (1, 3):
        if source.config.reads == "images":
            yield {"batch": batch}
        elif source.family.attention == "both":
            yield from ({"batch": batch, "seq": seq} for seq in (1, n))
        else:
            yield from ({"batch": batch, "seq": seq, "past": past} for past in (0, 1, n) for seq in (1, 3))


def drawn_inputs(source: ModelSource) -> Iterator[tuple[dict[str, int], dict[str, Tensor]]]:
    """Random arguments of the model's forward for each of `cases`; in batches of several, rows of an encoder are of
    unequal length."""
    config, attention, draw = source.config, source.family.attention, torch.Generator().manual_seed(0)
    for case in cases(source):
        batch, lengths = case["batch"], (case.get("past", 0) + case.get("seq", 0), 6)
        if config.reads == "images":
            yield case, {"images": torch.randn(batch, config.n_channels, *2 * (config.image_size,), generator=draw)}
            continue
        ids, read = (torch.randint(config.vocab_size, (batch, n), generator=draw) for n in lengths)
        keep, read_keep = (
            torch.arange(x.shape[1]) < torch.tensor([x.shape[1], 1, 4])[:batch, None] for x in (ids, read)
        )
        if attention == "cross":
            ids = ids % (getattr(config, "target_vocab_size", None) or config.vocab_size)
            yield case, {"source": read, "target": ids, "source_keep": read_keep}
        else:
            yield case, {"ids": ids, "keep": keep} if attention == "both" else {"ids": ids}


@torch.no_grad()
def differences(engine: GraphEngine, model: nn.Module) -> Iterator[dict[str, float]]:
    """How far an engine's outputs are from the model's, which is in fp32: for each case the largest difference and the
    model's largest absolute value."""
    attention = engine.source.family.attention
    for case, inputs in drawn_inputs(engine.source):
        batch, past = case["batch"], case.get("past", 0)
        expected, inputs = model(**inputs), {name: value.to(engine.device) for name, value in inputs.items()}
        if attention == "both":
            outputs = engine.forward(**inputs)
            pairs = zip(*(out if isinstance(out, tuple) else (out,) for out in (expected, outputs)), strict=True)
        else:
            ids = inputs.get("target", inputs.get("ids"))
            engine.begin(batch, inputs.get("source"), inputs.get("source_keep"))
            logits = [engine.read(part) for part in (ids[:, :past], ids[:, past:]) if part.shape[1]]
            pairs = [(expected, torch.cat(logits, dim=1))]
        pairs = [(a, b.float().cpu()) for a, b in pairs]
        delta = max(float((a - b).abs().max()) for a, b in pairs)
        yield {**case, "max_abs_delta": delta, "largest": max(float(a.abs().max()) for a, _ in pairs)}
