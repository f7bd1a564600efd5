"""Chats learned: the loss is transformers' over the assistant's tokens, packed rows are the rows alone, every layout has one curve; and the whole
path from data to an export that answers, without a network."""

from __future__ import annotations

import json
import random
import socket
import sys
from pathlib import Path

import pytest
import torch

from gradus import api, models, tasks
from gradus import recipe as recipes
from gradus.cli import main
from gradus.data.collate import IGNORE
from gradus.errors import InputError, UserError
from gradus.parallel.apply import apply
from gradus.proof.check import SessionChecks
from gradus.rows import read_rows
from gradus.train.run import train
from gradus.train.session import open_session

sys.path[:0] = [str(Path(__file__).parents[1])]

from distributed import run  # noqa: E402

WORDS = ["red", "blue", "green", "black", "white", "grey", "pink", "brown"]


def chat(rng: random.Random) -> list[dict[str, str]]:
    said = rng.sample(WORDS, rng.randint(1, 5))
    turns = [("user", f"say {' '.join(said)}"), ("assistant", " ".join(said))] * rng.randint(1, 2)
    return [{"role": role, "content": text} for role, text in ([("system", "be brief")] * rng.randint(0, 1) + turns)]


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng, folder = random.Random(0), tmp_path / "chats"
    folder.mkdir()
    for split, n in (("train", 48), ("valid", 12)):
        rows = [{"messages": chat(rng), "weight": rng.choice([0.5, 1, 3])} for _ in range(n)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


SIZES = {"n_layers": 2, "d_model": 32, "n_heads": 4, "seq_len": 96}
LLAMA = {"family": "llama", **SIZES, "n_kv_heads": 2, "d_ff": 48}


def recipe(chats: Path, model: dict = LLAMA, folder: str = "run", **more: dict) -> recipes.Recipe:
    sections = {
        "model": model, "task": {"name": "chat", "template": "chatml"}, "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "data": {"kind": "chats", "path": str(chats)}, "optimizer": {"name": "adamw", "lr": 3e-3}, "batch": {"samples": 8},
        "train": {"steps": 4, "clip_norm": 1.0}, "evaluate": {"decode": False}, "log": {"dir": folder, "every": 1},
    }  # fmt: skip
    for name, section in more.items():
        sections[name] = {**sections.get(name, {}), **section}
    Path("r.yaml").write_text(json.dumps(sections))
    return recipes.load("r.yaml", [])


def opened(*args, **more) -> tuple[tasks.base.Task, torch.nn.Module]:
    made = recipe(*args, **more)
    task = tasks.open_task(made)
    return task, models.build(task.complete(made.model), seed=1)


# ---------------------------------------------------------------- one process


def test_loss_is_transformers_over_the_assistants_tokens(data, tmp_path):
    """A sum over the tokens to learn divided by their count: transformers' mean over labels that are not -100."""
    from transformers import AutoModelForCausalLM

    task, model = opened(data)
    models.save(model, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    rows = [task.splits["train"][i] for i in range(6)]
    batch, longest = task.collate(rows), max(len(row["ids"]) for row in rows)
    ids, keep, labels = (torch.full((6, longest), value) for value in (0, 0, IGNORE))  # theirs are shifted by the model
    for i, row in enumerate(rows):
        n = len(row["ids"])
        ids[i, :n], keep[i, :n] = torch.tensor(row["ids"]), 1
        labels[i, :n] = torch.tensor(row["ids"]).where(torch.tensor(row["learn"]), IGNORE)
    expected = theirs(input_ids=ids, attention_mask=keep, labels=labels).loss
    found = task.losses(model, batch)["tokens"].detach() / batch["counts"]["tokens"]
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    means = {name: float(torch.as_tensor(total).detach()) / n for name, (total, n) in task.evaluate(model, batch).items()}
    metrics = task.metrics(means, "valid")
    assert metrics.keys() == {"loss", "perplexity", "mean_token_accuracy"} and metrics["loss"] == pytest.approx(float(found), rel=1e-5)


def test_a_rows_weight_multiplies_its_loss(data):
    """As a sum of the rows' own losses says; the count stays that of the tokens."""
    for loss in ("whole", "chunked"):
        task, model = opened(data, data={"weight": "weight"}, layout={"loss": loss})
        apply(model, task.recipe.layout)
        rows = [task.splits["train"][i] for i in range(6)]
        assert len({row["weight"] for row in rows}) > 1
        batch = task.collate(rows)
        alone = [task.collate([row]) for row in rows]
        plain = [float(task.losses(model, {k: v for k, v in one.items() if k != "weights"})["tokens"].detach()) for one in alone]
        expected = sum(row["weight"] * own for row, own in zip(rows, plain))
        assert float(task.losses(model, batch)["tokens"].detach()) == pytest.approx(expected, rel=1e-5), loss
        assert batch["counts"]["tokens"] == sum(one["counts"]["tokens"] for one in alone)


def test_weights_do_not_change_what_random_weights_are_checked_by(data):
    rows = [json.loads(line) | {"weight": 9} for line in (data / "train.jsonl").read_text().splitlines()]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = recipe(data, data={"weight": "weight"})
    assert SessionChecks(open_session(made), made).start().startswith("loss 5.")


WINDOWED = {**LLAMA, "window": 9, "full_every": 2}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize(
    "model, attention", [(LLAMA, "naive"), (LLAMA, "sdpa"), (LLAMA, "chunked"), (WINDOWED, "naive"), (WINDOWED, "sdpa"), (WINDOWED, "chunked"),
                         ({"family": "gpt", **SIZES}, "sdpa")],
)  # fmt: skip
def test_packed_rows_are_the_rows_alone(data, model, attention, dtype, tolerance):
    """Losses and gradients of chats that share a row, and of the same chats in rows of their own."""
    found = []
    for pack in ("none", "documents"):
        layout = {"attention": attention, **({"chunk": 16} if attention == "chunked" else {})}
        task, net = opened(data, model, data={"pack": pack, "weight": "weight"}, layout=layout)
        apply(net, task.recipe.layout)
        net.to(dtype)
        rows = task.splits["train"]
        batch = task.collate([rows[i] for i in range(len(rows))])
        assert ("segments" in batch) == (pack == "documents")
        batch["weights"] = batch["weights"].to(dtype)
        loss = task.losses(net, batch)["tokens"]
        loss.backward()
        found.append((len(rows), batch["counts"], loss.detach(), {name: p.grad for name, p in net.named_parameters()}))
    (n, counts, loss, gradients), (n_packed, counts_packed, packed, of_packed) = found
    assert n_packed < n / 2 and counts == counts_packed
    assert float(packed) == pytest.approx(float(loss), rel=tolerance)
    scale = max(g.abs().max() for g in gradients.values())
    assert max((gradients[name] - of_packed[name]).abs().max() / scale for name in gradients) < tolerance


def test_the_last_answer_of_a_packed_row_is_asked_for_by_its_own_chat_alone(data):
    task = opened(data, data={"pack": "documents"})[0]
    row = task.splits["train"][0]
    own = row["segments"] == row["segments"][-1]
    assert row["segments"][-1] > 0
    assert task.question(row) == task.question({key: row[key][own] for key in ("ids", "learn")})


def test_what_was_left_out_is_said_once(data):
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    Path("one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"messages": [{"role": "user", "content": "red"}]}, *rows]))
    for more in ({}, {"pack": "documents", "limit": 3}):
        (note,) = opened(Path("one.jsonl"), data=more)[0].notes()
        assert note.endswith("one.jsonl: 1 of 49 chats without a turn of the assistant's, left out.")


def test_the_right_answer_is_what_the_template_writes(data):
    """With the thought that it begins with, as a model learns to write it."""
    task = opened(data, task={"template": "qwen3"})[0]
    asked = json.loads((data / "train.jsonl").read_text().splitlines()[0])["messages"]
    prompt, truth = task.question(task.splits["train"][0])
    read = task.read(json.dumps(asked), 96)
    assert read["ids"].tolist() == prompt and task.said(read["truth"]) == task.said(truth) == f"<think>\n\n</think>\n\n{asked[-1]['content']}"


def test_new_says_that_it_chose_a_template_for_weights_without_one(data, capsys):
    task, model = opened(data)
    models.save(model, Path("base"))
    for name, beside in (("own", task.tokenizer.beside), ("none", {})):
        task.tokenizer.beside = beside
        task.tokenizer.save("base")
        assert main(["new", f"{name}.yaml", "--data", str(data), "--init", "base"]) == 0
        chosen = name == "none"
        assert ("chatml is the template, since the weights bring none" in capsys.readouterr().out) == chosen
        assert ("template: chatml" in Path(f"{name}.yaml").read_text()) == chosen


# ---------------------------------------------------------------- layouts

MIXTURE = {**LLAMA, "n_experts": 4, "top_k": 2}
GEMMA = {"family": "gemma", **SIZES, "n_kv_heads": 2, "d_head": 12, "d_ff": 48, "window": 9, "full_every": 2}
PACKED = {"data": {"pack": "documents", "weight": "weight"}}
LORA = {"adapter": {"rank": 4}}
COVERING = [  # model, layout, more: every axis, with packs and weights, adapters and small bases, a loss by chunks
    ({"family": "gpt", **SIZES}, {"shard": 2}, PACKED), ({"family": "gpt", **SIZES}, {"tensor": 2, "loss": "chunked"}, PACKED),
    ({"family": "gpt", **SIZES}, {"pipeline": 2, "micro_batch": 2}, {}), ({"family": "gpt", **SIZES}, {"context": 2}, PACKED),
    (LLAMA, {"shard": 2, "loss": "chunked", "checkpointing": "full"}, LORA), (LLAMA, {"tensor": 2}, PACKED), (LLAMA, {"tensor": 2, "sequence_parallel": False}, {}),
    (LLAMA, {"pipeline": 2, "loss": "chunked", "micro_batch": 2}, {"data": {"weight": "weight"}}), (LLAMA, {"context": 2, "context_method": "ulysses"}, PACKED),
    (LLAMA, {"context": 2}, {"data": {"weight": "weight"}, **LORA}), (LLAMA, {"micro_batch": 1, "loss": "chunked"}, {"adapter": {"rank": 4, "base": "nf4"}}),
    (LLAMA, {"replicate": "manual"}, PACKED), (LLAMA, {"attention": "chunked", "chunk": 16, "shard_optimizer": True}, PACKED),
    (MIXTURE, {"expert": 2}, {}), (MIXTURE, {"shard": 2}, PACKED),
    (GEMMA, {"shard": 2, "loss": "chunked"}, PACKED), (GEMMA, {"tensor": 2}, {}), (GEMMA, {"pipeline": 2, "micro_batch": 2}, PACKED),
    (GEMMA, {"context": 2, "context_method": "ulysses"}, {}),
]  # fmt: skip


def numbers(folder: str) -> list[float]:
    """What a run logged: losses and gradient norms of its steps, metrics of its evaluation."""
    wanted = ("train/loss", "train/grad_norm", "valid/loss", "valid/mean_token_accuracy")
    return [row["value"] for row in read_rows(Path(folder) / "metrics.jsonl") if row["name"] in wanted]


def on_two(world, chats: Path, part: slice) -> None:
    for i, (model, layout, more) in list(enumerate(COVERING))[part]:
        train(named(chats, i, world.size, model, layout, more, world.rank), world=world)


def named(chats: Path, i: int, n: int, model: dict, layout: dict, more: dict, rank: int = 0) -> recipes.Recipe:
    base = {"model": model, "task": {"name": "chat", "template": "chatml"}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    if "adapter" in more:
        base |= {"model": {"family": model["family"], "init": "base/checkpoints/best"}, "task": {"name": "chat"}, "tokenizer": {"kind": "file"}}
    sections = {**base, "optimizer": {"name": "sgd", "lr": 0.1}, "batch": {"samples": 8}, "train": {"steps": 3}, "evaluate": {"decode": False}}  # fmt: skip
    data = {"kind": "chats", "path": str(chats), **more.get("data", {})}
    file = Path(f"{i}-{n}-{rank}.yaml")
    file.write_text(json.dumps({**sections, **{k: v for k, v in more.items() if k != "data"}, "data": data, "layout": layout,
                                "log": {"dir": f"{i}-{n}", "every": 1}}))  # fmt: skip
    return recipes.load(str(file), [])


@pytest.mark.slow
@pytest.mark.parametrize("part", [slice(0, 7), slice(7, 13), slice(13, None)], ids=["gpt", "llama", "experts and windows"])
def test_every_layout_has_the_curve_of_one_process(data, part, capsys):
    train(recipe(data, folder="base", train={"steps": 1}))
    run(2, on_two, data, part)
    for i, (model, layout, more) in list(enumerate(COVERING))[part]:
        alone = {k: v for k, v in layout.items() if k in ("attention", "chunk")}
        train(named(data, i, 1, model, alone, more))
        expected, found = numbers(f"{i}-1"), numbers(f"{i}-2")
        assert len(found) == 8 and found == pytest.approx(expected, rel=5e-5), (model["family"], layout, more)


# ---------------------------------------------------------------- answers


def trained(data: Path, *overrides: str) -> Path:
    """A run that has learned one chat by heart."""
    rows = [{"messages": [{"role": "user", "content": "which colour?"}, {"role": "assistant", "content": "red blue"}]}] * 8
    for split in ("train", "valid"):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = recipe(data, train={"steps": 30}, optimizer={"lr": 1e-2}, evaluate={"decode": True, "every": 15, "answers": 1})
    train(made)
    return Path("run")


def test_a_chat_is_answered_as_it_was_learned(data, capsys, monkeypatch):
    folder = trained(data)
    log = capsys.readouterr().out
    rows = list(read_rows(folder / "metrics.jsonl"))
    assert [r["value"] for r in rows if r["name"] == "valid/exact_match"][-1] == 1.0
    answers = [r["value"] for r in rows if r["name"].startswith("answers/")]
    assert len(answers) == 2 and answers[-1].endswith("which colour? assistant │ red blue") and f"\n  {answers[-1]}" in log
    tokens = {name: [r["value"] for r in rows if r["name"] == f"train/{name}"] for name in ("tokens", "num_tokens")}
    assert tokens["tokens"] == tokens["num_tokens"] and len(tokens["tokens"]) == 30

    assert main(["generate", "run", "--chat", "which colour?"]) == 0
    assert capsys.readouterr().out == "red blue\n"
    lines = iter(["which colour?\n", "/reset\n", "which colour?\n", "x " * 200 + "\n", "/reset\n", ""])
    monkeypatch.setattr(sys.stdin, "readline", lambda: next(lines), raising=False)
    assert main(["generate", "run", "--chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "red blue\n" * 2 and err.count("the conversation begins anew") == 2 and "/reset begins anew." in err
    assert "text 1 ('after 2 messages: x x" in err

    ask = [{"role": "user", "content": "which colour?"}]
    Path("ask.jsonl").write_text("\n".join(json.dumps({"messages": [*ask, *more]}) for more in ([], [{"role": "assistant", "content": "red"}])))
    assert main(["predict", "run", "ask.jsonl", "which colour?", "--to", "out.jsonl"]) == 0
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [r["answer"] for r in records] == ["red blue"] * 3 and {r["input"] for r in records} == {"which colour?"}
    assert [r.get("right") for r in records] == [None, False, None] and records[1]["truth"] == "red"
    capsys.readouterr()
    (answered,) = api.predict("run", json.dumps(ask))
    assert answered["answer"] == "red blue"
    assert main(["predict", "run", "--split", "valid", "--n", "2"]) == 0
    assert "2 of 2 right" in capsys.readouterr().out
    assert main(["predict", "run", "which colour?", "red " * 200]) == 2
    assert "text 2 ('red red" in capsys.readouterr().err


def test_another_template_than_trainings_is_told(data, capsys):
    folder = trained(data)
    template = next((folder / "checkpoints").glob("best*")) / "chat_template.jinja"
    for file in (folder / "checkpoints").glob("*/chat_template.jinja"):
        file.write_text(template.read_text().replace("\\n", " "))
        file.with_name("checksums.json").unlink(missing_ok=True)
    capsys.readouterr()
    assert main(["generate", "run", "--chat", "which colour?", "--max-new", "1"]) == 0
    assert "is not the one of training" in capsys.readouterr().err
    with pytest.raises(UserError, match="the chat template is another"):
        own = recipes.load("run", ["task.template=null", "tokenizer.kind=file", "tokenizer.vocab_size=null", f"tokenizer.path={template.parent}"])
        tasks.open_task(own).resolved(own)


@pytest.mark.parametrize("text", ["[{bad", '[{"role": "poet", "content": "x"}]', "[{}]", "[{" * 100_000])
def test_json_that_is_no_chat_is_told(data, text):
    with pytest.raises(InputError, match="no chat that can be read: "):
        opened(data)[0].read(text, 64)


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--system", "be brief", "hello"], "--system: it is what the system says in a chat. Give --chat too"),
        (["--chat", "hello", "--beams", "2"], "--beams: not with --chat"),
        (["--chat", "hello", "--sliding-window"], "--sliding-window: not with --chat"),
        (["--chat", "hello " * 100], "more than the 96 that the model can read"),
    ],
)
def test_options_that_do_not_go_with_a_chat(data, capsys, words, problem):
    train(recipe(data, train={"steps": 1}))
    capsys.readouterr()
    assert main(["generate", "run", *words]) == 2
    assert problem in capsys.readouterr().err


# ---------------------------------------------------------------- the whole path


@pytest.fixture
def offline(monkeypatch):
    """Every socket but to this machine is an error."""
    connect = socket.socket.connect

    def local(self, address, *args):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a connection to {address}")
        return connect(self, address, *args)

    def name(host, *args, **kwargs):
        raise AssertionError(f"the address of {host} is asked for")

    monkeypatch.setattr(socket.socket, "connect", local)
    monkeypatch.setattr(socket.socket, "connect_ex", local)
    monkeypatch.setattr(socket, "getaddrinfo", name)


@pytest.mark.slow
def test_from_data_to_an_export_without_a_network(data, offline, capsys):
    for words in (
        ["new", "mine.yaml", "--data", str(data)],
        ["check", "mine.yaml", "model.n_layers=1", "model.d_model=32"],
        ["train", "mine.yaml", "train.steps=4", "evaluate.every=2", "model.n_layers=1", "model.d_model=32", "log.dir=mine", "layout.threads=1"],
        ["generate", "mine", "--chat", "say red", "--max-new", "5"], ["predict", "mine", "--split", "valid", "--n", "2"], ["evaluate", "mine"],
        ["export", "mine", "--to", "exported"],
        ["generate", "exported", "--chat", "say red", "--max-new", "5"],
    ):  # fmt: skip
        assert main(words) == 0, (words, capsys.readouterr())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("exported")
    messages = [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red"}]
    task = tasks.open_task(recipes.load("mine", configure=None))
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert theirs == task.template.ids(messages)
    ends = json.loads(Path("exported/generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends[0]) == "<|im_end|>" and tokenizer.eos_token_id in ends


@pytest.mark.slow
def test_the_benchmark_of_chats_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import chats

    chats.main(["made", str(tmp_path / "kept"), "--seeds", "0", "--steps", "2", "--chats", "24"])
    assert "of 24 answers right" in capsys.readouterr().out and (tmp_path / "kept/0/run/summary.json").is_file()
