"""Runs that train an adapter, or a part of the parameters: what is kept of them, and that they go on to the bit."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from run_parts import TINY, losses
from safetensors.torch import load_file

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from distributed import run  # noqa: E402
from test_processes import many, same  # noqa: E402

from gradus import models, tasks  # noqa: E402
from gradus import recipe as recipes  # noqa: E402
from gradus.data.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer, train_bpe  # noqa: E402
from gradus.errors import UserError  # noqa: E402
from gradus.infer import encode, find  # noqa: E402
from gradus.infer.export import export  # noqa: E402
from gradus.infer.generate import Continuation  # noqa: E402
from gradus.models.decoding import greedy  # noqa: E402
from gradus.recipe.schema import Adapter, GPTConfig  # noqa: E402
from gradus.train.run import train  # noqa: E402
from gradus.train.session import open_session  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_plan")
SHORT = [word for word in TINY if not word.startswith("model.")] + ["train.steps=6", "evaluate.every=4", "optimizer.eps=1e-4", "train.keep=9"]
LORA = ["adapter.rank=4", "adapter.dropout=0.1"]
PROBE = ["train.freeze=[all,-target_embedding,-head]"]


def words(base: Path, folder: Path, *more: str) -> list[str]:
    return [*SHORT, f"model.init={base}", f"log.dir={folder}", *more]


def state(folder: Path) -> dict[str, torch.Tensor]:
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return {f"{file.name} {name}": tensor for file in sorted(last.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def whole(undisturbed, tmp_path_factory, no_plan):
    """What is trained → the folder of a run that was not interrupted, made once."""
    folders: dict[str, Path] = {}

    def made(what: list[str]) -> Path:
        name = "adapter" if what is LORA else "frozen"
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name) / "run"
            train(recipes.load("copy-task", words(undisturbed, folders[name], *what)))
        return folders[name]

    return made


@pytest.mark.parametrize("what", [LORA, PROBE], ids=["adapter", "frozen"])
def test_a_run_that_stopped_goes_on_to_the_bit(what, whole, tmp_path):
    went_on(whole(what), tmp_path / "part")
    assert losses(whole(what)) == losses(tmp_path / "part")


def went_on(run: Path, part: Path) -> None:
    """A copy of a run goes on from its middle, and ends as the run did."""
    shutil.copytree(run, part, symlinks=True)
    shutil.rmtree(part / "checkpoints" / "step-00000006")
    train(recipes.load(part, [f"log.dir={part}"]), resume=part)
    wanted, found = state(run), state(part)
    assert wanted.keys() == found.keys() and all(wanted[name].equal(found[name]) for name in wanted)


def test_a_checkpoint_holds_the_adapter_and_its_optimizer_alone(undisturbed, whole, tmp_path):
    run = whole(LORA)
    base, kept = models.load(undisturbed), state(run)
    weights = [name for name in kept if name.startswith("adapter_model")]
    assert weights and all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in weights)
    assert not [name for name in kept if "exp_avg" in name and not name.endswith((".a.weight", ".b.weight"))]
    adapted = dict(models.load(run).named_parameters())
    assert all(adapted[name].equal(p) for name, p in base.named_parameters())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["trained_parameters"] == sum(p.numel() for p in adapted.values() if p.requires_grad) < summary["parameters"]
    with pytest.raises(UserError, match="--as onnx writes merged weights anyway"):
        list(export(str(run), tmp_path / "onnx", kind="onnx", merge=True))


@pytest.mark.parametrize("freeze", [["-all"], ["-head"], ["blocks.0", "-blocks.1"], ["all", "-all", "-blocks.0"]])
def test_a_pattern_that_takes_back_what_is_not_frozen_is_refused(freeze):
    config = GPTConfig(vocab_size=20, n_layers=2, d_model=8, n_heads=2)
    with pytest.raises(UserError, match=rf"train\.freeze: {freeze[-1]} takes back nothing that stands before it. Leave it out"):
        models.build(config.trained(None, freeze), "meta")
    assert models.build(config.trained(Adapter(rank=2), ["-blocks.0.attention_norm"]), "meta").blocks[0].attention_norm.weight.requires_grad


def test_what_is_frozen_stays_and_the_checkpoint_is_whole(undisturbed, whole):
    before = dict(models.load(undisturbed).named_parameters())
    after = dict(models.load(whole(PROBE)).named_parameters())
    changed = {name.split(".")[0] for name in before if not before[name].equal(after[name])}
    assert changed == {"target_embedding", "head"}
    assert all(p.requires_grad for p in after.values()), "an ordinary model again"


def test_new_weights_have_nothing_to_adapt(tmp_path):
    with pytest.raises(UserError, match=r"adapter: .*model\.init"):
        train(recipes.load("copy-task", [*TINY, *LORA, f"log.dir={tmp_path}"]))


@pytest.mark.slow
def test_two_processes_and_back(undisturbed, tmp_path):
    plain = [word for word in LORA if "dropout" not in word] + ["model.dropout=0.0", "train.steps=9", "evaluate.every=9", "data.n_valid=8", "train.checkpoint_every=6"]
    one = words(undisturbed, tmp_path / "one", *plain)
    train(recipes.load("copy-task", one))
    runs = [("copy-task", words(undisturbed, tmp_path / name, *plain, *more)) for name, more in (
        ("ddp", []), ("shard", ["layout.shard=2"]), ("tensor", ["layout.tensor=2"]), ("pipeline", ["layout.pipeline=2"]),
    )]  # fmt: skip
    assert run(2, many, runs) == [["done"] * len(runs)] * 2
    for name in ("ddp", "shard", "tensor", "pipeline"):
        same(tmp_path / "one", tmp_path / name)
    for name in ("shard", "pipeline"):
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000009")
        alone = ["layout.shard=1", "layout.pipeline=1", f"log.dir={tmp_path / name}"]
        train(recipes.load(tmp_path / name, alone), resume=tmp_path / name)
        same(tmp_path / "one", tmp_path / name)


MADE = {"bpe": lambda: train_bpe([TEXT], 280), "byte": ByteTokenizer, "char": lambda: CharTokenizer.from_texts([TEXT]), "word": lambda: WordTokenizer.from_texts([TEXT])}
TEXT = "\n\n".join(f"to be or not to be, that is question {i % 7} of a red ball" for i in range(40))
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def spoken(tmp_path):
    """kind of tokenizer → (a model that ends at many tokens and has a chat template, settings of a run that starts from it)."""
    (tmp_path / "t.txt").write_text(TEXT)

    def make(kind: str, beside: str) -> tuple[Path, list[str]]:
        tokenizer, base = MADE[kind](), tmp_path / kind
        config = GPTConfig(n_layers=1, d_model=16, n_heads=2, d_ff=16, vocab_size=tokenizer.vocab_size, seq_len=48)
        model, draw = models.build(config, seed=1), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():  # away from what says the same token for ever
                p.add_(torch.randn(p.shape, generator=draw), alpha=0.3)
        models.save(model, base)
        tokenizer.save(base)
        (base / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(0, config.vocab_size, 2))}))
        if beside.endswith(".jinja"):
            (base / beside).write_text(CHAT)
        else:
            about = json.loads((base / beside).read_text())
            (base / beside).write_text(json.dumps(about | {"chat_template": CHAT}))
        more = ["data.limit=16", "data.limit_valid=8", "data.valid_fraction=0.3", "batch.samples=4", "train.steps=1", "schedule.warmup_steps=0"]
        quiet = ["evaluate.every=null", "evaluate.samples=0", "train.epochs=null", "layout.device=cpu", f"data.path={tmp_path / 't.txt'}"]
        return base, [*more, *quiet, "model.preset=null", f"model.init={base}", f"log.dir={tmp_path / 'run'}"]

    return make


@pytest.mark.parametrize(("kind", "beside", "more"), [
    ("bpe", "chat_template.jinja", ["tokenizer.kind=file"]), ("byte", "tokenizer_config.json", ["tokenizer.kind=byte"]),
    ("char", "chat_template.jinja", ["tokenizer.kind=file", "adapter.rank=2"]), ("word", "tokenizer_config.json", ["tokenizer.kind=file", "adapter.rank=2"]),
])  # fmt: skip
def test_what_is_trained_further_stops_where_it_did_and_is_spoken_to_as_before(kind, beside, more, spoken, tmp_path):
    base, words = spoken(kind, beside)
    train(recipes.load("shakespeare-char-gpt", [*words, *more]))
    merge = any("adapter" in word for word in more)
    outs = {"merged": True, "adapter": False} if merge else {"out": False}
    for name, whole in outs.items():
        list(export(str(tmp_path / "run"), tmp_path / name, merge=whole))
    (last,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    tasks.save_tokenizers(tmp_path / "resumed", tasks.load_tokenizers(last))
    for folder in (last, tmp_path / "resumed", *(tmp_path / name for name in outs)):
        assert (folder / "generation_config.json").read_text() == (base / "generation_config.json").read_text()
        assert (folder / "chat_template.jinja").read_text() == CHAT
    out = tmp_path / next(iter(outs))
    chat = [{"role": "user", "content": "to be"}]
    assert transformers.AutoTokenizer.from_pretrained(out).apply_chat_template(chat, tokenize=False) == "<user>to be"
    ours = Continuation(find(str(tmp_path / "run")), ["to be or"], max_new=24)
    for _ in ours.steps(greedy):
        pass
    ids = torch.tensor([ours.before[0]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).generate(ids, do_sample=False, max_new_tokens=24)[0].tolist()
    assert len(theirs) < ids.shape[1] + 24 and (theirs[:-1], theirs[-1] % 2) == (ours.rows[0], 0)


def test_the_small_qwen3_is_continued_by_transformers_with_the_same_tokens(tmp_path):
    (tmp_path / "t.txt").write_text("def read(path, n=0):\n    return [path] * n\n" * 60)
    text = ["data.source=null", f"data.path={tmp_path / 't.txt'}", "data.limit_valid=2", "data.valid_fraction=0.2", "tokenizer.vocab_size=300"]
    size = ["model.n_layers=2", "model.d_model=32", "model.d_head=16", "model.n_heads=4", "model.n_kv_heads=2", "model.d_ff=48", "model.seq_len=48"]
    quiet = ["evaluate.every=null", "evaluate.samples=0", "layout.device=cpu", f"log.dir={tmp_path / 'run'}"]
    train(recipes.load("stories-qwen3", [*text, *size, *quiet, "train.steps=8", "schedule.warmup_steps=0", "batch.samples=4"]))
    list(export(str(tmp_path / "run"), tmp_path / "out"))
    ours = Continuation(find(str(tmp_path / "run")), ["def read("], max_new=24)
    for _ in ours.steps(greedy):
        pass
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    inputs = tokenizer("def read(", return_tensors="pt")
    assert type(theirs) is transformers.Qwen3ForCausalLM and len(set(ours.rows[0])) > 3
    assert theirs.generate(**inputs, do_sample=False, max_new_tokens=24, pad_token_id=0)[0].tolist() == ours.rows[0]


def test_what_config_json_alone_says_of_the_end_goes_with_a_run(spoken):
    base, words = spoken("byte", "chat_template.jinja")
    (base / "generation_config.json").unlink()
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | {"eos_token_id": [3, 5]}))
    session = open_session(recipes.load("shakespeare-char-gpt", [*words, "tokenizer.kind=file"]))
    assert json.loads(session.task.tokenizer.beside["generation_config.json"]) == {"eos_token_id": [3, 5]}


def test_rows_begin_and_end_as_the_starts_tokenizer_says(spoken, tmp_path):
    """As its weights read texts: rows of a table; running text has no place where one begins."""
    base, words = spoken("bpe", "chat_template.jinja")
    bpe = MADE["bpe"]()
    bpe.around(bpe.bos_id, None)
    bpe.save(base)
    rows = ["to be", "or not to be", "to"] * 40
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    whole = [i for row in rows for i in (bpe.bos_id, *bpe.encode(row), bpe.eos_id)]
    for name, begins in (("t.jsonl", True), ("t.txt", False)):
        session = open_session(recipes.load("shakespeare-char-gpt", [*words, "tokenizer.kind=file", f"data.path={tmp_path / name}", "data.limit=null"]))
        ids = session.task.splits["train"].tokens.ids.tolist()
        assert ids == whole[: len(ids)] if begins else bpe.bos_id not in ids
    source = find(str(base))
    assert encode(source, source.tokenizers(), ["to be"]).prompts == [whole[: 1 + len(bpe.encode("to be"))]], "and so does a prompt"


def test_what_belongs_to_another_tokenizer_is_left_out_and_told(spoken, tmp_path, capsys):
    _, words = spoken("byte", "chat_template.jinja")
    other = CharTokenizer.from_texts([TEXT])
    other.save(tmp_path / "other")
    session = open_session(recipes.load("shakespeare-char-gpt", [*words, "tokenizer.kind=file", f"tokenizer.path={tmp_path / 'other'}"]))
    assert "note: chat_template.jinja and generation_config.json of model.init left out: its tokenizer is another" in capsys.readouterr().err
    assert session.task.tokenizer.beside == {}


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_base_that_is_stored_small_is_never_kept(kind, undisturbed, tmp_path):
    train(recipes.load("copy-task", words(undisturbed, tmp_path / "run", *LORA, f"adapter.base={kind}")))
    kept = state(tmp_path / "run")
    assert all("lora_" in name for name in kept if name.startswith("adapter_model"))
    ids = torch.arange(1, 11)[None]
    model, plain = models.load(tmp_path / "run").eval(), models.load_plain(tmp_path / "run").eval()
    assert {b.dtype for name, b in model.named_buffers() if name.endswith("codes")} <= {torch.int8, torch.uint8}
    expected = model(ids, ids)
    assert torch.allclose(plain(ids, ids), expected, atol=1e-5 * float(expected.abs().max())), "merged into what was computed with"
    went_on(tmp_path / "run", tmp_path / "part")
