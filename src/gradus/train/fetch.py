"""Stage what a recipe names elsewhere (weights, tokenizer, data) into one folder, for a machine without internet."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError, need
from gradus.recipe.schema import Recipe

DESCRIPTION = ("*.json", "*.txt", "*.model")  # configuration and tokenizer
TOKENIZERS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "encoder.json",
    "*.model",
    "tok*.bin",
    "gradus_tokenizer.json",
)
SPLITS = ("train", "valid", "validation", "val", "dev", "test")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def fetch(recipe: Recipe, to: Path, command: Sequence[str] | None = None) -> Iterator[str]:
    """Fill `to`/weights, `to`/tokenizer and `to`/data, and yield a line for each, then the command that trains from them.

    What the recipe names on the Hugging Face hub is downloaded (data sets as one parquet file a split), what lies on this machine is
    copied. command: the words behind `gradus train` (a recipe and its overrides; None: the recipe's name). Every piece is
    tried; raises UserError at the end, with one line for each that could not be had.
    """
    settings: dict[str, str] = {}
    failed: list[str] = []
    for name, stage in (("weights", _weights), ("tokenizer", _tokenizer), ("data", _data)):
        try:
            source, found = stage(recipe, to / name)
            settings |= found
            yield f"{name:10} {source}" + (f" → {to / name} ({_size(to / name)})" if found else "")
        except UserError as e:
            failed.append(str(e))
        except OSError as e:
            failed.append(f"{to / name}: cannot be written ({e.strerror or e}). Free some space or give another --to.")
    if failed:
        raise UserError("\n".join(failed))
    first, *overrides = command or [recipe.name]
    kept = [o for o in overrides if o.split("=", 1)[0] not in settings]
    words = [first, *kept, *(f"{key}={value}" for key, value in settings.items())]
    yield ""
    yield "on the machine without internet:"
    yield "  export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1"
    yield f"  gradus train {shlex.join(words)}"


# ---------------------------------------------------------------- one piece each: (where from, settings that name the staged copy)


def _weights(recipe: Recipe, to: Path) -> tuple[str, dict[str, str]]:
    init = recipe.model.init
    if init is None:
        return "drawn from the seed: nothing to fetch", {}
    if Path(os.path.expanduser(init)).exists():
        place = models.locate(init)
        if place.is_file():  # llama2.c: the tokenizer may lie beside
            _copy([place, *_matching(place.parent, TOKENIZERS)], to)
            return init, {"model.init": str(to / place.name)}
        _copy([f for f in place.iterdir() if not f.name.startswith(("training.", "."))], to)
    else:
        _from_hub(init, "model.init", to, [[*DESCRIPTION, "*.safetensors"], [*DESCRIPTION, "*.bin"]], lambda: any(to.glob("*.safetensors")))
    models.config_of(to)  # raises where this is no model that can be read
    return init, {"model.init": str(to)}


def _tokenizer(recipe: Recipe, to: Path) -> tuple[str, dict[str, str]]:
    config = recipe.tokenizer
    if config is None or config.kind != "file":
        return f"{config.kind}, made from the training text: nothing to fetch" if config else "none: nothing to fetch", {}
    if config.path is None:
        return "beside the weights: nothing more to fetch", {}
    from gradus.data import tokenizers

    path = Path(os.path.expanduser(config.path))
    if path.is_file():  # files that say how to read this one lie beside it
        _copy([path, *(f for f in _matching(path.parent, TOKENIZERS) if f.suffix in (".json", ".txt", ".bpe"))], to)
        place = to / path.name
    else:
        if path.is_dir():
            _copy(_matching(path, TOKENIZERS), to)
        else:
            _from_hub(config.path, "tokenizer.path", to, [[*DESCRIPTION, *TOKENIZERS]])
        place = to
    tokenizers.load(place)
    return config.path, {"tokenizer.path": str(place)}


def _data(recipe: Recipe, to: Path) -> tuple[str, dict[str, str]]:
    data = recipe.data
    path = getattr(data, "path", None)
    if path is None:
        return "made or found on any machine: nothing to fetch", {}
    explicit = {split: getattr(data, split) for split in ("train", "valid", "test") if getattr(data, split, None)}
    if path.startswith("hf:"):
        splits = _load_dataset(path.removeprefix("hf:").partition("#")[0])
        wanted = [*SPLITS, *explicit.values()]
        to.mkdir(parents=True, exist_ok=True)
        for name, table in splits.items():
            if name in wanted:
                table.to_parquet(str(to / f"{name}.parquet"))
        return path, {"data.path": str(to), **{f"data.{split}": f"{name}.parquet" for split, name in explicit.items()}}
    place = Path(os.path.expanduser(path))
    if not place.exists():
        raise UserError(f"data.path={path}: no such file or folder{recipes.looked_for(path)}. Give one that is here, or hf:NAME.")
    if place.is_file():  # other splits lie beside it, by name
        _copy([place, *(place.parent / name for name in explicit.values())], to)
        return path, {"data.path": str(to / place.name)}
    _copy(list(place.iterdir()), to)
    return path, {"data.path": str(to)}


# ---------------------------------------------------------------- the hub


def _from_hub(name: str, key: str, to: Path, patterns: list[list[str]], enough: Callable[[], bool] = lambda: True) -> None:
    """Download the files of a hub repository: of the first patterns, and while these do not give enough, of the next."""
    if not HUB_NAME.fullmatch(name):
        raise UserError(f"{key}={name}: no such file or folder, and no name of the hub (like bert-base-cased or OWNER/NAME).")
    hub = need("huggingface_hub", "hf", f"{key}={name}: not a local folder, and downloading it")
    try:
        for allowed in patterns:
            hub.snapshot_download(name, local_dir=str(to), allow_patterns=allowed)
            if enough():
                break
    except Exception as e:  # the hub's client raises its own, requests', httpx' and the system's errors
        raise UserError(
            f"{key}={name}: no such file or folder, and the hub does not give it ({_reason(e)}). Check the name and the connection."
        ) from None


def _load_dataset(name: str) -> dict:
    datasets = need("datasets", "hf", f"data.path=hf:{name}")
    try:
        found = datasets.load_dataset(*name.split(":", 1))
    except Exception as e:  # of many kinds: offline, unknown, gated, no such configuration
        raise UserError(f"data.path=hf:{name}: the hub does not give it ({_reason(e)}). Check the name and the connection.") from None
    return dict(found) if isinstance(found, dict) else {"train": found}


def _reason(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0][:200]


# ---------------------------------------------------------------- files


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _copy(paths: Sequence[Path], to: Path) -> None:
    """Copy files and folders into `to`; links become what they point to. What lies there already, as itself, stays."""
    to.mkdir(parents=True, exist_ok=True)
    for path in dict.fromkeys(paths):
        if not path.exists():
            raise UserError(f"{path}: no such file, though the recipe names it.")
        if path.resolve() == (to / path.name).resolve():
            continue
        if path.is_dir():
            shutil.copytree(path, to / path.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
        elif not path.name.startswith("."):
            shutil.copy2(path, to / path.name)


def _size(folder: Path) -> str:
    return f"{sum(f.stat().st_size for f in folder.rglob('*') if f.is_file()) / 1e6:,.1f} MB"
