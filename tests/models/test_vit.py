"""ViT against transformers' ViT: outputs, gradients, weights in both directions, published sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

from gradus.errors import UserError
from gradus.models import build, config_of, count, load, save
from gradus.models.weights.vit import config_from_hf
from gradus.recipe.schema import ViTConfig

TINY = {"image_size": 8, "patch_size": 4, "n_layers": 2, "d_model": 24, "n_heads": 3, "d_ff": 40, "norm_eps": 1e-2}
HF_TINY = {
    "image_size": 8,
    "patch_size": 4,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-2,
}
SIZES = {  # Dosovitskiy et al. 2021, table 1; Zhai et al. 2022, table 2
    "B/16": {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_ff": 3072, "patch_size": 16},
    "L/16": {"n_layers": 24, "d_model": 1024, "n_heads": 16, "d_ff": 4096, "patch_size": 16},
    "H/14": {"n_layers": 32, "d_model": 1280, "n_heads": 16, "d_ff": 5120, "patch_size": 14},
    "g/14": {"n_layers": 40, "d_model": 1408, "n_heads": 16, "d_ff": 6144, "patch_size": 14},
    "G/14": {"n_layers": 48, "d_model": 1664, "n_heads": 16, "d_ff": 8192, "patch_size": 14},
}


def shake(model: nn.Module) -> nn.Module:
    """Every parameter, norms, biases and the head too, away from what an initialisation would leave equal."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


def gradients(model: nn.Module, folder: Path, theirs: bool) -> dict[str, torch.Tensor]:
    """The gradients under the names of a weights file: written as if they were the weights."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(folder) if theirs else save(model, folder)
    return load_file(folder / "model.safetensors")


def compare(ours: nn.Module, theirs: nn.Module, tmp_path: Path) -> None:
    """In float64: what differs then is the equations, not a processor's sums."""
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    ours, out = ours.double(), theirs.eval().double()(images)
    got, want = (ours(images), out.logits) if ours.config.n_classes else (ours.features(images), out.last_hidden_state)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(got)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    got, want = gradients(ours, tmp_path / "ours-g", theirs=False), gradients(theirs, tmp_path / "theirs-g", theirs=True)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("n_classes", [5, None])
def test_reads_theirs(n_classes, tmp_path):
    config = transformers.ViTConfig(**HF_TINY, num_labels=n_classes or 2)
    theirs = transformers.ViTForImageClassification(config) if n_classes else transformers.ViTModel(config, add_pooling_layer=False)
    shake(theirs).save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert ours.config == ViTConfig(**TINY, n_classes=n_classes)
    compare(ours, theirs, tmp_path)


@pytest.mark.parametrize("patches", ["convolution", "unfold", "rearrange"])
@pytest.mark.parametrize("n_classes", [5, None])
def test_they_read_ours(n_classes, patches, tmp_path):
    ours = shake(build(ViTConfig(**TINY, n_classes=n_classes, patches=patches)))
    save(ours, tmp_path / "ours")
    if n_classes:
        theirs, info = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "ours", output_loading_info=True)
    else:
        theirs, info = transformers.ViTModel.from_pretrained(tmp_path / "ours", add_pooling_layer=False, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert config_of(tmp_path / "ours") == ours.config
    compare(ours, theirs, tmp_path)


def test_a_pooler_of_theirs_is_not_read(tmp_path):
    theirs = shake(transformers.ViTModel(transformers.ViTConfig(**HF_TINY)))
    theirs.save_pretrained(tmp_path)
    assert "pooler.dense.weight" in load_file(tmp_path / "model.safetensors")
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(load(tmp_path).double()(images), theirs.eval().double()(images).last_hidden_state[:, 0], rtol=1e-4, atol=1e-5)


def test_a_body_takes_a_new_head(tmp_path):
    body = shake(build(ViTConfig(**TINY)))
    save(body, tmp_path)
    with pytest.raises(UserError, match=r"missing:? classifier.weight, classifier.bias"):
        load(tmp_path, n_classes=4)
    model = load(tmp_path, n_classes=4, strict=False)
    images = torch.randn(2, 3, 8, 8)
    assert model.load_report.new == ["head.weight", "head.bias"]
    assert torch.equal(model.features(images), body.features(images)) and model(images).shape == (2, 4)


def test_mean_pooling(tmp_path):
    """No class token, and the mean over patches of the final norm's output: I-JEPA's encoder with its classifier."""
    ours = shake(build(ViTConfig(**TINY, n_classes=5, pool="mean", patches="unfold")))
    images = torch.randn(2, 3, 8, 8)
    features = ours.features(images)
    assert features.shape == (2, 4, 24) and ours.class_token is None and ours.positions.shape == (1, 4, 24)
    torch.testing.assert_close(ours(images), features.sum(1) / 4 @ ours.head.weight.T + ours.head.bias)
    save(ours, tmp_path)
    again = load(tmp_path)
    assert again.config == ours.config
    assert torch.equal(again(images), ours(images))
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert isinstance(theirs, transformers.IJepaForImageClassification)
    torch.testing.assert_close(ours(images), theirs(images).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_classes", [5, None])
def test_reads_mean_pooling_of_theirs(n_classes, tmp_path):
    config = transformers.IJepaConfig(**HF_TINY, num_labels=n_classes or 2)
    theirs = shake(transformers.IJepaForImageClassification(config) if n_classes else transformers.IJepaModel(config)).eval()
    theirs.save_pretrained(tmp_path)
    ours, images = load(tmp_path), torch.randn(2, 3, 8, 8)
    assert ours.config == ViTConfig(**TINY, n_classes=n_classes, pool="mean")
    out = theirs(images)
    want = out.logits if n_classes else out.last_hidden_state.mean(1)
    torch.testing.assert_close(ours(images), want, rtol=1e-4, atol=1e-5)


def test_mean_pooling_is_the_encoder_of_theirs(tmp_path):
    """Their encoder over the patches alone, its states averaged: without the class token both are the same."""
    theirs = shake(transformers.ViTModel(transformers.ViTConfig(**HF_TINY), add_pooling_layer=False)).eval().double()
    ours = build(ViTConfig(**TINY, pool="mean")).double()
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["embeddings.cls_token"]
    tensors["embeddings.position_embeddings"] = tensors["embeddings.position_embeddings"][:, 1:]
    save(ours, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    ours = load(tmp_path, dtype=torch.float64)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    x = theirs.embeddings.patch_embeddings(images) + theirs.embeddings.position_embeddings[:, 1:]
    for layer in theirs.layers:
        x = layer(x)
    torch.testing.assert_close(ours(images), theirs.layernorm(x).mean(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pool", ["class_token", "mean"])
def test_three_ways_of_patches_are_one_model(pool):
    config = ViTConfig(**TINY, n_classes=5, pool=pool)
    first = shake(build(config))
    images, weight = torch.randn(3, 3, 8, 8, dtype=torch.float64), torch.randn(3, 5)
    results = []
    for how in ("convolution", "unfold", "rearrange"):
        model = build(config.model_copy(update={"patches": how}))
        model.load_state_dict(first.state_dict())
        out = model.double()(images)
        (out * weight).sum().backward()
        results.append((out, {name: p.grad for name, p in model.named_parameters()}))
    for out, grads in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=1e-4, atol=1e-5)
        for name in grads:
            torch.testing.assert_close(grads[name], results[0][1][name], rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("size", "total"), [("B/16", 86_567_656), ("L/16", 304_326_632), ("H/14", 632_045_800)])
def test_published_sizes(size, total):
    assert count(ViTConfig(**SIZES[size], n_classes=1000))["total"] == total


@pytest.mark.parametrize(("size", "total"), [("g/14", 1_011_000_000), ("G/14", 1_843_000_000)])
def test_published_sizes_of_zhai(size, total):
    """Table 2, in millions, without a classifier."""
    assert count(ViTConfig(**SIZES[size]))["total"] == pytest.approx(total, abs=500_000)


def test_initialisation():
    model = build(ViTConfig(image_size=32, patch_size=4, n_layers=1, d_model=96, n_heads=3, d_ff=192, n_classes=10))
    for name, p in model.named_parameters():
        if name == "positions" or (name.endswith("weight") and "norm" not in name and "head" not in name):
            assert p.std().item() == pytest.approx(0.02 * 0.8796, rel=0.06) and abs(p.mean().item()) < 0.001, name
        else:
            assert torch.equal(p, torch.full_like(p, 1.0 if "norm.weight" in name else 0.0)), name
    assert all(p.is_meta for p in build(model.config, device="meta").parameters())


def test_dropout_is_where_the_paper_has_it():
    """Appendix B.1: after the positions, and after each dense layer but q, k, v; none on attention weights."""
    model = shake(build(ViTConfig(**TINY, n_classes=5, dropout=0.5)))
    passed = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            assert module.p == 0.5
            module.register_forward_hook(lambda module, inputs, out, name=name: passed.append((name, out.shape[-1])))
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(images), model(images))
    block = [("dropout", 24), ("feedforward.dropout", 40), ("dropout", 24)]  # after to_out, up, down
    assert passed[: len(passed) // 2] == [("dropout", 24)] + [(f"blocks.{i}.{name}", size) for i in (0, 1) for name, size in block]
    assert all(block.attention.dropout == 0.0 for block in model.blocks)
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize("shape", [(2, 3, 10, 10), (2, 3, 8, 4), (2, 1, 8, 8), (3, 8, 8)])
def test_an_image_of_another_size_is_told(shape):
    model = build(ViTConfig(**TINY, n_classes=5))
    with pytest.raises(UserError, match=r"3 × 8 × 8.*model.image_size") as e:
        model(torch.zeros(shape))
    assert " × ".join(map(str, shape[1:])) in str(e.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act=relu"),
        ({"qkv_bias": False}, "qkv_bias=False"),
        ({"image_size": [8, 16]}, "image_size"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "architectures=ViTForMaskedImageModeling"),
    ],
)
def test_unsupported_fields_are_named(change, named):
    with pytest.raises(UserError, match=named):
        config_from_hf({"model_type": "vit", **HF_TINY, **change})


# ---------------------------------------------------------------- a convolutional stem


@pytest.mark.parametrize("pool", ["class_token", "mean"])
def test_a_stem_makes_tokens_in_place_of_patches(pool):
    """The very same model, but for what turns the image into tokens; and its parameters by the closed form."""
    stem, plain = (build(ViTConfig(**TINY, n_classes=5, pool=pool, patches=how)) for how in ("stem", "convolution"))
    shake(stem)
    d, n, token = 24, 4, pool == "class_token"
    sizes = {name: p.shape for name, p in plain.named_parameters() if not name.startswith("patches.")}
    assert {name: p.shape for name, p in stem.named_parameters() if not name.startswith("patches.")} == sizes
    convolutions = (9 * 3 * d // 2 + d // 2) + (9 * d // 2 * d + d)
    assert count(stem.config)["embeddings"] == convolutions + (n + token) * d + token * d
    assert count(stem.config)["total"] == count(plain.config)["total"] - (3 * 4 * 4 * d + d) + convolutions
    images = torch.randn(3, 3, 8, 8)
    x = stem.patches(images)
    assert x.shape == (3, n, d)
    if token:
        x = torch.cat((stem.class_token.expand(3, -1, -1), x), dim=1)
    x = x + stem.positions
    for block in stem.blocks:
        x = block(x)
    x = stem.norm(x)
    torch.testing.assert_close(stem(images), stem.head(x[:, 0] if token else x.mean(1)))


def test_initialisation_of_a_stem():
    model = build(ViTConfig(image_size=32, patch_size=4, n_layers=1, d_model=192, n_heads=3, d_ff=192, patches="stem"))
    first, second = model.patches.convolutions
    assert first.weight.std().item() == pytest.approx((2 / 27) ** 0.5, rel=0.05)
    assert second.weight.std().item() == pytest.approx((2 / (9 * 96)) ** 0.5, rel=0.05)
    assert not first.bias.any() and not second.bias.any()


@pytest.mark.parametrize("n_classes", [5, None])
def test_a_stem_is_saved_and_loaded(n_classes, tmp_path):
    ours = shake(build(ViTConfig(**TINY, n_classes=n_classes, pool="mean", patches="stem")))
    save(ours, tmp_path)
    again, images = load(tmp_path), torch.randn(2, 3, 8, 8)
    assert again.config == ours.config and torch.equal(again(images), ours(images))
    with pytest.raises(ValueError, match="gradus-vit"):
        transformers.AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"patches=unfold does not fit these weights, which have a convolutional stem\. Set patches=stem$"):
        load(tmp_path, patches="unfold", strict=False)


def test_weights_without_a_stem_are_none_for_it(tmp_path):
    transformers.ViTModel(transformers.ViTConfig(**HF_TINY)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"patches=stem does not fit .* have no convolutional stem\. Set patches=convolution$"):
        load(tmp_path, patches="stem", strict=False)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"patch_size": 1}, "patch_size=1 must be 2, 4, 8"),
        ({"image_size": 12, "patch_size": 6}, "patch_size=6 must be 2, 4, 8"),
        ({"image_size": 12, "patch_size": 8}, "image_size=12 is not a multiple of patch_size=8"),
        ({"patch_size": 8, "d_model": 30}, "d_model=30 is not a multiple of patch_size / 2 = 4"),
    ],
)
def test_sizes_that_a_stem_cannot_have(sizes, told):
    with pytest.raises(ValidationError, match=told):
        ViTConfig(**{**TINY, **sizes}, patches="stem")


# ---------------------------------------------------------------- torchvision's and timm's names


def as_torchvision(hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A body of transformers under the names of torchvision's vision_transformer.py."""
    names = {
        "embeddings.cls_token": "class_token", "embeddings.position_embeddings": "encoder.pos_embedding",
        "embeddings.patch_embeddings.projection": "conv_proj", "layernorm_before": "ln_1", "layernorm_after": "ln_2",
        "attention.output.dense": "self_attention.out_proj", "intermediate.dense": "mlp.0", "output.dense": "mlp.3",
        "encoder.layer.": "encoder.layers.encoder_layer_", "layernorm": "encoder.ln",
    }  # fmt: skip
    made = {}
    for name, tensor in hf.items():
        if "attention.attention" in name:
            continue
        for theirs, new in names.items():
            name = name.replace(theirs, new)
        made[name] = tensor
    for i in range(2):
        for kind in ("weight", "bias"):
            parts = [hf[f"encoder.layer.{i}.attention.attention.{part}.{kind}"] for part in ("query", "key", "value")]
            made[f"encoder.layers.encoder_layer_{i}.self_attention.in_proj_{kind}"] = torch.cat(parts)
    return made


def body(n_classes: int | None = None) -> nn.Module:
    config = transformers.ViTConfig(**HF_TINY | {"hidden_size": 128, "num_attention_heads": 2, "layer_norm_eps": 1e-6}, num_labels=n_classes or 2)
    theirs = transformers.ViTForImageClassification(config) if n_classes else transformers.ViTModel(config, add_pooling_layer=False)
    return shake(theirs).eval()


@pytest.mark.parametrize("head", [None, "heads.head", "heads.0"])
def test_torchvisions_names(head, tmp_path):
    """heads.0: the .pth of a published tutorial, whose new head is a Sequential of one Linear."""
    theirs, images = body(n_classes=10 if head else None), torch.randn(2, 3, 8, 8)
    named = load_file_of(theirs, tmp_path / "hf")
    made = as_torchvision({name.removeprefix("vit."): p for name, p in named.items() if not name.startswith("classifier")})
    made |= {f"{head}.{kind}": named[f"classifier.{kind}"] for kind in ("weight", "bias") if head}
    torch.save(made, tmp_path / "vit.pth")
    ours = load(tmp_path / "vit.pth").eval()
    assert ours.config.n_classes == (10 if head else None)
    got, want = (ours(images), theirs(images).logits) if head else (ours.features(images), theirs(images).last_hidden_state)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def load_file_of(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_positions_for_another_size_of_image(tmp_path):
    """Smooth positions stay the same function of the place, and the class token's is kept."""
    model = build(ViTConfig(**TINY | {"image_size": 16}))
    place = torch.arange(4) + 0.5
    with torch.no_grad():
        model.positions[0, 1:, 0] = (place[:, None] + 10 * place).flatten()
    save(model, tmp_path)
    large = load(tmp_path, image_size=32)
    assert large.config.image_size == 32 and large.load_report.resized == ["positions from images of 16 to 32 pixels"]
    grid = large.positions[0, 1:, 0].view(8, 8)[2:6, 2:6]  # away from the edges, where bicubic is exact for a plane
    place = ((torch.arange(8) + 0.5) / 2)[2:6]
    torch.testing.assert_close(grid, place[:, None] + 10 * place, rtol=0.05, atol=0.2)
    assert torch.equal(large.positions[0, 0], model.positions[0, 0])
