"""Training on when a replica dies: a step that is thrown away is taken again, what was done together is done again, and no row stands twice."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_parts import losses
from safetensors.torch import load_file

from gradus import recipe as recipes
from gradus.data.loader import Loader
from gradus.data.tokenizers import CharTokenizer
from gradus.errors import EnvironmentFault, UserError
from gradus.launch import replicas
from gradus.parallel.fake import fake_world
from gradus.parallel.mesh import Mesh
from gradus.parallel.precision import Precision
from gradus.parallel.quorum import Aborted, Member, split_groups
from gradus.parallel.world import World, free_port
from gradus.rows import Row, read_rows
from gradus.tasks import save_tokenizers
from gradus.train import elastic, run
from gradus.train.clock import Clock
from gradus.train.log import RunLog
from gradus.train.loop import Hook
from gradus.train.metrics import Metrics
from gradus.train.resume import start_of
from gradus.train.session import open_for
from gradus.train.step import Stepper

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]  # also in the processes that a test starts

TINY = [
    "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.dropout=0", "data.n_train=64", "data.n_valid=16",
    "schedule.warmup_steps=5", "batch.samples=16", "layout.micro_batch=8", "layout.device=cpu", "layout.threads=1", "train.steps=10",
    "evaluate.every=5", "evaluate.batch=16", "evaluate.samples=0", "train.checkpoint_every=5", "log.every=1",
]  # fmt: skip


class Alone:
    """The quorum of one replica, in which others are lost when the script says so: `losses` names the votes that come to nothing."""

    epoch, wanted, least, there, asked, aborted, name, training = 1, 2, 1, 1, False, None, "0.1", False

    def __init__(self, losses: tuple[str, ...] = ()):
        self.losses, self.votes, self.joined = list(losses), [], []
        self.members = [Member("0.1", 0, "here", 0)]
        self.observer = lambda place: None

    def commit(self, key: str) -> bool:
        self.votes.append(key)
        if key in self.losses:
            self.losses.remove(key)
            self.aborted = "replica 1 is lost in a test"
            return False
        return True

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, Aborted)

    def join(self, step: int, admit: bool = True) -> World:
        self.joined.append((step, admit))
        self.epoch, self.aborted = self.epoch + 1, None
        return World()

    def at(self, what: str, in_step: bool) -> None:
        pass

    def missing(self) -> dict[int, float]:
        return {1: 5.0}

    def end_of(self, member: Member) -> None:
        return None

    def close(self) -> None:
        self.closed = True


def trained(folder: Path, quorum: Alone | None, monkeypatch, *overrides: str, hooks=()) -> Path:
    keys = ["layout.elastic=true"] if quorum else []
    recipe = recipes.load("copy-task", [*TINY, *keys, f"log.dir={folder}", *overrides])
    monkeypatch.setattr(elastic, "enter", lambda recipe, world: (quorum, world))
    run.train(recipe, hooks=hooks)
    return folder


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_step_that_came_to_nothing_is_taken_again_as_if_it_never_had_been(precision, tmp_path, monkeypatch):
    """Bit for bit: weights, losses, the scaler's count; and the samples are those of the step."""
    starts: list[tuple[int, int]] = []
    steps = Loader.steps
    monkeypatch.setattr(Loader, "steps", lambda self, epoch, start=0: (starts.append((epoch, start)), steps(self, epoch, start))[1])
    right = trained(tmp_path / "right", None, monkeypatch, f"layout.precision={precision}")
    starts.clear()
    quorum = Alone(("step 3", "step 6"))
    ours = trained(tmp_path / "ours", quorum, monkeypatch, f"layout.precision={precision}")
    assert losses(ours) == losses(right) and quorum.joined == [(2, True), (5, True)] and quorum.closed
    assert quorum.votes.count("step 3") == 2 and quorum.votes.count("step 4") == 1
    of_training = [at for at in starts if at in ((0, 0), (0, 2), (1, 0), (1, 1), (2, 0))]
    assert of_training[:2] == [(0, 0), (0, 2)] and (1, 1) in of_training, "its batch is cut anew among those who are left"
    for name in ("model.safetensors", "training.safetensors"):
        files = [load_file(folder / "checkpoints" / "step-00000010" / name) for folder in (ours, right)]
        assert files[0].keys() == files[1].keys()  # but dropout is drawn anew
        assert all(torch.equal(files[0][key], files[1][key]) for key in files[0] if not key.startswith("rng."))
    gone = [row for row in read_rows(ours / "metrics.jsonl") if row["name"] == "elastic/epoch"]
    assert [(row["step"], row["why"]) for row in gone] == [(2, "replica 1 is lost in a test"), (5, "replica 1 is lost in a test")]


def test_what_all_do_between_two_steps_is_done_again_and_the_next_batch_is_cut_anew(tmp_path, monkeypatch):
    """An evaluation, whose best weights were kept already, and a checkpoint."""
    right = trained(tmp_path / "right", None, monkeypatch)
    evaluations: list[int] = []

    class Count(Hook):
        def logged(self, trainer, rows, line):
            evaluations.extend(row.step for row in rows if row.name == "valid/loss")

        def after_step(self, trainer, taken):
            assert trainer.progress.not_better == 0, "the evaluation that came to nothing is none that was no better"

    starts: list[tuple[int, int]] = []
    steps = Loader.steps
    monkeypatch.setattr(Loader, "steps", lambda self, epoch, start=0: (starts.append((epoch, start)), steps(self, epoch, start))[1])
    quorum = Alone(("after 5.0", "after 5.1"))
    ours = trained(tmp_path / "ours", quorum, monkeypatch, hooks=[Count()])
    assert evaluations == [5, 5, 10] and quorum.joined == [(5, False), (5, False)], "nobody comes in meanwhile"
    assert (1, 1) in starts, "the next step's batch is that of the new members"
    assert losses(ours) == losses(right)
    rows = [(row["name"], row["step"]) for row in read_rows(ours / "metrics.jsonl")]
    assert rows.count(("valid/loss", 5)) == 1, "the evaluation that was made twice stands once"
    best = [json.loads((folder / "checkpoints" / "best" / "best.json").read_text()) for folder in (ours, right)]
    assert best[0]["value"] == best[1]["value"]
    summary = json.loads((ours / "summary.json").read_text())
    assert summary["elastic"] == {"epochs": 3, "replicas": 1, "of": 2}


def test_split_weights_are_laid_out_anew_with_each_process_s_own_part(tmp_path):
    """Weights and optimizer bit for bit, over fewer replicas; a newcomer has neither memory nor groups before it is a member."""
    keys = ["layout.elastic=true", "layout.shard=2", "layout.micro_batch=4", f"log.dir={tmp_path}"]
    session = open_for(recipes.load("copy-task", [*TINY, *keys]), 4)
    hook, layout, kept = elastic.Elastic(None, None, None), session.recipe.layout, []
    own, axes, before = {}, {}, None
    for n in (4, 2):
        with fake_world(n, rank=1) as world:
            world = dataclasses.replace(world, groups=split_groups(n, 2))
            session.mesh = Mesh.make(layout, world)
            assert session.mesh.sizes["replicate"] == n // 2 and session.mesh.rank("shard") == 1
            if n == 4:
                stepper = Stepper(session.recipe, session.task, session.lay_out(), session.device, session.precision)
                stepper.session = session
                for held in stepper.parallel.trainable:
                    held.local.grad = torch.randn_like(held.local)
                stepper.optimizer.step()
            else:
                hook._lay_out(stepper, own)
                assert stepper.parallel is not before and {h.name: h.norm_axes for h in stepper.parallel.trainable} == axes
            own, before = hook._own(stepper), stepper.parallel
            axes = {h.name: h.norm_axes for h in before.trainable}
            kept.append({key: tensor.clone() for key, tensor in own.items()})
    assert kept[0].keys() == kept[1].keys() and any(key.startswith("exp_avg_sq.") for key in kept[0])
    assert all(torch.equal(kept[0][key], kept[1][key]) for key in kept[0])
    session.mesh = Mesh.make(layout, World(3, 4, newcomer=True))
    assert all(h.parameter.is_meta for h in session.lay_out(session.deferred(values=False)).local_parameters)


def test_who_becomes_rank_0_after_a_step_calls_each_hook_once(tmp_path, monkeypatch):
    """It gets the log as its first hook while the hooks are called: none of the others is called twice for it."""
    calls: list[int] = []

    class Count(Hook):
        def after_step(self, trainer, taken):
            calls.append(taken.step)

    begin = elastic.Elastic.begin

    def as_rank_1(self, trainer):
        begin(self, trainer)
        trainer.hooks[:] = [hook for hook in trainer.hooks if not isinstance(hook, RunLog)]

    monkeypatch.setattr(elastic.Elastic, "begin", as_rank_1)
    quorum = Alone(("after 5.0",))
    folder = trained(tmp_path / "run", quorum, monkeypatch, hooks=[Count()])
    assert calls == list(range(1, 11))
    assert [vote for vote in quorum.votes if vote.startswith("after 5.")] == ["after 5.0", "after 5.0", "after 5.1"], "one evaluation, again; one checkpoint"
    assert sorted(losses(folder)) == list(range(1, 11))


def test_the_line_says_who_is_missing_since_when(tmp_path, monkeypatch, capsys):
    trained(tmp_path / "run", Alone(), monkeypatch)
    since = time.strftime("%H:%M", time.localtime(time.time() - 5))
    assert f"  1 of 2 replicas, without 1 since {since}" in capsys.readouterr().out


@pytest.mark.parametrize(("why", "said"), [
    ("replica 1 has given no sign of life for 3 s", "replica 1 has given no sign of life for 3 s: step 4 with 1 of 2"),
    ("a connection of 0.1 broke", "replica 1 is lost (a connection of 0.1 broke): step 4 with 1 of 2"),
])  # fmt: skip
def test_the_line_says_once_why_a_replica_is_lost(why, said):
    class Trainer:
        progress, lines = SimpleNamespace(step=3), []
        log, say = staticmethod(lambda rows: None), staticmethod(lines.append)

    quorum = Alone()
    elastic.Elastic(quorum, None, None)._tell(Trainer(), [*quorum.members, Member("1.1", 1, "here", 3)], why, quorum.members[0], 0.5)
    assert Trainer.lines[0].startswith(said)


def test_who_becomes_rank_0_goes_on_in_a_new_file_and_writes_no_row_twice(tmp_path):
    """What the one before, should it wake up, still writes is lost."""
    config = recipes.load("copy-task", [f"log.dir={tmp_path}"]).log
    first = RunLog(tmp_path, config, {"name": "x"}, once=True)
    first.logged(Trainer(), [Row("train/loss", 1.0, "", 1)], None)
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"name": "train/loss", "val')  # it was killed here
    second = RunLog(tmp_path, config, {"name": "x"}, once=True)
    first.logged(Trainer(), [Row("train/loss", 3.0, "", 3)], None)
    for step in (1, 2, 2):
        second.logged(Trainer(), [Row("train/loss", float(step), "", step)], None)
    assert [(row["step"], row["value"]) for row in read_rows(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 2.0)]
    first.close()
    second.close()


def test_a_resume_writes_the_rows_again_of_steps_that_are_taken_again(tmp_path):
    config = recipes.load("copy-task", [f"log.dir={tmp_path}"]).log
    first, positions = RunLog(tmp_path, config, {"name": "x"}, once=True), []
    for step in range(1, 5):
        first.logged(Trainer(), [Row("train/loss", 1.0, "", step)], None)
        positions.append(first.file.position)
    first.close()
    second = RunLog(tmp_path, config, {"name": "x"}, positions[1], once=True)
    for step in (3, 4, 5):
        second.logged(Trainer(), [Row("train/loss", 2.0, "", step)], None)
    second.close()
    assert [(row["step"], row["value"]) for row in read_rows(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


class Trainer:
    metrics_position = 0


@pytest.mark.parametrize(("world", "keys", "why"), [
    (World(), ["log.dir=x"], "no other replica. Start several"),
    (World(0, 2, 0, 2, "test", "127.0.0.1", 9), [], r"all replicas write one run. Set log\.dir=FOLDER"),
])  # fmt: skip
def test_what_an_elastic_run_needs(world, keys, why):
    with pytest.raises(UserError, match=why):
        elastic.enter(recipes.load("copy-task", ["layout.elastic=true", *keys]), world)


def test_a_newcomer_reads_with_the_tokenizer_of_the_runs_latest_checkpoint(tmp_path):
    """Not one made from data that changed, as --resume --data-changed allows."""
    recipe, newcomer = recipes.load("shakespeare-char-gpt"), World(1, 2, 1, 2, "test", newcomer=True)
    assert start_of(recipe, tmp_path, False, newcomer).tokenizers is None, "no checkpoint yet: as the others made it"
    for step, text in ((4, "old"), (8, "to be")):
        (folder := tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        save_tokenizers(folder, {"": CharTokenizer.from_texts([text])})
    (tmp_path / "metrics.jsonl").write_text("")
    start = start_of(recipe, tmp_path, False, newcomer)
    assert start.tokenizers[""].encode("to be") == CharTokenizer.from_texts(["to be"]).encode("to be")
    assert start.before is start.checkpoint is None, "the rest comes from a member"


@pytest.mark.parametrize(("base", "ends"), [("new", True), ("old", False)])
def test_a_newcomer_that_has_read_another_base_of_the_adapter_is_refused(base, ends, monkeypatch):
    """The frozen weights come from a file, which may have changed since the run began."""
    quorum = Alone()
    quorum.members = [Member("0.1", 0, "here", 7), Member("1.2", 1, "here")]
    quorum.name = "1.2"
    ours = elastic.Elastic(quorum, Metrics(), lambda: None)
    ours.base = base
    told = {"tensors": {}, "base": "old", "progress": {"step": 7}, "last_step": 9, "scaler": {}, "seconds": {}, "evaluate_batch": None, "losses": []}
    monkeypatch.setattr(elastic.dist, "broadcast_object_list", lambda values, group, group_src: values.__setitem__(0, told))
    trainer = SimpleNamespace(optimizer=None, precision=Precision("fp32", torch.device("cpu")), clock=Clock(torch.device("cpu")))
    mesh = SimpleNamespace(rank=lambda axis: 1, group=lambda axis: None)
    trainer.parallel = SimpleNamespace(mesh=mesh, stored=[], trained=list)
    trainer.recipe = SimpleNamespace(model=SimpleNamespace(init="base.safetensors"), evaluate=SimpleNamespace(batch=None))
    monkeypatch.setattr(ours.metrics, "take_over", lambda trainer, losses: None)
    with pytest.raises(EnvironmentFault, match=r"model\.init=base\.safetensors: other weights") if ends else contextlib.nullcontext():
        ours._share(trainer)
    assert (getattr(trainer, "progress", None) is None) == ends


@pytest.mark.parametrize("other", [
    "layout.expert=2", "layout.tensor=2", "layout.pipeline=2", "layout.context=2", "layout.replicate=manual", "layout.replicate=parameter_server",
    "layout.shard_optimizer=true", "layout.local_sgd={every: 2}", "layout.diloco={every: 2}", "layout.compress=powersgd",
])  # fmt: skip
def test_what_is_not_built_is_refused_by_name(other):
    with pytest.raises(UserError, match=r"layout\.elastic"):
        recipes.load("copy-task", ["layout.elastic=true", other])


def test_a_replica_that_never_takes_a_step_stays_away(tmp_path, capsys, monkeypatch):
    """Each death is told to the quorum; the waits double."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(replicas.time, "sleep", lambda seconds: None)
    clock = iter(range(10**6))
    monkeypatch.setattr(replicas.time, "monotonic", lambda: next(clock) / 10)

    class Dead:
        def poll(self):
            return -signal.SIGKILL

    class Lives:
        calls = 0

        def poll(self):
            Lives.calls += 1
            return 0 if Lives.calls > 500 else None

    class Programs:
        signals, processes, seconds, deadline = [], [Dead(), Lives()], 60.0, float("inf")

    started: list[int] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    replicas.watch(Programs(), lambda number: (started.append(number), Dead())[1], tmp_path, store, most=3)
    assert started == [0, 0]
    said = capsys.readouterr().err
    assert said.startswith("\r\x1b[Kreplica 0 ended"), "on a terminal the line goes that rank 0 draws in place"
    assert said.count("replica 0 ended with SIGKILL before its first step; starting it again in") == 2 and "in 1 s" in said and "in 2 s" in said
    assert "it died 3 times without a step (layout.max_deaths), and stays away" in said.replace("\n", " ")
    assert store.get("gone/0.0") == b"ended with SIGKILL"


@pytest.mark.parametrize(("step", "waits"), [(None, False), (7, True)])
def test_a_mistake_of_the_users_before_the_first_step_ends_all(step, waits, tmp_path, monkeypatch):
    """The others may wait for who found it, and would do so for layout.timeout. Later they go on without it: it came to their run."""
    import torch.distributed as dist

    looks = []
    ended, lives = SimpleNamespace(poll=lambda: 2), SimpleNamespace(poll=lambda: 0 if len(looks) > 9 else looks.append(0))
    programs = SimpleNamespace(signals=[], processes=[ended, lives], seconds=60.0, deadline=float("inf"))
    monkeypatch.setattr(replicas.status, "read", lambda folder, rank: SimpleNamespace(step=step if rank else None, what="x"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    replicas.watch(programs, None, tmp_path, store, most=3)
    assert (len(looks) > 9) == waits


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path, monkeypatch, capsys):
    """Random instants and places named from inside; the curve, the samples and the weights of every replica."""
    import elastic as bench

    words = ["--kills", "10", "--steps", "150", "--processes", "3", "--each", "10", "--seed", "1", "--folder", str(tmp_path), "batch.samples=12"]
    monkeypatch.setattr(sys, "argv", ["elastic.py", *words])
    assert bench.main() == 0, capsys.readouterr().out
    assert "0 curves too far" in capsys.readouterr().out


def started(words: list[str], environment: dict[str, str], out: Path) -> subprocess.Popen:
    environment = {**os.environ, "GRADUS_NO_CALIBRATE": "1", "OMP_NUM_THREADS": "1", **environment}
    with open(out, "w", encoding="utf-8") as file:
        return subprocess.Popen([sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, env=environment)


def kill_at(step: int, record: Path, *processes: subprocess.Popen) -> None:
    """The process of this record, once it is at that step."""
    end = time.monotonic() + 300
    while time.monotonic() < end and all(process.poll() is None for process in processes):
        with contextlib.suppress(OSError, ValueError):
            seen = json.loads(record.read_text())
            if (seen["step"] or 0) >= step:
                return os.kill(seen["pid"], signal.SIGKILL)
        time.sleep(0.005)
    pytest.fail(f"{record}: never at step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_replicas_that_are_jobs_of_their_own(parts, tmp_path):
    """By the page's commands: a store, and a torchrun for each, which starts its replica again, with all its processes."""
    folder, port = tmp_path / "run", free_port()
    words = ["train", "copy-task", *TINY, "layout.elastic=true", "layout.min_replicas=2", f"log.dir={folder}", "train.steps=60"]
    words += [f"layout.shard={parts}", "layout.micro_batch=4"]
    store = started(["-m", "gradus.parallel.quorum", str(port)], {}, tmp_path / "store")
    jobs = []
    try:
        for replica in range(2):
            place = {"GRADUS_REPLICA": str(replica), "GRADUS_REPLICAS": "2", "GRADUS_STORE": f"127.0.0.1:{port}"}
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(parts), "--max-restarts", "100", "-m", "gradus"]
            jobs.append(started([*torchrun, *words], place, tmp_path / f"job-{replica}"))
        kill_at(10, folder / "ranks" / "rank-0000.json", *jobs)
        codes = [job.wait(300) for job in jobs]
    finally:
        for process in (*jobs, store):
            process.kill()
            process.wait(30)
    said = " ".join((tmp_path / "job-1").read_text().split())
    assert codes == [0, 0], said
    assert "replica 0 came, with the weights of replica 1" in said
    assert sorted(losses(folder)) == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_the_launcher_starts_a_dead_rank_0_again(parts, tmp_path, monkeypatch):
    """By the command of the pages; with layout.min_replicas=2 the other waits for it. The losses are those of one process."""
    folder, keys = tmp_path / "run", ["train.steps=60", "layout.micro_batch=4", "optimizer.eps=1e-4", "optimizer.lr=1e-4"]
    right = losses(trained(tmp_path / "one", None, monkeypatch, *keys))
    words = ["train", "copy-task", *TINY, "layout.elastic=true", "layout.min_replicas=2", f"log.dir={folder}", *keys]
    words += [f"layout.shard={parts}", "--processes", str(2 * parts)]
    process = started(["-m", "gradus", *words], {}, tmp_path / "out")
    try:
        kill_at(10, folder / "ranks" / "rank-0000.json", process)
        code = process.wait(300)
    finally:
        process.kill()
    said = (tmp_path / "out").read_text()
    assert code == 0, said
    text = " ".join(said.split())
    page = (Path(__file__).parents[2] / "docs/elastic.md").read_text(encoding="utf-8")
    came = r"replica 0 came, with the weights of replica \d: step \d+ with \d of \d replicas, after"
    for line in (r"replica 0 ended with SIGKILL at step \d+; starting it again in 1 s", came):
        assert re.search(line, text) and re.search(line, page), line
    assert losses(folder) == pytest.approx(right, abs=1e-5) and len(right) == 60 and "run folder:" in said
