"""What benchmarks/decode.yaml sets beside Gradus: other programs that decode the same weights, each a runner.

FUNCTION(None, options) → timing.Subject, of which a step is one text: a prompt of 16 tokens and 64 greedy ones, prefill included; its samples are
tokens. `same_tokens` is the share of the 64 that equal those of Gradus in PyTorch and fp32, whose logits the checks go back to.

Peers are looked for in $GRADUS_PEERS too, a folder: pip install --no-deps --target FOLDER llama-cpp-python diskcache ctranslate2 onnxruntime-genai
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradus import files, models
from gradus.data.tokenizers import train_bpe
from gradus.errors import UserError
from gradus.infer import engines, find
from gradus.infer.export import export
from gradus.measure.roofs import last_cache, reader
from gradus.models.decoding import complete
from gradus.proof.timing import Subject, Timed, Window
from gradus.recipe.schema import GPTConfig, LlamaConfig

PROMPT, NEW = 16, 64
SHAPES = {
    "llama-15m": LlamaConfig(vocab_size=32000, n_layers=6, d_model=288, n_heads=6, d_ff=768, seq_len=256, tie_output=True),
    "gpt2-small": GPTConfig(vocab_size=50257, n_layers=12, d_model=768, n_heads=12, seq_len=1024),
}
sys.path.append(os.environ.get("GRADUS_PEERS", "/nonexistent"))


def need(module: str) -> Any:
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as e:
        raise UserError(f"{module}: not here ({e}). Leave it out with --only, or see the head of benchmarks/peers_decode.py.") from None


# ------------------------------------------------------------ the same weights for all


def folder(options: dict[str, Any]) -> Path:
    """In Hugging Face's layout: of a shape with weights drawn from seed 0, or of a model that is there."""
    if unknown := set(options) - {"model", "precision", "threads"}:
        raise UserError(f"options: {', '.join(sorted(unknown))}: unknown. Known: model, precision, threads.")
    name = options["model"]
    to = files.cache_dir() / "decode" / Path(name).stem
    if not (to / "config.json").is_file():
        to.parent.mkdir(parents=True, exist_ok=True)
        models.save(models.build(SHAPES[name], seed=0) if name in SHAPES else models.load(name), to)
    return to


def prompt(at: Path) -> list[int]:
    config = models.config_of(at)
    rng = np.random.default_rng(0)
    return [1, *rng.integers(3, config.vocab_size, PROMPT - 1).tolist()]


def wanted(at: Path) -> list[int]:
    """The 64 tokens of Gradus in fp32, computed once."""
    kept = at / "greedy.json"
    if not kept.is_file():
        files.write_json(kept, complete(models.load(at).eval(), [prompt(at)], max_new=NEW)[0])
    return json.loads(kept.read_text())


def subject(options: dict[str, Any], at: Path, decode: Callable[[list[int]], list[int]], **facts: Any) -> Subject:
    """decode: a prompt's 64 new tokens."""
    right, seen, latest = wanted(at), [0], []

    def step(ids: list[int]) -> None:
        latest[:] = decode(ids)
        if len(latest) != NEW:
            raise UserError(f"{len(latest)} tokens, not {NEW}: it stopped early.")
        seen[0] += NEW

    def finish(timed: Timed, window: Window) -> None:
        timed.values["same_tokens"] = [float(np.mean([a == b for a, b in zip(latest, right)])), ""]

    weights = sum(p.numel() for p in models.build(models.config_of(at), "meta").parameters())
    facts = {"precision": options.get("precision", "fp32"), "parameters": weights, **facts}
    return Subject(lambda: prompt(at), step, lambda: seen[0], facts=facts, finish=finish)


# ------------------------------------------------------------ Gradus and its peers


def gradus(name: str, recipe: None, options: dict[str, Any]) -> Subject:
    at = folder(options)
    engine = engines.open(find(str(at)), name, options.get("precision", "fp32"))
    return subject(options, at, lambda ids: complete(engine, [ids], max_new=NEW)[0], computes=engine.computes)


gradus_torch, gradus_compiled = functools.partial(gradus, "torch"), functools.partial(gradus, "compiled")


def transformers(recipe: None, options: dict[str, Any]) -> Subject:
    theirs, at = need("transformers"), folder(options)
    model = theirs.AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def decode(ids: list[int]) -> list[int]:
        given = torch.tensor([ids])
        with torch.no_grad():
            out = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=0)
        return out[0, len(ids) :].tolist()

    return subject(options, at, decode)


def llama_cpp(recipe: None, options: dict[str, Any]) -> Subject:
    """Weights as GGUF, f32 or q8_0; its prompt cache is emptied before every text. It is given ids: its tokenizer is any."""
    there, at, kind = need("llama_cpp"), folder(options), options.get("precision", "f32")
    with_tokenizer, file = at.with_name(f"{at.name}-bpe"), at.with_name(f"{at.name}-{kind}") / "model.gguf"
    if not file.is_file():
        models.save(models.load(at), with_tokenizer)
        train_bpe([str(__doc__)], 270).save(with_tokenizer)
        list(export(str(with_tokenizer), file.parent, kind="gguf", type=kind))
    threads = torch.get_num_threads()
    model = there.Llama(str(file), n_ctx=128, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False)

    def decode(ids: list[int]) -> list[int]:
        model.reset()
        model.eval(ids)
        new = []
        while True:
            logits = there.llama_get_logits_ith(model.ctx, -1)
            new.append(int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax()))
            if len(new) == NEW:
                return new
            model.eval(new[-1:])

    return subject(options, at, decode)


def ctranslate2(recipe: None, options: dict[str, Any]) -> Subject:
    there, at, kind = need("ctranslate2"), folder(options), options.get("precision", "float32")
    to = at / f"ct2-{kind}"
    if not to.is_dir():
        need("ctranslate2.converters")
        plain_tokenizer(at)
        with files.aside(to) as aside:
            there.converters.TransformersConverter(str(at)).convert(str(aside), quantization=kind)
    model = there.Generator(str(to), device="cpu", compute_type=kind, inter_threads=1, intra_threads=torch.get_num_threads())
    words = json.loads((to / "vocabulary.json").read_text())
    number = {word: i for i, word in enumerate(words)}

    def decode(ids: list[int]) -> list[int]:
        out = model.generate_batch(
            [[words[i] for i in ids]], max_length=NEW, min_length=NEW, sampling_topk=1, include_prompt_in_result=False, end_token=[]
        )[0]
        return [number[t] for t in out.sequences[0]]

    return subject(options, at, decode, computes=model.compute_type)


def plain_tokenizer(at: Path) -> None:
    """tokenizer.json whose tokens are numbers, which some converters ask for."""
    if not (at / "tokenizer.json").is_file():
        tokenizers = need("tokenizers")
        words = {f"<{i}>": i for i in range(models.config_of(at).vocab_size)}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>")).save(str(at / "tokenizer.json"))
        files.write_json(at / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<1>", "eos_token": "<2>", "unk_token": "<0>"})


def onnx_genai(recipe: None, options: dict[str, Any]) -> Subject:
    """Llama alone: its builder knows no GPT-2."""
    there, at, kind = need("onnxruntime_genai"), folder(options), options.get("precision", "fp32")
    to = at / f"genai-{kind}"
    if not to.is_dir():
        plain_tokenizer(at)
        with files.aside(to) as aside, tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(at), "-o", str(aside), "-p", kind, "-e", "cpu", "-c", scratch]
            paths = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), os.environ.get("GRADUS_PEERS")) if p)
            made = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
            if made.returncode:
                raise UserError(f"onnxruntime_genai: its builder refuses this model: {made.stderr.strip().splitlines()[-1]}")
    settings = to / "genai_config.json"
    told = json.loads(settings.read_text())
    told["model"]["decoder"]["session_options"] |= {"intra_op_num_threads": torch.get_num_threads(), "inter_op_num_threads": 1}
    told["model"] |= {"eos_token_id": models.config_of(at).vocab_size - 1}  # held back by min_length
    files.write_json(settings, told)
    model = there.Model(str(to))

    def decode(ids: list[int]) -> list[int]:
        params = there.GeneratorParams(model)
        params.set_search_options(max_length=PROMPT + NEW, min_length=PROMPT + NEW, do_sample=False)
        run = there.Generator(model, params)
        run.append_tokens(ids)
        for _ in range(NEW):
            run.generate_next_token()
        return run.get_sequence(0)[len(ids) :].tolist()

    return subject(options, at, decode)


# ------------------------------------------------------------ the roof


def roof(recipe: None, options: dict[str, Any]) -> Subject:
    """Tokens/s if a token took no longer than reading the weights of its matrix products once, with the fastest read that PyTorch has of more
    memory than the caches hold. Where the weights themselves fit the L3 they may be read faster: its fact `cache_resident`."""
    at = folder(options)
    model = models.build(models.config_of(at), "meta")
    numbers = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    size = numbers * {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5}[options.get("precision", "fp32")]
    (read, n_bytes), seen = reader(torch.device("cpu")), [0.0]

    def step(_: None) -> None:
        read()
        seen[0] += n_bytes / size

    resident = size < last_cache()
    return Subject(lambda: None, step, lambda: round(seen[0]), facts={"weight_bytes": int(size), "cache_resident": resident, "precision": options.get("precision", "fp32")})
