"""Mixture of experts: the layer against transformers' Mixtral and a loop over tokens, its balance loss against the formula, the models
against MixtralForCausalLM, and what a recipe, a plan and a folder of weights make of it."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.layers import FeedForward, MixtureOfExperts, keep_balance, moe
from gradus.layers.moe import balance_loss, grouped_mm, grouped_outer
from gradus.measure.flops import count_flops, flops_per_token
from gradus.models.decoding import complete
from gradus.models.weights.llama import config_from_hf, config_to_hf
from gradus.parallel.apply import use_checkpointing, use_kernel
from gradus.recipe.presets import config_of
from gradus.recipe.schema import GPTConfig, LlamaConfig
from gradus.torch_private import FakeTensorMode, TorchDispatchMode
from gradus.train.loop import Trainer
from gradus.train.session import open_session

D, FF, E, V, L = 16, 24, 6, 41, 2
SIZE = {"vocab_size": V, "n_layers": L, "d_model": D, "n_heads": 2, "d_ff": FF, "seq_len": 32, "n_experts": E}
GPT, LLAMA = GPTConfig(**SIZE, top_k=3), LlamaConfig(**SIZE, n_kv_heads=1)
BOTH = pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])


def shake(model: nn.Module) -> nn.Module:
    """Every parameter away from what an initialisation would leave equal."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


# ---------------------------------------------------------------- the layer


def test_as_transformers_mixtral():
    config = transformers.MixtralConfig(hidden_size=D, intermediate_size=FF, num_local_experts=E, num_experts_per_tok=2)
    theirs = MixtralSparseMoeBlock(config)
    ours = shake(MixtureOfExperts(D, FF, E, 2, "silu", gated=True))
    experts = ours.experts
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat((experts.gate.weight, experts.up.weight), 2).transpose(1, 2))
        theirs.experts.down_proj.copy_(experts.down.weight.transpose(1, 2))
    x = torch.randn(3, 7, D, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    probe = torch.randn(3, 7, D)
    a, b = ours(x), theirs(y)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    (a * probe).sum().backward()
    (b * probe).sum().backward()
    gate, up = theirs.experts.gate_up_proj.grad.transpose(1, 2).split(FF, 2)
    pairs = [(x, y.grad), (ours.router.weight, theirs.gate.weight.grad), (experts.gate.weight, gate), (experts.up.weight, up)]
    for got, wanted in [*pairs, (experts.down.weight, theirs.experts.down_proj.grad.transpose(1, 2))]:
        torch.testing.assert_close(got.grad, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 3, E])
def test_as_a_loop_over_tokens(top_k):
    """Every token through feed-forward networks of its own, gradients too."""
    mixture = shake(MixtureOfExperts(D, FF, E, top_k, "gelu", bias=True))
    copies = [FeedForward(D, FF, "gelu") for _ in range(E)]
    with torch.no_grad():
        for i, one in enumerate(copies):
            for name, layer in (("up", mixture.experts.up), ("down", mixture.experts.down)):
                getattr(one, name).weight.copy_(layer.weight[i].T)
                getattr(one, name).bias.copy_(layer.bias[i])
    router = mixture.router.weight.detach().clone().requires_grad_()
    x = torch.randn(2, 9, D)

    rows = []
    for token in x.flatten(0, 1):
        scores = router @ token
        chosen = scores.argsort(descending=True)[:top_k]
        weights = scores[chosen].softmax(0)  # a softmax over the chosen is the renormalised softmax over all
        rows.append(sum(w * copies[int(i)](token) for w, i in zip(weights, chosen)))
    wanted = torch.stack(rows).view_as(x)
    got = mixture(x)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    probe = torch.randn_like(x)
    (got * probe).sum().backward()
    (wanted * probe).sum().backward()
    zero = lambda p: torch.zeros_like(p) if p.grad is None else p.grad  # noqa: E731
    torch.testing.assert_close(mixture.router.weight.grad, zero(router), atol=1e-5, rtol=1e-5)
    for name, layer in (("up", mixture.experts.up), ("down", mixture.experts.down)):
        torch.testing.assert_close(layer.weight.grad, torch.stack([zero(getattr(c, name).weight).T for c in copies]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.bias.grad, torch.stack([zero(getattr(c, name).bias) for c in copies]), atol=1e-5, rtol=1e-5)


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero():
    mixture = MixtureOfExperts(D, FF, E, 1, "silu", gated=True)
    mixture.router.weight.data.zero_()[3] = 1.0
    mixture(torch.rand(2, 5, D)).sum().backward()  # all positive: all go to expert 3
    for p in mixture.experts.parameters():
        touched = [bool(g.any()) for g in p.grad]
        assert touched == [i == 3 for i in range(E)]


def test_operators():
    """Autograd, meta and fake versions as PyTorch wants them, and the derivative itself."""
    counts = torch.tensor([2, 0, 3])
    x, w, y = torch.randn(5, 4), torch.randn(3, 4, 6), torch.randn(5, 6)
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(grouped_mm, (x.requires_grad_(), w.requires_grad_(), counts), test_utils=quick)
    torch.library.opcheck(grouped_outer, (x.detach(), y, counts), test_utils=quick)
    assert torch.autograd.gradcheck(lambda a, b: grouped_mm(a, b, counts), (x.double(), w.double()))


class NoWaiting(TorchDispatchMode):
    """Fails where a value is read on the host: on a GPU that waits for all that was launched before."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("counts", [[3, 0, 5], [8, 0, 0], [0, 0, 0]])
def test_fused_products_are_the_same(counts, monkeypatch):
    """The way of a GPU in bf16, which PyTorch's own operator can go on a CPU too."""
    counts = torch.tensor(counts)
    n = int(counts.sum())
    x, w, y = torch.randn(n, 16).bfloat16(), torch.randn(3, 16, 24).bfloat16(), torch.randn(n, 24).bfloat16()
    wanted = grouped_mm(x, w, counts), grouped_outer(x, y, counts), grouped_mm(y, w.transpose(1, 2), counts)
    monkeypatch.setattr(moe, "has_fused", lambda *_: True)
    monkeypatch.setattr(Tensor, "tolist", lambda _: pytest.fail("a value was read on the host")) if n else None
    found = grouped_mm(x, w, counts), grouped_outer(x, y, counts), grouped_mm(y, w.transpose(1, 2), counts)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    assert not found[1][counts == 0].any(), "a group without rows has a gradient of zero"


def test_a_layer_reads_no_value_on_the_host(monkeypatch):
    monkeypatch.setattr(moe, "has_fused", lambda *_: True)
    monkeypatch.setattr(Tensor, "tolist", lambda _: pytest.fail("a value was read on the host"))
    mixture = MixtureOfExperts(16, 24, E, 2, "silu", gated=True, bias=True)
    x = torch.randn(2, 50, 16, requires_grad=True)
    with NoWaiting(), torch.autocast("cpu", torch.bfloat16):
        mixture(x).sum().backward()
    assert all(p.grad is not None for p in mixture.parameters())


def test_what_pytorch_cannot_multiply_fused_goes_by_itself():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert not moe.has_fused(torch.bfloat16, cpu, 16, 16) and not moe.has_fused(torch.float32, gpu, 16, 16)
    if torch.cuda.is_available():
        assert not moe.has_fused(torch.bfloat16, gpu, 12, 16)


@pytest.mark.parametrize("shared", [{}, {"d_shared": 40, "norm_top_k": False}], ids=["", "shared"])
def test_half_precision_routes_in_fp32(shared):
    mixture = MixtureOfExperts(D, FF, E, 2, "silu", gated=True, bias=True, **shared)
    x = torch.randn(2, 50, D)
    wanted = mixture(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = mixture(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wanted, atol=2e-2, rtol=5e-2)
    got.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in mixture.parameters())
    mixture.zero_grad()
    mixture.bfloat16()(x.bfloat16()).sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in mixture.parameters())


# ---------------------------------------------------------------- the balance loss


def test_balance_loss_is_the_formula():
    """Fedus et al. 2021, equations 4 to 6, spelled out for each sequence."""
    torch.manual_seed(3)
    mixture = shake(MixtureOfExperts(D, FF, E, 2, "silu"))
    x = torch.randn(3, 8, D)
    with keep_balance(mixture) as kept:
        mixture(x)
    for row, got in zip(x, kept[0], strict=True):
        p = (row @ mixture.router.weight.T).softmax(-1)  # (seq, n_experts)
        total = 0.0
        for i in range(E):
            f = sum(i in token.topk(2).indices for token in p) / (2 * len(row))
            total += f * p[:, i].mean()
        assert got.item() == pytest.approx(float(E * total.detach()), rel=1e-5)
    even = torch.full((1, E, E), 1 / E)
    assert balance_loss(even, torch.full((1, E), 2)).item() == pytest.approx(1)
    assert balance_loss(torch.eye(E)[0].expand(1, 4, E), 4 * torch.eye(E, dtype=torch.long)[:1]).item() == pytest.approx(E)


def test_balance_loss_moves_the_router_towards_balance():
    torch.manual_seed(5)
    mixture = shake(MixtureOfExperts(D, FF, E, 1, "silu"))
    optimizer = torch.optim.Adam(mixture.parameters(), lr=1e-2)
    x = torch.randn(4, 64, D) + 1.0
    found = []
    for _ in range(40):
        with keep_balance(mixture) as kept:
            mixture(x)
        optimizer.zero_grad()
        kept[0].sum().backward()
        optimizer.step()
        found.append(kept[0].mean().item())
    assert found[0] > 1.5 and found[-1] < 1.15


@BOTH
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_balance_loss_is_not_kept_and_adds_up(config, mode):
    """Over micro-batches, one graph or recomputed; after the block the modules hold nothing, also after the backward pass."""
    model = shake(models.build(config))
    ids = torch.randint(V, (4, 9))

    def gradients(applied, micro_batches):
        model = copy.deepcopy(shaken)
        use_checkpointing(model, applied)
        total = 0.0
        for part in ids.chunk(micro_batches):
            with keep_balance(model) as kept:
                out = model(part)
            assert [k.shape for k in kept] == [(len(part),)] * L
            loss = torch.stack(kept).mean(0).sum() + (out**2).sum() / 100
            loss.backward()
            total += loss.item()
            assert all(m.balance is None and not m.keeps_balance for m in model.modules() if isinstance(m, MixtureOfExperts))
        return total, {name: p.grad for name, p in model.named_parameters()}

    shaken = model
    wanted, expected = gradients("none", 1)
    got, found = gradients(mode, 2)
    assert got == pytest.approx(wanted, rel=1e-5)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-4, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.slow
def test_compiled_as_eager():
    model = shake(models.build(LLAMA))
    compiled = copy.deepcopy(model)
    for block in compiled.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        ids = torch.randint(V, (4, 9))
        found = []
        for m in (model, compiled):
            with keep_balance(m) as kept:
                out = m(ids)
            (out.sum() + torch.stack(kept).sum()).backward()
            found.append((out, torch.stack(kept), m.blocks[0].feedforward.router.weight.grad.clone()))
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- the models


@BOTH
def test_initialisation_is_that_of_the_dense_model(config):
    model = models.build(config.model_copy(update={"d_model": 64, "d_ff": 128}))
    for name, p in model.named_parameters():
        if "norm" in name:
            continue
        ends = config.family == "gpt" and name.endswith(("to_out.weight", "down.weight"))
        if name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            assert p.std().item() == pytest.approx(0.02 / (2 * L) ** 0.5 if ends else 0.02, rel=0.12), name
    assert not torch.equal(model.blocks[0].feedforward.experts.up.weight[0], model.blocks[0].feedforward.experts.up.weight[1])


@BOTH
def test_without_values(config):
    """Built, initialised and differentiated on the meta device and with fake tensors."""
    for where in ("meta", "fake"):
        with FakeTensorMode() if where == "fake" else torch.device("meta"):
            model = models.build(config, device="meta" if where == "meta" else "cpu")
            with keep_balance(model) as kept:
                out = model(torch.zeros(2, 5, dtype=torch.long))
            (out.sum() + torch.stack(kept).sum()).backward()
        assert out.shape == (2, 5, V) and kept[0].shape == (2,)
        assert all(p.grad.shape == p.shape for p in model.parameters())


@BOTH
def test_decoding_with_a_cache(config):
    model = shake(models.build(config))
    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    assert complete(model, prompts, max_new=8) == complete(model, prompts, max_new=8, cache=False)


def test_counts():
    counts = models.count(LLAMA)
    assert counts["feedforward"] == L * (E * 3 * D * FF + D * E)
    counts = models.count(GPT)
    assert counts["feedforward"] == L * (E * (2 * D * FF + D + FF) + D * E)
    assert counts["head"] == 0 and counts["total"] == sum(p.numel() for p in models.build(GPT).parameters())
    assert models.count(config_of("mixtral-8x7b"))["total"] == 46_702_792_704  # Mixtral-8x7B as published


@BOTH
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operations_are_those_of_the_chosen_experts(config, device):
    model = models.build(config, device=device)
    use_kernel(model, "naive", 0)
    b, s, matrices = 2, 9, 2 if config.family == "gpt" else 3
    attention = 2 * D * D + 2 * D * (config.n_kv_heads * D // 2 if config.family == "llama" else D)
    each = L * (attention + D * E + config.top_k * matrices * D * FF) + V * D
    operations = count_flops(lambda: model(torch.zeros(b, s, dtype=torch.long, device=device)).sum().backward())
    assert operations == b * s * (6 * each + 12 * L * D * s)


# ---------------------------------------------------------------- weights


HF = {
    "vocab_size": V, "num_hidden_layers": L, "hidden_size": D, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": FF,
    "max_position_embeddings": 32, "num_local_experts": E, "num_experts_per_tok": 3,
}  # fmt: skip


def assert_same(model: nn.Module, hf: nn.Module) -> None:
    """Logits, and the gradient of every parameter. Grouped products have no float64: within 256 units in
    the last place of the largest, for some 100 sums of 16 to 40 terms one after the other."""

    def same(got: torch.Tensor, wanted: torch.Tensor, name: str = "logits") -> None:
        assert (got - wanted).abs().max() <= 256 * torch.finfo(torch.float32).eps * wanted.abs().max(), name

    ids = torch.randint(V, (3, 20))
    ours, theirs = model(ids), hf(ids, use_cache=False).logits
    same(ours, theirs)
    probe = torch.randn_like(ours)
    (ours * probe).sum().backward()
    (theirs * probe).sum().backward()
    names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "feedforward_norm"}
    names |= {f"self_attn.{hf}_proj": f"attention.to_{us}" for hf, us in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out"))}
    mine = {name: p.grad for name, p in model.named_parameters()}
    pairs = {"model.embed_tokens.weight": "token_embedding.weight", "model.norm.weight": "norm.weight", "lm_head.weight": "head.weight"}
    grads = {name: p.grad for name, p in hf.named_parameters()}
    for i in range(L):
        us, them = f"blocks.{i}", f"model.layers.{i}"
        pairs |= {f"{them}.{theirs}.weight": f"{us}.{ours}.weight" for theirs, ours in names.items()}
        pairs[f"{them}.mlp.gate.weight"] = f"{us}.feedforward.router.weight"
        gate, up, down = (mine.pop(f"{us}.feedforward.experts.{name}.weight").transpose(1, 2) for name in ("gate", "up", "down"))
        for name, wanted in (("gate_up_proj", torch.cat((gate, up), 1)), ("down_proj", down)):
            same(grads.pop(f"{them}.mlp.experts.{name}"), wanted, name)
    assert set(pairs) == set(grads) and set(pairs.values()) == set(mine)
    for theirs, ours in pairs.items():
        same(mine[ours], grads[theirs], ours)


def test_ours_in_transformers(tmp_path):
    model = shake(models.build(LLAMA.model_copy(update={"rope_theta": 300.0, "norm_eps": 1e-4, "top_k": 3})))
    models.save(model, tmp_path, max_shard_bytes=20_000)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert isinstance(hf, transformers.MixtralForCausalLM)
    assert_same(model, hf)
    assert torch.equal(models.load(tmp_path).blocks[1].feedforward.experts.down.weight, model.blocks[1].feedforward.experts.down.weight)


def test_theirs_in_ours(tmp_path):
    hf = shake(transformers.MixtralForCausalLM(transformers.MixtralConfig(**HF)))
    hf.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = set(file.keys())
    published = {f"model.layers.1.block_sparse_moe.experts.{n}.{w}.weight" for n in range(E) for w in ("w1", "w2", "w3")}
    assert published | {"model.layers.1.block_sparse_moe.gate.weight"} <= stored  # the names of the published files
    model = models.load(tmp_path)
    assert (model.config.n_experts, model.config.top_k, model.config.rope_theta) == (E, 3, 1_000_000.0)
    assert_same(model, hf.train())


def test_gpt_there_and_back(tmp_path):
    model = shake(models.build(GPT))
    models.save(model, tmp_path, max_shard_bytes=20_000)
    again = models.load(tmp_path)
    assert again.config == GPT
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_configuration_there_and_back(tmp_path):
    config = LLAMA.model_copy(update={"top_k": 1, "balance": 0.5})
    models.save(models.build(config), tmp_path)
    assert models.config_of(tmp_path) == config  # with the balance, which Hugging Face has no word for
    published = {  # mistralai/Mixtral-8x7B-v0.1's config.json
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    }  # fmt: skip
    assert config_from_hf(published) == config_of("mixtral-8x7b").model_copy(update={"preset": None})
    assert config_from_hf(config_to_hf(config_of("mixtral-8x7b"))) == config_from_hf(published)
    assert config_from_hf({**published, "sliding_window": 4096}).window == 4096
    for field, value in (("router_jitter_noise", 0.1), ("hidden_act", "gelu")):
        with pytest.raises(UserError, match=f"{field}={value} is not supported"):
            config_from_hf({**published, field: value})


def test_an_expert_that_is_missing_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    models.save(models.build(LLAMA), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.4.w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing model\.layers\.1\.block_sparse_moe\.experts\.4\.w2\.weight\. With"):
        models.load(tmp_path)
    assert models.load(tmp_path, strict=False).load_report.new == ["blocks.1.feedforward.experts.down.weight"]


# ---------------------------------------------------------------- recipes and the trainer


RECIPE = ["model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=12", "model.dropout=0.0", "tokenizer.kind=byte",
          "tokenizer.vocab_size=null", "evaluate.test=false", "layout.precision=fp32", "layout.device=cpu", "batch.samples=8", "train.steps=4",
          "optimizer.lr=1e-2", "schedule.name=constant", "schedule.warmup_steps=0"]  # fmt: skip
LLAMA_RECIPE = ["model.family=llama", "model.bias=null", "model.d_ff=24"]


def session(folder, *settings):
    (folder / "train.txt").write_text(" ".join(f"{i * i % 97} and {7 * i % 31}." for i in range(400)))
    (folder / "valid.txt").write_text(" ".join(f"{i * i % 89} and {5 * i % 31}." for i in range(40)))
    return open_session(recipes.load("shakespeare-char-gpt", [*RECIPE, f"data.path={folder}", f"data.cache={folder / 'cache'}", *settings]))


@pytest.mark.parametrize("family", [[], LLAMA_RECIPE], ids=["gpt", "llama"])
def test_the_trainer_adds_the_balance_loss(tmp_path, family):
    """As by hand, whatever the micro-batches; evaluation leaves it out; a dense model has none."""

    def losses(*settings):
        s = session(tmp_path, "model.n_experts=4", "model.balance=0.5", *family, *settings)
        torch.manual_seed(0)
        model = s.build()
        trainer = Trainer(s, model, tmp_path / "run")
        found = []
        for _, step in zip(range(4), trainer.loader.steps(0)):
            expected = 0.0
            for batch in step.micro_batches:
                assert batch["counts"]["balance"] == len(batch["ids"])
                sums = s.task.losses(model, batch)
                with keep_balance(model) as kept:
                    logits = model(batch["ids"])
                tokens = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
                assert sums["balance"].item() == pytest.approx(0.5 * sum(k.sum().item() for k in kept) / 2, rel=1e-5)
                expected += tokens.item() / (8 * 12) + sums["balance"].item() / 8
                evaluated, n = s.task.evaluate(model, batch)["loss"]
                assert (evaluated.item(), n) == (pytest.approx(tokens.item(), rel=1e-5), batch["counts"]["tokens"])
            loss, norm = trainer.step(step.micro_batches)
            assert loss.item() == pytest.approx(expected, rel=1e-5)
            found += [loss.item(), norm.item()]
        return found

    whole = losses()
    assert whole[-2] < whole[0]
    assert losses("layout.micro_batch=2", "layout.checkpointing=full") == pytest.approx(whole, rel=1e-5)
    dense = session(tmp_path, *family).task
    batch = dense.collate([dense.splits["train"][0]])
    assert set(batch["counts"]) == set(dense.losses(models.build(dense.recipe.model), batch)) == {"tokens"}


def test_operations_of_a_run_are_counted(tmp_path):
    few, many = (flops_per_token(session(tmp_path, f"model.n_experts={n}").task) for n in (4, 16))
    assert many - few == 6 * 2 * 16 * 12  # the router's twelve rows more, in two layers; the experts chosen are as many


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.top_k=1"], r"model\.top_k: cannot take effect without experts\. Set model\.n_experts=8"),
        (["model.balance=0.1"], r"model\.balance: cannot take effect without experts"),
        (["model.n_experts=4", "model.top_k=5"], r"top_k=5 is more than n_experts=4"),
        (["model.n_expert=4"], r"Did you mean model\.n_experts\?"),
    ],
)
def test_mistakes(tmp_path, settings, said):
    with pytest.raises(UserError, match=said):
        session(tmp_path, *settings)
