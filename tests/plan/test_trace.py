"""The traced step against the step itself: memory by PyTorch's own profiler, operations by its counter, collectives by `Traffic`."""

from __future__ import annotations

import bisect
import gc
import itertools
import sys
import time
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus.errors import UserError
from gradus.layers import word_loss
from gradus.measure.flops import count_flops
from gradus.measure.memory import Timeline, component_bytes
from gradus.parallel.apply import apply
from gradus.parallel.mesh import Mesh
from gradus.parallel.precision import Precision
from gradus.plan import batches as making
from gradus.plan.trace import _attention, trace_recipe
from gradus.plan.work import COMPONENTS
from gradus.recipe import schema
from gradus.recipe.schema import Recipe
from gradus.train.step import Stepper

sys.path[:0] = [str(Path(__file__).parents[1])]

from distributed import run  # noqa: E402

FAMILIES = ["gpt", "llama", "bert", "t5", "seq2seq", "vit"]


def recipe(family: str, samples: int = 4, layers: int = 2, d: int = 64, seq: int = 64, vocab: int = 512, **layout) -> Recipe:
    """A small recipe of each family; its data is never opened."""
    size = {"n_layers": layers, "d_model": d, "n_heads": 4}
    text = schema.TextData(path="absent")
    model, task, data = {
        "gpt": lambda: (schema.GPTConfig(vocab_size=vocab, seq_len=seq, dropout=0.1, **size), schema.CausalLMTask(), text),
        "llama": lambda: (schema.LlamaConfig(vocab_size=vocab, seq_len=seq, n_kv_heads=2, **size), schema.CausalLMTask(), text),
        "bert": lambda: (schema.BertConfig(vocab_size=vocab, seq_len=seq, d_ff=4 * d, **size), schema.MaskedLMTask(), text),
        "t5": lambda: (schema.T5Config(vocab_size=vocab, seq_len=seq, d_ff=4 * d, d_head=d // 4, **size), schema.SpanCorruptionTask(), text),
        "seq2seq": lambda: (
            schema.Seq2SeqConfig(vocab_size=vocab, seq_len=seq, d_ff=4 * d, **size), schema.TranslationTask(), schema.PairsData(path="absent"),
        ),
        "vit": lambda: (
            schema.ViTConfig(image_size=32, patch_size=4, d_ff=4 * d, n_classes=10, **size), schema.ClassificationTask(),
            schema.ImagesData(path="absent"),
        ),
    }[family]()  # fmt: skip
    return Recipe(
        model=model, task=task, data=data, optimizer=schema.AdamW(lr=1e-3), train=schema.Train(steps=9, clip_norm=1.0),
        batch=schema.Batch(samples=samples), layout=schema.Layout(device="cpu", **layout),
    )  # fmt: skip


def stepper_of(r: Recipe, mesh: Mesh | None = None) -> tuple[Stepper, list[dict], dict[str, int]]:
    device = torch.device("cpu")
    precision = Precision(r.layout.precision, device)
    parallel = apply(precision.cast(models.build(r.model)), r.layout, mesh)
    parallel.bare.train()
    batches = making.micro_batches(r, mesh.world.size if mesh else 1)
    counts = {kind: sum(b["counts"][kind] for b in batches) for kind in batches[0]["counts"]}
    return Stepper(r, making.task_without_data(r), parallel, device, precision), batches, counts


def storages(tensors) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def without_buffers_of_products(timeline: Timeline) -> list[tuple[int, int]]:
    """Its changes but what a matrix product takes and lets go of before it ends: oneDNN's buffers in bf16, as the processor has units for it or
    not."""
    events = timeline.profile.profiler.kineto_results.events()
    products = sorted((e.start_ns(), e.end_ns()) for e in events if e.name() in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"))
    times, dropped = [at for at, _ in timeline.changes], set()
    for start, end in products:
        taken: dict[int, list[int]] = {}  # bytes → the changes that took so many in this product
        for i in range(bisect.bisect_left(times, start), bisect.bisect_left(times, end)):
            change = timeline.changes[i][1]
            if change > 0:
                taken.setdefault(change, []).append(i)
            elif taken.get(-change):
                dropped |= {i, taken[-change].pop()}
    return [change for i, change in enumerate(timeline.changes) if i not in dropped]


def measured(r: Recipe, mesh: Mesh | None = None) -> tuple[dict[str, int], int]:
    """(weights and optimizer state, peak of the second step) of a real step."""
    torch.set_num_threads(1)
    stepper, batches, counts = stepper_of(r, mesh)
    warm = 3 if mesh else 1  # DDP makes its buckets anew in its second step
    for _ in range(warm):
        stepper.step(batches, counts)
    parts = [h.local for h in stepper.parallel.local_parameters]
    state = [v for values in stepper.optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    held = {"weights": storages([*parts, *stepper.parallel.bare.buffers()]), "optimizer": storages(state)}
    if mesh is None:
        assert held == {k: v for k, v in component_bytes(stepper.parallel.bare, stepper.optimizer).items() if k in held}
    data = storages(v for b in batches for v in b.values() if isinstance(v, torch.Tensor))
    tables = storages({id(m): m.table for m in stepper.parallel.bare.modules() if isinstance(getattr(m, "table", None), torch.Tensor)}.values())
    buckets = held["weights"] if mesh and r.layout.shard == r.layout.tensor == 1 else 0  # of DDP's, one more copy of all gradients
    peaks = []
    for _ in range(5 if mesh else 1):  # gloo's threads let go of a collective's tensors when they get to it, which only ever adds: the least
        gc.collect()  # or what an earlier model leaves would be released within the step
        time.sleep(0.05 if mesh else 0.0)  # likewise what those threads still have
        with Timeline() as timeline:
            stepper.step(batches, counts)
        timeline.changes = without_buffers_of_products(timeline)
        peaks.append(max(peak for _, _, peak in timeline.phases()))
    return held, held["weights"] + held["optimizer"] + data + tables + buckets + min(peaks)


@pytest.mark.slow
@pytest.mark.parametrize("precision, checkpointing", [("fp32", "none"), ("bf16", "full")])
@pytest.mark.parametrize("family", FAMILIES)
def test_peak_of_a_real_step(family, precision, checkpointing):
    """fp32: to a few bytes (the kernels' own scalars). bf16: a sum of two precisions also makes one of its operands anew, which is not in
    the trace."""
    r = making.complete(recipe(family, precision=precision, checkpointing=checkpointing))
    traced = trace_recipe(r)
    held, peak = measured(r)
    assert {k: traced.state[k] for k in held} == held
    assert traced.state["gradients"] == 4 * models.count(r.model)["total"]  # as large as the weights
    assert sum(traced.memory.values()) == traced.peak and set(traced.memory) == set(COMPONENTS)
    if precision == "fp32":
        assert abs(traced.peak - peak) <= 64
    else:
        assert 0 <= (peak - traced.peak) / peak < 0.03


SLOW = pytest.mark.slow


@pytest.mark.parametrize("family, precision", [("gpt", "fp32"), ("gpt", "bf16"), pytest.param("llama", "fp32", marks=SLOW), pytest.param("llama", "bf16", marks=SLOW)])
def test_logits_by_chunks_take_a_chunk(family, precision, monkeypatch):
    """Planned, and measured, as the peak is where they are. Beside them there is the head's gradient, one buffer."""
    rows, vocab, most = 32, 4096, {}
    monkeypatch.setattr(word_loss, "ROWS", rows)
    for loss in ("whole", "chunked"):
        r = making.complete(recipe(family, samples=2, layers=1, d=32, vocab=vocab, loss=loss, precision=precision))
        traced = trace_recipe(r)
        _, peak = measured(r)
        assert abs(traced.peak - peak) <= (0.01 * peak if (loss, precision) == ("whole", "bf16") else 64), loss
        changes = [change * (a.tag == "logits") for a, change in traced.timeline.events]
        most[loss] = max(itertools.accumulate(changes))
    targets = making.micro_batches(r, 1)[0]["counts"]["tokens"]
    assert targets >= 4 * rows  # so many chunks
    chunk = (4 if precision == "fp32" else 6) * rows * vocab
    assert most["whole"] >= 2 * 4 * targets * vocab
    assert chunk <= most["chunked"] <= 1.03 * chunk  # and the chunk's states, and a few numbers a row
    assert traced.peak_phase == "loss"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing, family", [("none", "gpt"), ("full", "gpt"), ("full", "bert"), ("full", "t5"), ("full", "vit")])  # full has what none has
def test_operations(checkpointing, family):
    """As PyTorch's counter counts the same real step; a causal kernel does half of what it counts."""
    r = making.complete(recipe(family, checkpointing=checkpointing))
    stepper, batches, counts = stepper_of(r)
    traced = trace_recipe(r).work
    found = 0.0
    for op in traced.micro:
        causal = op.kind == "attention" and family == "gpt"
        found += op.flops * op.count * (2 if causal else 1)
    assert found == count_flops(lambda: stepper.step(batches, counts))


def test_closed_form_of_the_operations():
    """6 · parameters of the matrices · tokens, and 12 · layers · width · length · tokens for attention (Chowdhery et al. 2022)."""
    c = making.complete(recipe("llama", vocab=256, layers=3)).model
    r = making.complete(recipe("llama", vocab=256, layers=3))
    tokens = 4 * 64
    matrices = sum(p.numel() for name, p in models.build(c).named_parameters() if p.ndim == 2 and "embedding" not in name)
    ops = trace_recipe(r).work.micro
    products = sum(op.flops * op.count for op in ops if op.kind == "matmul")
    attention = sum(op.flops * op.count for op in ops if op.kind == "attention" and op.phase == "forward")
    assert products == 6 * matrices * tokens
    assert attention == 4 * c.n_layers * c.d_model * 64 * tokens / 2  # causal


@pytest.mark.slow
@pytest.mark.parametrize("family, precision, target", [  # every two of family, precision and target together
    *((family, *way) for family in ("gpt", "t5", "seq2seq", "vit") for way in (("fp32", "cpu"), ("bf16", "cuda"))),
    *((family, *way) for family in ("llama", "bert") for way in (("fp32", "cuda"), ("bf16", "cpu"))),
])  # fmt: skip
def test_attention_forward_is_its_closed_form(family, precision, target):
    """4 · batch · heads · queries · keys · head width of each layer, half of it where a causal kernel runs: whichever kernel it is. T5's is
    masked by its bias, GPT's and Llama's is causal, those of the others look at all places."""
    r = making.complete(recipe(family, precision=precision))
    r = r.model_copy(update={"model": r.model.model_copy(update={"dropout": 0.0})})  # a CPU's kernel has none
    ops = [op for op in trace_recipe(r, target=target).work.micro if op.kind == "attention"]
    layers = {"gpt": 2, "llama": 2, "bert": 2, "vit": 2, "t5": 6, "seq2seq": 6}[family]  # of a decoder's layer two
    if target == "cpu" and precision == "bf16":  # written out there for so few tokens
        assert not ops
        return
    if target == "cuda" or family != "t5":  # a CPU's has no trained bias either
        assert sum(op.count for op in ops if op.phase == "forward") == layers
    for op in ops:
        batch, heads, queries, keys, dim, of_values = op.shape
        assert of_values == dim
        causal = family in ("gpt", "llama") or (family == "seq2seq" and op.flops != 4 * batch * heads * queries * keys * dim * BACK[op.phase])
        assert op.flops == 4 * batch * heads * queries * keys * dim * BACK[op.phase] / (2 if causal else 1)
    if family == "seq2seq":  # the encoder's two and the crossing two see all, the decoder's own two half
        whole = 4 * 4 * 4 * 64 * 64 * 16
        assert sum(op.flops * op.count for op in ops if op.phase == "forward") == whole * (2 + 2 + 2 / 2)


BACK = {"forward": 1.0, "backward": 2.5}


@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"])
def test_every_kernel_says_causal_in_its_own_place(kernel):
    """Forwards and backwards, by the operator's own schema: none of its other truths (compute_log_sumexp, grad_input_mask) is taken for it."""
    q = torch.empty(2, 3, 8, 16, device="meta")
    other = {"int": 8, "SymInt": 8, "float": 0.0, "bool": True, "Tensor": q}
    for name in (f"_scaled_dot_product_{kernel}", f"_scaled_dot_product_{kernel}_backward"):
        operator = getattr(torch.ops.aten, name).default
        arguments = operator._schema.arguments
        for causal in (False, True):
            values = {a.name: [True] * 4 if "bool[" in str(a.type) or "List" in str(a.type) else other.get(str(a.type)) for a in arguments}
            values["is_causal"] = causal
            full = 4 * 2 * 3 * 8 * 8 * 16 * (2.5 if name.endswith("backward") else 1)
            args = tuple(values[a.name] for a in arguments if not a.kwarg_only)
            kwargs = {a.name: values[a.name] for a in arguments if a.kwarg_only}
            assert _attention(operator, args, kwargs) == ((2, 3, 8, 8, 16, 16), full / 2 if causal else full)


# ---------------------------------------------------------------- several processes

LAYOUTS = [{}, {"shard": 2}, {"tensor": 2}, {"shard": 2, "checkpointing": "full", "param_dtype": "bf16"}]


def real_peaks(world, families: list[str]) -> list:
    out = []
    for family in families:
        for layout in LAYOUTS:
            r = making.complete(recipe(family, **layout))
            out.append(measured(r, Mesh.make(r.layout, world)))
    return out


@pytest.mark.slow
def test_peak_of_two_processes():
    families = ["gpt"]
    told = run(2, real_peaks, families)
    errors = []
    for rank in range(2):
        i = 0
        for family in families:
            for layout in LAYOUTS:
                held, peak = told[rank][i]
                traced = trace_recipe(making.complete(recipe(family, **layout)), 2, rank)
                assert {k: traced.state[k] for k in held} == held, layout
                errors.append(abs(traced.peak / peak - 1))
                i += 1
    assert sorted(errors)[len(errors) // 2] < 0.03 and max(errors) < 0.10, errors


@pytest.mark.slow
def test_traffic():
    """Of a GPT: calls and bytes as they follow from its sizes (and as `Traffic` counts them in real processes: tests/parallel)."""
    n = 4
    weights = 4 * models.count(recipe("gpt").model)["total"]
    replicated = trace_recipe(recipe("gpt"), n).work.transfers
    sent = {t.axis: 0.0 for t in replicated}
    for t in replicated:
        sent[t.axis] += t.sent
    ring = (n - 1) / n
    assert sent == {"replicate": 2 * ring * weights, "control": 2 * ring * 4}
    of_shard = [t for t in trace_recipe(recipe("gpt", shard=n), n).work.transfers if t.axis == "shard"]
    assert sum(t.sent for t in of_shard) == 3 * ring * weights  # gathered twice, reduced once
    assert {(t.kind, t.hidden_by) for t in of_shard} == {
        ("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"),
    }  # fmt: skip
    stream = 4 * 4 * 64 * 64
    both = trace_recipe(recipe("gpt", tensor=n), n).work.transfers
    assert sum(t.sent for t in both if t.axis == "sequence") == pytest.approx((4 * 2 + 2 + 4 * 2 + 1) * stream * ring)
    assert all(t.hidden_by == "" for t in both)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_traffic_of_a_split_sequence(method):
    """A ring passes keys and values on n - 1 times in each pass, and in the backward one their gradients n times (Liu et al. 2023);
    Ulysses exchanges queries, keys, values and results in each pass (Jacobs et al. 2023)."""
    n, layers, part = 4, 3, 4 * 2 * (16 // 4) * 32  # bytes of a process's part: samples, tokens, d_model
    r = recipe("gpt", samples=2, layers=layers, d=32, seq=16, vocab=64, context=n, context_method=method)
    found = [t for t in trace_recipe(r, n).work.transfers if t.axis == "context" and t.kind != "all_reduce"]
    assert {t.kind for t in found} == {"send" if method == "ring" else "all_to_all"}
    times = 2 * (2 * (n - 1) + n) if method == "ring" else 2 * 4 * (n - 1) / n
    assert sum(t.sent for t in found) == layers * times * part


# ---------------------------------------------------------------- properties


@pytest.mark.slow
def test_more_processes_never_need_more():
    peaks = [trace_recipe(recipe("gpt", samples=8, shard=n), n).peak for n in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_keeps_less(family):
    kept = [trace_recipe(recipe(family, checkpointing=mode)) for mode in ("none", "selective", "full")]
    assert kept[0].peak > kept[1].peak > kept[2].peak
    assert kept[0].memory["activations"] > kept[2].memory["activations"]


@pytest.mark.slow
def test_a_gpu_keeps_no_scores():
    """CUDA's kernels keep none with dropout or a trained bias either, where a CPU's do."""
    for family in ("t5", "gpt"):
        r = recipe(family, seq=256)
        assert trace_recipe(r, target="cuda").peak < 0.8 * trace_recipe(r, target="cpu").peak


@pytest.mark.slow
def test_a_gpu_keeps_one_byte_of_dropout():
    """A CPU keeps the factors, four bytes each."""
    shapes = {}
    for target in ("cpu", "cuda"):
        traced = trace_recipe(making.complete(recipe("bert", samples=1)), target=target)
        shapes[target] = {(s.name, s.nbytes) for s in traced.timeline.allocations}
    stream = 64 * 64
    assert ("native_dropout", stream) in shapes["cuda"]
    assert not any(name == "bernoulli_" or name == "native_dropout" for name, _ in shapes["cpu"])


def test_workers_apart_meet_once_in_so_many_steps():
    small = {"samples": 2, "layers": 1, "d": 16, "seq": 8, "vocab": 32}
    weights = 4 * models.count(recipe("gpt", **small).model)["total"]
    for every in (1, 4):
        work = trace_recipe(recipe("gpt", **small, local_sgd={"every": every}), 2).work
        assert sum(t.payload * t.calls for t in work.transfers if t.axis == "replicate") == weights / every


def test_gradients_that_stay_whole_are_gradients():
    """FSDP2 reduces once a step: from one micro-batch to the next they are not cut."""
    r = recipe("gpt", samples=4, shard=2, micro_batch=1)
    assert trace_recipe(r, 2).memory["gradients"] >= 0.5 * 4 * models.count(r.model)["total"]


def test_a_recipe_that_only_its_data_completes():
    r = recipe("gpt")
    r = r.model_copy(update={"model": r.model.model_copy(update={"vocab_size": None})})
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        trace_recipe(r)


def test_what_cannot_be_traced():
    r = recipe("gpt", replicate="manual", transport="mpi")
    with pytest.raises(UserError, match="cannot be traced"):
        trace_recipe(r, 2)


@pytest.mark.slow
def test_packed_documents_keep_no_scores_on_a_gpu():
    """There flex_attention skips blocks; on a CPU every layer keeps the whole mask."""
    settings = {"model": {"family": "gpt", "n_layers": 2, "d_model": 64, "n_heads": 2, "d_ff": 128, "vocab_size": 256, "seq_len": 512, "dropout": 0.0},
                "task": {"name": "causal_lm"}, "batch": {"samples": 2}, "optimizer": {"name": "adamw", "lr": 1e-3}, "train": {"steps": 2},
                "layout": {"precision": "bf16"}}  # fmt: skip
    found = {}
    for pack in ("stream", "documents"):
        recipe = Recipe.model_validate({"name": "packed", "data": {"kind": "text", "path": "-", "pack": pack}, **settings})
        found[pack] = {target: trace_recipe(recipe, target=target).memory["activations"] for target in ("cpu", "cuda")}
    scores = 2 * 512 * 512
    assert found["documents"]["cpu"] > found["stream"]["cpu"] + 2 * scores
    assert abs(found["documents"]["cuda"] - found["stream"]["cuda"]) < scores / 8
