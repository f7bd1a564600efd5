"""The ViT tutorial's prompt for Llama-2, through Meta's layout: stories260K is written as Meta publishes a Llama and continued beside its own file.

    make experiment NAME=llama-in-metas-layout SET=FOLDER        FOLDER holds stories260K.bin and tok512.bin; seconds on one core
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gradus import files, models
from gradus.errors import UserError
from gradus.infer import encode, engines, find
from gradus.measure.machine import conditions
from gradus.models.decoding import complete
from gradus.models.weights.meta_llama import LAYER, TOP
from gradus.rows import Row, read_rows

HERE = Path(__file__).resolve().parent
ROWS, PAGE = HERE / "results/llama-in-metas-layout.jsonl", HERE.parent / "docs/experiments/llama-in-metas-layout.md"
PROMPT, NEW = "The interesting life of the blue eyed child from a glass orb", 60
SOURCE = ". A story of the unusual life of a young girl who grew up in the midst of the great depression."
SHORT = ("Once upon a time, there was", 30)  # a prompt as the model knows them, and its tokens
WAYS = {  # name → through Meta's layout, with the cache, engine, precision
    "its own file": (False, True, "torch", "fp32"), "Meta's layout": (True, True, "torch", "fp32"),
    "Meta's layout, no cache": (True, False, "torch", "fp32"), "Meta's layout, bf16": (True, True, "torch", "bf16"),
}  # fmt: skip
Record = dict[str, Any]


# ------------------------------------------------------------ Meta's layout


def write_meta(of: Path, tokenizer: Path, to: Path) -> None:
    """A Llama as Meta publishes it: consolidated.00.pth, params.json, tokenizer.model."""
    config, tensors = models.config_of(of), dict(models.weights.to_hf(models.load(of)))
    names = {f"model.layers.{i}.{theirs}": f"layers.{i}.{name}" for i in range(config.n_layers) for name, (theirs, _) in LAYER.items()}
    names |= {theirs: name for name, (theirs, _) in TOP.items()} | {"model.embed_tokens.weight": "tok_embeddings.weight"}
    state = {names[theirs]: tensor for theirs, tensor in tensors.items()}
    for name, tensor in state.items():
        if heads := {"wq": config.n_heads, "wk": config.n_kv_heads}.get(name.split(".")[-2]):  # rotates neighbours, not halves
            state[name] = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    state.setdefault("output.weight", state["tok_embeddings.weight"])
    torch.save({name: tensor.clone() for name, tensor in state.items()}, to / "consolidated.00.pth")
    width = 8 * config.d_model // 3
    params = {"dim": config.d_model, "n_layers": config.n_layers, "n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads, "vocab_size": config.vocab_size,
              "multiple_of": next(n for n in range(1, config.d_ff + 1) if -(-width // n) * n == config.d_ff), "norm_eps": config.norm_eps, "max_seq_len": config.seq_len}  # fmt: skip
    (to / "params.json").write_text(json.dumps(params) + "\n")
    (to / "tokenizer.model").write_bytes(sentencepiece(tokenizer.read_bytes()))


def sentencepiece(data: bytes) -> bytes:
    """llama2.c's tokenizer as the SentencePiece model that it was made from (sentencepiece_model.proto)."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, *varint(len(value))]) + value

    def varint(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    pieces, at = b"", 4
    for i in range(len(data)):
        if at >= len(data):
            break
        score, length = struct.unpack_from("<fi", data, at)
        piece, at = data[at + 8 : at + 8 + length].decode().replace(" ", "▁").encode(), at + 8 + length
        kind = 2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 1  # unknown, control, byte, normal
        piece = (b"<unk>", b"<s>", b"</s>")[i] if i < 3 else f"<0x{i - 3:02X}>".encode() if i < 259 else piece
        pieces += field(1, field(1, piece) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind]))
    trainer = bytes([3 << 3, 2]) + bytes([*varint(35 << 3), 1])  # model_type BPE, byte_fallback
    normalizer = field(1, b"identity") + bytes([3 << 3, 1, 4 << 3, 0, 5 << 3, 1])  # a space before, spaces kept, as ▁
    return pieces + field(2, trainer) + field(3, normalizer)


# ------------------------------------------------------------ both


def rows(folder: Path) -> Iterator[Row]:
    """The continuations of each way; how many tokens equal those of the first, and how far the prompt's logits are off."""
    own, tokenizer = folder / "stories260K.bin", folder / "tok512.bin"
    for file in (own, tokenizer):
        if not file.is_file():
            raise UserError(f"{folder}: no {file.name} in it. Give the folder of stories260K.")
    yield Row("text", SOURCE, "", None, {"kind": "source", "prompt": PROMPT})
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        meta = Path(scratch)
        write_meta(own, tokenizer, meta)
        yield Row("params.json", (meta / "params.json").read_text().strip(), "", None, {"kind": "written", "sizes": {p.name: p.stat().st_size for p in sorted(meta.iterdir())}})
        for prompt, new in ((PROMPT, NEW), SHORT):
            right: list[int] = []
            for way, (through, cache, engine, precision) in WAYS.items():
                place = find(str(meta if through else own))
                words = place.tokenizers(None if through else str(tokenizer))
                ids = encode(place, words, [prompt]).prompts
                made = engines.open(place, engine, precision)
                found = complete(made, ids, max_new=new, cache=cache)[0]
                logits = made(torch.tensor(ids)).float()
                if not right:
                    right, wanted, begins = found, logits, ids
                about = {"kind": "measured", "prompt": prompt, "way": way, "precision": precision, "prompt tokens": len(ids[0]), "same prompt": ids == begins,
                         "tokens": len(found), "equal": sum(a == b for a, b in zip(found, right, strict=True)), "max_abs_delta": float((logits - wanted).abs().max())}  # fmt: skip
                yield Row("text", words[""].decode(ids[0] + found)[len(prompt) :], "", None, {**about, **conditions()})


def page(found: Sequence[Record]) -> str:
    texts = [r for r in found if r["name"] == "text" and r["kind"] == "measured"]
    written = next(r for r in found if r["name"] == "params.json")
    parts = [
        "# A Llama read from files in Meta's layout writes the same tokens as from its own file", "",
        "**The source** (\"First shot at inference\" in Mboya's tutorial \"Scaling ViTs across training compute\") runs Llama-2-7B on an A100 with 40 GB from `meta-llama/Llama-2-7b`, which is in Meta's own layout, and continues one prompt.", "",
        "**Run here**: those weights (13.5 GB in bf16, under a licence) are not available here, so stories260K, a Llama of 260,032 parameters that was trained on children's stories, is written in",
        "that layout and loaded by the same code: `consolidated.00.pth` with Meta's names and its order of the rows of queries and keys (it rotates neighbouring channels), `params.json`,",
        "and `tokenizer.model`, a SentencePiece model. Greedy, on one core. `make experiment NAME=llama-in-metas-layout SET=FOLDER` writes this page and its rows again; FOLDER holds",
        "stories260K.bin and tok512.bin. With the weights, `gradus generate meta-llama/Llama-2-7b \"" + PROMPT + "\" --precision bf16` does the",
        "source's step, and `gradus launch modal` writes its app ([launching](../launch.md)).", "",
        f"`params.json`: `{written['value']}`; sizes in bytes: " + ", ".join(f"{name} {n:,}" for name, n in written["sizes"].items()) + ".", "",
    ]  # fmt: skip
    for prompt in dict.fromkeys(r["prompt"] for r in texts):
        of = [r for r in texts if r["prompt"] == prompt]
        parts += [f"## {prompt} …", "", *([f"The source, Llama-2-7B: {SOURCE}", ""] if prompt == PROMPT else [])]
        parts += [f"stories260K from its own file: {' '.join(of[0]['value'].split())}", "", "| read from | prompt tokens equal | new tokens equal | largest logit difference on the prompt |", "|---|---|---:|---:|"]
        parts += [f"| {r['way']} | {'yes' if r['same prompt'] else 'no'} | {r['equal']} of {r['tokens']} | {r['max_abs_delta']:.1e} |" for r in of]
        parts += [""]
    parts += ["A model this small knows little beyond its stories; what is shown is that the weights arrive in the right places. A row in bf16 may differ where two tokens are nearly equally likely."]
    return "\n".join(parts) + "\n"


def main(folder: Path) -> None:
    files.write_text(ROWS, "".join(row.json() + "\n" for row in rows(folder)))
    files.write_text(PAGE, page(read_rows(ROWS)))
    print(f"rows: {ROWS}\npage: {PAGE}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parent.parent / "shared/data/stories260K"))
    except UserError as e:
        raise SystemExit(f"error: {e}") from None
