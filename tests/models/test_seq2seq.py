"""The original Transformer against transformers' Marian (post-norm) and Pegasus (pre-norm) and torch.nn's layers: outputs, gradients,
dropout, weights in both directions, published sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from gradus.errors import UserError
from gradus.models import build, config_of, count, deferred, load, save
from gradus.models.weights.seq2seq import config_from_hf, model_type
from gradus.recipe.schema import Seq2SeqConfig

TINY = {"vocab_size": 40, "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24, "seq_len": 12}
HF_TINY = {
    "vocab_size": 40,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "d_model": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 12,
    "scale_embedding": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 0,
    "dropout": 0.0,
}
MARIAN = (transformers.MarianConfig, transformers.MarianMTModel)
PEGASUS = (transformers.PegasusConfig, transformers.PegasusForConditionalGeneration)
TWO_VOCABULARIES = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30}
THEIRS = {  # name → (their classes, their fields)
    "marian": (*MARIAN, {"activation_function": "swish"}),
    "marian, two vocabularies": (*MARIAN, dict(activation_function="relu", **TWO_VOCABULARIES)),
    "marian, untied": (*MARIAN, dict(activation_function="gelu", tie_word_embeddings=False, **TWO_VOCABULARIES)),
    "pegasus": (*PEGASUS, {"activation_function": "relu"}),
}
HALVES = {"positions": "halves", "output_bias": True}
OURS = {  # name → (their class, our fields)
    "marian": (MARIAN[1], dict(**HALVES)),
    "marian, no bias": (MARIAN[1], {"positions": "halves", "activation": "silu", "n_decoder_layers": 1}),
    "marian, two vocabularies": (MARIAN[1], dict(share_embeddings=False, target_vocab_size=30, activation="gelu", **HALVES)),
    "marian, untied": (MARIAN[1], dict(share_embeddings=False, tie_output=False, **HALVES)),
    "pegasus": (PEGASUS[1], dict(norm_first=True, n_decoder_layers=3, **HALVES)),
    "pegasus, no bias": (PEGASUS[1], {"norm_first": True, "positions": "halves"}),
    "marian, the paper": (MARIAN[1], {}),
    "marian, alternating positions": (MARIAN[1], {"share_embeddings": False, "tie_output": False, "target_vocab_size": 30}),
    "pegasus, alternating positions": (PEGASUS[1], {"norm_first": True, "output_bias": True}),
    "pegasus, untied": (PEGASUS[1], {"norm_first": True, "share_embeddings": False, "tie_output": False, "positions": "halves"}),
}
VARIANTS = {  # beyond Hugging Face's
    "the annotated code": {"norm_first": True, "share_embeddings": False, "tie_output": False, "output_bias": True, "target_vocab_size": 30},
    "shared but untied": {"tie_output": False, "positions": "halves"},
    "pre-norm two embeddings": {"norm_first": True, "share_embeddings": False, "positions": "halves"},
    "another epsilon": {"norm_eps": 1e-6, "positions": "halves"},
}


def tiny(**fields) -> Seq2SeqConfig:
    return Seq2SeqConfig(**{**TINY, "dropout": 0.0, **fields})


def shake(model: nn.Module) -> nn.Module:
    """Every parameter, norms and biases too, away from what an initialisation would leave equal; not the table of positions."""
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "embed_positions" not in name:
                p.add_(torch.randn_like(p), alpha=0.2)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(source, target, keep): sources of 9, 5 and 2 tokens; 0 is padding and in no target."""
    keep = torch.arange(9) < torch.tensor([9, 5, 2])[:, None]
    return torch.randint(1, 30, (3, 9)) * keep, torch.randint(1, 30, (3, 7)), keep


def gradients(model: nn.Module, folder: Path, theirs: bool) -> dict[str, torch.Tensor]:
    """The gradients under the names of a weights file: written as if they were the weights."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.copy_(p.grad)
    model.save_pretrained(folder) if theirs else save(model, folder)
    return {name: g for name, g in load_file(folder / "model.safetensors").items() if "embed_positions" not in name}


def compare(ours: nn.Module, theirs: nn.Module, tmp_path: Path) -> None:
    """In float64: what differs then is the equations, not a processor's sums."""
    source, target, keep = batch()
    ours, theirs = ours.double(), theirs.eval().double()
    got = ours(source, target, source_keep=keep)
    want = theirs(input_ids=source, attention_mask=keep.long(), decoder_input_ids=target).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(got)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    got, want = gradients(ours, tmp_path / "ours-g", theirs=False), gradients(theirs, tmp_path / "theirs-g", theirs=True)
    if "final_logits_bias" in got:  # a buffer there: its gradient is the closed form
        torch.testing.assert_close(got.pop("final_logits_bias")[0], weight.sum((0, 1)))
    del want["final_logits_bias"]
    if not ours.config.share_embeddings:
        want.pop("model.shared.weight", None)  # of Pegasus, which nothing reads
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", THEIRS)
def test_reads_theirs(name, tmp_path):
    config_class, model_class, fields = THEIRS[name]
    theirs = shake(model_class(config_class(**HF_TINY, **fields)))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert len(ours.decoder.blocks) == 3 and ours.config.norm_first == name.startswith("pegasus")
    compare(ours, theirs, tmp_path)


@pytest.mark.parametrize("name", OURS)
def test_they_read_ours(name, tmp_path):
    model_class, fields = OURS[name]
    ours = shake(build(tiny(**fields)))
    save(ours, tmp_path / "ours")
    theirs, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert isinstance(theirs, model_class)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    free = {"model.shared.weight"} if name == "pegasus, untied" else set()  # which nothing reads
    assert all("embed_positions" in key or "final_logits_bias" in key or key in free for key in info["missing_keys"])
    assert config_of(tmp_path / "ours") == ours.config
    compare(ours, theirs, tmp_path)


@pytest.mark.parametrize("name", [*OURS, *VARIANTS])
def test_save_then_load_is_exact(name, tmp_path):
    config = tiny(**VARIANTS[name] if name in VARIANTS else OURS[name][1])
    ours = shake(build(config))
    save(ours, tmp_path)
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert kind == model_type(config) == ("gradus-seq2seq" if name in VARIANTS else name.split(",")[0])
    again = load(tmp_path)
    assert again.config == config
    assert (again.source_embedding is again.target_embedding) == config.share_embeddings
    assert (again.head.weight is again.target_embedding.tokens.weight) == config.tie_output
    source, target, keep = batch()
    assert torch.equal(again(source, target, source_keep=keep), ours(source, target, source_keep=keep))


@pytest.mark.parametrize("halves", [False, True])
def test_a_tie_undone_at_loading_changes_nothing(halves, tmp_path):
    """With and without the tie the features lie in another order in a file."""
    ours = shake(build(tiny(**({"positions": "halves"} if halves else {}))))
    save(ours, tmp_path / "tied")
    untied = load(tmp_path / "tied", tie_output=False, strict=False)
    with torch.no_grad():
        untied.head.weight.copy_(ours.head.weight)
    source, target, keep = batch()
    expected = ours(source, target, source_keep=keep)
    assert torch.equal(untied(source, target, source_keep=keep), expected)
    save(untied, tmp_path / "untied")
    again = load(tmp_path / "untied", tie_output=True, strict=False)
    assert torch.equal(again(source, target, source_keep=keep), expected)


@pytest.mark.parametrize("fields", [{}, {"norm_first": True, "share_embeddings": False, "tie_output": False}])
def test_a_file_re_saved_by_transformers_loads(fields, tmp_path):
    """It holds a bias of zeros that we have not, and of Pegasus an embedding that nothing reads."""
    ours = build(tiny(**fields))
    save(ours, tmp_path / "ours")
    transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert "final_logits_bias" in load_file(tmp_path / "theirs" / "model.safetensors")
    source, target, keep = batch()
    again = load(tmp_path / "theirs")
    assert again.config == ours.config
    assert torch.equal(again(source, target, source_keep=keep), ours(source, target, source_keep=keep))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scale_embedding": False}, "scale_embedding=False"),
        ({"activation_function": "tanh"}, "activation_function=tanh"),
        ({"decoder_ffn_dim": 32}, "decoder_ffn_dim=32"),
        ({"decoder_attention_heads": 4}, "decoder_attention_heads=4"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false"),
        ({"architectures": ["MarianModel"]}, "architectures=MarianModel"),
    ],
)
def test_unsupported_fields_are_named(change, named):
    hf = {"model_type": "marian", "architectures": ["MarianMTModel"], **HF_TINY}
    with pytest.raises(UserError, match=named):
        config_from_hf({**hf, **change})


# ---------------------------------------------------------------- torch.nn


def torch_stacks(ours: nn.Module) -> tuple[nn.TransformerEncoder, nn.TransformerDecoder, dict[str, str]]:
    """torch.nn's encoder and decoder with our weights (but their in_proj, which is our q, k, v in one), and the names' mapping."""
    c = ours.config
    args = {
        "d_model": c.d_model,
        "nhead": c.n_heads,
        "dim_feedforward": c.d_ff,
        "dropout": c.dropout,
        "batch_first": True,
        "norm_first": c.norm_first,
    }

    def norm():
        return nn.LayerNorm(c.d_model) if c.norm_first else None

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**args), c.n_layers, norm(), enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**args), c.n_layers, norm())
    norms = {"encoder": ("attention_norm", "feedforward_norm"), "decoder": ("attention_norm", "cross_norm", "feedforward_norm")}
    names = {}  # theirs → ours
    for stack in ("encoder", "decoder"):
        if c.norm_first:
            names[f"{stack}.norm"] = f"{stack}.norm"
        for i in range(c.n_layers):
            theirs, mine = f"{stack}.layers.{i}", f"{stack}.blocks.{i}"
            names |= {f"{theirs}.linear1": f"{mine}.feedforward.up", f"{theirs}.linear2": f"{mine}.feedforward.down"}
            names |= {f"{theirs}.norm{n}": f"{mine}.{name}" for n, name in enumerate(norms[stack], 1)}
            for their, our in (("self_attn", "attention"), ("multihead_attn", "cross"))[: 1 if stack == "encoder" else 2]:
                names[f"{theirs}.{their}.out_proj"] = f"{mine}.{our}.to_out"
                names[f"{theirs}.{their}.in_proj"] = f"{mine}.{our}"
    both = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    with torch.no_grad():
        for parameter, values in pairs(both, ours, names):
            parameter.copy_(torch.cat(values))
    return encoder, decoder, names


def pairs(theirs: nn.Module, ours: nn.Module, names: dict[str, str]):
    """(their parameter, our parameters that it holds one above the other), every one of theirs."""
    mine = dict(ours.named_parameters())
    for name, p in theirs.named_parameters():
        if ".in_proj_" in name:
            base, kind = name.rsplit("_", 1)
            yield p, [mine[f"{names[base]}.{q}.{kind}"] for q in ("to_q", "to_k", "to_v")]
        else:
            base, kind = name.rsplit(".", 1)
            yield p, [mine[f"{names[base]}.{kind}"]]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [False, True])
def test_stacks_equal_torch(norm_first, dropout):
    """Hidden states and gradients; with dropout from one seed too, since its places and their order are the same."""
    ours = shake(build(tiny(norm_first=norm_first, dropout=dropout))).double()
    encoder, decoder, names = torch_stacks(ours)
    encoder, decoder = encoder.double(), decoder.double()
    source, target, keep = batch()
    if dropout:  # torch.nn lays batches out in another order, and so its random numbers: one row has but one order
        source, target, keep = source[:1], target[:1], keep[:1]
    ours.source_embedding.dropout.p = 0.0  # torch.nn has no embeddings
    torch.manual_seed(1)
    got = ours.decode_hidden(target, ours.encode(source, keep), keep)
    torch.manual_seed(1)
    memory = encoder(ours.source_embedding(source), src_key_padding_mask=~keep)
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    want = decoder(ours.target_embedding(target), memory, tgt_mask=later, memory_key_padding_mask=~keep)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(got)
    (want * weight).sum().backward()
    ours.zero_grad()  # through the embeddings, which both used
    (got * weight).sum().backward()
    checked = 0
    for p, mine in pairs(nn.ModuleDict({"encoder": encoder, "decoder": decoder}), ours, names):
        torch.testing.assert_close(torch.cat([q.grad for q in mine]), p.grad, rtol=1e-3, atol=2e-4)
        checked += p.numel()
    assert checked == count(ours.config)["total"] - 40 * 16  # all but the embedding


# ---------------------------------------------------------------- the model itself


def test_published_sizes():
    annotated = Seq2SeqConfig(
        n_layers=2, d_model=512, n_heads=8, d_ff=2048, vocab_size=11, norm_first=True, share_embeddings=False, tie_output=False, output_bias=True
    )
    assert count(annotated)["total"] == 14_731_787
    # Table 3 gives 65 and 213 million for a vocabulary of "about 37000"
    base = count(Seq2SeqConfig(n_layers=6, d_model=512, n_heads=8, d_ff=2048, vocab_size=37_000))["total"]
    big = count(Seq2SeqConfig(n_layers=6, d_model=1024, n_heads=16, d_ff=4096, vocab_size=37_000))["total"]
    assert base == 63_082_496 and base == pytest.approx(65e6, rel=0.03)
    assert big == 214_245_376 and big == pytest.approx(213e6, rel=0.01)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_positions(layout):
    """Section 3.5 written out, at positions where half precision would be coarse; the table survives a cast of the model."""
    model = build(tiny(seq_len=2000, positions=layout, dropout=0.0)).bfloat16()
    with torch.no_grad():
        model.source_embedding.tokens.weight.zero_()
    got = model.source_embedding(torch.zeros(1, 2000, dtype=torch.long))[0]
    assert got.dtype == torch.bfloat16
    for position in (0, 1, 257, 1999):
        for i in range(8):
            angle = position / 10_000 ** (2 * i / 16)
            sin, cos = (got[position, 2 * i], got[position, 2 * i + 1]) if layout == "interleaved" else (got[position, i], got[position, i + 8])
            assert sin.item() == pytest.approx(math.sin(angle), abs=2**-8) and cos.item() == pytest.approx(math.cos(angle), abs=2**-8)


def test_initialisation():
    model = build(Seq2SeqConfig(vocab_size=1000, n_layers=1, d_model=64, n_heads=4, d_ff=256, output_bias=True))
    for name, p in model.named_parameters():
        if p.ndim == 2:
            bound = math.sqrt(6 / sum(p.shape))  # Glorot & Bengio 2010, equation 16
            assert bound * 0.98 < p.abs().max() <= bound and abs(p.std().item() / (bound / math.sqrt(3)) - 1) < 0.05, name
        else:
            assert torch.equal(p, torch.full_like(p, 1.0 if "norm.weight" in name else 0.0)), name


def test_meta_device_allocates_nothing_and_draws_afresh():
    config = tiny(norm_first=True)
    model = build(config, device="meta")
    assert all(p.is_meta for p in model.parameters())
    ids = torch.zeros(2, 5, dtype=torch.long, device="meta")
    assert model(ids, ids).shape == (2, 5, 40)  # the positions follow the model to the device of its input, and back below
    model, other = deferred(config, seed=3).on("cpu"), build(config, seed=3)
    source, target, keep = batch()
    assert torch.equal(model(source, target, source_keep=keep), other(source, target, source_keep=keep))
    assert model.head.weight is model.source_embedding.tokens.weight


@pytest.mark.parametrize("norm_first", [False, True])
def test_ragged_sources_equal_each_alone(norm_first):
    model = shake(build(tiny(norm_first=norm_first))).double()
    source, target, keep = batch()
    together = model(source, target, source_keep=keep)
    for i, n in enumerate(keep.sum(1).tolist()):
        alone = model(source[i : i + 1, :n], target[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_cache_equals_no_cache(norm_first):
    """Ragged sources and ragged starts: a prefill padded on the right, then token by token, each row at its own place."""
    model = shake(build(tiny(norm_first=norm_first, n_decoder_layers=3))).eval().double()
    source, target, keep = batch()
    target = torch.randint(1, 30, (3, 11))
    starts = torch.tensor([4, 1, 2])
    with torch.no_grad():
        memory = model.encode(source, keep)
        whole = model.decode(target, memory, keep)  # (3, 11, vocab)
        cache = model.new_cache(3, 12)
        prefill = target[:, :4].masked_fill(torch.arange(4) >= starts[:, None], 39)
        logits = model.decode(prefill, memory, keep, cache=cache)
        for row, n in enumerate(starts.tolist()):
            torch.testing.assert_close(logits[row, :n], whole[row, :n], rtol=1e-4, atol=1e-5)
        memory.fill_(math.nan)  # its keys and values are in the cache: it is not read again
        for step in range(7):
            places = starts + step
            logits = model.decode(target.gather(1, places[:, None]), memory, keep, cache=cache, positions=places[:, None])
            torch.testing.assert_close(logits[:, 0], whole[torch.arange(3), places], rtol=1e-4, atol=1e-5)


def test_cache_goes_on_where_it_was():
    model = shake(build(tiny())).eval().double()
    source, target, keep = batch()
    memory = model.encode(source, keep)
    cache = model.new_cache(3, 7)
    parts = [model.decode(part, memory, keep, cache=cache) for part in target.split((3, 1, 3), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model.decode(target, memory, keep), rtol=1e-4, atol=1e-5)


def test_select_gives_the_chosen_places():
    model = shake(build(tiny()))
    source, target, keep = batch()
    select = torch.rand(target.shape) < 0.5
    torch.testing.assert_close(model(source, target, source_keep=keep, select=select), model(source, target, source_keep=keep)[select])


def test_what_is_too_long_is_told():
    model = build(tiny())
    long = torch.ones(1, 13, dtype=torch.long)
    with pytest.raises(UserError, match=r"13 tokens is longer than model.seq_len=12"):
        model.encode(long)
    with pytest.raises(UserError, match=r"13 tokens is longer than model.seq_len=12"):
        model(long[:, :3], long)
    with pytest.raises(UserError, match=r"13 tokens is longer than model.seq_len=12"):
        model.new_cache(1, 13)
    with pytest.raises(UserError, match="vocab_size"):
        build(Seq2SeqConfig(**{**TINY, "vocab_size": None}))
