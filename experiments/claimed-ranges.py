"""A book chapter's claims beside what committed rows say: `python experiments/claimed-ranges.py` writes the table of docs/experiments/claimed-ranges.md again.

`norm_call` is the runner of what claimed-ranges.yaml adds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import files
from gradus.rows import read_rows

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs/experiments/claimed-ranges.md"
FIRST, LAST = "<!-- claims -->\n", "<!-- end of claims -->\n"
NO_GPU = "not measured: no GPU was available"
REST, SIZE = ("memory/rest", "activations and the rest"), ("size/weights", "stored weights")
Record = dict[str, Any]


def norm_call(recipe: Any, options: dict[str, Any]) -> Any:
    """Layer norm of 8,192 tokens of 768 channels with its backward pass: PyTorch's own kernel, or written out."""
    import torch

    from gradus.proof.timing import Subject

    x, norm, calls = torch.randn(16, 512, 768, requires_grad=True), torch.nn.LayerNorm(768), [0]

    def written_out(x: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias

    def step(_: None) -> None:
        out = norm(x) if options["fused"] else written_out(x)
        torch.autograd.grad(out.sum(), (x, norm.weight, norm.bias))
        calls[0] += 16

    return Subject(lambda: None, step, lambda: calls[0])


# ------------------------------------------------------------ what was measured


def rows_of(study: str) -> list[Record]:
    file = HERE / "results" / f"{study}.jsonl"
    return [r for r in read_rows(file) if r["kind"] == "measured"] if file.exists() else []


def span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def where(r: Record, each: bool = False) -> str:
    n = r.get("threads", 1)
    return f"{r['cpu']}, {n} thread{'s' * (n > 1)}{' per process' if each else ''}"


def link(study: str) -> str:
    return f"[{study}]({study}.md)"


def told(study: str, *words: str, label: str = "", also: tuple[str, str] | None = None, each: bool = False) -> Callable[[], str]:
    """Speed and tensors of all configurations that have these names on their axes, against the base of each. also: (a row, its name here) that
    is set against that of the same base too. each: of the speed-up, the part for each process."""

    def text() -> str:
        found = [r for r in rows_of(study) if set(words) <= set(r["at"].values())]
        speeds = [r["value"] / (r["processes"] if each else 1) for r in found if r["name"] == "ratio"]
        if not speeds:
            return f"not measured yet: {link(study)}"
        said = [f"{'efficiency' if each else 'speed ×'} {span(speeds)}"]
        said += [f"tensors × {span(sizes)}"] if (sizes := [r["value"] for r in found if r["name"] == "ratio/memory"]) and not each else []
        if also:
            parts = {r["configuration"]: r["value"] for r in rows_of(study) if r["name"] == also[0]}
            said += [f"{also[1]} × {span([parts[r['configuration']] / parts[r['against']] for r in found if r['name'] == 'ratio'])}"]
        return f"{label or ', '.join(words)}: {', '.join(said)} ({where(found[0], each)}; {link(study)})"

    return text


def kernels(kernel: str, direction: str) -> Callable[[], str]:
    """The same of the table of docs/peers.md."""

    def text() -> str:
        found = json.loads((HERE.parent / "benchmarks/results/attention_kernels-cpu-1-thread.json").read_text(encoding="utf-8"))
        of = {(r["kernel"], r["length"]): r for r in found["rows"] if r["pass"] == direction}
        pairs = [(of[kernel, n], r) for (name, n), r in of.items() if name == "naive"]
        speeds, sizes = [b["median_ms"] / r["median_ms"] for r, b in pairs], [r["peak_mib"] / b["peak_mib"] for r, b in pairs]
        cpu = found["conditions"]["environment"]["cpu"]
        return f"{kernel}, {direction}, n 512 to {max(n for _, n in of):,}, batch 1: speed × {span(speeds)}, tensors × {span(sizes)} ({cpu} with AMX, 1 thread; [measured beside others](../peers.md))"

    return text


def both_ways(kernel: str, old: str) -> list[Callable[[], str]]:
    new = [told("chunked-attention", kernel, way, label=f"{kernel}, {way}, n 512 to 2,048, batch 4") for way in ("forward", "forward + backward")]
    return [*new, *(kernels(old, way) for way in ("forward", "forward + backward"))]


def quarter() -> str:
    """What a call of attention written out allocates at half the length."""
    found = [r for r in rows_of("chunked-attention") if r["name"] == "memory/allocated" and {"forward", "written out"} <= set(r["at"].values())]
    if not found:
        return f"not measured yet: {link('chunked-attention')}"
    of = {r["at"]["length"]: r["value"] for r in found}
    return f"a call of attention written out, forward, 512 against 1,024: tensors × {of['n=512'] / of['n=1024']:.2f} ({where(found[0])}; {link('chunked-attention')})"


def scaled() -> str:
    """Of `gradus scale`."""
    r = next(r for r in read_rows(HERE.parent / "benchmarks/results/scale-vit-cpu.jsonl") if r["name"] == "scale/efficiency" and r["processes"] == 2)
    return f"2 processes, {r['recipe']}, {r['batch_samples']} images per step in total: efficiency {r['value']:.2f} ({r['cpu']} with AMX, 1 thread per process)"


def engine(name: str, **more: Any) -> Callable[[], str]:
    """Of the grid of inference, over its sizes."""
    return told("inference-grid", name, label=f"{name}, BERT-base's shape, 1 to 32 sequences of 128, 1 and 8 of 512", **more)


def points() -> str:
    """What dynamic quantization alone loses."""
    r = next((r for r in rows_of("classifier-in-every-engine") if r["name"] == "points_lost" and r["configuration"] == "dynamic int8"), None)
    return f"dynamic int8, MiniLM on SST-2: {r['value']:.2f} points lost ({where(r)}; {link('classifier-in-every-engine')})" if r else f"not measured yet: {link('classifier-in-every-engine')}"


CLAIMS: list[tuple[str, str, list[Callable[[], str] | str]]] = [
    ("attention: PyTorch's fused kernel", "up to 50 % less memory, 2 to 3 times as fast", both_ways("sdpa", "sdpa")),
    ("attention in chunks", "50 to 90 % less memory for 5 to 30 % more time", both_ways("chunks of 256", "chunked 256")),
    ("fused layer norm", "2 to 3 times as fast", [told("claimed-ranges", "nn.LayerNorm", label="8,192 × 768, forward + backward, against written out")]),
    ("mixed precision", "BERT-base: 16 → 8 GB (× 0.5)", [
        told("bert-base-ladder", "+ mixed precision", label="bf16, BERT-base, 2 sequences of 512"), told("mini-gpt-on-wikitext2", "stage: + mixed precision", label="bf16, mini-GPT, 2 sequences of 256")]),
    ("checkpointing", "16 → 9 GB (× 0.56), 20 to 30 % more time (speed × 0.77 to 0.83)", [
        told("claimed-ranges", "checkpointing full", also=REST), told("claimed-ranges", "checkpointing attention", also=REST)]),
    ("length 512 → 256", "attention a quarter, activations half", [told("claimed-ranges", "256 tokens", label="256 against 512 tokens, attention written out", also=REST), quarter]),
    ("TorchScript", "10 to 30 % faster", [engine("TorchScript")]),
    ("cache of keys and values", "5 to 10 times as fast", [told("kv-cache", f"{n} tokens with cache", label=f"GPT-2 small's shape, {n:,} tokens") for n in (100, 500, 1000)]),
    ("ONNX Runtime; with int8", "1.5 to 2; 3 to 4 times as fast", [engine("ONNX Runtime"), engine("ONNX Runtime int8", also=SIZE)]),
    ("TensorRT", "2 to 5 times as fast", [NO_GPU]),
    ("dynamic quantization to int8", "2 to 3 times as fast, a quarter of the size", [
        engine("dynamic int8", also=SIZE), told("classifier-in-every-engine", "dynamic int8", label="dynamic int8, MiniLM, 1 × 128", also=SIZE)]),
    ("TorchScript, fp16 and dynamic quantization", "5 to 8 times as fast, less than 1 % accuracy lost", [
        "not possible in one model: PyTorch's dynamic int8 takes fp32 inputs, and runs only on CPUs", told("inference-ladder", "+ half precision", label="TorchScript in bf16, BERT-base's shape, 1 × 128"),
        points]),
    ("pinned memory", "transfers 20 to 30 % faster", [NO_GPU]),
    ("loader workers", "4 to 8 per GPU", [told("vit-epoch-measured", "2 loader workers", label="2 workers against none, images of 32 pixels, 2 processors in all"), NO_GPU]),
    ("torch.compile", "20 to 50 % faster", [told("claimed-ranges", "compiled", label="BERT-base's layers, 4 of 12, a training step"), engine("compiled")]),
    ("several GPUs", "85 to 95 % efficiency on 2 to 8, 70 to 85 % across nodes", [
        told("ddp-scaling", "2 processes", label="2 processes, 8 sequences each", each=True), scaled, "across nodes: not measured: one machine"]),
]  # fmt: skip


# ------------------------------------------------------------ the page


def table() -> Iterator[str]:
    yield "| | claimed | measured, and on what |"
    yield "|---|---|---|"
    for what, claimed, found in CLAIMS:
        yield f"| {what} | {claimed} | {'<br>'.join(dict.fromkeys(f if isinstance(f, str) else f() for f in found))} |"


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(FIRST)
    files.write_text(PAGE, before + FIRST + "\n".join(table()) + "\n" + LAST + rest.partition(LAST)[2])
    print(f"page: {PAGE}")


if __name__ == "__main__":
    main()
