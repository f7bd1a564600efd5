"""Whole runs on several processes: what is learnt, evaluated and kept is what one process learns, and a stop changes nothing."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.parallel import check
from gradus.parallel import world as worlds
from gradus.parallel.world import LARGE_PAGES, World
from gradus.recipe.schema import Layout
from gradus.train import resolve

sys.path.insert(0, str(Path(__file__).parents[1]))

from distributed import run

COPY = [
    "model.n_layers=2", "model.d_model=32", "model.n_heads=4", "model.d_ff=64", "model.dropout=0.0", "data.n_train=400", "data.n_valid=48",
    "batch.samples=32", "train.steps=20", "train.clip_norm=1.0", "optimizer.eps=1e-4", "layout.device=cpu", "layout.threads=1", "log.every=1",
]  # fmt: skip
SHORT = [*COPY, "data.n_train=80", "train.steps=9", "evaluate.samples=0"]  # three epochs of three steps
TEXT = "".join(f"Line {i} of a short play, {i * i} words long.\n" for i in range(400))


def gpt(folder: Path) -> list[str]:
    (folder / "text.txt").write_text(TEXT)
    return [
        f"data.path={folder / 'text.txt'}", f"data.cache={folder / 'cache'}", "model.n_layers=4", "model.d_model=32", "model.seq_len=32",
        "batch.samples=16", "train.steps=10", "evaluate.every=5", "evaluate.samples=0", "data.limit_valid=9", "optimizer.eps=1e-4",
        "layout.device=cpu", "layout.threads=1", "log.every=1",
    ]  # fmt: skip


def train(world, name: str, overrides: list[str], resume: bool = False, stop_at: int | None = None) -> str:
    """`name` is a recipe, or with `resume` a run folder. stop_at: a SIGTERM comes to one process (the last) before that step."""
    from gradus.train import loop, run
    from gradus.train.signals import Stopped

    original = loop.Trainer.take

    def interrupted(self, step):
        if self.progress.step + 1 == stop_at and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, step)

    loop.Trainer.take = interrupted
    run._print_model = lambda *_: None  # what an untrained model writes, which nobody reads here
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run.train(recipes.load(name, overrides), world=world, resume=Path(name) if resume else None)
    except Stopped as stop:
        return str(stop.checkpoint)
    finally:
        loop.Trainer.take = original
    return "done"


def many(world, runs: list[tuple]) -> list[str]:
    return [train(world, *arguments) for arguments in runs]


def rows(folder: Path) -> dict:
    return {(r["name"], r["step"]): r["value"] for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if r.get("step")}


def same(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    a, b = rows(one), rows(other)
    kinds = ("train/loss", "train/grad_norm", "train/tokens", "train/samples", "valid/loss", "valid/accuracy", "valid/exact_match")
    keys = [k for k in a if k[0] in kinds]
    assert len(keys) > 30
    for key in keys:
        assert b[key] == pytest.approx(a[key], rel=tolerance, abs=1e-12), f"{other.name}: {key}"


@pytest.mark.slow
def test_copying_ragged_batches_on_two_and_four(tmp_path):
    """80 samples in batches of 32: the last of an epoch has 16."""
    of = {n: [] for n in (1, 2, 4)}
    for n, name, *more in [
        (1, "one"), (2, "ddp"), (2, "manual", "layout.replicate=manual", "layout.micro_batch=4"), (2, "server", "layout.replicate=parameter_server"),
        (2, "shard", "layout.shard=2", "layout.micro_batch=5"), (2, "zero1", "layout.shard_optimizer=true"), (4, "hsdp", "layout.shard=2"),
        (4, "ddp4", "layout.micro_batch=2"), (1, "fp16", "layout.precision=fp16"),
        (2, "fp16-zero1", "layout.precision=fp16", "layout.shard_optimizer=true"),
        (2, "fp16-pipeline", "layout.precision=fp16", "layout.pipeline=2", "layout.micro_batch=8"),
    ]:  # fmt: skip
        of[n].append(("copy-task", [*SHORT, f"log.dir={tmp_path / name}", *more]))
    for n, runs in of.items():
        assert run(n, many, runs) == [["done"] * len(runs)] * n
    for name in ("ddp", "manual", "server", "shard", "zero1", "hsdp", "ddp4"):
        same(tmp_path / "one", tmp_path / name)
    for name in ("fp16-zero1", "fp16-pipeline"):  # the scale is known, and taken out of the norm, where others see the loss or take the step
        found = rows(tmp_path / name)
        for key, value in rows(tmp_path / "fp16").items():
            if key[0] in ("train/loss", "train/grad_norm"):
                assert found[key] == pytest.approx(value, rel=1e-2), f"{name}: {key}"
    sent = {name: rows(tmp_path / name)["traffic/sent", 2] for name in ("ddp", "server", "shard", "zero1")}
    size = 4 * models.count(models.config_of(tmp_path / "one"))["total"]
    assert sent["ddp"] == pytest.approx(size, rel=0.01)  # 2 (n - 1) / n of the gradients
    assert sent["zero1"] == pytest.approx(1.5 * size, rel=0.02)  # and a broadcast of the weights


@pytest.mark.slow
def test_a_language_model_in_every_way_to_split_it(tmp_path):
    text = [*gpt(tmp_path), "model.n_layers=2", "train.steps=8", "evaluate.every=4"]
    deep = "model.n_layers=4"  # for two stages of each process
    two = {
        "tensor": ["layout.tensor=2"],
        "context": ["layout.context=2"],
        "ulysses": ["layout.context=2", "layout.context_method=ulysses"],
        "gpipe": ["layout.pipeline=2", "layout.schedule=gpipe", "layout.micro_batch=4"],
        "zero_bubble": ["layout.pipeline=2", "layout.schedule=zero_bubble", "layout.micro_batch=4", deep],
    }
    four = {"2d": ["layout.tensor=2", "layout.shard=2"], "3d": ["layout.tensor=2", "layout.pipeline=2", "layout.micro_batch=4"]}
    for n, layouts in ((1, {"one": [], "one-deep": [deep]}), (2, two), (4, four)):
        run(n, many, [("shakespeare-char-gpt", [*text, f"log.dir={tmp_path / name}", *more]) for name, more in layouts.items()])
    for name, layout in (two | four).items():
        one = tmp_path / ("one-deep" if deep in layout else "one")
        same(one, tmp_path / name)
        weights = models.load(tmp_path / name).state_dict()  # the best, in the Hugging Face layout, whatever the layout of the run
        for key, value in models.load(one).state_dict().items():
            assert (weights[key] - value).abs().max() < 1e-4, f"{name}: {key}"


def counted(world, folder: str, layouts: list[list[str]]) -> list[list[list[float]]]:
    """For each layout the losses and norms of three steps, with the counts as whole numbers and as tensors, as several GPUs have them."""
    import torch

    from gradus.train.loop import Trainer
    from gradus.train.session import open_session

    found = []
    for layout in layouts:
        found.append([])
        for make in (int, torch.tensor):
            session = open_session(recipes.load("shakespeare-char-gpt", layout), world=world)
            trainer = Trainer(session, session.lay_out(), Path(folder) / "run")
            steps = [step.micro_batches for _, step in zip(range(3), trainer.loader.steps(0))]
            counts = [{kind: make(n) for kind, n in trainer.totals(step).counts.items()} for step in steps]
            found[-1].append([x.item() for step, n in zip(steps, counts) for x in trainer.step(step, n)])
    return found


@pytest.mark.slow
def test_counts_that_stay_on_the_device_divide_alike(tmp_path):
    text, pipeline = gpt(tmp_path), ["layout.pipeline=2", "layout.micro_batch=4"]
    layouts = [[], ["layout.tensor=2"], ["layout.shard=2"], ["layout.context=2"], pipeline]
    for whole, tensors in run(2, counted, str(tmp_path), [[*text, *layout] for layout in layouts])[0]:
        assert whole == tensors and len(whole) == 6


def decode(world, name: str, layouts: list[list[str]]) -> list[tuple[dict, int, dict[int, str]]]:
    """For each layout: (metrics of the validation split, sequences that this process decoded, what it translated) of fresh weights."""
    from gradus.models import decoding
    from gradus.parallel.apply import apply
    from gradus.tasks import copy, translation
    from gradus.train.evaluation import evaluate
    from gradus.train.session import open_session

    found, counts = [], []

    def counted(model, prompts, **kwargs):
        counts.append(len(prompts))
        return decoding.complete(model, prompts, **kwargs)

    copy.complete = translation.complete = counted
    for overrides in layouts:
        session, mine = open_session(recipes.load(name, overrides), world=world), {}
        if hasattr(session.task, "decode_split"):
            original = session.task.decode_split
            session.task.decode_split = lambda *args, original=original, mine=mine: mine.update(original(*args)) or mine
        parallel = apply(session.build(), session.recipe.layout, session.mesh)
        counts.clear()
        metrics = evaluate(parallel, session.task, "valid", session.precision, session.device)
        found.append((metrics, sum(counts), mine))
    translation.complete = decoding.complete
    return found


SHARES = [  # processes, layouts, sentences of each: 3 batches and 2, or twice 2 and 1
    (2, ([], ["layout.tensor=2"]), [21, 16]),
    pytest.param(2, (["layout.shard=2"], ["layout.pipeline=2", "layout.micro_batch=4"]), [21, 16], marks=pytest.mark.slow),
    pytest.param(3, ([],), [16, 13, 8], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("n", "layouts", "shares"), SHARES)
def test_decoding_is_shared_and_bleu_is_the_same_to_the_digit(n, layouts, shares, tmp_path):
    """37 sentences of unequal length: batches of 8, the last of 5. Half the references are what one process writes, so that BLEU has digits."""
    words = ["eins", "zwei", "drei", "vier", "eins", "drei", "zwei", "fünf", "sechs"]
    lines = [" ".join(words[i % 4 : i % 4 + 2 + i % 5]) for i in range(37)]
    for split, language in ((s, x) for s in ("train", "val") for x in ("de", "en")):
        (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    overrides = [
        f"data.path={tmp_path}", f"data.cache={tmp_path / 'cache'}", "model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.d_ff=32",
        "model.seq_len=16", "tokenizer.kind=word", "batch.tokens=256", "evaluate.test=false", "evaluate.batch=7", "data.test=null",
        "layout.precision=fp32", "layout.device=cpu", "layout.threads=1",
    ]  # fmt: skip
    ((_, total, written),) = decode(World(), "multi30k-seq2seq", [overrides])
    assert total == 37 and sorted(written) == list(range(37))
    (tmp_path / "val.en").write_text("\n".join(written[i] if i % 2 else lines[i] for i in range(37)) + "\n")
    ((alone, _, _),) = decode(World(), "multi30k-seq2seq", [overrides])
    assert 1 < alone["bleu"] < 99
    of_ranks = run(n, decode, "multi30k-seq2seq", [[*overrides, *more] for more in layouts])
    for i, layout in enumerate(layouts):
        metrics, counts, parts = zip(*(found[i] for found in of_ranks))
        assert [m["bleu"] for m in metrics] == [alone["bleu"]] * n, layout
        assert metrics[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert sorted(counts, reverse=True) == shares, layout
        assert {i: text for part in parts for i, text in part.items()} == written


def test_the_copies_of_exact_match_are_shared(tmp_path):
    overrides = [*COPY, "data.n_valid=45", "evaluate.batch=8"]
    ((alone, n, _),) = decode(World(), "copy-task", [overrides])
    assert n == 45
    layouts = ([], ["layout.tensor=2"], ["layout.pipeline=2", "layout.micro_batch=8"])
    of_ranks = run(2, decode, "copy-task", [[*overrides, *more] for more in layouts])
    for i, layout in enumerate(layouts):
        counts = [found[i][1] for found in of_ranks]
        assert counts == [23, 22], layout  # of 16, 16 and 13
        for found in of_ranks:
            assert found[i][0] == pytest.approx(alone, rel=1e-5), layout


def on_the_command_line(world, *commands: list[str]) -> list[tuple[int, str]]:
    """(exit code, what went to standard error) of each."""
    from gradus import cli

    found = []
    for words in commands:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = cli.run(words)
        found.append((code, said.getvalue()))
    return found


@pytest.mark.slow
def test_the_batch_of_each_device_is_stored_and_kept(tmp_path):
    """TrainingArguments on two processes; the run goes on with one and with four, with the file and without it."""
    file, folder = tmp_path / "args.json", tmp_path / "run"
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3, "fsdp": "full_shard", "save_total_limit": 9}
    file.write_text(json.dumps({"TrainingArgs": arguments}))
    small = [word for word in COPY if not word.startswith(("batch.", "train.steps"))]
    train = ["train", "copy-task", *small, f"log.dir={folder}", "--json_file", str(file)]
    again = ["train", str(folder), "--resume"]
    (((code, said),), ((_, silent),)) = run(2, on_the_command_line, train)
    assert code == 0 and "batch.samples=16: 4 × 2 processes × accumulation 2" in said and silent == "", "said once"
    stored = recipes.load(folder)
    assert (stored.batch.samples, stored.layout.micro_batch, stored.layout.shard) == (16, 4, 2)
    found = {(r["name"], r["step"]): r["value"] for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if r.get("step")}
    assert found["train/samples", 3] == 48
    ((code, said),) = on_the_command_line(World(), [*again, "--json_file", str(file)])
    assert code == 0 and "per_device_train_batch_size=4: a resumed run keeps its batch" in said, said
    for n, words, given in ((1, [], str(file)), (4, [], str(file)), (8, ["layout.shard=1"], None)):
        recipe, notes = resolve.load(str(folder), words, resolve.RunContext(given, World(size=n, local_size=n), resuming=True))
        assert (recipe.batch.samples, recipe.layout.micro_batch) == (16, min(4, 16 // n))
        assert recipe.layout.shard == (n if given else 1)
        assert any("layout.micro_batch=2 instead of 4" in note for note in notes) == (n == 8)
        check.validate(recipe, n)
    assert recipes.load(folder).batch.samples == 16


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "shard"])
def test_a_stop_on_one_process_stops_all_and_a_resume_is_bitwise(tmp_path, layout):
    n, more = (4, ["model.dropout=0.1", "layout.shard=2"]) if layout == "shard" else (2, ["model.dropout=0.1"])
    whole, cut = (str(tmp_path / name) for name in ("whole", "cut"))
    found = run(n, many, [("copy-task", [*SHORT, *more, f"log.dir={whole}"]), ("copy-task", [*SHORT, *more, f"log.dir={cut}"], False, 5)])
    assert found == [["done", str(Path(cut) / "checkpoints" / "step-00000005")]] * n
    run(n, train, cut, more, True)
    same(Path(whole), Path(cut), tolerance=0.0)


@pytest.mark.slow
def test_four_two_one_four(tmp_path):
    one, moved = (str(tmp_path / name) for name in ("one", "moved"))
    run(1, train, "copy-task", [*SHORT, f"log.dir={one}"])
    run(4, train, "copy-task", [*SHORT, f"log.dir={moved}", "layout.shard=4"], False, 2)
    run(2, train, moved, ["layout.shard=1"], True, 4)
    run(1, train, moved, ["layout.shard=1"], True, 6)
    run(4, train, moved, ["layout.shard=2"], True)
    same(Path(one), Path(moved))


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("fsdp2", "simple"), ("simple", "fsdp2")])
def test_a_run_of_either_kind_of_fsdp_goes_on_as_the_other(tmp_path, ways):
    one, moved = (str(tmp_path / name) for name in ("one", "moved"))
    first, then = ([f"layout.shard_with={way}"] for way in ways)
    run(1, train, "copy-task", [*SHORT, f"log.dir={one}"])
    run(2, train, "copy-task", [*SHORT, f"log.dir={moved}", "layout.shard=2", *first], False, 4, environment={"CXX": "no-compiler"})
    run(2, train, moved, then, True, environment={"CXX": "no-compiler"})
    same(Path(one), Path(moved))


@pytest.mark.slow
def test_all_processes_take_the_checkpoint_before_a_damaged_one(tmp_path):
    whole, hurt = (str(tmp_path / name) for name in ("whole", "hurt"))
    run(2, many, [("copy-task", [*SHORT, f"log.dir={folder}", "train.checkpoint_every=3"]) for folder in (whole, hurt)])
    checkpoints = Path(hurt, "checkpoints")
    part = sorted((checkpoints / "step-00000009" / "sharded").iterdir())[1]
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    for n in (2, 1):
        run(n, train, hurt, [], True)
        same(Path(whole), Path(hurt), tolerance=0.0 if n == 2 else 1e-5)
        shutil.rmtree(checkpoints / "step-00000009")
    assert (checkpoints / "damaged-step-00000009").is_dir()


@pytest.mark.slow
def test_workers_that_train_apart(tmp_path):
    text = gpt(tmp_path)
    runs = [("shakespeare-char-gpt", [*text, f"log.dir={tmp_path / key}", f"layout.{key}.every=5"]) for key in ("diloco", "local_sgd")]
    cut = ("shakespeare-char-gpt", [*text, f"log.dir={tmp_path / 'cut'}", "layout.diloco.every=5"], False, 2)
    assert run(2, many, [*runs, cut])[0][2].endswith("step-00000005"), "they stop when they meet"
    run(2, train, str(tmp_path / "cut"), [], True)
    same_keys = {k: v for k, v in rows(tmp_path / "diloco").items() if k[0] in ("train/loss", "valid/loss", "train/tokens")}
    assert len(same_keys) > 12 and same_keys == {k: rows(tmp_path / "cut")[k] for k in same_keys}
    for key in ("diloco", "local_sgd"):
        found = rows(tmp_path / key)
        assert found["valid/loss", 10] < found["valid/loss", 5]
        assert found["train/tokens", 10] == 10 * 16 * 32
    with pytest.raises(AssertionError, match="Resume with 2"):
        run(1, train, str(tmp_path / "cut"), ["layout.diloco=null", "train.steps=10"], True)


@pytest.mark.slow
def test_workers_of_which_a_part_is_frozen_or_without_momentum_resume_exactly(tmp_path):
    tiny = [*COPY, "model.n_layers=1", "model.d_model=16", "model.d_ff=16", "data.n_train=96", "data.n_valid=4", "train.steps=8", "evaluate.samples=0"]
    frozen = "train.freeze=[encoder.blocks.0,decoder.blocks.0.feedforward]"
    runs, folders = [], []
    for more in (("layout.diloco.every=2", frozen), ("layout.local_sgd.every=2", frozen), ("layout.diloco={every: 2, outer_momentum: 0}",)):
        whole, cut = (tmp_path / f"{len(runs)}-{name}" for name in ("whole", "cut"))
        folders.append((whole, cut))
        runs += [("copy-task", [*tiny, *more, f"log.dir={whole}"]), ("copy-task", [*tiny, *more, f"log.dir={cut}"], False, 2), (str(cut), [], True)]
    stops = run(2, many, runs)[0]
    assert all(stop.endswith("step-00000002") for stop in stops[1::3])
    for whole, cut in folders:
        same(whole, cut, tolerance=0.0)


@pytest.mark.slow
def test_a_bad_sample_names_its_file_and_the_process(tmp_path):
    """Images are decoded when they are wanted, so only the process that wants it meets a damaged one."""
    from PIL import Image

    for i in range(40):
        folder = tmp_path / "images" / "train" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i, 2 * i, 3 * i)).save(folder / f"{i:02d}.png")
    bad = tmp_path / "images" / "train" / "b" / "07.png"
    bad.write_bytes(b"not a picture")
    data = [f"data.path={tmp_path / 'images'}", "data.source=path", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]", "model.image_size=8"]
    data += ["model.n_channels=3", "model.patch_size=4", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=16"]
    data += ["batch.samples=20", "train.epochs=1", "layout.device=cpu", "evaluate.test=false", f"log.dir={tmp_path / 'run'}"]
    with pytest.raises(AssertionError, match=r"rank [01] of 2:(.|\n)*07\.png"):
        run(2, train, "digits-vit", data)


@functools.cache
def recipe(*overrides: str):
    return recipes.load("copy-task", [*COPY, *overrides])


@pytest.mark.parametrize(
    ("n", "overrides", "told"),
    [
        (3, (), "does not divide among 3 processes"),
        (2, ("layout.replicate=none",), "2 processes are left over"),
        (3, ("layout.shard=2",), "shard 2 = 2 processes, and 3 were started"),
        (2, ("layout.tensor=3",), "Start 3"),
        (3, ("layout.tensor=3", "batch.samples=33"), "Use 1, 2 or 4"),
        (1, ("layout.replicate=data_parallel",), "processes here: 1, GPUs: 0"),
        (1, ("layout.diloco.every=5",), "cannot take effect with one replica"),
        (2, ("layout.diloco.every=5", "train.checkpoint_every=7"), "Set train.checkpoint_every=5"),
        (2, ("layout.shard=2", "layout.compress=bf16"), "a hook of DDP"),
        (1, ("layout.compress=bf16",), "layout.compress: cannot take effect with one replica"),
        (2, ("layout.replicate=manual", "layout.bucket_mb=1"), "layout.bucket_mb: cannot take effect with layout.replicate=manual"),
        (2, ("layout.shard=2", "layout.bucket_mb=1"), "layout.bucket_mb: cannot take effect with layout.shard=2"),
        (2, ("layout.transport=mpi",), "It is for manual"),
        (4, ("layout.shard=2", "layout.shard_optimizer=true"), "sharding splits the optimizer's state already"),
        (2, ("layout.reshard=false",), "cannot take effect without layout.shard"),
        (2, ("layout.context=2",), "context is for bert, gpt, llama, gemma, vit"),
        (2, ("layout.micro_batch=20",), "a process's share of 16 samples"),
        (4, ("layout.pipeline=2", "layout.context=2", "model.n_layers=4"), "layout.pipeline: cannot be combined with layout.context=2"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_built(n, overrides, told):
    with pytest.raises(UserError) as e:
        check.validate(recipe(*overrides), n)
    assert told in str(e.value), str(e.value)


@pytest.mark.parametrize("given, shard, found", [(None, 2, "1"), (None, 1, None), ("0", 2, "0")])
def test_where_weights_are_sharded_large_pages_are_asked_for_before_processes_meet(monkeypatch, given, shard, found):
    asked = []
    monkeypatch.setenv(LARGE_PAGES, "")  # so that what the test leaves is undone
    monkeypatch.delenv(LARGE_PAGES) if given is None else monkeypatch.setenv(LARGE_PAGES, given)
    monkeypatch.setattr(worlds, "join", lambda *_: asked.append(os.environ.get(LARGE_PAGES)))
    worlds.meet(World(size=2), Layout(device="cpu", shard=shard))
    assert asked == [found]
