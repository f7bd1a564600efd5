"""Where the weights of a model lie: the file or folder, and its files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradus import files, hub
from gradus.errors import UserError, did_you_mean, some
from gradus.models import weights
from gradus.models.weights import peft

CONFIGS = ("config.json", "params.json", peft.CONFIG)  # one of which a folder with a model has


def locate(name_or_path: str | Path, weights_too: bool = True) -> Path:
    """The local file or folder that holds a model: a llama2.c .bin, nanoGPT's ckpt.pt, a folder in the Hugging Face or
    Meta layout (also by its one file of weights), the best or else the newest checkpoint of a Gradus run, or the local
    copy of a hub name (weights_too=False: only its config.json).

    Raises UserError where there is none.
    """
    path = Path(os.path.expanduser(name_or_path))
    if path.is_file():
        return _of_file(path)
    if not path.exists():
        if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(name_or_path)):
            return _from_hub(str(name_or_path), weights_too)
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file or folder.{did_you_mean(path.name, siblings) if siblings else ''}")
    runs = path / "checkpoints"
    for folder in (path, runs / "best", *reversed(files.numbered(runs, "step-"))):
        if any((folder / file).is_file() for file in CONFIGS):
            if folder == runs / "best" and folder.resolve().parent != runs.resolve():
                raise UserError(
                    f"{folder}: a link to {folder.resolve()}, outside of the run. Give that folder itself, or link "
                    "one of the run's own"
                )
            return folder
        if folder.name == "best" and (kept := [p.name for p in runs.glob("best*")]):
            raise UserError(
                f"{folder}: the run's best weights are not there, and others do not stand for them "
                f"({some(sorted(kept))}). Copy the run again, or give one of the folders in {runs}."
            )
    if kept := weights.checkpoints(path):
        if len(kept) > 1:
            raise UserError(f"{path}: several checkpoints: {some(list(map(str, kept)))}. Give one of them")
        return locate(kept[0], weights_too)
    if runs.is_dir():
        raise UserError(
            f"{path}: a run without a checkpoint yet. Let it reach one (train.checkpoint_every), or give another folder"
        )
    if ggufs := sorted(path.glob("*.gguf")):
        return _of_file(ggufs[0])
    holds = some(sorted(p.name for p in path.iterdir())) or "nothing"
    raise UserError(
        f"{path}: neither config.json (Hugging Face), nor params.json (Meta), nor checkpoints/ (a Gradus run) in it; "
        f"it holds {holds}"
    )


def _of_file(path: Path) -> Path:
    """The file itself, where it says by itself what model it holds, else its folder, if this is all of its weights."""
    if path.suffix == ".gguf":
        raise UserError(f"{path}: GGUF is run by llama.cpp: llama-cli -m {path}. Or give the run that it comes from")
    described = (path.parent / "config.json").is_file()
    if described and [*weights.files_of(path.parent)] == [path]:
        return path.parent
    if path.suffix == ".bin" or (described and path.suffix in weights.CHECKPOINTS) or is_nanogpt(path) or _is_vit(path):
        return path
    alone = "weights alone do not say what model they are. Give a folder that holds them and config.json"
    raise UserError(f"{path}: {'a recipe. Give its run (gradus train)' if path.suffix == '.yaml' else alone}")


def is_nanogpt(path: Path) -> bool:
    return path.suffix in (".pt", ".pth") and "model_args" in weights.read_pickle(path)


def _is_vit(path: Path) -> bool:
    from gradus.models.weights import vit_names

    try:
        return vit_names.knows(weights.read_tensors(path))
    except UserError:  # damaged, or no weights
        return False


def _from_hub(name: str, weights_too: bool) -> Path:
    """A repository in Hugging Face's layout, or else in Meta's, whose sizes are in its weights too."""
    description = ["*.json", "*.txt", "*.model", "*.jinja"]
    kinds = ["*.safetensors", "pytorch_model*.bin"] if weights_too else ["config.json"]
    whole = [[*description, kind] for kind in kinds] if weights_too else [kinds]

    def enough(folder: Path) -> bool:
        return (folder / "config.json").is_file() and any(any(folder.glob(kind)) for kind in kinds)

    folder = hub.download(name, [*whole, [*description, "consolidated.*.pth"]], enough, name)
    if not any((folder / file).is_file() for file in ("config.json", "params.json")):
        raise UserError(
            f"{name}: the local copy of the hub has neither config.json nor params.json. "
            "`gradus fetch` it where there is internet, then give the folder"
        )
    return folder


def in_metas_layout(path: Path) -> bool:
    return (path / "params.json").is_file() and not (path / "config.json").is_file()


def weight_files(path: Path) -> list[Path]:
    """The files from which `load` reads the weights of what `locate` gives; of an adapter its own. Raises UserError for
    a shard that is missing."""
    if (path / "sharded").is_dir():
        return sorted((path / "sharded").glob("*.safetensors"))
    if (path / peft.CONFIG).is_file():
        return [file for file in (path / peft.WEIGHTS, path / peft.PICKLED) if file.is_file()][:1]
    return sorted(path.glob("consolidated.*.pth")) if in_metas_layout(path) else list(weights.files_of(path))


def digest(base: Path) -> str:
    """SHA-256 of the files that hold a model's weights. They are read once and not again while their dates stay."""
    return _digest(weight_files(base))


def digests(base: Path) -> Iterator[str]:
    """The same, and as earlier versions had it: of everything below a folder that could hold weights."""
    yield digest(base)
    kinds = (".safetensors", ".bin", ".pth", ".pt")
    yield _digest(sorted(f for f in base.rglob("*") if f.suffix in kinds and "training" not in f.name and f.is_file()))


def _digest(paths: Iterable[Path]) -> str:
    try:
        known = (files.remembered(path, "sha256", 0, files.content_hash) for path in paths)
        return hashlib.sha256(b"".join(map(bytes.fromhex, known))).hexdigest()
    except OSError as e:
        raise UserError(f"{e.filename}: cannot be read ({e.strerror}). Copy or download it again") from None
