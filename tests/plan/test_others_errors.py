"""Mistakes seen in other planners, each as a test of ours: the numbers in the names of the tests are those of the list they come from."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from gradus import hardware, models
from gradus.errors import UserError
from gradus.plan import engine
from gradus.plan.case import Case
from gradus.plan.counts import Shape, active, flops, operations, utilisation
from gradus.plan.peak import peak_of
from gradus.plan.roofline import op_seconds
from gradus.plan.serving import BYTES, serving, usage_of
from gradus.plan.trace import Traced, trace_recipe
from gradus.plan.work import Op
from gradus.recipe.presets import config_of
from gradus.recipe.schema import GPTConfig, LlamaConfig, ModelConfig, Recipe

sys.path[:0] = [str(Path(__file__).parent)]

from closed_forms import closed_form  # noqa: E402

GIB = 2**30
GPT = GPTConfig(vocab_size=96, n_layers=2, d_model=32, n_heads=4, seq_len=32)
LLAMA = LlamaConfig(vocab_size=96, n_layers=2, d_model=32, n_heads=4, d_ff=64, seq_len=32)
LONG = GPTConfig(vocab_size=96, n_layers=2, d_model=32, n_heads=4, seq_len=256)
# Le Scao et al. 2022 (BLOOM), section 3.2 and table 3: 384 devices as tensor 4 × pipeline 12 × data 8. (Its norm of the embeddings is left out,
# and ALiBi for learned positions.)
BLOOM = GPTConfig(vocab_size=250_880, n_layers=70, d_model=14_336, n_heads=112, seq_len=2048)


def recipe(model: ModelConfig, samples: int = 4, **layout) -> Recipe:
    return Recipe(
        model=model, task={"name": "causal_lm"}, data={"kind": "text"}, optimizer={"name": "adamw", "lr": 1e-3}, batch={"samples": samples},
        train={"steps": 1}, layout=layout,
    )  # fmt: skip


@functools.cache
def traced(model_json: str, family: type, n: int, rank: int, samples: int, **layout) -> Traced:
    return trace_recipe(recipe(family.model_validate_json(model_json), samples, **layout), n, rank, target="cuda")


def trace(model: ModelConfig, n: int = 1, rank: int = 0, samples: int = 4, **layout) -> Traced:
    return traced(model.model_dump_json(), type(model), n, rank, samples, **layout)


def held(t: Traced, part: str) -> float:
    return t.state[part]


# ---------------------------------------------------------------- 1: cookbook's memory script


@pytest.mark.slow
@pytest.mark.parametrize("part", ["weights", "gradients", "optimizer"])
def test_1_all_states_are_divided_by_tensor_and_pipeline(part):
    """Not only the weights. Of four devices each holds about a quarter: norms and row biases are whole under tensor parallelism."""
    whole, split = trace(GPT), trace(GPT, 4, tensor=2, pipeline=2, micro_batch=1)
    assert held(whole, part) / 4 <= held(split, part) < held(whole, part) / 3



@pytest.mark.slow
def test_1_blooms_gradients_fit_beside_its_measured_memory():
    """670 GiB of gradients a device were printed for a run that took 59 GB in the whole."""
    made = engine.processes(Case.of(recipe(BLOOM, 2048, tensor=4, pipeline=12, precision="bf16", micro_batch=2), 384, "cuda"))
    assert 10 * GIB < max(peak_of(p).gradients for p in made) < 25 * GIB


@pytest.mark.slow
def test_1_zero_divides_by_replicas_not_by_devices():
    """On four devices: sharded by two, with two replicas, a device holds half of the states; with ZeRO-1 over four replicas, a quarter of the
    optimizer's. Two tensor ranks by two shards hold a quarter."""
    whole, hybrid, zero1 = trace(GPT), trace(GPT, 4, shard=2), trace(GPT, 4, shard_optimizer=True)
    assert held(hybrid, "optimizer") / held(whole, "optimizer") == pytest.approx(1 / 2, abs=0.01)
    assert held(hybrid, "weights") / held(whole, "weights") == pytest.approx(1 / 2, abs=0.01)
    assert held(zero1, "optimizer") / held(whole, "optimizer") == pytest.approx(1 / 4, abs=0.02)
    assert held(zero1, "weights") == held(whole, "weights")
    assert held(trace(GPT, 4, tensor=2, shard=2), "optimizer") / held(whole, "optimizer") == pytest.approx(1 / 4, abs=0.03)


def test_1_the_cache_has_keys_and_values_and_only_the_key_heads():
    """Llama-2-70B at 4,096: 5.00 GiB were printed, 1.25 are true."""
    llama = config_of("llama2-70b")
    assert usage_of(llama, 1, 4096).own * BYTES["bf16"] == 1.25 * GIB == 2 * 80 * 8 * 128 * 4096 * 2
    without_both = 80 * 64 * 128 * 4096 * 2  # no factor of two, all heads
    assert without_both == 5 * GIB


@pytest.mark.slow
def test_1_full_checkpointing_is_not_the_selective_formula():
    kept = {mode: trace(LONG, checkpointing=mode).memory["activations"] for mode in ("none", "selective", "full")}
    assert kept["full"] < kept["selective"] < kept["none"]


def test_1_a_layer_has_two_norms_of_weight_and_bias():
    """4h a layer, not 8h."""
    assert models.count(GPT)["norms"] == 2 * 4 * 32 + 2 * 32
    assert models.count(LLAMA)["norms"] == 2 * 2 * 32 + 32


def test_1_the_inner_width_need_not_be_a_whole_multiple():
    """Llama-2-70B: 1.3 × 2/3 × 4 × 8192, up to a multiple of 4096."""
    assert config_of("llama2-70b").d_ff == 28_672
    odd = GPT.model_copy(update={"d_ff": 85})
    assert models.count(odd)["feedforward"] == 2 * (2 * 32 * 85 + 85 + 32)


# ---------------------------------------------------------------- 2: DeepSpeed's estimator


@pytest.mark.slow
def test_2_zero_2_has_whole_weights_once_and_a_share_of_all_states():
    """2P of gathered weights and states over N (Rajbhandari et al. 2020, figure 1), of ours 16P with fp32 gradients; 4P + 16P/N and
    2P + 18P/N were both to be read."""
    t, zero3 = trace(GPT, 4, shard=4, reshard=False, param_dtype="bf16"), trace(GPT, 4, shard=4, param_dtype="bf16")
    assert t.memory["gathered"] == pytest.approx(2 * t.parameters, rel=0.01) and zero3.memory["gathered"] < 1.5 * t.parameters
    for traced_ in (t, zero3):
        assert sum(held(traced_, part) for part in ("weights", "gradients", "optimizer")) == pytest.approx(16 * t.parameters / 4, rel=0.01)


@pytest.mark.slow
def test_2_the_plan_is_more_than_states():
    """0.49 GB were predicted and 14.7 seen: activations and logits are memory too, and grow with the batch."""
    small, large = trace(GPT, samples=2), trace(GPT, samples=16)
    assert held(small, "weights") == held(large, "weights") and held(small, "optimizer") == held(large, "optimizer")
    assert large.peak > 2.5 * small.peak
    assert large.memory["activations"] + large.memory["logits"] > large.peak / 2
    assert sum(large.memory.values()) == large.peak


# ---------------------------------------------------------------- 3: accelerate's estimate


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_3_states_are_added_not_compared(precision):
    """Mixed precision has all of 16 bytes a parameter at once; max(4P, 6P, 8P) is half of that."""
    t = trace(GPT, precision=precision)
    states = sum(t.state[part] for part in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(16 * t.parameters, rel=0.01)
    assert t.peak >= 16 * t.parameters
    assert t.memory["weights"] + t.memory["optimizer"] >= 12 * t.parameters  # whenever the peak is


# ---------------------------------------------------------------- 4: Megatron's activation formula


@pytest.mark.slow
def test_4_experts_gates_and_grouped_queries_are_in_the_activations():
    dense = trace(LLAMA, precision="bf16").memory["activations"]  # in fp32 a GPU's attention shares no keys
    assert trace(LLAMA.model_copy(update={"n_experts": 4, "top_k": 2}), precision="bf16").memory["activations"] > 1.2 * dense
    few = trace(LLAMA.model_copy(update={"n_kv_heads": 1}), precision="bf16").memory["activations"]
    assert dense - few >= 4 * 32 * 2 * 3 * 8 * 2  # samples · tokens · (k, v) · heads fewer · width · bytes, of one layer at least
    wider = trace(LLAMA.model_copy(update={"d_ff": 128}), precision="bf16").memory["activations"]
    assert wider - dense >= 2 * 4 * 32 * 64 * 2 * 3  # layers · samples · tokens · more width · bytes · (gate, up, their product)


@pytest.mark.slow
def test_4_the_scores_are_there_without_a_fused_kernel_and_gone_with_one():
    """5as²: a fused kernel has removed them already, so that selective recomputation then saves little (25.52 → 24.94 GB)."""
    naive, fused = trace(LONG, attention="naive"), trace(LONG)
    scores = 4 * 4 * 256 * 256 * 4  # samples · heads · s² · bytes, of one layer at least
    assert naive.memory["activations"] - fused.memory["activations"] >= scores
    saved_naive = naive.peak - trace(LONG, attention="naive", checkpointing="attention").peak
    saved_fused = fused.peak - trace(LONG, checkpointing="attention").peak
    assert saved_fused < saved_naive / 3
    assert trace(LONG, checkpointing="full").memory["activations"] < fused.memory["activations"] / 2


# ---------------------------------------------------------------- 5: an unknown device as an A100


def test_5_an_unknown_device_is_an_error_and_no_other():
    with pytest.raises(UserError, match="calibrate"):
        hardware.find("MI350Z")
    with pytest.raises(UserError, match="MI350Z"):
        hardware.cluster("8xMI350Z")
    with pytest.raises(UserError, match="not known"):
        utilisation("mfu", 1e15, 1.0, hardware.cluster("8xV100"), "bf16")  # it has no bf16: nothing stands in


# ---------------------------------------------------------------- 6: fused attention that counts for nothing


def test_6_fused_attention_counts_on_a_cpu_and_under_fake_tensors():
    """GPT-2 small, a whole training step: 6·N_mm + 12·L·h·s a token, ratio 1.0000; with the fused kernel the scores again."""
    gpt2 = recipe(config_of("gpt2-small"))
    n = 12 * 12 * 768**2 + 50_257 * 768
    found = operations(Case.of(gpt2, target="cuda"))
    assert found.model / (1024 * (6 * n + 12 * 12 * 768 * 1024)) == 1
    assert found.hardware - found.model == 1024 * 2 * 12 * 768 * 1024
    rows = {r.name: r.value for r in flops(Case.of(gpt2, target="cuda"))}
    assert rows["flops/model"] == 4 * found.model


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT, LLAMA, LLAMA.model_copy(update={"n_experts": 4})])
def test_6_the_traced_step_has_the_same_operations(model):
    """All scores written out: what fused kernels leave out or compute again is no matter."""
    work = trace(model, micro_batch=2, attention="naive").work
    assert work.micro_batches == 2
    assert work.micro_batches * sum(op.flops * op.count for op in work.micro if op.kind != "memory") == 4 * closed_form(model, Shape(32))


# ---------------------------------------------------------------- 7: peaks of another unit, another card, or with sparsity


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("RTX-3090", "bf16", 71e12), ("RTX-4090", "bf16", 165e12), ("A10G", "bf16", 70e12), ("A10", "bf16", 125e12),
        ("H100", "fp16", 989e12), ("H100", "bf16", 989e12), ("H100", "fp8", 1979e12), ("H100-PCIe", "bf16", 756e12),
        ("A100-80GB", "bf16", 312e12), ("L40S", "bf16", 362e12), ("L4", "fp8", 242e12), ("B200", "bf16", 2250e12),
    ],
)  # fmt: skip
def test_7_peaks_are_dense_and_of_tensor_cores(name, dtype, peak):
    assert hardware.find(name).peaks[dtype] == pytest.approx(peak, rel=1e-3)


def test_7_every_peak_is_possible():
    for device in hardware.devices().values():
        p = device.peaks
        assert all(1e9 < rate < 2e16 for rate in p.values()), device.name
        if device.kind == "gpu" and "bf16" in p:
            assert p["bf16"] >= 1.9 * p.get("fp32", 0) or device.name.startswith("RTX"), device.name  # tensor cores
            assert "fp8" not in p or 1.9 < p["fp8"] / p["bf16"] < 2.1, device.name
            assert "tf32" not in p or p["tf32"] <= p["bf16"], device.name
    with pytest.raises(UserError):
        hardware.find("GTX-750")


# ---------------------------------------------------------------- 8: experts' memory from active parameters


def test_8_all_experts_are_in_memory():
    """6 GB were printed where 75 are needed."""
    mixtral = config_of("mixtral-8x7b")
    weights = next(r.value for r in serving(mixtral) if r.name == "serving/weights")
    assert weights == 2 * 46_702_792_704 > 3 * 2 * active(mixtral)
    model = LLAMA.model_copy(update={"n_experts": 8, "top_k": 1})
    t = trace(model)
    assert t.state["weights"] == 4 * models.count(model)["total"] > 3 * 4 * active(model)


# ---------------------------------------------------------------- 9: no vocabulary


def test_9_embeddings_are_parameters_and_their_projection_is_work():
    """Without them 32 % of GPT-2 small's parameters are missing, and 0.4 % of GPT-3's."""
    small, large = (models.count(config_of(name)) for name in ("gpt2-small", "gpt3-175b"))
    assert small["embeddings"] / small["total"] == pytest.approx(0.316, abs=0.001)
    assert large["embeddings"] / large["total"] == pytest.approx(0.0037, abs=0.0001)
    wide = GPT.model_copy(update={"vocab_size": 192})
    assert closed_form(wide, Shape(32)) - closed_form(GPT, Shape(32)) == 6 * 96 * 32 * 32
    assert trace(wide).state["weights"] - trace(GPT).state["weights"] == 4 * 96 * 32
    assert trace(wide).peak > trace(GPT).peak + 16 * 96 * 32


# ---------------------------------------------------------------- and what PyTorch's own estimator does


@pytest.mark.parametrize("name", ["A100-80GB", "H100", "T4", "RTX-4090"])
def test_no_product_is_faster_than_the_dense_peak(name):
    """A cost model priced a product at 150 % of it, and another a thousand times off."""
    device = hardware.find(name)
    dtype = "bf16" if "bf16" in device.peaks else "fp16"
    for m in (64, 1024, 8192):
        product = Op("matmul", "mm", dtype, "forward", 2.0 * m**3, 2.0 * 3 * m**2, (1, m, m, m))
        seconds = op_seconds(product, device)
        assert seconds >= product.flops / device.peaks[dtype]
        assert seconds < 1000 * max(product.flops / device.peaks[dtype], product.bytes / device.bandwidth) + 1e-4


@pytest.mark.parametrize(("name", "bandwidth"), [("V100", 150e9), ("A100-80GB", 300e9), ("H100", 450e9), ("H800", 200e9), ("B200", 900e9)])
def test_links_are_one_directional(name, bandwidth):
    assert hardware.find(name).link.bandwidth == pytest.approx(bandwidth, rel=0.01)
