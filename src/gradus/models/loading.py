"""Models with the weights of a file: to use as they are, or to train from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus import limits
from gradus.errors import UserError, did_you_mean, some
from gradus.models import weights
from gradus.models.building import build, deferred, whole, with_values
from gradus.models.config_json import adapter_config, one_line
from gradus.models.family import lookup
from gradus.models.locating import locate
from gradus.models.opening import config_of, opened, resized
from gradus.models.weights import LoadReport, Stored, peft
from gradus.recipe.schema import ModelConfig

if TYPE_CHECKING:  # a configuration is read without torch
    import torch
    from torch import nn

    from gradus.models.values import Deferred


def load(
    name_or_path: str | Path, *, strict: bool = True, dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu", **overrides: Any,
) -> nn.Module:  # fmt: skip
    """Load a model with its weights from a local folder (Hugging Face's or Meta's layout, or a Gradus run: its best or
    newest checkpoint), a llama2.c .bin, or the Hugging Face hub. It is in training mode, as `build` gives it.

    strict: every tensor must fit. strict=False leaves tensors that are missing, or a head of another size, freshly
    initialised and ignores extra ones; `model.load_report` (weights.LoadReport) names them. dtype: float32 unless
    given. overrides replace fields of the configuration (dropout=0.0, head="classification", n_classes=2, ...).

    Beside the model, memory holds one tensor at a time. Raises UserError for anything absent, damaged or refused, and
    for what does not fit.
    """
    import torch

    loaded = load_deferred(name_or_path, strict=strict, **overrides)
    loaded.model.to(dtype or torch.float32)
    return loaded.on(device)


def load_plain(
    name_or_path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """As `load`, of an adapter its base with the product of its matrices added, in fp32 whatever the dtype."""
    from gradus.models.adapt import merged

    if config_of(name_or_path).adapter:
        return merged(load(name_or_path)).to(device, dtype)
    return load(name_or_path, dtype=dtype, device=device)


def beside(base: nn.Module, folder: str | Path) -> nn.Module:
    """The adapted model of an adapter's folder, around the parameters of a loaded base, which it shares: several
    adapters of one base take little more memory than one. Raises UserError as `load`, and where it is another base's.
    """
    import torch

    from gradus.models.values import fill

    path = locate(folder)
    config, tensors = opened(path, weights_too=True)
    if not config.adapter:
        raise UserError(f"{path}: no adapter: it has no {peft.CONFIG}")
    if config.adapter.base:
        kind = config.adapter.base
        raise UserError(f"{path}: trained beside weights in {kind}. Give it as the model, without --adapter")
    model, own = build(config, "meta"), dict(base.named_parameters(remove_duplicate=False))
    values, like = weights.fitting(model, tensors, path)[0], next(base.parameters())
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{module_name}.{name}".lstrip(".")
            if parameter.requires_grad:
                new = torch.nn.Parameter(torch.empty_like(parameter, device=like.device, dtype=like.dtype))
                fill({full: new}, values)
            elif full not in own or own[full].shape != parameter.shape:
                raise UserError(f"{path}: an adapter of another base: {full} is not in the one given")
            else:
                new = own[full]
            setattr(module, name, new)
    return model


def load_deferred(
    name_or_path: str | Path, *, strict: bool = True, seed: int | None = None, **overrides: Any
) -> Deferred:
    """As `load`, before the model has memory. seed: of what is freshly initialised, as in `build`."""
    path = locate(name_or_path)
    stored, tensors = opened(path, weights_too=True)
    known = set(type(stored).model_fields) - {"family", "preset", "init"}
    for key in overrides:
        if key not in known:
            raise UserError(f"load: {key} is not a field of a {stored.family} model.{did_you_mean(key, known)}")
    with one_line("load"):
        config = stored.changed(**overrides) if overrides else stored
    return _fitted(config, stored, tensors, path, strict, seed)


def load_start(config: ModelConfig, seed: int | None) -> Deferred:
    """What training starts from, before it has memory: the weights that config.init names, and what they lack as in
    `deferred`; without any, all as there."""
    if config.init is None:
        return deferred(config, seed)
    path = locate(config.init)
    stored, tensors = opened(path, weights_too=True)
    if stored.adapter:
        raise UserError(
            f"model.init={config.init}: an adapter beside other weights. Merge it (gradus export {config.init} --merge "
            "--to FOLDER) and give that folder."
        )
    if (modules := path / "modules.json").is_file():  # of sentence-transformers
        weights.note(f"{modules}: the encoder alone is read, not what stands behind it (pooling, normalisation)")
    start = {"preset": None, "init": str(path.absolute()) if config.adapter else None}
    fitted = _fitted(config.model_copy(update=start), stored, tensors, path, False, seed)
    _refuse_unfit(fitted.model, fitted.report, config.init)
    hf = limits.read_object(file) if (file := path / "config.json").is_file() else {}
    dropouts = [n for n in hf if n.endswith(("dropout", "_prob", "pdrop")) and "classif" not in n]
    other = [n for n in dropouts if hf[n] not in (None, config.dropout)]
    fitted.report.unused += [f"{n}={hf[n]} (config.json)" for n in other]
    frozen = {name for name, p in fitted.model.named_parameters() if not p.requires_grad}
    if left := [name for name in fitted.report.new if name in frozen]:
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in left))
        raise UserError(
            f"model.init={config.init}: {some(left)} not in it, and frozen, so never trained. "
            f"Set train.freeze=[{', '.join([*config.freeze, *(f'-{name}' for name in modules)])}]."
        )
    adapter_config(fitted.model)  # raises for what could not be kept
    return fitted


def _refuse_unfit(model: nn.Module, report: LoadReport, where: str) -> None:
    """Raises UserError for a start that lacks more than the head of a classifier: random values among
    trained weights spoil them."""
    config = model.config
    stacks = lookup(config.family).stacks if getattr(config, "n_classes", None) else ()
    own, heads = (".a.weight", ".b.weight"), {name for stack in stacks for name in stack.heads}  # own: an adapter's
    if new := [n for n in report.new if n.split(".")[0] not in heads and not n.endswith(own)]:
        there = f", which has {some(report.unused)} instead" if report.unused else ""
        raise UserError(
            f"model.init={where}: {len(new)} of the model's {len(model.state_dict())} tensors are not in it{there}: "
            f"{some(new)} would start from random values. Give weights of the whole model, with the head that "
            "the task needs, under Hugging Face's names."
        )


def _fitted(
    config: ModelConfig, stored: ModelConfig, stored_tensors: dict[str, Stored], path: Path, strict: bool,
    seed: int | None,
) -> Deferred:  # fmt: skip
    """The model of a configuration with the values of stored tensors, those of the configuration `stored`."""
    from gradus.models.values import drawn

    if config.family != stored.family:
        raise UserError(f"{path}: a {stored.family}, not a {config.family}. Set model.family={stored.family}")
    wanted, has = (getattr(c, "patches", None) for c in (config, stored))
    if "stem" in (wanted, has) and wanted != has:  # the other ways to make tokens have one weight for all
        what = f"{'a' if has == 'stem' else 'no'} convolutional stem. Set patches={has}"
        raise UserError(f"{path}: patches={wanted} does not fit these weights, which have {what}")
    model, tensors = whole(config), resized(stored, config, stored_tensors)
    values, report = weights.fitting(model, tensors, path, strict)
    report.stored = stored
    if tensors is not stored_tensors:
        report.resized.append(f"positions from images of {stored.image_size} to {config.image_size} pixels")
    if report.new:
        values = drawn(model, seed) | values
    return with_values(config, model, values, report=report)


def load_weights(model: nn.Module, name_or_path: str | Path) -> LoadReport:
    """Copy weights into a model that is there already (any device and dtype), every tensor. Errors as in `load`."""
    from gradus.models.values import fill, held, stored_small

    path = locate(name_or_path)
    _, tensors = opened(path, weights_too=True)
    values, report = weights.fitting(whole(model.config), tensors, path)
    fill(held(model), stored_small(model, values))
    return report
