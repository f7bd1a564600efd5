"""Peak memory: the upper end that a plan must fit with; what other programs keep, against their own modules; published points, read by fields."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gradus.hardware import Cluster, Device
from gradus.plan import engine
from gradus.plan.answer import Request, answer
from gradus.plan.case import Case
from gradus.plan.process import Memory
from gradus.plan.profiles import INDEX
from gradus.plan.search import Space
from gradus.recipe.schema import Layout

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

from published import estimates, memory, scoring  # noqa: E402
from published.points import NotCovered  # noqa: E402

SIZES = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 176, "vocab": 96, "tied": False, "family": "llama"}


def point(config: dict | None = None, **fields) -> dict:
    config = {**SIZES, "precision": "bf16, no autocast", "micro_batch": 2, "recompute": "none", "framework": "transformers", "memory_kind": "allocated"} | (config or {})
    return {"id": "x", "group": "a", "model": "tiny", "params": None, "config": config, "hardware": "H100", "n_devices": 1, "batch": 2, "seq": 32,
            "metric": "peak_memory", "value": 1.5, "unit": "GB", "kind": "measured", "source": "", "note": None, **fields}  # fmt: skip


# ---------------------------------------------------------------- the upper end


def test_the_upper_end_of_tensors_is_what_a_tenth_of_our_own_runs_exceed():
    rows = [json.loads(line) for file in ROOT.glob("benchmarks/results/accuracy-cpu*.jsonl") for line in file.read_text().splitlines()]
    rows = [row for row in rows if row["name"] == "proof/memory/allocated"]
    for split, end in ((False, engine.HELD), (True, engine.HELD_SPLIT)):
        found = [row["measured"] / row["predicted"] for row in rows if (row["layout"] == "tensor") == split]
        assert len(found) >= 20 and end == pytest.approx(np.quantile(found, 0.9), rel=0.02)


def test_the_upper_end_counts_each_communicator():
    def of(communicators: int) -> float:
        held = Memory({}, 10**9, 10**9, int(engine.CONTEXT + engine.WORKSPACE + communicators * engine.COMMUNICATOR), 0, "", {}, 1, [])
        low, high = engine.interval(held, Layout(device="cuda"), "cuda")
        assert low < held.device_total < high
        return high - engine.RESERVED[1] * 1e9

    assert of(4) - of(0) == pytest.approx(4 * engine.COMMUNICATORS[1], abs=4)
    assert 4.3e9 <= of(4) <= 5.6e9, "Megatron-DeepSpeed has 4.3 to 5.2 GB outside PyTorch with about four"


def hardware_of(tmp_path, monkeypatch, nbytes: float) -> None:
    own = f"{{peaks: {{fp32: 1 TFLOP/s, bf16: 2 TFLOP/s}}, memory: {nbytes / 1e9:.6f} GB, bandwidth: 10 GB/s}}"
    (tmp_path / "own.yaml").write_text(f"devices: {{Thimble: {own}}}")
    monkeypatch.setenv("GRADUS_HARDWARE", str(tmp_path / "own.yaml"))


def test_a_plan_fits_by_its_upper_end_or_says_that_only_the_middle_does(tmp_path, monkeypatch):
    monkeypatch.setattr("gradus.plan.search.remedy", lambda *given: None)  # what would fit, which takes a search
    request = Request("copy-task", ("layout.micro_batch=80", "layout.replicate=none"), "Thimble")
    hardware_of(tmp_path, monkeypatch, 80e9)
    made = answer(request)
    middle = made.value("memory/device")
    high = next(row.conditions["high"] for row in made.rows if row.name == "memory/device")
    assert made.fits and not made.tight and made.headline[1].startswith("fits") and high > middle
    hardware_of(tmp_path, monkeypatch, (middle + high) / 2)
    made = answer(request)
    assert made.fits is False and made.tight and not made.advice and made.value("time/step") > 0
    assert made.headline[1].startswith("tight") and "fits by the middle estimate, not by its upper end" in made.headline[1]
    hardware_of(tmp_path, monkeypatch, 0.9 * middle)
    made = answer(request)
    assert made.fits is False and not made.tight and made.headline[1].startswith("NO FIT") and made.value("time/step") is None


def test_the_search_takes_what_fits_by_its_upper_end_first():
    q = memory.question_of(point())
    case = Case.of(q.recipe, 1, "cuda")
    needed = engine.plan(case).memory.device_total
    device = Device("Thimble", {"bf16": 1e12, "fp32": 1e12}, 1e9, 1e11)
    one = {size: Space(case, Cluster(Device(device.name, device.peaks, size, device.bandwidth), 1)).evaluate(case.layout) for size in (needed * 1.001, needed * 4.0)}
    (tight, roomy) = one.values()
    assert not tight.fits and tight.time and roomy.fits, "what fits by the middle estimate alone has a time and is said not to fit"
    faster = dataclasses.replace(tight, time=dataclasses.replace(tight.time, parts={"matmul": 1e-9}))
    assert faster.seconds < roomy.seconds and min((faster, roomy), key=lambda c: c.order) is roomy


# ---------------------------------------------------------------- what other programs keep


def kept_by_a_block(q: memory.Question) -> float:
    """Bytes a token that a block keeps for its backward pass, as the trace and the program have it."""
    (p,) = memory.theirs(q)
    pieces = p.stages[0].profile.later["forward"]
    net = next(piece.stretch.net for piece in pieces if piece.unit == "blocks.1" and piece.edge == "pre_forward")
    return net[INDEX["activations"]] / (q.recipe.layout.micro_batch * q.base.seq_len)


def saved_by(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Bytes of what autograd keeps, parameters left out, each storage once."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(input_ids=ids, use_cache=False).logits
    del out
    return sum(nbytes for nbytes, _ in kept.values())


def test_a_block_of_hugging_face_keeps_what_the_plan_says():
    from transformers import LlamaConfig, LlamaForCausalLM

    def saved(layers: int) -> float:
        torch.manual_seed(0)
        config = LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=96,
                             attn_implementation="sdpa")  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        return saved_by(model, torch.randint(0, 96, (2, 32)))

    ours = kept_by_a_block(memory.question_of(point()))
    theirs = (saved(4) - saved(2)) / 2 / 64
    assert ours == pytest.approx(theirs, rel=0.05)
    plain = kept_by_a_block(memory.question_of(point({"framework": "nanotron"})))
    assert theirs > 1.2 * plain, "its norms and repeated keys make a difference"


def test_what_is_computed_again_is_not_kept():
    none, products, full = (memory.question_of(point({"framework": "torchtitan", "recompute": way}, n_devices=2, batch=4)) for way in ("none", "selective (per-op SAC)", "full"))
    h, kv, f = 64, 32, 176
    # kept of the block: its input, queries, values, attention's output with its statistics, gate, the last product
    assert kept_by_a_block(products) == pytest.approx(2 * (4 * h + kv + f), rel=0.06)
    assert kept_by_a_block(none) > kept_by_a_block(products) > kept_by_a_block(full) == pytest.approx(2 * h, rel=0.05)
    offloaded = memory.question_of(point({"framework": "torchtune", "steps_of_ladder": ["packed", "activation offloading"]}))
    assert kept_by_a_block(offloaded) == 0


def test_state_is_as_the_program_has_it():
    def after(**config) -> float:
        return memory.planned(memory.question_of(point(config, metric="allocated_memory_after_step")))

    q = memory.question_of(point())
    count = estimates._sizes(q)[0]
    alive = 2 * 64 * 96  # half logits of the model's output
    assert after() == pytest.approx((2 + 2 + 4) * count + alive, rel=0.01), "half weights, gradients and moments"
    assert after(precision="bf16") == pytest.approx((4 + 4 + 8) * count + alive, rel=0.01), "transformers trains in fp32 with autocast where nothing else is said"
    assert after(framework="nanotron") == pytest.approx((2 + 4 + 12) * count, rel=0.01)
    assert after(optimizer="8-bit AdamW") == pytest.approx((2 + 2 + 2) * count + alive, rel=0.01)
    trained = 4 * 3 * (2 * 64 + 64 + 32)  # rank 4 beside queries and values of three blocks
    assert after(method="lora", lora_rank=4, base_frozen=True) == pytest.approx(2 * count + 16 * trained + alive, rel=0.01)


def test_stages_of_equal_work_count_the_head():
    q = memory.question_of(point({"framework": "nanotron", "layers": 8, "pp": 2, "vocab": 4000, "micro_batch": 1}, n_devices=2, batch=4))
    case = memory.Balanced.of(q.recipe, 2, "cuda")
    assert case.bounds == [0, 7, 8], "the head is worth more than five blocks"
    assert Case.of(q.recipe, 2, "cuda").bounds == [0, 4, 8]


# ---------------------------------------------------------------- reading


def test_points_are_read_by_fields():
    q = memory.question_of(point({"method": "qlora", "base": "int4 (GPTQ)", "target_modules": ["c_attn", "w1"], "lora_rank": 8}))
    assert q.recipe.adapter.targets == ["to_q", "to_k", "to_v", "gate"] and q.frozen.bits == 4.156 and q.frozen.trained == 8 * 3 * (128 + 96 + 96 + 240)
    assert memory.question_of(point(seq=None, config={"dataset": "alpaca (max 10-20 tokens)"})).base.seq_len == 20
    fp32 = memory.question_of(point({"precision": "tf32"}))
    assert (fp32.recipe.layout.precision, fp32.recipe.layout.tf32, fp32.state) == ("fp32", True, 8.0)
    assert memory.measured(point(unit="GiB/device")) == 1.5 * 2**30 and memory.measured(point({"framework": "torchtitan"})) == 1.5 * 2**30
    kinds = {"reserved": "reserved", "not said": "device", "allocated": "allocated"}
    assert {said: memory.question_of(point({"memory_kind": said})).kind for said in kinds} == kinds
    for wrong in ({"config": {"precision": "NVFP4"}}, {"seq": None}):
        with pytest.raises(NotCovered):
            memory.question_of(point(**wrong))


def test_names_of_sources_say_nothing():
    named = point({"method": "lora", "lora_rank": 4}, source="pytorch/torchtitan@1 megatron.md", id="bloom-1", group="litgpt", note="")
    assert memory.planned(memory.question_of(named)) == memory.planned(memory.question_of(point({"method": "lora", "lora_rank": 4})))


# ---------------------------------------------------------------- scores


def entry(group: str, ratio: float, program: str = "hf") -> scoring.Entry:
    return scoring.Entry(point(group=group), group, program=program, error=math.log(ratio), label=group, value=1e9)


def test_an_interval_is_of_other_groups_each_of_which_counts_once():
    many, few = [entry("many", 1.0) for _ in range(30)], [entry("few", 1.2) for _ in range(3)]
    low, high = map(math.exp, scoring.interval([*many, *few]))
    assert (low, high) == (pytest.approx(1.0, abs=0.01), pytest.approx(1.2, abs=0.01)), "half of the weight lies at each"
    assert scoring.interval(many, "hf") == pytest.approx((0.0, 0.0))
    assert [*map(math.exp, scoring.interval([], "no such program"))] == pytest.approx(scoring.committed()["every"])
    found, _ = scoring.memory_entries([point(value=1e-3), point(value=1e-3), point(group="b", value=1e-6)])
    assert [e.measured for e in found] == pytest.approx([1e6, 1e6, 1e3])
    ratios = [e.measured / e.value for e in found]
    assert math.exp(found[0].between[1]) == pytest.approx(ratios[2]) and math.exp(found[2].between[1]) == pytest.approx(ratios[0]), "nested: made without its own"


def test_the_rivals_are_what_their_authors_say():
    q = memory.question_of(point())
    total = 96 * 64 * 2 + 64 + 3 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176)
    assert estimates.accelerate(q) == 8 * total and estimates.sixteen(q) == 16 * total and estimates.llamafactory(q) == 8 * total
    lora = memory.question_of(point({"method": "lora", "lora_rank": 4}))
    assert estimates.accelerate(lora) is None and estimates.llamafactory(lora) == 2 * total
    each = (64 * (64 + 2 * 32) + 2 * 64 + 2 * 64 * 176) * 2.5  # Unsloth's activations of a layer, of 64 tokens
    trained = lora.frozen.trained
    floor = min(0.15 * 2 * total, max(3 * each, 6 * trained))
    assert estimates.unsloth(lora) == pytest.approx(2 * total + 8 * trained + max(2 * trained, floor) + 3 * each + 1.4 * 2**30)
    zero = memory.question_of(point({"zero": 3, "framework": "transformers, DeepSpeed", "dp": 2}, n_devices=2, batch=4))
    assert estimates.deepspeed(zero) == 4 * 96 * 64 + 9 * total and math.isfinite(estimates.twenty(zero))
