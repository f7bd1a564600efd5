"""Adapters against PEFT's: its files read and ours read by it, with equal logits and gradients."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
import warnings

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gradus import models
from gradus.errors import UserError
from gradus.models import weights
from gradus.models.adapt import merged
from gradus.models.decoding import generate
from gradus.recipe.schema import (
    Adapter,
    BertConfig,
    GemmaConfig,
    GPTConfig,
    LlamaConfig,
    Seq2SeqConfig,
    T5Config,
    ViTConfig,
)

SIZES = {"n_layers": 2, "d_model": 32, "n_heads": 4, "dropout": 0.0}
CONFIGS = {
    "gpt": GPTConfig(**SIZES, vocab_size=48, seq_len=16),
    "llama": LlamaConfig(**SIZES, vocab_size=48, n_kv_heads=2, multiple_of=16, seq_len=16),
    "qwen3": LlamaConfig(**SIZES, vocab_size=48, n_kv_heads=2, multiple_of=16, seq_len=16, qk_norm=True, d_head=12, tie_output=True),
    "qwen2_moe": LlamaConfig(**SIZES, vocab_size=48, multiple_of=16, seq_len=16, qkv_bias=True, n_experts=4, d_expert=24, d_shared=40, dense_layers=[0]),
    "qwen2": LlamaConfig(**SIZES, vocab_size=48, n_kv_heads=2, multiple_of=16, seq_len=16, qkv_bias=True, window=4, full_every=2),
    "gemma": GemmaConfig(**SIZES, vocab_size=48, n_kv_heads=2, d_head=12, d_ff=48, seq_len=16, window=5, full_every=2),
    "bert": BertConfig(**SIZES, vocab_size=48, d_ff=64, seq_len=16, head="classification", n_classes=3),
    "t5": T5Config(**SIZES, vocab_size=48, d_head=8, d_ff=64, n_buckets=8, max_distance=16),
    "vit": ViTConfig(**SIZES, d_ff=64, image_size=8, patch_size=4, n_classes=5),
    "roberta": BertConfig(**SIZES, vocab_size=48, d_ff=64, seq_len=16, head="classification", n_classes=3, variant="roberta", first_position=2),
    "distilbert": BertConfig(**SIZES, vocab_size=48, d_ff=64, seq_len=16, head="classification", n_classes=3, variant="distilbert", n_token_types=0),
}
IDS = torch.randint(1, 48, (3, 9), generator=torch.Generator().manual_seed(5))
IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(5))
INPUTS = {
    "gpt": ((IDS,), {"input_ids": IDS, "use_cache": False}),
    **{name: ((IDS,), {"input_ids": IDS, "use_cache": False}) for name in ("llama", "qwen3", "qwen2_moe", "qwen2", "gemma")},
    "bert": ((IDS,), {"input_ids": IDS}),
    "roberta": ((IDS.clamp(2),), {"input_ids": IDS.clamp(2)}),  # 1 is its padding
    "distilbert": ((IDS,), {"input_ids": IDS}),
    "t5": ((IDS, IDS[:, :5]), {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}),
    "vit": ((IMAGES,), {"pixel_values": IMAGES}),
}
FAMILIES = tuple(CONFIGS)


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter away from what an initialisation leaves equal, B from 0."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Family → a folder with a random model of it."""
    folders = {}
    for family, config in CONFIGS.items():
        folders[family] = tmp_path_factory.mktemp(family)
        models.save(shaken(models.build(config, seed=1)), folders[family])
    return folders


def adapted(family: str, base, /, freeze=(), **adapter) -> torch.nn.Module:
    config = models.config_of(base).model_copy(update={"init": str(base)}).trained(Adapter(**{"rank": 4, **adapter}), freeze)
    return shaken_adapter(models.load_start(config, seed=2).on("cpu"))


def shaken_adapter(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p), alpha=0.1)
    return model


def their_base(family: str, base):
    name, _ = weights.loads_in_transformers(CONFIGS[family])
    return getattr(transformers, name).from_pretrained(base)


def in_peft(family: str, base, folder):
    """PEFT's model of our folder; any missing or unexpected key is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = their_base(family, base)
        theirs = peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
        result = peft.set_peft_model_state_dict(theirs, peft.load_peft_weights(str(folder)))
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora_" in key or "modules_to_save.default" in key]
    return theirs


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def compare(family: str, ours, theirs, tolerance: float = 1e-5) -> None:
    """Logits, and the gradients of all that is trained, and of nothing else, under the names of the files."""
    args, kwargs = INPUTS[family]
    found, expected = ours.eval()(*args), theirs.eval()(**kwargs).logits
    assert far(found, expected) < tolerance
    probe = torch.randn_like(found)
    (found * probe).sum().backward()
    (expected * probe).sum().backward()
    wanted = {}
    for name, p in theirs.named_parameters():
        if p.grad is not None:
            wanted[name.replace(".default", "").replace(".modules_to_save", "")] = p.grad
    grads = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert grads.keys() == {name for name, p in ours.named_parameters() if p.grad is not None}
    seen = set()
    for rule in weights.rules(ours):
        if not grads.keys() >= set(rule.names):
            continue
        name = rule.theirs if ".lora_" in rule.theirs else f"base_model.model.{rule.theirs}"
        expected = wanted[name]
        got = rule.to_theirs(*(grads[our] for our in rule.names))
        if len(rule.names) > 1 and name.endswith("lora_B.weight"):  # a block-diagonal B's zeros are no parameters of ours
            expected = expected * rule.to_theirs(*(torch.ones_like(grads[our]) for our in rule.names))
        assert far(got, expected) < tolerance, name
        seen.add(name)
    assert seen == wanted.keys()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_reads_ours(family, rslora, bases, tmp_path):
    ours = adapted(family, bases[family], rslora=rslora, targets=["all-linear", "down:2:3"])
    models.save(ours, tmp_path)
    compare(family, ours, in_peft(family, bases[family], tmp_path))


THEIRS = {
    "gpt": {"target_modules": ["c_attn"]},
    **{key: {"target_modules": ["q_proj", "v_proj"]} for key in ("llama", "qwen3", "qwen2_moe", "qwen2", "gemma")},
    **{key: {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"} for key in ("bert", "roberta")},
    "distilbert": {"target_modules": ["q_lin", "v_lin"], "task_type": "SEQ_CLS", "modules_to_save": ["pre_classifier"]}, "t5": {"target_modules": ["q", "v"]},
    "vit": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]},
}  # fmt: skip
KINDS = {
    "plain": {}, "rslora": {"use_rslora": True}, "all": {"target_modules": "all-linear"},
    "pattern": {"target_modules": "all-linear", "rank_pattern": {"^.*0.*(q|query|q_proj|c_attn)$": 6}, "alpha_pattern": {"v|value|v_proj|c_attn": 5}},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_we_read_pefts(family, kind, bases, tmp_path):
    settings = peft.LoraConfig(**{"r": 4, "lora_alpha": 7, **THEIRS[family], **KINDS[kind]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(their_base(family, bases[family]), settings)
    shaken_adapter(theirs)
    theirs.save_pretrained(tmp_path)
    ours = models.load(tmp_path)
    args, kwargs = INPUTS[family]
    assert far(ours.eval()(*args), theirs.eval()(**kwargs).logits) < 1e-5
    if family != "gpt":  # whose one A for q, k, v we have three times
        compare(family, ours, theirs)


@pytest.mark.parametrize("family", ["qwen2", "gemma"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_small_base_beneath_a_window_is_the_model_of_the_weights_that_it_stands_for(family, kind, bases):
    """Logits, each gradient and five steps of a model of the rounded weights, in full; the codes stay. Rounded by hand, to NF4's published values."""
    small = adapted(family, bases[family], base=kind)
    plain, codes = adapted(family, bases[family]), {name: b.clone() for name, b in small.named_buffers() if name.endswith("codes")}
    plain.load_state_dict({name: p for name, p in small.state_dict().items() if ".a." in name or ".b." in name}, strict=False)
    with torch.no_grad():
        for name, linear in plain.named_modules():
            if f"{name}.codes" in codes:
                linear.weight.copy_(ROUNDED[kind](linear.weight))
    assert len(codes) == 14 and far(small.eval()(IDS), models.load(bases[family]).eval()(IDS)) > 0.01
    runs = []
    for model in (small.eval(), plain.eval()):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer, steps = torch.optim.AdamW(trained, lr=3e-3), []
        for _ in range(5):
            loss = torch.nn.functional.cross_entropy(model(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            steps.append(torch.cat([loss.detach()[None], *(p.grad.flatten() for p in trained)]))
            optimizer.step()
        runs.append(torch.stack(steps))
    assert far(*runs) < 1e-5 and runs[0][-1, 0] < runs[0][0, 0]
    assert all(torch.equal(b, codes[name]) for name, b in small.named_buffers() if name in codes)


def rounded_to_int8(weight: torch.Tensor) -> torch.Tensor:
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step).round() * step


def rounded_to_nf4(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / largest[..., None] - NF4).abs().argmin(-1)
    return (NF4[nearest] * largest).view_as(weight)


ROUNDED = {"int8": rounded_to_int8, "nf4": rounded_to_nf4}
NF4 = torch.tensor([  # Dettmers et al. 2023, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_are_pefts(family, bases, tmp_path):
    """AdamW from one adapter. Of GPT-2 theirs has for q, k and v one A of three times the rank, and all of B: where ours
    has zeros it would learn, so that their gradients there are held at 0."""
    ours = adapted(family, bases[family], targets=["attention"] if family == "gpt" else ["all-linear"])
    models.save(ours, tmp_path)
    theirs = in_peft(family, bases[family], tmp_path)
    for name, p in theirs.named_parameters():
        if "c_attn.lora_B" in name:
            p.register_hook(lambda grad, held=p.detach() != 0: grad * held)
    args, kwargs = INPUTS[family]
    runs = []
    for model, call in ((ours.eval(), lambda: ours(*args)), (theirs.eval(), lambda: theirs(**kwargs).logits)):
        optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3), []
        for _ in range(20):
            logits = call()
            labels = torch.arange(logits.numel() // logits.shape[-1]) % logits.shape[-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        runs.append(torch.stack(losses))
    assert runs[0][-1] < 0.9 * runs[0][0]
    assert far(*runs) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_loaded_and_merged(family, bases, tmp_path):
    ours = adapted(family, bases[family], dropout=0.1, targets=["attention"]).eval()
    models.save(ours, tmp_path / "adapter")
    names = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert len(names) < 8, "short names where they are unambiguous"
    loaded = models.load(tmp_path / "adapter").eval()
    assert loaded.config == ours.config
    args, _ = INPUTS[family]
    expected = ours(*args)
    assert loaded(*args).equal(expected)
    models.save(merged(loaded), tmp_path / "merged")
    plain = models.load(tmp_path / "merged").eval()
    assert plain.config.adapter is None and far(plain(*args), expected) < 1e-5


def test_of_a_family_that_transformers_does_not_have(tmp_path):
    config = Seq2SeqConfig(**SIZES, vocab_size=48, d_ff=64, seq_len=16)
    models.save(shaken(models.build(config, seed=1)), tmp_path / "base")
    ours = adapted("seq2seq", tmp_path / "base", targets=["all-linear", "-cross"]).eval()
    models.save(ours, tmp_path / "adapter")
    assert models.load(tmp_path / "adapter").eval()(IDS, IDS).equal(ours(IDS, IDS))
    assert far(merged(ours).eval()(IDS, IDS), ours(IDS, IDS)) < 1e-5
    experts = CONFIGS["gpt"].model_copy(update={"n_experts": 4})
    models.save(shaken(models.build(experts, seed=1)), tmp_path / "experts")
    ours = adapted("gpt", tmp_path / "experts", targets=["attention"]).eval()
    models.save(ours, tmp_path / "beside")
    assert models.load(tmp_path / "beside").eval()(IDS).equal(ours(IDS))


def test_other_ways_to_load_ours(bases, tmp_path):
    ours = adapted("llama", bases["llama"], freeze=["-norm"]).eval()
    models.save(ours, tmp_path)
    expected = ours(IDS)
    by_itself = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path).eval()
    assert far(by_itself(input_ids=IDS).logits, expected) < 1e-5
    plain = adapted("llama", bases["llama"])
    models.save(plain, tmp_path / "plain")
    model = their_base("llama", bases["llama"])
    model.load_adapter(str(tmp_path / "plain"))
    assert far(model.eval()(input_ids=IDS).logits, plain.eval()(IDS)) < 1e-5
    of_the_folder = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert far(of_the_folder(input_ids=IDS).logits, plain(IDS)) < 1e-5


def test_what_does_not_fit_is_told(bases, tmp_path):
    models.save(adapted("gpt", bases["gpt"]), tmp_path / "a")
    with pytest.raises(UserError, match="Merge it"):
        models.load_start(CONFIGS["gpt"].model_copy(update={"init": str(tmp_path / "a")}), 0)
    with pytest.raises(UserError, match="PEFT has blocks"):
        models.save(adapted("gpt", bases["gpt"], targets=["to_q"]), tmp_path / "b")
    about = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    for key, value in (("use_dora", True), ("bias", "all"), ("peft_type", "LOHA")):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(about | {key: value}))
        (tmp_path / "a" / "gradus_config.json").unlink(missing_ok=True)
        with pytest.raises(UserError, match=str(value)):
            models.load(tmp_path / "a")


def test_another_base_is_refused(bases, tmp_path):
    models.save(shaken(models.build(CONFIGS["llama"], seed=3)), tmp_path / "base")
    models.save(adapted("llama", tmp_path / "base"), tmp_path / "adapter")
    models.save(shaken(models.build(CONFIGS["llama"], seed=4)), tmp_path / "base")
    with pytest.raises(UserError, match="digest"):
        models.load(tmp_path / "adapter")


def test_the_base_is_what_is_read_of_its_folder_and_read_once(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    base = tmp_path / "base"
    models.save(shaken(models.build(CONFIGS["llama"], seed=3)), base)
    models.save(adapted("llama", base), tmp_path / "adapter")
    for name in ("optimizer.pt", "scheduler.bin", "rng_state.pth", "checkpoint-5/model.safetensors"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_bytes(b"of somebody's training")
    models.load(tmp_path / "adapter")
    now, read, file_digest = time.time() + 10, [], hashlib.file_digest
    monkeypatch.setattr(time, "time", lambda: now)  # a young file may still change without its dates showing it
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: read.append(file.name) or file_digest(file, kind))
    for _ in range(3):
        models.load(tmp_path / "adapter")
    assert read == [str(base / "model.safetensors")]
    for memo in (tmp_path / "cache" / "files").iterdir():
        memo.write_text('{"stamp": 5, "value": []}')
    models.load(tmp_path / "adapter")
    dates = os.stat(base / "model.safetensors")
    models.save(shaken(models.build(CONFIGS["llama"], seed=4)), base)
    os.utime(base / "model.safetensors", ns=(dates.st_atime_ns, dates.st_mtime_ns))
    with pytest.raises(UserError, match="digest"):
        models.load(tmp_path / "adapter")


def test_a_digest_of_an_earlier_version_still_holds(bases, tmp_path):
    """It was of all that could be weights, also of a second format that nobody reads."""
    base = tmp_path / "base"
    models.save(models.load(bases["llama"]), base)
    (base / "pytorch_model.bin").write_bytes(b"the same in another format")
    models.save(adapted("llama", base), tmp_path / "adapter")
    about = json.loads((tmp_path / "adapter" / "gradus_config.json").read_text())
    parts = [hashlib.sha256((base / name).read_bytes()).digest() for name in ("model.safetensors", "pytorch_model.bin")]
    about["gradus"]["base_digest"] = hashlib.sha256(b"".join(parts)).hexdigest()
    (tmp_path / "adapter" / "gradus_config.json").write_text(json.dumps(about))
    models.load(tmp_path / "adapter")


def test_a_frozen_part_that_the_base_lacks_is_refused(tmp_path):
    body = CONFIGS["bert"].model_copy(update={"head": "none", "n_classes": None, "pooler": False})
    models.save(models.build(body, seed=1), tmp_path)
    config = CONFIGS["bert"].model_copy(update={"init": str(tmp_path)})
    with pytest.raises(UserError, match=r"train\.freeze=\[-pooler\]"):
        models.load_start(config.trained(Adapter(rank=4)), 0)
    assert models.load_start(config.trained(Adapter(rank=4), ["-pooler"]), 0)


@pytest.mark.parametrize("norm_first", [False, True], ids=["marian", "pegasus"])
def test_matrices_are_in_the_order_of_the_bases_features(norm_first, tmp_path):
    """Sin and cos alternate in our positions and not in theirs, so theirs has the features in another order."""
    config = Seq2SeqConfig(**SIZES, vocab_size=48, d_ff=64, seq_len=16, norm_first=norm_first)
    models.save(shaken(models.build(config, seed=1)), tmp_path / "base")
    ours = adapted("seq2seq", tmp_path / "base").eval()
    models.save(ours, tmp_path / "adapter")
    name, _ = weights.loads_in_transformers(config)
    theirs = peft.PeftModel.from_pretrained(getattr(transformers, name).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    expected = theirs.eval()(input_ids=IDS, decoder_input_ids=IDS[:, :5]).logits
    assert far(ours(IDS, IDS[:, :5]), expected) < 1e-5
    theirs.save_pretrained(tmp_path / "again")
    assert far(models.load(tmp_path / "again").eval()(IDS, IDS[:, :5]), expected) < 1e-5


def test_a_module_trained_whole_has_the_name_that_it_has_in_memory(bases, tmp_path):
    ours = adapted("vit", bases["vit"], freeze=["-attention_norm"])
    models.save(ours, tmp_path)
    theirs = in_peft("vit", bases["vit"], tmp_path).eval()
    assert far(ours.eval()(IMAGES), theirs(pixel_values=IMAGES).logits) < 1e-5
    assert models.load(tmp_path).eval()(IMAGES).equal(ours(IMAGES))


@pytest.mark.parametrize(("family", "freeze", "named"), [
    ("gpt", "-token_embedding", "shared"), ("bert", "-to_q.bias", "to_q.weight adapted"),
    ("bert", "-attention_norm.bias", "attention_norm.weight is not"), ("vit", "-positions", "class_token is not"),
])  # fmt: skip
def test_what_peft_cannot_hold_is_refused_before_training(family, freeze, named, bases):
    with pytest.raises(UserError, match=named):
        adapted(family, bases[family], freeze=[freeze])


def test_an_adapter_of_other_images_is_read_with_positions_resized_again(bases, tmp_path):
    config = CONFIGS["vit"].model_copy(update={"image_size": 16, "init": str(bases["vit"])}).trained(Adapter(rank=4))
    ours = shaken_adapter(models.load_start(config, 0).on("cpu")).eval()
    models.save(ours, tmp_path)
    images = torch.randn(2, 3, 16, 16)
    assert models.load(tmp_path).eval()(images).equal(ours(images))


def written_by_peft(family: str, base, folder, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(their_base(family, base), peft.LoraConfig(**{"r": 4, **THEIRS[family], **settings}))
    shaken_adapter(theirs).save_pretrained(folder)
    return theirs.eval()


def change(folder, tensors=lambda tensors: tensors, **about) -> None:
    """Of a folder that PEFT wrote."""
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file(tensors(load_file(file)), file)
    config.write_text(json.dumps(json.loads(config.read_text()) | about))


OTHER_FILES = {
    "expression": {"target_modules": r".*layers\.1\..*(q|o)_proj"}, "layers": {"layers_to_transform": [1]},
    "without": {"exclude_modules": ["layers.0.self_attn.q_proj"]}, "norm whole": {"modules_to_save": ["norm"]},
    "gaussian": {"init_lora_weights": "gaussian"},
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_other_files_of_pefts(kind, bases, tmp_path):
    theirs = written_by_peft("llama", bases["llama"], tmp_path, **OTHER_FILES[kind])
    compare("llama", models.load(tmp_path), theirs)


def test_pickled_weights_and_a_base_beside_the_adapter(bases, tmp_path):
    theirs = written_by_peft("llama", bases["llama"], tmp_path / "adapter")
    (tmp_path / "base").symlink_to(bases["llama"])
    change(tmp_path / "adapter", base_model_name_or_path="../base")
    torch.save(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), tmp_path / "adapter" / "adapter_model.bin")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    compare("llama", models.load(tmp_path / "adapter"), theirs)


@pytest.mark.parametrize(("family", "saved"), [("gpt", ["wte"]), ("llama", ["embed_tokens"]), ("llama", ["lm_head"]), ("llama", ["lm_head", "embed_tokens"]), ("t5", ["lm_head"])])
def test_a_saved_embedding_leaves_the_tied_other_to_the_base(family, saved, tmp_path):
    """transformers ties the base's two; PEFT copies the one that it saves."""
    config = CONFIGS[family].model_copy(update={"tie_output": True})
    models.save(shaken(models.build(config, seed=1)), tmp_path / "base")
    targets = {"gpt": ["c_attn"], "llama": ["q_proj"], "t5": ["q"]}[family]
    about = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=saved, fan_in_fan_out=family == "gpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = shaken_adapter(peft.get_peft_model(their_base(family, tmp_path / "base"), about))
        theirs.save_pretrained(tmp_path / "adapter")
        theirs = peft.PeftModel.from_pretrained(their_base(family, tmp_path / "base"), tmp_path / "adapter").eval()
    args, kwargs = INPUTS[family]
    with torch.no_grad():
        expected = theirs(**kwargs).logits
        for model in (models.load(tmp_path / "adapter"), models.load_plain(tmp_path / "adapter")):
            assert far(model.eval()(*args), expected) < 1e-5 and not model.config.tie_output


def test_a_saved_embedding_that_cannot_be_parted_is_refused(bases, tmp_path):
    peft.get_peft_model(their_base("t5", bases["t5"]), peft.LoraConfig(r=4, target_modules=["q"], modules_to_save=["shared"])).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"modules_to_save: shared\.weight: tied in the model"):
        models.load(tmp_path)


def test_names_of_an_older_transformers(bases, tmp_path):
    theirs = written_by_peft("vit", bases["vit"], tmp_path)
    older = (("layers.", "encoder.layer."), ("attention.q_proj", "attention.attention.query"), ("attention.v_proj", "attention.attention.value"))

    def named(tensors):
        for new, old in older:
            tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
        return tensors

    change(tmp_path, named, target_modules=["query", "value"])
    assert far(models.load(tmp_path).eval()(IMAGES), theirs(pixel_values=IMAGES).logits) < 1e-5


FAULTS = {
    "a targeted Linear": ("llama", lambda ts: {n: t for n, t in ts.items() if "layers.1" not in n}, {}, "layers.1.*missing"),
    "a module saved whole": ("bert", lambda ts: {n: t for n, t in ts.items() if "classifier" not in n}, {}, "classifier.*missing"),
    "another rank": ("llama", lambda ts: ts, {"r": 8}, "rank 4, and adapter_config.json says 8"),
    "an extra tensor": ("llama", lambda ts: ts | {"base_model.model.model.x.weight": torch.zeros(2)}, {}, "extra model.x"),
    "PiSSA": ("llama", lambda ts: ts, {"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    "no base": ("llama", lambda ts: ts, {"base_model_name_or_path": None}, "base_model_name_or_path"),
    "an empty base": ("llama", lambda ts: ts, {"base_model_name_or_path": ""}, "base_model_name_or_path .* got ''"),
    "a broken rank_pattern": ("llama", lambda ts: ts, {"rank_pattern": {"(": 4}}, r"rank_pattern: .* cannot be matched \(unclosed group\)"),
    "a broken alpha_pattern": ("llama", lambda ts: ts, {"alpha_pattern": {"*": 4}}, r"alpha_pattern: .* \(repetition operator missing"),
    "a broken target_modules": ("llama", lambda ts: ts, {"target_modules": "("}, r"target_modules: '\('.*unclosed group"),
    "an expression too large": ("llama", lambda ts: ts, {"target_modules": r"(\w{999}){999}"}, "exceeds size limit"),
    "an expression too long": ("llama", lambda ts: ts, {"exclude_modules": "(x)" * 400}, "longer than 1,000 characters"),
    "too many expressions": ("llama", lambda ts: ts, {"rank_pattern": {f"({i})": 4 for i in range(60)}}, "more than 50 expressions"),
    "too many names": ("llama", lambda ts: ts, {"target_modules": ["q_proj"] * 100_001}, "target_modules: more than 100,000 entries"),
    "a base that is gone": ("llama", lambda ts: ts, {"base_model_name_or_path": "/nowhere/at/all"}, "its base: /nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_that_is_missing_or_foreign_is_passed_over(fault, bases, tmp_path):
    family, tensors, about, named = FAULTS[fault]
    written_by_peft(family, bases[family], tmp_path)
    change(tmp_path, tensors, **about)
    with pytest.raises(UserError, match=named) as e:
        models.load(tmp_path)
    assert str(tmp_path) in str(e.value)


@pytest.mark.parametrize("about", [
    {"rank_pattern": {"(([a-z0-9._]+)+)+!": 4}}, {"alpha_pattern": {"(([a-z0-9._]+)+)+!": 4}}, {"target_modules": "(([a-z0-9._]+)+)+!"},
    {"exclude_modules": "(([a-z0-9._]+)+)+!"},
])  # fmt: skip
def test_an_expression_that_bursts_is_matched_at_once(about, bases, tmp_path):
    """Python's own engine would take hours, and it can be stopped from the main thread only."""
    theirs = written_by_peft("llama", bases["llama"], tmp_path)
    change(tmp_path, **about)
    assert far(models.load(tmp_path).eval()(IDS), theirs(input_ids=IDS).logits) < 1e-5


def test_patterns_are_read_as_peft_reads_them():
    from peft.utils.other import get_pattern_key

    modules = [f"model.layers.{i}.{part}_proj" for i in range(12) for part in ("self_attn.q", "self_attn.v", "mlp.up")]
    patterns = [
        "q_proj", r"model\.layers\.1\.mlp\.up_proj", "^model.layers.2.self_attn.q_proj$", "^layers.3.mlp.up_proj", r"layers\.[45]\..*", "8.mlp.up_proj$",
        "^.*6.*(q|v)_proj$", "up_proj|v_proj", r".*\.1\d\.\w+\.q_proj", "self-attn", "nothing",
    ]  # fmt: skip
    for first in range(len(patterns)):
        order = patterns[first:] + patterns[:first]
        value_of = weights.peft._by_module({"rank_pattern": {key: key for key in order}}, "rank_pattern", None)
        assert [value_of(m) or m for m in modules] == [get_pattern_key(order, m) for m in modules]


def test_an_adapter_is_no_base(bases, tmp_path):
    for name in ("a", "b"):
        written_by_peft("llama", bases["llama"], tmp_path / name)
    for base, named in (("a", "the adapter itself"), ("b", "an adapter itself. Merge that")):
        change(tmp_path / "a", base_model_name_or_path=str(tmp_path / base))
        change(tmp_path / "b", base_model_name_or_path=str(tmp_path / "a"))
        for read in (models.load, models.config_of):
            with pytest.raises(UserError, match=named):
                read(tmp_path / "a")


@pytest.mark.parametrize("change", [{"vocab_size": None}, {"gradus": {"adapter": None}}, {"gradus": {"adapter": {}}}, {"gradus": 5}])
def test_what_is_not_there_in_our_own_file_is_one_line(change, bases, tmp_path):
    models.save(adapted("llama", bases["llama"]), tmp_path)
    file = tmp_path / "gradus_config.json"
    about = json.loads(file.read_text())
    gradus = about["gradus"] | change["gradus"] if isinstance(change.get("gradus"), dict) else change.get("gradus", about["gradus"])
    file.write_text(json.dumps(about | change | {"gradus": gradus}))
    for read in (models.config_of, models.load):
        with pytest.raises(UserError, match=re.escape(str(tmp_path))) as e:
            read(tmp_path)
        assert "\n" not in str(e.value)


def test_what_is_edited_in_pefts_file_is_told_and_then_obeyed(bases, tmp_path):
    ours = adapted("llama", bases["llama"], targets=["attention"])
    models.save(ours, tmp_path / "adapter")
    (tmp_path / "moved").symlink_to(bases["llama"])
    change(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "moved"))
    assert models.load(tmp_path / "adapter").eval()(IDS).equal(ours.eval()(IDS)), "where the base is may be set there"
    for about in ({"lora_alpha": 32}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 2}}):
        models.save(ours, tmp_path / "adapter")
        change(tmp_path / "adapter", **about)
        with pytest.raises(UserError, match=rf"{next(iter(about))}=.*adapter_config.json.* delete gradus_config.json") as e:
            models.load(tmp_path / "adapter")
        assert "\n" not in str(e.value)
        (tmp_path / "adapter" / "gradus_config.json").unlink()
        theirs = in_peft("llama", bases["llama"], tmp_path / "adapter").eval()
        assert far(models.load(tmp_path / "adapter").eval()(IDS), theirs(input_ids=IDS).logits) < 1e-5


def test_a_head_that_is_not_there_is_not_the_bases(bases, tmp_path):
    """Of a file of ours: its checksums are gone, or were written anew."""
    models.save(adapted("bert", bases["bert"]), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == ["classifier"]
    save_file({name: t for name, t in tensors.items() if not name.endswith("classifier.bias")}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"adapter: .*classifier\.bias missing, which adapter_config\.json names") as e:
        models.load(tmp_path / "adapter")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("value", [1, 10**17, "yes", [True]])
def test_rslora_is_true_or_false(value, bases, tmp_path):
    models.save(adapted("gpt", bases["gpt"]), tmp_path)
    change(tmp_path, use_rslora=value)
    with pytest.raises(UserError, match=r"use_rslora=.*: expected true or false"):
        models.load(tmp_path)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_what_is_no_linear_of_the_body_are_refused(target, bases, tmp_path):
    written_by_peft("llama", bases["llama"], tmp_path, target_modules=["q_proj", target])
    with pytest.raises(UserError, match=r"cannot be adapted|not supported"):
        models.load(tmp_path)


@pytest.mark.parametrize("target", ["to_q:1048577", "to_q:9000000000000000000", "to_q:99999999999999999999", "to_q:2:1e13", f"to_q:{'9' * 5000}", "to_q:0"])
def test_ranks_and_scales_of_targets_have_limits(target):
    config = GPTConfig(vocab_size=40, n_layers=1, d_model=16, n_heads=2).trained(Adapter(rank=2, targets=[target]))
    with pytest.raises(UserError, match="with a rank of at most 1,048,576 and an alpha of at most 1e") as e:
        models.build(config, "meta")
    assert len(str(e.value)) < 300


@pytest.mark.shared_data
def test_stories260k_adapted(shared_data, tmp_path):
    models.save(models.load(shared_data / "stories260K" / "stories260K.bin"), tmp_path / "base")
    # alpha 16 with such random matrices drowns the weights: fp32 is then 2e-5 from fp64 without any merging
    ours = adapted("llama", tmp_path / "base", alpha=4).eval()
    models.save(ours, tmp_path / "adapter")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.randint(512, (2, 50))
    expected = theirs(input_ids=ids).logits
    assert far(ours(ids), expected) < 1e-5 and far(merged(ours).eval()(ids), expected) < 1e-5


@pytest.mark.shared_data
@pytest.mark.parametrize(("kind", "off"), [("int8", 0.008), ("nf4", 0.11)])
def test_a_small_base_is_off_by_what_the_page_says(kind, off, shared_data, tmp_path):
    models.save(models.load(shared_data / "stories260K" / "stories260K.bin"), tmp_path / "base")
    base = models.load(tmp_path / "base").eval()
    ids = torch.tensor([[1, *itertools.islice(generate(base, [[1]], max_new=200), 200)]])
    config = models.config_of(tmp_path / "base").model_copy(update={"init": str(tmp_path / "base")})
    small = models.load_start(config.trained(Adapter(rank=4, base=kind)), 0).on("cpu").eval()  # B is 0
    found, expected = small(ids), base(ids)
    assert float(((found - expected).norm() / expected.norm()).detach()) == pytest.approx(off, rel=0.1)
