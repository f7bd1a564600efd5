"""GPT against transformers' GPT-2; and what both causal decoders (GPT, Llama) must do: caches, packing, padding, tracing."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.errors import UserError
from gradus.layers import KERNELS, Attention, get_kernel
from gradus.models import build, config_of, count, load, load_start, save
from gradus.models.weights.gpt import config_from_hf, config_to_hf, rules
from gradus.parallel.apply import apply
from gradus.recipe.schema import GPTConfig, Layout, LlamaConfig, RopeScaling
from gradus.torch_private import FakeTensorMode

VOCAB, SEQ = 41, 20
GPT_TINY = {"vocab_size": VOCAB, "n_layers": 3, "d_model": 32, "n_heads": 4, "seq_len": SEQ}
HF_TINY = {"vocab_size": VOCAB, "n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": SEQ, "bos_token_id": 0, "eos_token_id": 0}
DECODERS = {
    "gpt": GPTConfig(**GPT_TINY),
    "llama": LlamaConfig(
        vocab_size=VOCAB, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48, seq_len=SEQ, rope_theta=100.0,
        rope_scaling=RopeScaling(original_seq_len=32),
    ),
}  # fmt: skip


def shake(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter, norms and biases too, away from what an initialisation would leave equal."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


def decoder(name: str) -> torch.nn.Module:
    """In float64: one order of sums is compared with another, and no processor's rounding with another's."""
    return shake(build(DECODERS[name])).double()


# ---------------------------------------------------------------- against transformers


def assert_same(model, hf) -> None:
    """Logits, and the gradient of every parameter through the mapping of the weights. In float64: no processor's sums are compared."""
    ids = torch.randint(0, VOCAB, (3, 13))
    ours, theirs = model.double()(ids), hf.double()(ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    probe = torch.randn_like(ours)
    (ours * probe).sum().backward()
    (theirs * probe).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    wanted = {name: p.grad for name, p in hf.named_parameters()}
    seen = set()
    for rule in rules(model.config):
        if rule.theirs in wanted:
            seen.add(rule.theirs)
            got = rule.to_theirs(*(grads[name] for name in rule.names))
            torch.testing.assert_close(got, wanted[rule.theirs], atol=1e-4, rtol=1e-4, msg=lambda m, r=rule: f"{r.theirs}: {m}")
    assert seen == (wanted.keys() if model.config.bias else {name for name in wanted if not name.endswith(".bias")})


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("tie_output", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_ours_in_transformers(tmp_path, tie_output, bias, activation):
    config = GPTConfig(**GPT_TINY, tie_output=tie_output, bias=bias, activation=activation, d_ff=72, dropout=0.0)
    model = shake(build(config))
    save(model, tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert isinstance(hf, transformers.GPT2LMHeadModel)
    assert_same(model, hf)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("body", [True, False], ids=["body", "whole"])
def test_theirs_in_ours(tmp_path, tied, body):
    hf = shake(transformers.GPT2LMHeadModel(transformers.GPT2Config(**HF_TINY, tie_word_embeddings=tied, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)))
    (hf.transformer if body else hf).save_pretrained(tmp_path)
    if body and not tied:
        with pytest.raises(UserError, match=r"missing lm_head\.weight"):
            load(tmp_path)
        return
    model = load(tmp_path)
    assert (model.head.weight is model.token_embedding.weight) == tied
    assert_same(model, hf.train())


@pytest.mark.parametrize(("bias", "wrapper"), [(True, ""), (False, "_orig_mod.")])
def test_a_checkpoint_of_nanogpt(tmp_path, bias, wrapper):
    """nanoGPT's GPT is GPT-2 with the exact gelu, matrices of nn.Linear, and without biases where bias=False (its model.py)."""
    hf = shake(transformers.GPT2LMHeadModel(transformers.GPT2Config(**HF_TINY, activation_function="gelu", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)))
    state = {}
    with torch.no_grad():
        for name, p in hf.state_dict().items():
            if name.endswith(".bias") and not bias:
                p.zero_()
            else:
                linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
                state[wrapper + name] = p.T.contiguous() if linear else p.clone()
    args = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": SEQ, "bias": bias, "vocab_size": VOCAB, "dropout": 0.0}
    beside = {"optimizer": {"state": {}}, "iter_num": 7, "best_val_loss": torch.tensor(1.5), "config": {"out_dir": "out", "compile": True}}
    file = tmp_path / "ckpt.pt"
    torch.save({"model": state, "model_args": args, **beside}, file)
    assert config_of(file) == GPTConfig(**GPT_TINY, bias=bias, activation="gelu", dropout=0.0)
    assert_same(load(file), hf.train())
    assert config_of(tmp_path) == config_of(file), "the one checkpoint of a folder"
    start = load_start(GPTConfig(**GPT_TINY, bias=bias, activation="gelu", init=str(file)), seed=0).on("cpu")
    assert torch.equal(start.head.weight, hf.lm_head.weight.float()) and start.load_report.new == []
    torch.save({"model": state, "model_args": {k: v for k, v in args.items() if k != "block_size"}}, file)
    with pytest.raises(UserError, match=r"ckpt\.pt: block_size is missing"):
        load(file)
    (tmp_path / "old.pt").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"several checkpoints: \S+/ckpt\.pt, \S+/old\.pt\. Give one of them"):
        load(tmp_path)


def test_configuration_there_and_back():
    config = GPTConfig(**GPT_TINY, activation="relu", d_ff=70, dropout=0.3, norm_eps=1e-6, tie_output=False)
    theirs = config_to_hf(config)
    assert config_from_hf(theirs) == config
    assert {theirs[f"{where}_pdrop"] for where in ("resid", "embd", "attn")} == {0.3}
    published = transformers.GPT2Config().to_dict()
    assert config_from_hf(published) == GPTConfig(vocab_size=50257, n_layers=12, d_model=768, n_heads=12, dropout=0.1)


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ("activation_function", "gelu_nw", "activation_function=gelu_nw.*known are gelu, gelu_new"),
        ("architectures", ["GPT2ForSequenceClassification"], "architectures=GPT2ForSequenceClassification is not supported"),
    ],
)
def test_unsupported_features_are_named(field, value, said):
    with pytest.raises(UserError, match=said):
        config_from_hf({"model_type": "gpt2", field: value})


# ---------------------------------------------------------------- the paper's sizes and initialisation


@pytest.mark.slow
@pytest.mark.parametrize("n_layers, d_model, n_heads, seq_len, total", [
    (12, 768, 12, 1024, 124_439_808), (24, 1024, 16, 1024, 354_823_168), (36, 1280, 20, 1024, 774_030_080),
    (48, 1600, 25, 1024, 1_557_611_200), (96, 12288, 96, 2048, 174_604_259_328),
])  # fmt: skip
def test_published_sizes(n_layers, d_model, n_heads, seq_len, total):
    assert count(GPTConfig(vocab_size=50257, n_layers=n_layers, d_model=d_model, n_heads=n_heads, seq_len=seq_len))["total"] == total


def test_initialisation():
    model = build(GPTConfig(vocab_size=500, n_layers=8, d_model=128, n_heads=4, seq_len=64))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert torch.count_nonzero(p) == 0, name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            residual = name.endswith(("to_out.weight", "down.weight"))
            assert p.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name
            assert abs(p.mean().item()) < 1e-3


def test_dropout_where_the_paper_has_it():
    """On the embeddings, the attention weights and before each of the two residual additions; none when evaluating."""
    model = build(GPTConfig(**GPT_TINY, dropout=0.4))
    assert model.dropout.p == 0.4
    assert all(block.dropout.p == block.attention.dropout == 0.4 and block.feedforward.dropout.p == 0 for block in model.blocks)
    ids = torch.randint(0, VOCAB, (2, 9))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


# ---------------------------------------------------------------- both decoders


@pytest.fixture(params=DECODERS)
def name(request) -> str:
    return request.param


def test_no_token_looks_ahead(name):
    model = decoder(name)
    ids = torch.randint(0, VOCAB, (1, 10))
    other = ids.clone()
    other[0, 6] = (other[0, 6] + 1) % VOCAB
    difference = (model(ids) - model(other)).abs().amax(-1)[0]
    assert (difference[:6] == 0).all() and (difference[6:] > 0).all()


@settings(max_examples=15, derandomize=True)
@given(name=st.sampled_from(sorted(DECODERS)), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
@torch.no_grad()
def test_cache_equals_no_cache(name, cuts, seed):
    """A sequence given in pieces of any length, without positions, against the whole at once."""
    torch.manual_seed(seed)
    model = decoder(name)
    ids = torch.randint(0, VOCAB, (2, sum(cuts)))
    cache = model.new_cache(2, sum(cuts))
    pieces = [model(piece, cache=cache) for piece in ids.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids), atol=1e-4, rtol=1e-4)
    assert cache.length == sum(cuts)


@torch.no_grad()
def test_ragged_batch_equals_each_row_alone(name):
    """Prompts padded on the right; then each row goes on at its own place, over the padding's keys."""
    model = decoder(name)
    lengths, new = [7, 3, 5], 4
    rows = [torch.randint(0, VOCAB, (n + new,)) for n in lengths]
    prompt = torch.full((3, 7), VOCAB - 1)
    for row, n, place in zip(rows, lengths, prompt, strict=True):
        place[:n] = row[:n]
    cache = model.new_cache(3, 7 + new)
    last = torch.arange(7) == torch.tensor(lengths)[:, None] - 1
    logits = [model(prompt, positions=torch.arange(7).expand(3, 7), select=last, cache=cache)]  # (3, vocab)
    for step in range(new):
        token = torch.stack([row[n + step] for row, n in zip(rows, lengths, strict=True)])[:, None]
        places = torch.tensor([[n + step] for n in lengths])
        logits.append(model(token, positions=places, cache=cache)[:, 0])
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        alone = model(row[None])[0, n - 1 :]
        torch.testing.assert_close(torch.stack([step[i] for step in logits]), alone, atol=1e-4, rtol=1e-4)


def test_packed_equals_unpacked(name):
    """Documents in one row, with segments and positions of their own: logits and gradients as one row a document."""
    model = decoder(name)
    documents = [torch.randint(0, VOCAB, (n,)) for n in (4, 1, 6)]
    packed = torch.cat(documents)[None]
    segments = torch.cat([torch.full((len(d),), i) for i, d in enumerate(documents)])[None]
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    together = model(packed, segments=segments, positions=positions)
    apart = torch.cat([model(d[None])[0] for d in documents])[None]
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    probe = torch.randn_like(apart)
    got, wanted = (torch.autograd.grad((logits * probe).sum(), list(model.parameters())) for logits in (together, apart))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_nobody_looks_where_keep_is_false(name):
    model = decoder(name)
    ids = torch.randint(0, VOCAB, (2, 8))
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[1, 2:4] = False
    changed = ids.clone()
    changed[1, 2:4] = (changed[1, 2:4] + 1) % VOCAB
    one, other = model(ids, keep=keep), model(changed, keep=keep)
    assert torch.equal(one[keep], other[keep]) and not torch.equal(model(ids)[keep], model(changed)[keep])


def test_select_gives_the_same_logits(name):
    model = decoder(name)
    ids, select = torch.randint(0, VOCAB, (3, 6)), torch.rand(3, 6) < 0.5
    torch.testing.assert_close(model(ids, select=select), model(ids)[select])
    torch.testing.assert_close(model.head(model.hidden(ids)), model(ids))


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_make_one_model(name, kernel):
    model = decoder(name)
    ids = torch.randint(0, VOCAB, (2, 11))
    segments = (torch.arange(11) // 4).expand(2, 11)
    expected = model(ids, segments=segments)
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = get_kernel(kernel, 3)
    torch.testing.assert_close(model(ids, segments=segments), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_checkpointing_changes_no_gradient(name, kernel):
    """Whatever is kept and whatever is computed again, dropout included."""
    gradients = []
    for mode in ("none", "attention", "selective", "full"):
        torch.manual_seed(3)
        model = build(DECODERS[name].model_copy(update={"dropout": 0.2}))
        apply(model, Layout(attention=kernel, chunk=4, checkpointing=mode))
        ids = torch.randint(0, VOCAB, (2, 11))
        gradients.append(torch.autograd.grad(model(ids).square().sum(), list(model.parameters())))
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            assert torch.equal(one, two)


def test_half_precision_keeps_positions(name):
    """A model in bf16 stays near the same weights in fp32, also with the cache."""
    model = build(DECODERS[name]).requires_grad_(False)
    ids = torch.randint(0, VOCAB, (2, SEQ))
    expected = model(ids)
    model.bfloat16()
    assert model(ids).dtype == torch.bfloat16
    torch.testing.assert_close(model(ids).float(), expected, atol=0.03, rtol=0)
    cache = model.new_cache(2, SEQ)
    assert cache.layers[0].k.dtype == torch.bfloat16
    pieces = torch.cat([model(piece, cache=cache) for piece in ids.split(7, 1)], 1)
    torch.testing.assert_close(pieces.float(), expected, atol=0.03, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_traceable_without_values(name, mode, kernel):
    config = DECODERS[name].model_copy(update={"dropout": 0.1})
    with mode():
        model = build(config, device="meta" if torch.empty(0).device.type == "meta" else "cpu")
        for module in model.modules():
            if isinstance(module, Attention):
                module.kernel = get_kernel(kernel, 4)
        ids = torch.zeros(2, 11, dtype=torch.long)
        logits = model(ids, segments=ids, keep=ids == 0)
        logits.sum().backward()
    assert logits.shape == (2, 11, VOCAB) and all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_block_by_block(name, kernel):
    """One graph a block; `chunked` alone stays outside of it. (aot_eager: traces forward and backward, generates no code.)"""
    torch._dynamo.reset()
    model = decoder(name)
    ids = torch.randint(0, VOCAB, (2, 9))
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = get_kernel(kernel, 4)
    expected = torch.autograd.grad(model(ids).square().sum(), list(model.parameters()))
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=kernel != "chunked")
    got = torch.autograd.grad(model(ids).square().sum(), list(model.parameters()))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)
    torch._dynamo.reset()


def test_built_on_meta_then_loaded(name, tmp_path):
    """Nothing besides parameters is needed: no buffer is left without values."""
    model = decoder(name).float()
    save(model, tmp_path)
    ids = torch.randint(0, VOCAB, (1, 5))
    assert torch.equal(load(tmp_path)(ids), model(ids))
    assert not list(model.buffers())


def test_mistakes_are_one_line(name):
    model = decoder(name)
    with pytest.raises(UserError, match=f"sequence of {SEQ + 1} tokens is longer than"):
        model(torch.zeros(1, SEQ + 1, dtype=torch.long))
    cache = model.new_cache(1, SEQ + 5)
    model(torch.zeros(1, SEQ, dtype=torch.long), cache=cache)
    with pytest.raises(UserError, match=f"sequence of {SEQ + 1} tokens is longer than"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    with pytest.raises(UserError, match="not segments or keep"):
        model(torch.zeros(1, 2, dtype=torch.long), keep=torch.ones(1, 2, dtype=torch.bool), cache=model.new_cache(1, 4))
    with pytest.raises(UserError, match="vocab_size: not known"):
        build(DECODERS[name].model_copy(update={"vocab_size": None}))
