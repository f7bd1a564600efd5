"""What `locate` gives, opened: its configuration, and its tensors under Hugging Face's names. Formats: Hugging Face's
folders, those of several processes and of adapters (PEFT's too), Meta's, llama2.c's, nanoGPT's, timm's and
torchvision's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus import limits
from gradus.errors import UserError, some
from gradus.models import config_json, weights
from gradus.models.building import build, whole
from gradus.models.config_json import one_line
from gradus.models.family import lookup
from gradus.models.locating import digests, in_metas_layout, is_nanogpt, locate, weight_files
from gradus.models.weights import Stored, checksums, peft, sharded
from gradus.recipe import schema

Opened = tuple[schema.ModelConfig, dict[str, Stored]]


def config_of(name_or_path: str | Path) -> schema.ModelConfig:
    """The configuration that lies beside weights; the weights are not read. Raises UserError as `load`."""
    return opened(locate(name_or_path, weights_too=False), weights_too=False)[0]


def tensors_of(name_or_path: str | Path) -> dict[str, Stored]:
    """The weights under Hugging Face's names, read on demand. Raises UserError as `load`."""
    return opened(locate(name_or_path), weights_too=True)[1]


def opened(path: Path, weights_too: bool) -> Opened:
    """(configuration, tensors under Hugging Face's names; none of them unless weights_too)."""
    if path.is_file() and path.suffix == ".bin":
        from gradus.models.weights import llama2c

        return llama2c.read(path)
    if in_metas_layout(path):
        from gradus.models.weights import meta_llama

        with one_line(path / "params.json"):
            return meta_llama.read(path)
    if path.is_dir():
        _verify(path, weights_too)
    file, hf, about = described(path)
    own = config_json.own_fields(hf, file)
    if about is not None or "adapter" in own:
        return Adapter(path, file, hf, own, about).opened(weights_too)
    if file is None or ("model_type" not in hf and str(hf.get("architecture", "")).startswith("vit_")):  # timm's
        from gradus.models.weights import gpt, vit_names

        with one_line(path):
            return gpt.from_nanogpt(path) if is_nanogpt(path) else vit_names.read(weights.read_tensors(path), path)
    config = config_json.read(hf, file)
    if (with_tensors := getattr(weights.rules_of(config.family), "with_tensors", None)) and weights.files_of(path):
        config = with_tensors(config, weights.read_tensors(path))
    if not weights_too:
        return config, {}
    if (path / sharded.FOLDER).is_dir():  # a checkpoint of several processes
        return config, weights.theirs(build(config, "meta"), sharded.model(path))
    return config, weights.read_tensors(path)


def described(path: Path) -> tuple[Path | None, dict[str, Any], dict[str, Any] | None]:
    """(the file that describes the model, of an adapter ours, what it says, what adapter_config.json says). None where
    there is none: weights may be alone."""
    file, about = (path if path.is_dir() else path.parent) / "config.json", None
    if path.is_dir() and (path / peft.CONFIG).is_file():
        about = limits.read_object(path / peft.CONFIG)
        file = next((path / name for name in (peft.OURS, file.name) if (path / name).is_file()), None)
    elif not file.is_file() or not (path.is_dir() or path.suffix in weights.CHECKPOINTS):
        file = None
    return file, limits.read_object(file) if file else {}, about


def is_adapter(path: Path) -> bool:
    file, hf, about = described(path)
    return about is not None or "adapter" in config_json.own_fields(hf, file)


def _verify(folder: Path, weights_too: bool) -> None:
    """Raises UserError where a folder has checksums and what is read of it is not what they are of."""
    if not os.path.lexists(folder / checksums.FILE):
        return
    ours = (folder / peft.OURS).is_file()  # then adapter_config.json, where the base is set, is compared by itself

    def wanted(name: str) -> bool:
        if name.startswith("training.") or (ours and name == peft.CONFIG):
            return False
        return weights_too or name.endswith((".json", ".txt", ".model", ".jinja"))

    read = [name for name in ("config.json", peft.OURS, "params.json") if (folder / name).is_file()]
    parts = weight_files(folder) if weights_too else []
    checksums.verify(folder, wanted, [*read, *(os.path.relpath(part, folder) for part in parts)])


def resized(stored: schema.ModelConfig, config: schema.ModelConfig, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors, with positions for images of the size that `config` has."""
    if getattr(config, "image_size", None) == getattr(stored, "image_size", None):
        return tensors
    from gradus.models.weights import vit_names

    return vit_names.resized(stored, config, tensors)


# ---------------------------------------------------------------- adapters


@dataclass(frozen=True)
class Adapter:
    """The folder of an adapter. In one that Gradus wrote a file has all that the recipe said (`hf`, what is Gradus's in
    `own`), in PEFT's own `about` its sizes alone; a checkpoint of several processes has no `about`."""

    path: Path
    file: Path | None
    hf: dict[str, Any]
    own: dict[str, Any]
    about: dict[str, Any] | None

    @property
    def key(self) -> str:
        """What names the base."""
        return f"base_model_name_or_path in {peft.CONFIG}" if self.about else "gradus.base in config.json"

    def opened(self, weights_too: bool) -> Opened:
        """(configuration, which names the base in `init`; the base's tensors with the adapter's in their place)."""
        if self.about is not None:
            peft.check_config(self.about, self.path / peft.CONFIG)
        base = self.base(weights_too)
        stored, tensors = opened(base, weights_too)
        config = self.read_config(base, weights_too) if "adapter" in self.own else stored
        if (self.path / sharded.FOLDER).is_dir():
            adapter = weights.theirs(whole(config), sharded.model(self.path)) if weights_too else {}
        else:
            adapter = peft.read_tensors(self.path, stored)
        if "adapter" not in self.own:
            try:
                with one_line(self.path / peft.CONFIG):
                    config, adapter = _of_peft(stored, self.about, adapter)
            except UserError as e:
                raise UserError(f"{self.path}: {str(e).removeprefix(f'{self.path}/')}") from None
        config = config.model_copy(update={"init": str(base)})
        return config, self.joined(config, adapter, stored, tensors) if weights_too else {}

    def base(self, weights_too: bool) -> Path:
        """The base that the adapter names. Raises UserError where there is none."""
        path, key = self.path, self.key
        named = self.about.get("base_model_name_or_path") if self.about else self.own.get("base")
        if not isinstance(named, str) or not named.strip():
            raise UserError(f"{path}: {key}: expected the folder or name of the base, got {named!r:.40}")
        here = Path(os.path.expanduser(named)).exists()
        try:
            base = locate(path / named if not here and (path / named).exists() else named, weights_too)
        except UserError as e:
            raise UserError(f"{path}: its base: {e} Set {key} to where it is.") from None
        if base.is_dir() and is_adapter(base):
            what = f"an adapter itself. Merge that: gradus export {base} --merge"
            if base.samefile(path):
                base, what = named, f"the adapter itself. Set {key} to the model that it is for"
            raise UserError(f"{path}: its base {base} is {what}")
        return base

    def read_config(self, base: Path, weights_too: bool) -> schema.ModelConfig:
        """What Gradus wrote. Raises UserError where it is of another base."""
        config, known = config_json.read(self.hf, self.file), self.own.get("base_digest")
        if weights_too and known is not None and known not in digests(base):
            raise UserError(
                f"{base}: not the weights that the adapter in {self.path} was trained on (their digest differs). "
                f"Put those back, or set {self.key} to where they are"
            )
        return config

    def joined(
        self, config: schema.ModelConfig, adapter: dict[str, Stored], stored: schema.ModelConfig,
        tensors: dict[str, Stored],
    ) -> dict[str, Stored]:  # fmt: skip
        """The tensors of the base, whose configuration is `stored`, with the adapter's in their place."""
        prefixes = getattr(weights.rules_of(config.family), "PREFIXES", ())

        def bare(name: str) -> str:
            return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)

        tensors = resized(stored, config, tensors)
        model, taken = whole(config), {bare(name) for name in adapter}
        if self.about and "adapter" in self.own:
            peft.refuse_edited(model, self.about, self.path)
            if lacks := list(peft.lacking_whole(config, self.about, adapter)):
                raise UserError(f"{self.path}: {some(lacks)} {peft.MISSING}")
        used, _ = weights.match(model, tensors, False, config.init)
        kept = {n: t for n, t in tensors.items() if n in used and bare(n) not in taken} | adapter
        if getattr(config, "tie_output", True) != getattr(stored, "tie_output", True):
            embedding = f"{lookup(config.family).tokens[0]}.weight"
            kept.setdefault("lm_head.weight", next(tensors[n] for n, rule in used.items() if rule.ours == embedding))
        return kept


def _of_peft(base: schema.ModelConfig, about: dict, tensors: dict[str, Stored]) -> Opened:
    """(configuration, tensors) of an adapter that PEFT wrote."""
    saved = {name: stored for name, stored in tensors.items() if ".lora_" not in name}
    ends = (".classifier.weight", ".classifier.out_proj.weight")  # RoBERTa's head has a dense layer too
    heads = [tensor for name, tensor in saved.items() if f".{name}".endswith(ends)]
    config = base
    if heads and hasattr(base, "n_classes"):
        head = {"head": "classification", "pooler": True} if hasattr(base, "head") else {}
        config = base.changed(**head, n_classes=heads[0].shape[0])
    if not about.get("ensure_weight_tying"):
        config = _untied(config, saved)
    targets, tensors = peft.targets(build(config, "meta"), about, tensors)
    adapter = schema.Adapter(
        rank=about.get("r", 8), alpha=about.get("lora_alpha", 8), rslora=bool(about.get("use_rslora")),
        dropout=about.get("lora_dropout", 0.0), targets=targets,
    )  # fmt: skip
    whole = {name for rule in weights.table_of(config) if rule.theirs in saved for name in rule.names}
    names = sorted({name.rpartition(".")[0] for name in whole if not weights.in_head(name)})
    return config.trained(adapter, [f"-{name}" for name in names]), tensors


def _untied(base: schema.ModelConfig, saved: Iterable[str]) -> schema.ModelConfig:
    """The base's configuration where some of its tensors are saved beside an adapter. Of two that are tied PEFT copies
    the saved one, and the other keeps the base's values. Raises UserError where our model cannot untie it."""
    config = base
    if getattr(base, "tie_output", False) and weights.shared(build(base, "meta"), saved):
        scale = {"scale_output": base.scales} if hasattr(base, "scales") else {}
        config = base.changed(**scale, tie_output=False)
    if parted := weights.shared(build(config, "meta"), saved):
        raise UserError(
            f"modules_to_save: {some(parted)}: tied in the model, and PEFT unties it. Merge the adapter with "
            "PEFT (merge_and_unload) and give the merged model"
        )
    return config
