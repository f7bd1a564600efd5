"""Staging: local files are copied, the hub is asked for the right things, and the printed command trains from the copies."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus import recipe as recipes
from gradus.cli import main
from gradus.data import tokenizer_files, tokenizers
from gradus.errors import UserError
from gradus.recipe.schema import BertConfig
from gradus.train.fetch import fetch
from gradus.train.session import open_session

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a"]
BERT = BertConfig(vocab_size=len(WORDS), n_layers=1, d_model=8, n_heads=2, d_ff=16, seq_len=16)


@pytest.fixture
def weights(tmp_path) -> Path:
    folder = tmp_path / "here" / "bert"
    torch.manual_seed(0)
    models.save(models.build(BERT), folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return folder


@pytest.fixture
def labelled(tmp_path) -> Path:
    folder = tmp_path / "here" / "texts"
    folder.mkdir(parents=True)
    for split in ("train", "valid"):
        (folder / f"{split}.tsv").write_text("sentence\tlabel\na good film\t1\na bad film\t0\n")
    return folder


def sst2(*overrides: str):
    return recipes.load("sst2-bert", [*overrides, "data.max_len=16"])


def test_local_pieces_are_copied_and_the_command_trains_from_the_copies(weights, labelled, tmp_path):
    command = ["sst2-bert", f"model.init={weights}", f"data.path={labelled}", "data.max_len=16", "optimizer.lr=0.1"]
    lines = list(fetch(sst2(*command[1:3]), tmp_path / "a folder", command))
    for original in (weights / "model.safetensors", weights / "config.json", weights / "vocab.txt"):
        assert (tmp_path / "a folder" / "weights" / original.name).read_bytes() == original.read_bytes()
    assert (tmp_path / "a folder" / "data" / "train.tsv").read_text() == (labelled / "train.tsv").read_text()
    assert "HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1" in lines[-2]
    words = shlex.split(lines[-1])
    assert words[:3] == ["gradus", "train", "sst2-bert"]
    assert words[3:] == ["data.max_len=16", "optimizer.lr=0.1", f"model.init={tmp_path}/a folder/weights", f"data.path={tmp_path}/a folder/data"]

    (labelled / "train.tsv").unlink()
    (weights / "config.json").unlink()
    staged = recipes.load(words[2], [*words[3:], f"data.cache={tmp_path}/cache", "layout.device=cpu"])
    session = open_session(staged)
    assert session.recipe.model.d_model == 8
    assert len(session.task.splits["train"]) == 2
    session.build()


def test_the_command_has_the_arguments_of_a_file_too(weights, labelled, tmp_path, capsys):
    (tmp_path / "args.json").write_text('{"learning_rate": 0.25}')
    words = ["sst2-bert", f"model.init={weights}", f"data.path={labelled}", "data.max_len=16", "--json_file", str(tmp_path / "args.json")]
    assert main(["fetch", *words, "--to", str(tmp_path / "to")]) == 0
    typed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    staged = recipes.load(typed[2], [word for word in typed[3:] if "=" in word])
    assert "--json_file" in typed or staged.optimizer.lr == 0.25


def test_staging_twice_and_onto_itself_is_the_same(weights, labelled, tmp_path):
    to = tmp_path / "to"
    first = list(fetch(sst2(f"model.init={weights}", f"data.path={labelled}"), to))
    before = {p: p.read_bytes() for p in to.rglob("*") if p.is_file()}
    assert list(fetch(sst2(f"model.init={weights}", f"data.path={labelled}"), to)) == first
    list(fetch(sst2(f"model.init={to}/weights", f"data.path={to}/data"), to))
    assert {p: p.read_bytes() for p in to.rglob("*") if p.is_file()} == before


def test_a_run_gives_its_best_weights_without_the_optimizers_state(weights, labelled, tmp_path):
    run = tmp_path / "here" / "run"
    checkpoint = run / "checkpoints" / "step-00000003"
    checkpoint.parent.mkdir(parents=True)
    weights.rename(checkpoint)
    (checkpoint / "training.safetensors").write_bytes(b"state")
    (run / "checkpoints" / "best").symlink_to(checkpoint.name)
    list(fetch(sst2(f"model.init={run}", f"data.path={labelled}"), tmp_path / "to"))
    assert sorted(p.name for p in (tmp_path / "to" / "weights").iterdir()) == ["config.json", "model.safetensors", "vocab.txt"]


class Table:
    """What is used of a data set of the hub: it writes itself as parquet."""

    def __init__(self, labels):
        self.labels = labels

    def to_parquet(self, path: str) -> None:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"sentence": ["a good film"] * len(self.labels), "label": self.labels}), path)


@pytest.fixture
def hub(monkeypatch, weights):
    """A hub that is not there: what is asked of it is kept, and it gives the local weights and a small table."""
    import datasets
    import huggingface_hub

    asked = []

    def snapshot_download(name, *, local_dir, allow_patterns):
        asked.append(("snapshot_download", name, local_dir, tuple(allow_patterns)))
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        for file in weights.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                (Path(local_dir) / file.name).write_bytes(file.read_bytes())
        return local_dir

    def load_dataset(*name):
        asked.append(("load_dataset", *name))
        return datasets.DatasetDict({"train": Table([0, 1]), "validation": Table([1]), "unsupervised": Table([0])})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "DatasetDict", dict)
    return asked


@pytest.mark.slow
def test_the_hub_is_asked_for_weights_tokenizer_and_data(hub, tmp_path):
    to = tmp_path / "to"
    recipe = recipes.load("imdb-bert", ["tokenizer.path=someone/words", "data.path=hf:owner/films:small"])
    lines = list(fetch(recipe, to))
    weights, tokenizer, data = hub
    assert weights[:3] == ("snapshot_download", "bert-base-cased", str(to / "weights"))
    assert {"*.json", "*.txt", "*.safetensors"} <= set(weights[3]) and "*.bin" not in weights[3]
    assert tokenizer[:3] == ("snapshot_download", "someone/words", str(to / "tokenizer"))
    assert not any("safetensors" in pattern for pattern in tokenizer[3])
    assert data == ("load_dataset", "owner/films", "small")
    assert sorted(p.name for p in (to / "data").iterdir()) == ["train.parquet", "validation.parquet"]
    assert shlex.split(lines[-1])[2:] == ["imdb-bert", f"model.init={to}/weights", f"tokenizer.path={to}/tokenizer", f"data.path={to}/data"]
    assert tokenizer_files.load(to / "tokenizer").vocab_size == len(WORDS)

    staged = recipes.load(
        "imdb-bert", [*shlex.split(lines[-1])[3:], "data.max_len=16", "data.text=sentence", f"data.cache={tmp_path}/cache", "layout.device=cpu"],
    )  # fmt: skip
    session = open_session(staged)
    assert (len(session.task.splits["train"]), len(session.task.splits["valid"])) == (2, 1)


def test_weights_that_are_no_safetensors_are_asked_for_again_as_bin(hub, weights, tmp_path):
    torch.save({}, weights / "pytorch_model.bin")
    (weights / "model.safetensors").unlink()
    list(fetch(recipes.load("imdb-bert"), tmp_path / "to"))
    asked = [call for call in hub if call[0] == "snapshot_download"]
    assert len(asked) == 2 and "*.bin" in asked[1][3]
    assert (tmp_path / "to" / "weights" / "pytorch_model.bin").exists()


@pytest.fixture
def unreachable(monkeypatch):
    import datasets
    import huggingface_hub

    def ask(*args, **kwargs):
        assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING), "every retry would be told"
        raise ConnectionError("Name or service not known\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    monkeypatch.setattr(datasets, "load_dataset", ask)


def test_data_or_weights_that_are_not_reached_are_no_fault_of_the_machine(unreachable, tmp_path, monkeypatch, capsys, weights):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    for words in ([f"model.init={weights}", "data.max_len=16", "data.path=hf:owner/films"], ["model.init=owner/model"]):
        assert main(["train", "sst2-bert", "layout.device=cpu", *words]) == 2, "what restarts runs must not restart this one"
        (line,) = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: "))
        assert "Name or service not known" in line and "Check the name and the connection" in line
    assert not (tmp_path / "runs").exists()


def test_without_internet_every_missing_piece_is_one_line(unreachable, tmp_path):
    recipe = recipes.load("imdb-bert", ["tokenizer.path=someone/words"])
    lines = []
    with pytest.raises(UserError) as error:
        for line in fetch(recipe, tmp_path / "to"):
            lines.append(line)
    said = str(error.value).splitlines()
    assert [line.split(":")[0].split("=")[0] for line in said] == ["model.init", "tokenizer.path", "data.path"]
    assert all("Name or service not known" in line and "story" not in line for line in said)
    assert not lines


def test_what_needs_no_fetching_is_said(tmp_path):
    lines = list(fetch(recipes.load("copy-task"), tmp_path / "to"))
    assert [line.split()[0] for line in lines[:3]] == ["weights", "tokenizer", "data"]
    assert all("nothing to fetch" in line for line in lines[:3])
    assert lines[-1].strip() == "gradus train copy-task"
    assert not (tmp_path / "to").exists()


def test_a_file_brings_what_belongs_to_it(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    (here / "story.txt").write_text("once upon a time " * 50)
    (here / "held.txt").write_text("there was a text " * 20)
    made = tokenizers.train_bpe(["once upon a time there was a text"], 280)
    made.save(here / "tok")
    overrides = [f"data.path={here}/story.txt", "data.valid=held.txt", "tokenizer.kind=file", f"tokenizer.path={here}/tok/tokenizer.json"]
    recipe = recipes.load("shakespeare-char-gpt", overrides)
    lines = list(fetch(recipe, tmp_path / "to", ["shakespeare-char-gpt", *overrides]))
    assert sorted(p.name for p in (tmp_path / "to" / "data").iterdir()) == ["held.txt", "story.txt"]
    assert sorted(p.name for p in (tmp_path / "to" / "tokenizer").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert tokenizer_files.load(tmp_path / "to" / "tokenizer").fingerprint == made.fingerprint
    words = shlex.split(lines[-1])[3:]
    assert words == [
        "data.valid=held.txt",
        "tokenizer.kind=file",
        f"tokenizer.path={tmp_path}/to/tokenizer/tokenizer.json",
        f"data.path={tmp_path}/to/data/story.txt",
    ]


def test_missing_data_is_named(tmp_path, weights):
    with pytest.raises(UserError, match=r"data\.path=.*nowhere"):
        list(fetch(sst2(f"model.init={weights}", f"data.path={tmp_path}/nowhere"), tmp_path / "to"))
