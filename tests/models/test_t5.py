"""T5 against transformers' T5, v1.0 and v1.1: outputs, gradients, weights in both directions, cached decoding, published sizes."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gradus.errors import UserError
from gradus.layers import get_kernel, relative_buckets
from gradus.models import build, config_of, count, load, save
from gradus.models.weights.t5 import config_from_hf, rules
from gradus.recipe.schema import T5Config

# d_head is not d_model / n_heads; sequences are long enough for the logarithmic and the last bucket
TINY = {
    "vocab_size": 40,
    "n_layers": 2,
    "n_decoder_layers": 3,
    "d_model": 24,
    "n_heads": 3,
    "d_head": 10,
    "d_ff": 20,
    "n_buckets": 8,
    "max_distance": 12,
}
HF_TINY = {
    "vocab_size": 40, "num_layers": 2, "num_decoder_layers": 3, "d_model": 24, "num_heads": 3, "d_kv": 10, "d_ff": 20,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
}  # fmt: skip
VERSIONS = {"1.0": {"gated": False, "tie_output": True}, "1.1": {"gated": True, "tie_output": False}}


def tiny(version: str, **fields) -> T5Config:
    return T5Config(**TINY, **VERSIONS[version], **fields)


def shake(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter, norms too, away from what an initialisation would leave equal; scores of a size that softmax can tell apart."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


def their_tiny(version: str, **fields) -> transformers.T5ForConditionalGeneration:
    """transformers 5.23 ties the head of v1.1 although its configuration says otherwise, and keeps one of its own only where it
    is set afterwards or lies in the file. Ours has a head of its own, so theirs gets one."""
    if version == "1.1":
        fields |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    hf = transformers.T5ForConditionalGeneration(transformers.T5Config(**HF_TINY, **fields))
    if version == "1.1":
        hf.lm_head.weight = torch.nn.Parameter(torch.randn(40, 24) * 24**-0.5)
    return shake(hf)


def padded_batch() -> dict[str, torch.Tensor]:
    """Sources of 19, 8 and 1 tokens, targets of 17, 9 and 4; padded with 0."""
    source_keep = torch.arange(19) < torch.tensor([19, 8, 1])[:, None]
    target_keep = torch.arange(17) < torch.tensor([17, 9, 4])[:, None]
    source, target = torch.randint(1, 40, (3, 19)) * source_keep, torch.randint(1, 40, (3, 17)) * target_keep
    target[:, 0] = 0  # the decoder starts from the padding id
    return {"source": source, "target": target, "source_keep": source_keep, "target_keep": target_keep}


def run_ours(model, batch) -> torch.Tensor:
    """In float64, as theirs: what differs then is the equations, not a processor's sums."""
    return model.double()(batch["source"], batch["target"], source_keep=batch["source_keep"])[batch["target_keep"]]


def run_theirs(hf, batch) -> torch.Tensor:
    out = hf.double()(input_ids=batch["source"], attention_mask=batch["source_keep"].long(), decoder_input_ids=batch["target"], use_cache=False)
    return out.logits[batch["target_keep"]]


@pytest.mark.parametrize("version", VERSIONS)
def test_theirs_to_ours(version, tmp_path):
    hf = their_tiny(version).eval()
    hf.save_pretrained(tmp_path)
    model, batch = load(tmp_path).eval(), padded_batch()
    assert model.config == tiny(version)
    ours, theirs = run_ours(model, batch), run_theirs(hf, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    probe = torch.randn_like(theirs)
    (ours * probe).sum().backward()
    (theirs * probe).sum().backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_name = {rule.theirs: rule for rule in rules(model.config)}
    for name, p in hf.named_parameters():
        grad = by_name[name].to_theirs(*(parameters[n].grad for n in by_name[name].names))
        assert (grad - p.grad).abs().max() < 1e-4 * p.grad.abs().max(), name
    assert all(p.grad is not None for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in hf.parameters())


@pytest.mark.parametrize("version", VERSIONS)
def test_ours_to_theirs(version, tmp_path):
    model = shake(build(tiny(version))).eval()
    save(model, tmp_path)
    assert config_of(tmp_path) == model.config
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (version == "1.1")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == (version == "1.0")
    hf, info = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    batch = padded_batch()
    torch.testing.assert_close(run_ours(model, batch), run_theirs(hf.eval(), batch), rtol=1e-4, atol=1e-5)

    hf.save_pretrained(tmp_path / "again")  # its config.json now says tied, whatever it is
    again = load(tmp_path / "again").eval()
    assert again.config == model.config
    torch.testing.assert_close(run_ours(again, batch), run_ours(model, batch))


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_scaling_and_tying_are_two_fields(tied, scaled, tmp_path):
    """transformers 5 ties by the file: a head of its own lies in it or does not, whatever the configuration says."""
    config = transformers.T5Config(**HF_TINY, feed_forward_proj="gated-gelu", tie_word_embeddings=scaled)
    hf = shake(transformers.T5ForConditionalGeneration(config))
    if not tied:
        hf.lm_head.weight = torch.nn.Parameter(torch.randn_like(hf.lm_head.weight))
    hf.save_pretrained(tmp_path / "theirs")
    batch = padded_batch()
    model = load(tmp_path / "theirs").eval()
    assert (model.config.tie_output, model.config.scale_output) == (tied, None if tied == scaled else scaled)
    torch.testing.assert_close(run_ours(model, batch), run_theirs(hf.eval(), batch), rtol=1e-4, atol=1e-4)
    save(model, tmp_path / "ours")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(run_theirs(again, batch), run_ours(model, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": True, "scale_decoder_outputs": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("head", ["absent", "the embedding", "another"])
def test_a_head_is_its_own_where_the_file_has_another_than_the_embedding(head, said, tmp_path):
    """Whatever config.json says: of older versions of transformers too, whose files have a tied head once more."""
    hf = shake(transformers.T5ForConditionalGeneration(transformers.T5Config(**HF_TINY)))
    state = {name: tensor.clone() for name, tensor in hf.state_dict().items() if "embed_tokens" not in name}
    if head == "absent":
        del state["lm_head.weight"]
    elif head == "another":
        state["lm_head.weight"].add_(1.0)
    torch.save(state, tmp_path / "pytorch_model.bin")
    config = {**HF_TINY, "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs, model, batch = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval(), load(tmp_path).eval(), padded_batch()
    assert config_of(tmp_path) == model.config
    torch.testing.assert_close(run_ours(model, batch), run_theirs(theirs, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("version", VERSIONS)
def test_dropout_stands_where_theirs_does(version, tmp_path):
    """Same seed, same draws in the same order: training outputs are equal only if every dropout is in its place."""
    hf = their_tiny(version, dropout_rate=0.3)
    hf.save_pretrained(tmp_path)
    model, batch = load(tmp_path).train(), padded_batch()
    torch.manual_seed(1)
    ours = run_ours(model, batch)
    torch.manual_seed(1)
    torch.testing.assert_close(ours, run_theirs(hf.train(), batch), rtol=1e-4, atol=1e-5)
    assert not torch.equal(ours, run_ours(model.eval(), batch))


@pytest.mark.parametrize("kernel", ["naive", "chunked"])
def test_kernels_agree(kernel):
    model, batch = shake(build(tiny("1.0"))).eval(), padded_batch()
    results = []
    for name in ("sdpa", kernel):
        for module in model.modules():
            if hasattr(module, "kernel"):
                module.kernel = get_kernel(name, chunk=4)
        model.zero_grad()
        out = run_ours(model, batch)
        out.square().sum().backward()
        results.append([out, *(p.grad for p in model.parameters())])
    for expected, got in zip(*results, strict=True):
        assert (expected - got).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("n_buckets", "max_distance"), [(4, 3), (5, 3), (32, 17)])
def test_the_fewest_buckets_and_the_nearest_distance_are_theirs(n_buckets, max_distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    T5Config(**{**TINY, "n_buckets": n_buckets, "max_distance": max_distance})
    keys = torch.arange(-40, 41)  # of a query at 0
    for both in (True, False):
        theirs = T5Attention._relative_position_bucket(keys, both, n_buckets, max_distance)
        assert torch.equal(relative_buckets(torch.zeros(1, dtype=torch.long), keys, both, n_buckets, max_distance)[0], theirs)


@pytest.mark.parametrize(("n_buckets", "max_distance", "said"), [(1, 8, "n_buckets"), (3, 8, "n_buckets"), (32, 16, "max_distance=17"), (9, 4, "max_distance=5")])
def test_buckets_that_leave_none_for_what_is_far_are_refused(n_buckets, max_distance, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        T5Config(**{**TINY, "n_buckets": n_buckets, "max_distance": max_distance})
    theirs = {"model_type": "t5", **HF_TINY, "relative_attention_num_buckets": n_buckets, "relative_attention_max_distance": max_distance}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(UserError, match=said):
        config_of(tmp_path)


def test_padding_is_not_looked_at():
    model, batch = shake(build(tiny("1.0"))).eval().double(), padded_batch()
    other = {**batch, **{part: batch[part].where(batch[f"{part}_keep"], 7) for part in ("source", "target")}}
    torch.testing.assert_close(run_ours(model, batch), run_ours(model, other))
    alone = model(batch["source"][1:2, :8], batch["target"][1:2, :9])
    torch.testing.assert_close(model(batch["source"], batch["target"], source_keep=batch["source_keep"])[1:2, :9], alone, rtol=1e-4, atol=1e-5)


def test_the_head_runs_on_selected_places_only():
    model, batch = shake(build(tiny("1.1"))).eval().double(), padded_batch()
    sizes = []
    model.head.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape))
    selected = model(batch["source"], batch["target"], source_keep=batch["source_keep"], select=batch["target_keep"])
    assert sizes == [(batch["target_keep"].sum(), 40)]
    torch.testing.assert_close(selected, run_ours(model, batch))


@pytest.mark.parametrize("version", VERSIONS)
def test_cached_decoding_is_decoding(version):
    """Prefill of prompts of 5, 3 and 1 tokens padded on the right, then a token a row at its own place, from the cache alone."""
    model, batch = shake(build(tiny(version))).eval().double(), padded_batch()
    source, keep = batch["source"], batch["source_keep"]
    target = torch.randint(1, 40, (3, 16))
    with torch.no_grad():
        memory = model.encode(source, keep)
        whole = model.decode(target, memory, keep)  # (3, 16, vocab)
        lengths, rows = torch.tensor([5, 3, 1]), torch.arange(3)
        cache = model.new_cache(3, 16)
        prompt = target[:, :5].where(torch.arange(5) < lengths[:, None], 0)
        prefill = model.decode(prompt, memory, keep, cache=cache)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(prefill[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)
        projected = []
        for block in model.decoder.blocks:
            block.cross.to_k.register_forward_hook(lambda *_: projected.append(1))
        for _ in range(11):
            step = model.decode(target[rows, lengths][:, None], memory, keep, cache=cache, positions=lengths[:, None])
            torch.testing.assert_close(step[:, 0], whole[rows, lengths], rtol=1e-4, atol=1e-5)
            lengths = lengths + 1
    assert not projected  # the memory's keys and values were kept


def test_greedy_decoding_is_theirs(tmp_path):
    config = tiny("1.1").model_copy(update={"n_decoder_layers": 2})  # their cache has as many layers as the encoder
    model, batch = shake(build(config)).eval(), padded_batch()
    save(model, tmp_path)
    hf = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    source, keep = batch["source"], batch["source_keep"]
    theirs = hf.generate(input_ids=source, attention_mask=keep.long(), max_new_tokens=15, min_new_tokens=15, do_sample=False, eos_token_id=None)
    ids, cache = torch.zeros(3, 1, dtype=torch.long), model.new_cache(3, 16)
    with torch.no_grad():
        memory = model.encode(source, keep)
        for _ in range(15):
            ids = torch.cat([ids, model.decode(ids[:, -1:], memory, keep, cache=cache)[:, -1:].argmax(-1)], dim=1)
    assert ids.tolist() == theirs.tolist()
    assert len(set(ids.flatten().tolist())) > 3


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (T5Config(vocab_size=32128, n_layers=6, d_model=512, n_heads=8, d_ff=2048), 60_506_624),
        (T5Config(vocab_size=32128, n_layers=12, d_model=768, n_heads=12, d_ff=3072), 222_903_552),
        (T5Config(vocab_size=32128, n_layers=24, d_model=1024, n_heads=16, d_ff=4096), 737_668_096),
        (T5Config(vocab_size=32128, n_layers=24, d_model=1024, n_heads=32, d_head=128, d_ff=16384), 2_851_598_336),
        (T5Config(vocab_size=32128, n_layers=24, d_model=1024, n_heads=128, d_head=128, d_ff=65536), 11_307_321_344),
        (T5Config(vocab_size=32128, n_layers=12, d_model=768, n_heads=12, d_ff=2048, **VERSIONS["1.1"]), 247_577_856),
    ],
    ids=["small", "base", "large", "3B", "11B", "v1.1-base"],
)
def test_published_sizes(config, parameters):
    assert count(config)["total"] == parameters


@pytest.mark.parametrize("version", VERSIONS)
def test_initialisation(version):
    """The paper's code: see T5.reset_parameters. The first loss of an untied head is that of guessing."""
    config = T5Config(vocab_size=300, n_layers=1, d_model=144, n_heads=4, d_head=64, d_ff=400, **VERSIONS[version])
    model = build(config)
    for name, p in model.named_parameters():
        match name.split(".")[-2]:
            case "embedding":
                expected = 1.0
            case "to_q":
                expected = (144 * 64) ** -0.5
            case "table":
                expected = 144**-0.5
            case "to_k" | "to_v" | "to_out" | "head" | "up" | "gate" | "down":
                expected = p.shape[1] ** -0.5
            case _:
                assert "norm" in name and (p == 1).all()
                continue
        assert p.std().item() == pytest.approx(expected, rel=0.2 if p.numel() < 1000 else 0.05), name
    if config.tie_output:
        return  # the embedding of a token is nearest to itself, so a fresh model repeats its input
    ids = torch.randint(300, (8, 20))
    loss = torch.nn.functional.cross_entropy(model(ids, ids.roll(1)).flatten(0, 1), torch.randint(300, (160,)))
    assert loss.item() == pytest.approx(math.log(300), abs=1.0)


def test_old_names_of_published_checkpoints(tmp_path):
    """Copies of the tied matrix, and the cross-attention's relative bias that an early converter wrote."""
    model, batch = shake(build(tiny("1.0"))).eval(), padded_batch()
    save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    state |= {name: state["shared.weight"].clone() for name in copies}
    state["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 3)
    save_file(state, tmp_path / "model.safetensors")
    torch.testing.assert_close(run_ours(load(tmp_path).eval(), batch), run_ours(model, batch))
    state["lm_head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    theirs, ours = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval(), load(tmp_path).eval()
    assert not ours.config.tie_output, "a head of its own, as for transformers"
    torch.testing.assert_close(run_ours(ours, batch), run_theirs(theirs, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("field", [{"feed_forward_proj": "gated-silu"}, {"architectures": ["T5EncoderModel"]}, {"decoder_start_token_id": 2}])
def test_unsupported_fields_are_named(field):
    name, value = next(iter(field.items()))
    with pytest.raises(UserError, match=f"{name}={value[0] if isinstance(value, list) else value}"):
        config_from_hf({"model_type": "t5", **field})
