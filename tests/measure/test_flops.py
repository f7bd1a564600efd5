"""Counted operations against closed forms; peaks by whole names; memory against sizes known beforehand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from gradus import hardware, models
from gradus import recipe as recipes
from gradus.measure.flops import count_flops, flops_per_token, for_run, to_meta
from gradus.measure.memory import Timeline, component_bytes
from gradus.parallel.apply import use_checkpointing, use_kernel
from gradus.recipe.schema import BertConfig, GPTConfig, LlamaConfig, T5Config, ViTConfig
from gradus.train.session import open_session

L, D, A, V, S, B, FF = 3, 24, 4, 50, 16, 2, 96
GPT = GPTConfig(vocab_size=V, n_layers=L, d_model=D, n_heads=A, seq_len=S, bias=False)
N_MM = L * (4 * D * D + 2 * D * FF) + V * D  # matrices that multiply: the tied head is one, the embeddings are looked up


def gpt(kernel: str = "sdpa", device: str = "cpu"):
    model = models.build(GPT, device=device)
    use_kernel(model, kernel, 4)
    return model, torch.zeros(B, S, dtype=torch.long, device=device)


def train(model, ids):
    return lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kernel", ["sdpa", "naive"])
def test_forward_is_the_closed_form(kernel, device):
    model, ids = gpt(kernel, device)
    with torch.no_grad():
        assert count_flops(lambda: model(ids)) == B * S * (2 * N_MM + 4 * L * D * S)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_training_is_three_times_forward(device):
    model, ids = gpt("naive", device)
    assert count_flops(train(model, ids)) == B * S * (6 * N_MM + 12 * L * D * S)


def test_fused_attention_on_a_cpu_is_counted_with_the_scores_it_computes_again():
    model, ids = gpt("sdpa")
    assert count_flops(train(model, ids)) == B * S * (6 * N_MM + 12 * L * D * S + 2 * L * D * S)


def test_full_checkpointing_computes_the_blocks_again():
    model, ids = gpt("naive")
    use_checkpointing(model, "full")
    again = 2 * (N_MM - V * D - L * FF * D) + 4 * L * D * S  # but for the last matrix: nothing in the block needs its result
    assert count_flops(train(model, ids)) == B * S * (6 * N_MM + 12 * L * D * S + again)


def test_grouped_queries_and_gates():
    config = LlamaConfig(vocab_size=V, n_layers=L, d_model=D, n_heads=A, n_kv_heads=2, d_ff=40, seq_len=S)
    matrices = L * (2 * D * D + 2 * D * D // 2 + 3 * D * 40) + V * D
    model = models.build(config, device="meta")
    use_kernel(model, "naive", 0)
    assert count_flops(train(model, torch.zeros(B, S, dtype=torch.long, device="meta"))) == B * S * (6 * matrices + 12 * L * D * S)


def test_a_selection_keeps_its_size_without_values():
    config = BertConfig(vocab_size=V, n_layers=L, d_model=D, n_heads=A, d_ff=FF, seq_len=S, head="masked_lm")
    select = torch.zeros(B, S, dtype=torch.bool)
    select[0, [1, 5]] = select[1, 3] = True
    batch = to_meta({"ids": torch.zeros(B, S, dtype=torch.long), "select": select, "n_tokens": 5})
    model = models.build(config, device="meta")
    use_kernel(model, "naive", 0)
    with torch.no_grad():
        found = count_flops(lambda: model(batch["ids"], select=batch["select"]))
        assert model(batch["ids"], select=batch["select"]).shape == (3, V)
    assert found == B * S * (2 * L * (4 * D * D + 2 * D * FF) + 4 * L * D * S) + 3 * 2 * (D * D + D * V)


def test_cross_attention_and_patches():
    t5 = models.build(T5Config(vocab_size=V, n_layers=L, d_model=D, n_heads=A, d_head=5, d_ff=FF, n_buckets=8, max_distance=16), device="meta")
    use_kernel(t5, "naive", 0)
    inner, source, target = A * 5, 7, 11
    attention = lambda q, k: 2 * (2 * D * inner * q + 2 * D * inner * k) + 4 * inner * q * k  # noqa: E731
    expected = (
        L * (attention(source, source) + attention(target, target) + attention(target, source) + 4 * D * FF * (source + target)) + 2 * D * V * target
    )
    ids = lambda n: torch.zeros(1, n, dtype=torch.long, device="meta")  # noqa: E731
    with torch.no_grad():
        assert count_flops(lambda: t5(ids(source), ids(target))) == expected

    config = ViTConfig(image_size=8, patch_size=2, n_layers=L, d_model=D, n_heads=A, d_ff=FF, n_classes=5, n_channels=3)
    vit = models.build(config, device="meta")
    use_kernel(vit, "naive", 0)
    s = 17
    with torch.no_grad():
        found = count_flops(lambda: vit(torch.zeros(B, 3, 8, 8, device="meta")))
    assert found == B * (s * (2 * L * (4 * D * D + 2 * D * FF) + 4 * L * D * s) + 16 * 2 * 12 * D + 2 * D * 5)


# ---------------------------------------------------------------- of a run


def copy_session(**more):
    settings = {
        "model.n_layers": 1,
        "model.d_model": 16,
        "model.n_heads": 2,
        "model.d_ff": 32,
        "data.n_train": 20,
        "data.n_valid": 5,
        "layout.device": "cpu",
    }
    return open_session(recipes.load("copy-task", **{**settings, **more}))


def test_a_run_is_counted_by_its_own_tokens():
    session = copy_session(**{"layout.checkpointing": "full", "layout.attention": "chunked"})  # neither changes the model's operations
    d, ff, v = 16, 32, session.recipe.model.vocab_size
    sample = session.task.collate([session.task.splits["train"][0]])
    s, t = sample["source"].shape[1], sample["target"].shape[1]
    attention = lambda q, k: 4 * d * d * (q + k) + 4 * d * q * k  # noqa: E731
    forward = attention(s, s) + attention(t, t) + attention(t, s) + 4 * d * ff * (s + t) + 2 * d * v * t
    assert flops_per_token(session.task) == 3 * forward / sample["n_tokens"]


def test_ragged_samples_are_counted_without_padding(tmp_path):
    lengths = [4, 6, 9, 30] * 2
    for split in ("train", "valid"):
        (tmp_path / f"{split}.tsv").write_text("sentence\tlabel\n" + "".join(f"{'x' * (n - 2)}\t{i % 2}\n" for i, n in enumerate(lengths)))
    recipe = recipes.load(
        "sst2-bert", ["model.init=null", "model.preset=null", f"data.path={tmp_path}", f"data.cache={tmp_path}"],
        model={"family": "bert", "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "seq_len": 32},
        tokenizer={"kind": "byte"}, data={"pad": "max_length", "max_len": 32}, layout={"device": "cpu"},
    )  # fmt: skip
    session = open_session(recipe)
    assert session.task.collate([session.task.splits["train"][0]])["ids"].shape[1] > 30, "the run itself pads"
    forward = sum(n * 2 * (4 * 16 * 16 + 2 * 16 * 32) + 4 * 16 * n * n + 2 * (16 * 16 + 16 * 2) for n in (4, 6, 9, 30))
    assert flops_per_token(session.task) == pytest.approx(3 * forward / 49, rel=1e-12)


def test_unknown_devices_have_no_peak_and_cost_no_time(monkeypatch):
    session = copy_session()
    monkeypatch.setattr("gradus.measure.flops.flops_per_token", lambda task: pytest.fail("counted although there is no peak"))
    assert for_run(session) == (None, None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X999")
    assert for_run(dataclasses.replace(session, device=torch.device("cuda"))) == (None, None)


@pytest.mark.parametrize(
    ("precision", "tf32", "peak"), [("fp32", False, 67e12), ("fp32", True, 494e12), ("bf16", False, 989e12), ("fp8", False, 989e12), ("pure_fp16", True, 989e12)]
)
def test_the_peak_is_that_of_the_numbers_used(monkeypatch, precision, tf32, peak):
    session = copy_session()
    session.recipe.layout.precision, session.recipe.layout.tf32 = precision, tf32
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    per_token, found = for_run(dataclasses.replace(session, device=torch.device("cuda")))
    assert found == peak
    assert per_token == flops_per_token(session.task)


@pytest.mark.parametrize(
    ("name", "numbers", "peak"),
    [
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),  # it has none
        ("Tesla T4", "fp16", 65e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "tf32", 156e12),
        ("NVIDIA A10G", "bf16", 70e12),
        ("NVIDIA A10G", "tf32", None),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", 85.8e12),
        ("NVIDIA GeForce RTX 3090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("AMD Instinct MI300X", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_peaks_by_whole_names(name, numbers, peak):
    device = hardware.by_driver(name)
    assert (device and device.peaks.get(numbers)) == peak


# ---------------------------------------------------------------- memory


def test_component_bytes_count_shared_tensors_once():
    model, ids = gpt()
    n = sum(p.numel() for p in model.parameters())
    assert component_bytes(model) == {"weights": 4 * n, "gradients": 0, "optimizer": 0}
    optimizer = torch.optim.Adam(model.parameters())
    train(model, ids)()
    optimizer.step()
    steps = len(list(model.parameters()))  # Adam counts its steps a parameter, in fp32
    assert component_bytes(model, optimizer) == {"weights": 4 * n, "gradients": 4 * n, "optimizer": 8 * n + 4 * steps}
    model.bfloat16()
    assert component_bytes(model)["weights"] == 2 * n


def test_peak_of_known_allocations():
    kept = []

    def work():
        a = torch.empty(1000, dtype=torch.float32)
        kept.append(torch.empty(500, dtype=torch.float32))
        del a
        torch.empty(2000, dtype=torch.uint8)

    with Timeline() as timeline:
        work()
        timeline.mark("after")
    assert timeline.phases()[0][1:] == (2000, 6000)
