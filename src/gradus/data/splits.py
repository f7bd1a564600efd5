"""Which file, or which part of a data set, is which split."""

from __future__ import annotations

import glob
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from gradus.data.cache import digest
from gradus.data.corpus import Corpus
from gradus.data.readers import (
    KINDS,
    SPLITS,
    Readable,
    Shards,
    alias_in,
    card,
    expanded,
    hub_splits,
    is_hub,
    near,
    split_called,
    suffix,
)
from gradus.errors import DataError, UserError, did_you_mean
from gradus.recipe.text import looked_for
from gradus.text import say

UNLABELLED = re.compile("unsup(ervised)?|unlabell?ed", re.IGNORECASE)  # folders beside those of classes, as IMDB's
ABOUT = ("readme", "license", "licence", "requirements", "dataset_info", "dataset_infos")  # files that are no data


def find_split(path: str | Path, split: str, explicit: str | None = None, required: bool = True) -> Readable | None:
    """The file of a split (train, valid, test) of a folder, by its name (see `split_files`), or its files as one.

    explicit: the file's name below `path`, where it is not a usual one. A single file is its own train split. `hf:NAME`
    gives `hf:NAME#SPLIT`, which `read_rows` takes. Raises UserError, with what is there, for no file, or several that
    are no parts of one; with required=False no file is None.
    """
    if is_hub(path):
        return _find_hub_split(str(path).removeprefix("hf:").partition("#")[0], split, explicit, required)
    path = existing(path)
    if explicit is not None:
        file = (path if path.is_dir() else path.parent) / explicit
        if not file.is_file():
            raise UserError(f"data.{split}={explicit}: no such file in {file.parent}.{near(file)}")
        return file
    if path.is_file():
        if split != "train" and required:
            raise UserError(f"{path}: one file, so no {split} split. Set data.{split}=NAME, a file beside it.")
        return path if split == "train" else None
    found, how = split_files(path)
    files = sorted(found.get(split, ()), key=_in_order)
    if len(files) == 1 and how != "texts":
        return files[0]
    if files:
        if how not in ("texts", "stated") and not _are_parts(files):
            raise _several(path, split, [str(f.relative_to(path)) for f in files])
        return Shards(tuple(files), how == "texts")
    if required:
        there = ", ".join(f.name for f in visible_files(path)[:20]) or "no files"
        names = ", ".join(f"{a}.*" for a in SPLITS[split])
        raise UserError(f"{path}: no file for the {split} split ({names}); there are: {there}. Set data.{split}=NAME.")
    return None


def find_splits(path: str | Path, explicit: Any = None) -> dict[str, Readable]:
    """Split → its file, as `find_split` finds it, of those that there are. explicit: has their names as attributes.
    Raises UserError where there is no training split."""
    found = {split: find_split(path, split, getattr(explicit, split, None), split == "train") for split in SPLITS}
    return {split: file for split, file in found.items() if file is not None}


def existing(path: str | Path) -> Path:
    """The path, with the home folder for ~. Raises DataError where there is nothing."""
    if not (found := expanded(path)).exists():
        raise DataError(f"{path}: no such file or folder{looked_for(path)}.{near(found)}")
    return found


def split_files(folder: Path) -> tuple[dict[str, list[Path]], str]:
    """({split: its files}, how they were found), of a folder. texts: each file is one, and its folder's name the label.

    The files that lie in it and are named after a split (`train.*`, `val-*`, `wiki.test.*`); else texts in two folders
    or more (`pos/1.txt`), also below folders named after splits; else what lies in folders and is named, or in folders
    that are (`data/train-00000-of-00002.parquet`, `train/0000.parquet`). Where no name is of a split, all files
    of one level are for training. Before all: what the only configuration of a README.md of the hub says.
    """
    if (stated := _configured(folder)).get("train"):
        return stated, "stated"
    folder = inner(folder)
    top, folders = data_files(folder), folders_in(folder)
    if "train" in (named := by_split(top, folder)):
        return named, "named"
    below = [file for each in folders for file in data_files(each)]
    if "train" in (classes := {} if named or _tables(below) else _labelled_texts(folder, folders)):
        return classes, "texts"
    if named or "train" in (named := by_split(below, folder)):
        return named, "named"
    return {"train": top or below}, "all"


def inner(folder: Path) -> Path:
    """The folder, or the only one in it, where that holds folders and nothing is beside it."""
    match folders_in(folder):
        case [only] if not (data_files(folder) or _split_of(Path(only.name))) and folders_in(only):
            return inner(only)
    return folder


def _labelled_texts(folder: Path, folders: list[Path]) -> dict[str, list[Path]]:
    """Split → the texts, one per file, in folders of classes, of which there are at least two."""
    found: dict[str, list[Path]] = {}
    roots = [(root, of[0]) for root in folders if (of := _split_of(Path(root.name)))]
    for root, split in roots or [(folder, "train")]:
        classes = [[f for f in visible_files(each) if suffix(f) in (".txt", "")] for each in class_folders(root)]
        if sum(map(bool, classes)) > 1:
            found.setdefault(split, []).extend(itertools.chain(*classes))
    return found


def _configured(folder: Path) -> dict[str | None, list[Path]]:
    """Split → the files that README.md gives it, as those of the hub do; {} where it says nothing plain. Raises
    UserError for several configurations."""
    found: dict[str | None, list[Path]] = {}
    match card(folder):
        case {"configs": [{"config_name": _}, {"config_name": _}, *_] as several}:
            names = ", ".join(str(each["config_name"]) for each in several if "config_name" in each)
            what = f"the data set has several configurations: {names}"
            raise UserError(f"{folder / 'README.md'}: {what}. Give the file or the folder of one (data.path)")
        case {"configs": [{"data_files": [*files]}]}:
            for file in files:
                match file:
                    case {"split": str(split), "path": str(path)}:
                        there = (folder / name for name in glob.glob(path, root_dir=folder, recursive=True))
                        found.setdefault(split_called(split), []).extend(filter(Path.is_file, there))
                    case _:
                        return {}
    return found


def data_files(folder: Path) -> list[Path]:
    return [f for f in visible_files(folder) if suffix(f) in KINDS and f.name.split(".")[0].casefold() not in ABOUT]


def _tables(files: list[Path]) -> set[str]:
    return {KINDS[suffix(f)] for f in files} - {"txt"}


def folders_in(path: Path) -> list[Path]:
    return [d for d in sorted(path.iterdir()) if d.is_dir() and not d.name.startswith(".")]


def class_folders(folder: Path) -> list[Path]:
    return [d for d in folders_in(folder) if not UNLABELLED.fullmatch(d.name)]


def print_left_out(path: str | Path) -> None:
    """Note which folders beside those of classes are left out."""
    for d in (d for pattern in ("*", "*/*") for d in expanded(path).glob(pattern) if UNLABELLED.fullmatch(d.name)):
        say(f"note: {d}: by its name it holds what has no label, so it is left out. Else rename it.")


def _in_order(file: Path) -> list[Any]:
    """By the numbers in its name: 2 before 10."""
    return [(int(x), "") if x.isdecimal() else (math.inf, x) for x in re.split(r"(\d+)", str(file))]


def _are_parts(files: list[Path]) -> bool:
    """Whether these files are the parts of one text or table: texts that are not named after a split, or files whose
    names differ only in numbers, counted from 0 or 1 or written 1-of-9 (test_2016 and test_2017 are two)."""
    name = files[0].name
    if not (_tables(files) or _split_of(Path(name))):
        return True
    alike = {re.sub(r"\d+(-of-\d+.*)?", "#", str(file)) for file in files}
    return len(alike) == 1 and ("-of-" in name or any(int(x) <= 1 for x in re.findall(r"\d+", name)))


def _find_hub_split(name: str, split: str, explicit: str | None, required: bool) -> Path | None:
    there = hub_splits(name)
    if alias := alias_in(there, explicit or split):
        return Path(f"hf:{name}#{alias}")
    if required or explicit:
        none = f"no split {explicit or split!r}; there are: {', '.join(there)}"
        raise UserError(f"hf:{name}: {none}. Set data.{split}=NAME.")
    return None


def _several(path: Path, split: str, names: list[str]) -> UserError:
    there = f"{', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
    folder = ", or give the folder of one" if "/" in there else ""
    return UserError(f"{path}: several files for the {split} split: {there}. Set data.{split}=NAME{folder}.")


def visible_files(folder: Path, names: re.Pattern[str] | None = None) -> list[Path]:
    """Raises UserError for what is called like a file of data (or as names) and is none: a folder, a dead link."""
    there = {f: f.is_file() for f in sorted(folder.iterdir()) if not f.name.startswith(".")}
    for f, is_file in there.items():
        if not is_file and (suffix(f) in KINDS or not f.is_dir() or (names and names.fullmatch(f.name))):
            raise UserError(f"{f}: not a file, or a link to none. Remove it, or take another folder (data.path).")
    return [f for f, is_file in there.items() if is_file]


def _split_of(path: Path) -> tuple[str, bool] | None:
    """(the split that a file is called after by its name, else by its folder's; whether by the whole of it)."""
    for part in reversed(path.parts):
        for i, word in enumerate([part.split(".")[0], *re.split(r"[\W\d_]+", part)]):
            if split := split_called(word):
                return split, i == 0
    return None


def by_split(files: list[Path], folder: Path) -> dict[str, list[Path]]:
    """Split → the files called after it by their names or those of folders below `folder`: exactly (`train.csv`), else
    as one part of a name (`train-00000-of-00001.parquet`)."""
    found: dict[tuple[str, bool] | None, list[Path]] = {}
    for file in files:
        found.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    return {split: named for split in SPLITS if (named := found.get((split, True)) or found.get((split, False)))}


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
        sides: dict[str, dict[str, Path]] = {}
        side = re.compile(rf"(.+)\.({re.escape(source)}|{re.escape(target)})(\.txt)?(\.gz|\.xz)?")
        for file in visible_files(folder, side):
            if match := side.fullmatch(file.name):
                sides.setdefault(match[1], {})[match[2]] = file
        names = [n.name for n in by_split([Path(name) for name in sides], Path()).get(split, ())]
        if explicit is not None:
            names = [explicit] if explicit in sides else []
        if len(names) > 1:
            raise _several(folder, split, names)
        for name in names:
            for language in {source, target} - sides[name].keys():
                lacks = f"no {name}.{language} to go with the other language"
                raise UserError(f"{path}: {lacks}. Set data.source and data.target.")
            return Corpus.lines(sides[name][source]), Corpus.lines(sides[name][target])
        if explicit is not None and not (folder / explicit).is_file():
            pair = f"{explicit}.{source} and {explicit}.{target}"
            meant = did_you_mean(explicit, sides)
            raise UserError(f"data.{split}={explicit}: {path} has neither this file nor {pair}.{meant}")
    file = find_split(path, split, explicit, required)
    return None if file is None else (Corpus.column(file, source), Corpus.column(file, target))


# ---------------------------------------------------------------- some samples of one


PER_SAMPLE = ("lengths", "sides", "labels")
OF_ALL = ("classes", "shape", "as_read", "preprocess", "folder", "content", "truncation", "notes", "epoch_aware")


class Part:
    """Some samples of a data set, in the order of `indices`, with what is known of them."""

    def __init__(self, dataset: Any, indices: np.ndarray, name: str | None = None):
        self.dataset, self.indices = dataset, indices
        self.name = name or getattr(dataset, "name", type(dataset).__name__)
        for name in (*PER_SAMPLE, *OF_ALL):
            if hasattr(dataset, name):
                value = getattr(dataset, name)
                setattr(self, name, value[indices] if name in PER_SAMPLE else value)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.dataset[int(self.indices[i])]

    def item(self, i: int, epoch: int) -> dict[str, Any]:
        return self.dataset.item(int(self.indices[i]), epoch)


def hold_out(dataset: Any, every: int = 10, unit: str = "rows") -> tuple[Part, Part]:
    """(the rest, the part held out): of each label every `every`-th sample, a fixed and stratified choice; of one with
    fewer samples the last, where there are two."""
    mask, few = np.zeros(len(dataset), dtype=bool), []
    for label in np.unique(dataset.labels):
        own = np.flatnonzero(dataset.labels == label)
        mask[own[every - 1 :: every] if len(own) >= every else own[1:][-1:]] = True
        few += [int(label)] * (1 < len(own) < every)
    if not mask.any():
        raise UserError(f"{dataset.name}: no class has 2 {unit}, enough to hold one out. Add a valid split.")
    parts = Part(dataset, np.flatnonzero(~mask)), Part(dataset, np.flatnonzero(mask), f"{dataset.name} (held out)")
    for part, held_out in zip(parts, (False, True)):
        if getattr(part, "content", None):
            part.content = digest(part.content, every, held_out, *few)
    return parts


def limited(splits: dict[str, Any], data: Any) -> dict[str, Any]:
    """The splits, of which train and valid keep the first so many samples of a fixed shuffle."""
    for split, most in (("train", data.limit), ("valid", data.limit_valid)):
        if most is not None and split in splits and most < len(splits[split]):
            order = np.random.Generator(np.random.PCG64(0)).permutation(len(splits[split]))
            splits[split] = Part(splits[split], order[:most])
    return splits
