"""Which file, or which part of a data set, is which split."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from gradus.data.cache import digest
from gradus.data.corpus import Corpus
from gradus.data.readers import KINDS, SPLITS, alias_in, expanded, hub_splits, is_hub, near, suffix
from gradus.errors import DataError, UserError, did_you_mean
from gradus.recipe.text import looked_for


def find_split(path: str | Path, split: str, explicit: str | None = None, required: bool = True) -> Path | None:
    """The file of a split (train, valid, test) of a folder, by its name: `train.*`, `valid.*`, `val-*`, `wiki.test.*`
    ...

    explicit: the file's name below `path`, where it is not a usual one. A single file is its own train split. `hf:NAME`
    gives `hf:NAME#SPLIT`, which `read_rows` takes. Raises UserError, with what is there, for no file or several; with
    required=False no file is None.
    """
    if is_hub(path):
        return _find_hub_split(str(path).removeprefix("hf:").partition("#")[0], split, explicit, required)
    path = expanded(path)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder{looked_for(path)}.{near(path)}")
    if explicit is not None:
        file = (path if path.is_dir() else path.parent) / explicit
        if not file.is_file():
            raise UserError(f"data.{split}={explicit}: no such file in {file.parent}.{near(file)}")
        return file
    if path.is_file():
        if split != "train" and required:
            raise UserError(f"{path}: one file, so no {split} split. Set data.{split}=NAME, a file beside it.")
        return path if split == "train" else None
    files = visible_files(path)
    matching = named_after([f for f in files if suffix(f) in KINDS], split)
    if len(matching) > 1:
        raise _several(path, split, [f.name for f in matching])
    if matching:
        return matching[0]
    if required:
        there, names = ", ".join(f.name for f in files[:20]) or "no files", ", ".join(f"{a}.*" for a in SPLITS[split])
        raise UserError(f"{path}: no file for the {split} split ({names}); there are: {there}. Set data.{split}=NAME.")
    return None


def _find_hub_split(name: str, split: str, explicit: str | None, required: bool) -> Path | None:
    there = hub_splits(name)
    if alias := alias_in(there, explicit or split):
        return Path(f"hf:{name}#{alias}")
    if required or explicit:
        none = f"no split {explicit or split!r}; there are: {', '.join(there)}"
        raise UserError(f"hf:{name}: {none}. Set data.{split}=NAME.")
    return None


def _several(path: Path, split: str, names: list[str]) -> UserError:
    return UserError(f"{path}: several files for the {split} split: {', '.join(names)}. Set data.{split}=NAME.")


def visible_files(folder: Path, names: re.Pattern[str] | None = None) -> list[Path]:
    """Raises UserError for what is called like a file of data (or as names) and is none: a folder, a dead link."""
    files, others = [], []
    for f in sorted(f for f in folder.iterdir() if not f.name.startswith(".")):
        (files if f.is_file() else others).append(f)
    for f in others:
        if suffix(f) in KINDS or not f.is_dir() or (names and names.fullmatch(f.name)):
            raise UserError(f"{f}: not a file, or a link to none. Remove it, or take another folder (data.path).")
    return files


def named_after(files: list[Path], split: str) -> list[Path]:
    """Files called after a split: exactly (`train.csv`), else as one part of the name
    (`train-00000-of-00001.parquet`)."""
    exact = [f for f in files if f.name.split(".")[0] in SPLITS[split]]
    return exact or [f for f in files if set(re.split(r"[-_.]", f.name)) & set(SPLITS[split])]


def find_pairs(
    path: str | Path, split: str, source: str = "de", target: str = "en", explicit: str | None = None,
    required: bool = True,
) -> tuple[Corpus, Corpus] | None:  # fmt: skip
    """The two sides of a split of parallel text: files `train.de`, `train.en` (also .txt, .gz, .xz) of a folder, or two
    columns of a table.

    explicit: the files' common name (`test_2016_flickr`), or that of the table. Raises UserError as `find_split` does,
    and where one side is missing.
    """
    folder = expanded(path)
    if not is_hub(path) and folder.is_dir():
        sides: dict[str, dict[str, Path]] = {source: {}, target: {}}
        side = re.compile(rf"(.+)\.({re.escape(source)}|{re.escape(target)})(\.txt)?(\.gz|\.xz)?")
        for file in visible_files(folder, side):
            if match := side.fullmatch(file.name):
                sides[match[2]][match[1]] = file
        names = sorted(set(sides[source]) | set(sides[target]))
        matching = [n.name for n in named_after([Path(name) for name in names], split)]
        if explicit is not None:
            matching = [name for name in names if name == explicit]
        if len(matching) > 1:
            raise _several(folder, split, matching)
        for name in matching:
            for language in (one for one, files in sides.items() if name not in files):
                lacks = f"no {name}.{language} to go with the other language"
                raise UserError(f"{path}: {lacks}. Set data.source and data.target.")
            return Corpus.lines(sides[source][name]), Corpus.lines(sides[target][name])
        if explicit is not None and not (folder / explicit).is_file():
            pair = f"{explicit}.{source} and {explicit}.{target}"
            meant = did_you_mean(explicit, names)
            raise UserError(f"data.{split}={explicit}: {path} has neither this file nor {pair}.{meant}")
    file = find_split(path, split, explicit, required)
    return None if file is None else (Corpus.column(file, source), Corpus.column(file, target))


# ---------------------------------------------------------------- some samples of one


class Part:
    """Some samples of a data set, in the order of `indices`, with what is known of them."""

    def __init__(self, dataset: Any, indices: np.ndarray, name: str | None = None):
        self.dataset, self.indices = dataset, indices
        self.name = name or getattr(dataset, "name", type(dataset).__name__)
        self.epoch_aware = getattr(dataset, "epoch_aware", False)
        for name in ("lengths", "sides", "labels", "classes", "shape", "folder", "content", "cut"):
            if hasattr(dataset, name):
                value = getattr(dataset, name)
                setattr(self, name, value[indices] if name in ("lengths", "sides", "labels") else value)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.dataset[int(self.indices[i])]

    def item(self, i: int, epoch: int) -> dict[str, Any]:
        return self.dataset.item(int(self.indices[i]), epoch)


def hold_out(dataset: Any, every: int = 10, unit: str = "rows") -> tuple[Part, Part]:
    """(the rest, the part held out): of each label every `every`-th sample, a fixed and stratified choice; of one with
    fewer samples the last, where there are two."""
    mask = np.zeros(len(dataset), dtype=bool)
    for label in np.unique(dataset.labels):
        own = np.flatnonzero(dataset.labels == label)
        mask[own[every - 1 :: every] if len(own) >= every else own[1:][-1:]] = True
    if not mask.any():
        raise UserError(f"{dataset.name}: no class has 2 {unit}, enough to hold one out. Add a valid split.")
    parts = Part(dataset, np.flatnonzero(~mask)), Part(dataset, np.flatnonzero(mask), f"{dataset.name} (held out)")
    for part, held_out in zip(parts, (False, True)):
        if hasattr(part, "content"):
            part.content = digest(part.content, every, held_out)
    return parts


def limited(splits: dict[str, Any], limit: int | None, limit_valid: int | None) -> dict[str, Any]:
    """The splits, of which train and valid keep the first so many samples of a fixed shuffle."""
    for split, most in (("train", limit), ("valid", limit_valid)):
        if most is not None and split in splits and most < len(splits[split]):
            order = np.random.Generator(np.random.PCG64(0)).permutation(len(splits[split]))
            splits[split] = Part(splits[split], order[:most])
    return splits
