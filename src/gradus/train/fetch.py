"""Stage what a recipe names elsewhere (weights, tokenizer, data) into one folder, for a machine without internet."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gradus import hub, models
from gradus import recipe as recipes
from gradus.data import tokenizer_files
from gradus.data.readers import expanded
from gradus.data.splits import SPLITS
from gradus.errors import UserError
from gradus.recipe.schema import Recipe
from gradus.text import size

DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja")  # configuration and tokenizer
TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "gradus_tokenizer.json", "vocab.*",
              "merges.txt", "encoder.json", "*.model", "tok*.bin", "*.jinja")  # fmt: skip
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def fetch(recipe: Recipe, to: Path, command: Sequence[str] | None = None) -> Iterator[str]:
    """Fill `to`/weights, `to`/tokenizer and `to`/data, and yield a line for each, then the command that trains from
    them.

    What the recipe names on the Hugging Face hub is downloaded (data sets as one parquet file a split), what lies on
    this machine is copied. command: the words behind `gradus train` (a recipe and its overrides; None: the recipe's
    name). Every piece is tried; raises UserError at the end, with one line for each that could not be had.
    """
    settings: dict[str, str] = {}
    failed: list[str] = []
    for name, stage in (("weights", _weights), ("tokenizer", _tokenizer), ("data", _data)):
        try:
            source, stage_settings = stage(recipe, to / name)
            settings |= stage_settings
            yield f"{name:10} {source}" + (f" → {to / name} ({_size(to / name)})" if stage_settings else "")
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


# ---------------------------------------------------------------- one piece each: (where from, settings that name it)


def _weights(recipe: Recipe, to: Path) -> tuple[str, dict[str, str]]:
    init = recipe.model.init
    if init is None:
        return "drawn from the seed: nothing to fetch", {}
    if expanded(init).exists():
        place = models.locate(init)
        if place.is_file():  # llama2.c: the tokenizer may lie beside
            _copy([place, *_tokenizers_in(place.parent)], to)
            return init, {"model.init": str(to / place.name)}
        _copy([f for f in place.iterdir() if not f.name.startswith(("training.", "."))], to)
    else:
        patterns = [[*DESCRIPTION, "*.safetensors"], [*DESCRIPTION, "*.bin"]]
        _from_hub(init, "model.init", to, patterns, lambda folder: any(folder.glob("*.safetensors")))
    models.config_of(to)  # raises where this is no model that can be read
    return init, {"model.init": str(to)}


def _tokenizer(recipe: Recipe, to: Path) -> tuple[str, dict[str, str]]:
    config = recipe.tokenizer
    if config is None:
        return "none: nothing to fetch", {}
    if config.kind != "file":
        return f"{config.kind}, made from the training text: nothing to fetch", {}
    if config.path is None:
        return "beside the weights: nothing more to fetch", {}
    path, place = expanded(config.path), to
    if path.is_file():  # files that say how to read this one lie beside it
        companions = [f for f in _tokenizers_in(path.parent) if f.suffix in (".json", ".txt", ".bpe", ".jinja")]
        _copy([path, *companions], to)
        place = to / path.name
    elif path.is_dir():
        _copy(_tokenizers_in(path), to)
    else:
        _from_hub(config.path, "tokenizer.path", to, [[*DESCRIPTION, *TOKENIZERS]])
    tokenizer_files.load(place)
    return config.path, {"tokenizer.path": str(place)}


def _data(recipe: Recipe, to: Path) -> tuple[str, dict[str, str]]:
    data = recipe.data
    path = getattr(data, "path", None)
    if path is None:
        return "made or found on any machine: nothing to fetch", {}
    explicit = {split: getattr(data, split) for split in ("train", "valid", "test") if getattr(data, split, None)}
    if path.startswith("hf:"):
        splits = hub.data_set(path.removeprefix("hf:").partition("#")[0], f"data.path={path}")
        wanted = [*itertools.chain(*SPLITS.values()), *explicit.values()]
        to.mkdir(parents=True, exist_ok=True)
        for name, table in splits.items():
            if name in wanted:
                table.to_parquet(str(to / f"{name}.parquet"))
        return path, {"data.path": str(to), **{f"data.{split}": f"{name}.parquet" for split, name in explicit.items()}}
    place = expanded(path)
    if not place.exists():
        where = recipes.looked_for(path)
        raise UserError(f"data.path={path}: no such file or folder{where}. Give one that is here, or hf:NAME.")
    if place.is_file():  # other splits lie beside it, by name
        _copy([place, *(place.parent / name for name in explicit.values())], to)
        return path, {"data.path": str(to / place.name)}
    _copy(list(place.iterdir()), to)
    return path, {"data.path": str(to)}


def _from_hub(
    name: str, key: str, to: Path, patterns: list[list[str]], enough: Callable[[Path], bool] = lambda folder: True
) -> None:
    if not HUB_NAME.fullmatch(name):
        raise UserError(f"{key}={name}: no such file or folder, and not a hub name (bert-base-cased, OWNER/NAME).")
    hub.download(name, patterns, enough, f"{key}={name}", to)


# ---------------------------------------------------------------- files


def _tokenizers_in(folder: Path) -> list[Path]:
    return sorted({file for pattern in TOKENIZERS for file in folder.glob(pattern) if file.is_file()})


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
    return size(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))
