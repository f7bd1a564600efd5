"""Llama against transformers' Llama and Qwen2. What it shares with GPT (caches, packing, tracing) is tested in test_gpt.py."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from gradus.errors import UserError
from gradus.models import build, count, load, save
from gradus.models.decoding import Steps, beam_search, complete
from gradus.models.weights.llama import config_from_hf, config_to_hf, rules
from gradus.recipe.schema import LlamaConfig, RopeScaling
from gradus.train.optim import decays

VOCAB = 41
TINY = {"vocab_size": VOCAB, "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 56, "seq_len": 64, "rope_theta": 500.0}
HF_TINY = {
    "vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 56,
    "max_position_embeddings": 64,
}  # fmt: skip
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=16)
HF_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def shake(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter, norms too, away from what an initialisation would leave equal."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


def assert_same(model, hf, keep=None) -> None:
    """Logits, and the gradient of every parameter through the mapping of the weights. In float64: no processor's sums are compared."""
    ids = torch.randint(0, VOCAB, (3, 40))
    keep = torch.ones(3, 40, dtype=torch.bool) if keep is None else keep
    ours = model.double()(ids, keep=None if keep.all() else keep)
    theirs = hf.double()(ids, attention_mask=keep.long(), use_cache=False).logits
    torch.testing.assert_close(ours[keep], theirs[keep], atol=1e-5, rtol=1e-5)
    probe = torch.randn_like(ours) * keep[..., None]
    (ours * probe).sum().backward()
    (theirs * probe).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    wanted = {name: p.grad for name, p in hf.named_parameters()}
    seen = set()
    for rule in rules(model.config):
        if rule.theirs in wanted:
            seen.add(rule.theirs)
            got = rule.to_theirs(*(grads[name] for name in rule.names))
            torch.testing.assert_close(got, wanted[rule.theirs], atol=2e-4, rtol=1e-4, msg=lambda m, r=rule: f"{r.theirs}: {m}")
    assert seen == wanted.keys()


YARN = RopeScaling(type="yarn", factor=4.0, original_seq_len=16)
LINEAR = RopeScaling(type="linear", factor=4.0)
ROPES = {  # transformers' rope_parameters
    "plain": {"rope_type": "default", "rope_theta": 300.0}, "llama3": {"rope_theta": 300.0, **HF_SCALING},
    "linear": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn of DeepSeek": {"rope_type": "yarn", "rope_theta": 300.0, "factor": 40.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 0.5,
                         "mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn, no wave between": {"rope_type": "yarn", "rope_theta": 300.0, "factor": 2.0, "original_max_position_embeddings": 6, "attention_factor": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("n_kv_heads, d_head", [(4, None), (2, None), (1, 10)])
@pytest.mark.parametrize("tie_output", [True, False])
@pytest.mark.parametrize("rope_scaling", [None, SCALING, YARN, LINEAR], ids=["plain", "llama3", "yarn", "linear"])
def test_ours_in_transformers(tmp_path, n_kv_heads, d_head, tie_output, rope_scaling):
    config = LlamaConfig(**TINY, n_kv_heads=n_kv_heads, d_head=d_head, tie_output=tie_output, rope_scaling=rope_scaling, norm_eps=1e-4)
    model = shake(build(config))
    save(model, tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert isinstance(hf, transformers.LlamaForCausalLM)
    assert_same(model, hf)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("body", [True, False], ids=["body", "whole"])
def test_theirs_in_ours(tmp_path, tied, rope, body):
    config = transformers.LlamaConfig(**HF_TINY, num_key_value_heads=2, tie_word_embeddings=tied, rope_parameters=rope)
    hf = shake(transformers.LlamaForCausalLM(config))
    (hf.model if body else hf).save_pretrained(tmp_path)
    if body and not tied:
        with pytest.raises(UserError, match=r"missing lm_head\.weight"):
            load(tmp_path)
        return
    model = load(tmp_path)
    assert (model.head.weight is model.token_embedding.weight) == tied
    assert_same(model, hf.train())


OLD = {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    "fields",
    [
        OLD, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}},
        {"rope_scaling": OLD["rope_scaling"], "rope_parameters": {"rope_theta": 300.0}}, {"rope_scaling": {**OLD["rope_scaling"], "rope_theta": 300.0}},
        {"rope_parameters": {kind: {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0} for kind in ("full_attention", "sliding_attention")}},
    ],
)  # fmt: skip
def test_rotary_positions_are_read_under_both_names_and_written_under_both(fields):
    """Where a program knows one name alone, the other's theta would be 10,000 without a word."""
    config = config_from_hf({**HF_TINY, "model_type": "llama", **fields})
    assert (config.rope_theta, config.rope_scaling) == (300.0, RopeScaling(type="linear", factor=2.0))
    hf = config_to_hf(config)
    assert (hf["rope_theta"], hf["rope_scaling"]) == (300.0, {"rope_type": "linear", "factor": 2.0})
    assert hf["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}


@pytest.mark.parametrize("every", [2, 3])
def test_smollm3_has_layers_without_rotation(tmp_path, every):
    config = transformers.SmolLM3Config(**HF_TINY | {"num_hidden_layers": 4, "vocab_size": VOCAB + 1}, num_key_value_heads=2, no_rope_layer_interval=every, pad_token_id=VOCAB)
    theirs = shake(transformers.SmolLM3ForCausalLM(config)).train()
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.config.no_rotation_every == every
    assert_same(model, theirs)
    save(model, tmp_path / "back")
    assert "gradus" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert isinstance(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back"), transformers.SmolLM3ForCausalLM)
    assert config_from_hf(config_to_hf(model.config)) == model.config
    with pytest.raises(UserError, match=r"no_rope_layers=\[0, 1, 1, 1\] is not supported"):
        config_from_hf({**HF_TINY, "num_hidden_layers": 4, "model_type": "smollm3", "no_rope_layers": [0, 1, 1, 1]})


@pytest.mark.parametrize("tied", [True, False])
def test_qwen2_there_and_back(tmp_path, tied):
    """Biases of queries, keys and values. Published configurations name a window that is not used, here one shorter than the text."""
    config = transformers.Qwen2Config(**HF_TINY, num_key_value_heads=2, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    theirs = shake(transformers.Qwen2ForCausalLM(config))
    theirs.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}))
    model = load(tmp_path)
    assert model.config.qkv_bias and (model.head.weight is model.token_embedding.weight) == tied
    assert_same(model, theirs.train())
    save(model, tmp_path / "back")
    assert "gradus" not in json.loads((tmp_path / "back" / "config.json").read_text()), "nothing of it that Hugging Face has no words for"
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert isinstance(back, transformers.Qwen2ForCausalLM)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    ids = torch.randint(1, VOCAB, (1, 5))
    found = back.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert complete(model.eval(), ids.tolist(), max_new=20)[0] == found[0, 5:].tolist()
    assert config_from_hf(config_to_hf(model.config)) == model.config


@pytest.mark.parametrize("window", [None, 64])
def test_mistral_without_a_window_is_a_llama(tmp_path, window):
    """A window that no text fills is none. Exported it is a Llama, which computes the same."""
    config = transformers.MistralConfig(**HF_TINY, num_key_value_heads=2, head_dim=12, sliding_window=window)
    theirs = shake(transformers.MistralForCausalLM(config)).train()
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert_same(model, theirs)
    model.zero_grad()
    save(model, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").train()
    assert isinstance(back, transformers.LlamaForCausalLM)
    assert_same(model, back)


WINDOWS = {  # transformers' configuration, its fields, ours
    "mistral": (transformers.MistralConfig, {"sliding_window": 6}, {"window": 6}),
    "qwen2": (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, {"window": 6, "full_first": 1, "qkv_bias": True}),
    "qwen2 by types": (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
                       {"window": 6, "full_every": 2, "qkv_bias": True}),
    "ministral": (transformers.MinistralConfig, {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"], "head_dim": 8},
                  {"window": 6, "full_every": 3}),
    "smollm3": (transformers.SmolLM3Config, {"use_sliding_window": True, "sliding_window": 6, "no_rope_layer_interval": 3, "pad_token_id": VOCAB, "vocab_size": VOCAB + 1,
                                             "layer_types": ["full_attention"] + ["sliding_attention"] * 3}, {"window": 6, "full_first": 1, "no_rotation_every": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_there_and_back(tmp_path, name):
    """Logits and gradients; tokens that are continued past the window; and written it is the same again."""
    kind, fields, ours = WINDOWS[name]
    config = kind(**{**HF_TINY, "num_hidden_layers": 4, "num_key_value_heads": 2, "rope_parameters": ROPES["plain"], **fields})
    theirs = shake(transformers.AutoModelForCausalLM.from_config(config))
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    for field, value in ours.items():
        assert getattr(model.config, field) == value
    assert_same(model, theirs.train())
    ids = torch.randint(1, VOCAB, (1, 5))
    wanted = theirs.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert complete(model.eval(), ids.tolist(), max_new=20)[0] == wanted[0, 5:].tolist()
    save(model.float(), tmp_path / "back")
    assert "gradus" not in json.loads((tmp_path / "back" / "config.json").read_text())
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(theirs)
    torch.testing.assert_close(back(ids.repeat(1, 5)).logits, theirs.float()(ids.repeat(1, 5)).logits)
    assert config_from_hf(config_to_hf(model.config)) == model.config


@pytest.mark.parametrize("stated", [{}, {"sliding_window": 8}, {"sliding_window": None}, {"sliding_window": 8, "max_window_layers": 1}, {"max_window_layers": 1},
                                    {"max_window_layers": 1, "sliding_window": 64}, {"sliding_window": 8, "max_window_layers": 0, "layer_types": ["full_attention"] * 2}])  # fmt: skip
def test_qwen2_has_a_window_where_transformers_has_one(stated):
    """A window of 4,096 unless stated, in the layers from max_window_layers on (28 unless stated); none where no layer has it or no text fills it."""
    fields = {**HF_TINY, "num_key_value_heads": 2, "use_sliding_window": True, "max_position_embeddings": 64 if "sliding_window" in stated else 5000, **stated}
    theirs = transformers.Qwen2Config(**fields)
    ours = config_from_hf({"model_type": "qwen2", **fields})
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [ours.window_of(i) for i in range(2)] == [w if w and w < fields["max_position_embeddings"] else None for w in windows]


def test_a_window_that_is_not_ours_is_refused():
    assert config_from_hf({"model_type": "mistral"}).window == 4096, "which a config.json need not state"
    mixed = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": [f"{x}_attention" for x in ("sliding", "full", "full", "sliding")]}
    with pytest.raises(UserError, match=r"layer_types=.* is not supported by family llama"):
        config_from_hf({**HF_TINY, "num_hidden_layers": 4, **mixed})
    for other in ({"model_type": "llama"}, {"model_type": "smollm3", "use_sliding_window": True}):
        with pytest.raises(UserError, match="sliding_window=8 is not supported by family llama in model_type="):
            config_from_hf({**HF_TINY, "sliding_window": 8, **other})
    with pytest.raises(ValueError, match=r"full_first and full_every are of models with a window"):
        LlamaConfig(**TINY, full_every=2)


WINDOWED = {**TINY, "n_layers": 3, "n_kv_heads": 2, "window": 5, "full_every": 2}


def test_a_cache_of_a_window_past_its_edge():
    """A prompt, a token at a time, and several at once, against the whole text, also behind prompts of unequal length; these each as if it were
    alone; beams; fixed shapes."""
    model = shake(build(LlamaConfig(**WINDOWED)).double()).eval().requires_grad_(False)
    ids = torch.randint(0, VOCAB, (3, 30))
    for parts in ((30,), (1,) * 30, (2, 1, 9, 4, 1, 13), (9, *(1,) * 21)):
        cache = model.new_cache(3, 30)
        assert [layer.k.shape[2] for layer in cache.layers] == [5, 30, 5]
        logits = [model(x, cache=cache) for x in ids.split(parts, dim=1)]
        torch.testing.assert_close(torch.cat(logits, dim=1), model(ids))
    cache, lengths = model.new_cache(3, 30), torch.tensor([11, 3, 6])
    cache.lengths, rows = lengths, torch.arange(3)[:, None]
    model(ids[:, :11], positions=torch.arange(11).expand(3, -1), cache=cache)
    for n in (4, 1, 3):
        at = lengths[:, None] + torch.arange(n)
        torch.testing.assert_close(model(ids[rows, at], positions=at, cache=cache), model(ids)[rows, at])
        lengths = lengths + n
    prompts = [[1, 2, 3], [4] * 12, [5, 6, 7, 8, 9, 10, 1], [3]]
    alone = [complete(model, [p], max_new=16, cache=False)[0] for p in prompts]
    assert complete(model, prompts, max_new=16) == alone

    class Fixed(Steps):
        def prefill(self, *args, **kwargs):
            logits = super().prefill(*args, **kwargs)
            self.cache.fix()
            return logits

    assert complete(Fixed(model), prompts, max_new=16) == alone
    for prompt in prompts:
        (found,) = beam_search(model, [prompt], beams=3, max_new=16)
        assert found == by_hand(model, prompt, 3, 16)


def test_padding_that_a_window_would_keep_is_refused():
    """Prompts of unequal length of which nobody told the cache; without a window their rows go on over the padding."""
    model, plain = (build(LlamaConfig(**fields)).eval() for fields in (WINDOWED, TINY))
    ids, token, at = torch.randint(0, VOCAB, (2, 8)), torch.tensor([[1], [2]]), torch.tensor([[8], [3]])
    for lengths in (None, torch.tensor([8, 3])):
        for m in (model, plain):
            cache = m.new_cache(2, 12)
            cache.lengths = lengths
            m(ids, positions=torch.arange(8).expand(2, -1), cache=cache)
            if m is plain or lengths is not None:
                m(token, positions=at, cache=cache)
                cache.fix()
                continue
            for wrong in (lambda: m(token, positions=at, cache=cache), cache.fix):  # noqa: B023
                with pytest.raises(AssertionError, match=r"a window keeps no padding: set cache\.lengths"):
                    wrong()
            m(token, positions=torch.full((2, 1), 8), cache=cache)


def by_hand(model, prompt: list[int], beams: int, new: int) -> list[int]:
    """Beam search that computes every text anew."""
    texts = [(0.0, prompt)]
    for _ in range(new):
        scores = model(torch.tensor([text for _, text in texts]))[:, -1].log_softmax(-1)
        texts = sorted(((one + s, [*text, i]) for (one, text), row in zip(texts, scores, strict=True) for i, s in enumerate(row.tolist())), reverse=True)[:beams]
    return texts[0][1][len(prompt) :]


def test_padding_as_transformers():
    """A mask with holes, in the middle and on the right, as their attention_mask."""
    config = transformers.LlamaConfig(**HF_TINY, num_key_value_heads=2)
    hf = shake(transformers.LlamaForCausalLM(config)).train()
    model = build(config_from_hf(config.to_dict()))
    tensors = hf.state_dict()
    with torch.no_grad():
        for rule in rules(model.config):
            model.state_dict()[rule.ours].copy_(tensors[rule.theirs])
    keep = torch.ones(3, 40, dtype=torch.bool)
    keep[1, 30:] = False
    keep[2, 5:9] = False
    assert_same(model, hf, keep)


def test_configuration_there_and_back():
    config = LlamaConfig(**TINY, n_kv_heads=2, d_head=10, rope_scaling=SCALING, tie_output=True, norm_eps=1e-6, dropout=0.1)
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(config_to_hf(LlamaConfig(**TINY))) == LlamaConfig(**TINY)
    former = {  # meta-llama/Llama-3.1-8B's config.json, as transformers 4 wrote it
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
    }  # fmt: skip
    read = config_from_hf(former)
    assert read == LlamaConfig(
        vocab_size=128256, n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14336, seq_len=131072, rope_theta=500_000.0,
        rope_scaling=RopeScaling(),
    )  # fmt: skip
    assert count(read)["total"] == 8_030_261_248


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type=dynamic is not supported"),
        ({"rope_parameters": {"rope_type": "lama3"}}, "rope_type=lama3.*known are default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "lacks original_max_position_embeddings"),
        ({"rope_parameters": {**ROPES["yarn"], "truncate": False}}, "truncate=False is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}, "rope_scaling has factor=2.0, rope_parameters 3.0"),
        ({"rope_parameters": {"full_attention": ROPES["plain"], "sliding_attention": ROPES["linear"]}}, "only the same for all layers is"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor, original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures=LlamaForTokenClassification is not supported"),
    ],
)
def test_unsupported_features_are_named(fields, said):
    with pytest.raises(UserError, match=said):
        config_from_hf({"model_type": "llama", **fields})


def test_heads_without_a_width_of_their_own_divide_the_model():
    assert LlamaConfig(**TINY | {"n_heads": 3, "d_head": 10}).head_dim == 10
    with pytest.raises(ValueError, match=f"d_model={TINY['d_model']} is not a multiple of n_heads=1000"):
        LlamaConfig(**TINY | {"n_heads": 1000})


@pytest.mark.parametrize("n_layers, d_model, n_heads, n_kv_heads, d_ff, vocab_size, total", [
    (32, 4096, 32, 32, 11008, 32000, 6_738_415_616), (40, 5120, 40, 40, 13824, 32000, 13_015_864_320),
    (80, 8192, 64, 8, 28672, 32000, 68_976_648_192), (32, 4096, 32, 8, 14336, 128256, 8_030_261_248),
    (80, 8192, 64, 8, 28672, 128256, 70_553_706_496), (126, 16384, 128, 8, 53248, 128256, 405_853_388_800),
])  # fmt: skip
def test_published_sizes(n_layers, d_model, n_heads, n_kv_heads, d_ff, vocab_size, total):
    config = LlamaConfig(vocab_size=vocab_size, n_layers=n_layers, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, d_ff=d_ff)
    assert count(config)["total"] == total


def test_initialisation():
    model = build(LlamaConfig(vocab_size=500, n_layers=2, d_model=128, n_heads=4, qkv_bias=True))
    for name, p in model.named_parameters():
        if "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all() and not decays(name, p), name
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.05), name


def test_positions_are_relative():
    """All positions moved by one number: the same logits."""
    model = shake(build(LlamaConfig(**TINY, n_kv_heads=2))).double()
    ids = torch.randint(0, VOCAB, (2, 9))
    positions = torch.arange(9).expand(2, 9)
    torch.testing.assert_close(model(ids, positions=positions + 31), model(ids), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model(ids, positions=positions * 2), model(ids), atol=1e-3)


def test_dropout_is_that_of_the_attention_weights():
    model = build(LlamaConfig(**TINY, dropout=0.5))
    ids = torch.randint(0, VOCAB, (2, 9))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
