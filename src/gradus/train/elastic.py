"""Training on when a replica dies (layout.elastic): the members of a quorum change, the run does not.

A step's gradients count once all members have them (`Quorum.commit`); where one of them dies before, the others throw
them away, form a new group, cut the same global batch among themselves and take the same step. What else needs all of
them (an evaluation, a checkpoint) is done again likewise. Who comes back gets everything from a member, not from disk.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradus import models
from gradus.data.loader import Step
from gradus.errors import EnvironmentFault, UserError, either
from gradus.parallel import world as worlds
from gradus.parallel.apply import use_replicas
from gradus.parallel.engine import Parallel
from gradus.parallel.mesh import DATA, Mesh
from gradus.parallel.quorum import Aborted, Ended, Member, Quorum
from gradus.parallel.replicate import Replicas
from gradus.parallel.status import has_parent
from gradus.parallel.world import World
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.text import duration, say
from gradus.torch_private import forget_meshes
from gradus.train.log import RunLog
from gradus.train.loop import Hook, Taken, Trainer
from gradus.train.metrics import Metrics
from gradus.train.optim import load_state_tensors, state_tensors
from gradus.train.step import Progress

T = TypeVar("T")
IN_STEP = ("the all-reduce of counts", "the forward and backward passes with their collectives", "the gradient norm")


def enter(recipe: Recipe, world: World) -> tuple[Quorum, World]:
    """Meet the other replicas, or find that their run is under way: then this process is a `World.newcomer`."""
    layout = recipe.layout
    if not os.path.isdir("/proc/self/fd"):
        raise UserError("layout.elastic=true: only on Linux can a process shut a group's connections. Leave it out.")
    if world.launcher in [launcher.name for launcher in worlds.LAUNCHERS[1:]] and not has_parent():
        text = f"layout.elastic=true: {world.launcher} ends all replicas where one dies. Start each by itself"
        raise UserError(f"{text} (docs/elastic.md), or all with --processes {world.size}.")
    if world.port is None:
        raise UserError("layout.elastic=true: no other replica. Start several: --processes 2.")
    if recipe.log.dir is None:
        raise UserError("layout.elastic=true: all replicas write one run. Set log.dir=FOLDER, which all hosts share.")
    device = worlds.open_kind(layout)
    if device == "cuda":
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    quorum = Quorum(world, layout, device)
    if quorum.newcomer:
        return quorum, dataclasses.replace(world, newcomer=True)
    return quorum, quorum.join(-1)


class Elastic(Hook):
    """A trainer's part in a quorum."""

    def __init__(self, quorum: Quorum, metrics: Metrics, log: Callable[[], RunLog]):
        self.quorum, self.metrics, self.open_log = quorum, metrics, log
        self.trainer: Trainer | None = None
        self.recent: deque[tuple[list[Row], str | None]] = deque(maxlen=8)  # what rank 0 may not have written
        self.log: RunLog | None = None  # where it was handed over to this process
        self.recut = False  # whether the members have changed since a step was taken
        self.turn = 0  # of what all do together after a step
        self.base: str | None = None  # digest of the frozen weights beside an adapter, which no member sends

    # ------------------------------------------------------------ as a hook

    def logged(self, trainer: Trainer, rows: list[Row], line: str | None) -> None:
        self.recent.append((rows, line))

    def rows(self, trainer: Trainer) -> list[Row]:
        n, wanted = self.quorum.there, self.quorum.wanted
        return [Row("elastic/replicas", n, "replicas", trainer.progress.step, {"of": wanted})]

    def missing(self) -> str:
        """For the log's line: which replicas are missing, since when."""
        gone = self.quorum.missing()
        if not gone:
            return ""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - max(gone.values())))
        there = f"{self.quorum.there} of {self.quorum.wanted} replicas"
        return f"  {there}, without {either(sorted(gone), 'and')} since {since}"

    # ------------------------------------------------------------ what all do

    def begin(self, trainer: Trainer) -> None:
        """The trainer is made, and has its weights, or is a newcomer. Collective."""
        self.trainer, trainer.elastic, self.quorum.training = trainer, self, True
        self.quorum.stopping = lambda: bool(trainer.signals.asked)
        self.metrics.beside, at = self.missing, trainer.at
        if trainer.recipe.adapter:
            self.base = models.digest(models.base_of(trainer.recipe.model))

        def tell(what: str, step: int | None = None) -> None:
            at(what, step)
            self.quorum.at(what, what in IN_STEP)

        trainer.at = tell
        if self.quorum.epoch:
            self._equip(trainer)
        else:
            try:
                self._rejoin(trainer, -1, "")
            except Ended:
                say("the run that this store belongs to has ended: nothing is left to do", sys.stderr)
                worlds.leave()

    def take(self, step: Step) -> Taken | None:
        """Take a step; None where the members changed before it was done: it is to be cut anew."""
        trainer, lost, self.recut = self.trainer, False, False
        try:
            taken = trainer.take(step)
        except Exception as e:
            if not self.quorum.lost(e):
                raise
            lost = True
        if lost:  # here, where the error no longer holds what it met
            self.regroup()
            return None
        self.turn = 0
        return taken

    def commit(self) -> None:
        """Before the optimizer steps: raises Aborted where a member is gone. Collectives of GPUs that were aborted end
        as if nothing were amiss, so they are waited for first."""
        self.trainer.clock.synchronise()
        if self.quorum.aborted is not None or not self.quorum.commit(f"step {self.trainer.progress.step + 1}"):
            raise Aborted

    def together(self, work: Callable[[], T]) -> T:
        """What all members do between two steps, again where one of them dies meanwhile: once all have done it, it
        counts. `work` may change the progress."""
        trainer, number = self.trainer, self.turn
        while True:
            before, lost = copy.deepcopy(trainer.progress), True
            try:
                value = work()
                lost = not self.quorum.commit(f"after {before.step}.{number}")
            except Exception as e:
                if not self.quorum.lost(e):
                    raise
            if not lost:
                self.turn += 1
                return value
            vars(trainer.progress).update(vars(before))
            self.regroup(admit=False)

    def between(self) -> bool:
        """Between two steps: who waits comes in, and where too few are left, one is waited for. Returns whether the
        members have changed since the last step, so that the next one's batch is to be cut anew."""
        if self.quorum.asked or self.quorum.there < self.quorum.least:
            self.regroup()
        return self.recut

    def regroup(self, admit: bool = True) -> None:
        """Go on with those who are left, and with who has come (admit). Collective."""
        trainer, why = self.trainer, self.quorum.aborted or ""
        trainer.parallel.zero_grad()
        trainer.precision.forget()
        self.quorum.observer("gradients thrown away")
        try:
            self._rejoin(trainer, trainer.progress.step, why, admit)
        except Ended:
            raise EnvironmentFault("the others have ended the run without this replica") from None

    def close(self) -> None:
        if self.log:
            self.log.close()

    def end(self, trainer: Trainer, summary: dict[str, Any]) -> list[str]:
        quorum = self.quorum
        summary["elastic"] = {"epochs": quorum.epoch, "replicas": quorum.there, "of": quorum.wanted}
        return []

    # ------------------------------------------------------------ with whom

    def _rejoin(self, trainer: Trainer, step: int, why: str, admit: bool = True) -> None:
        began, before, layout, session = time.monotonic(), self.quorum.members, trainer.recipe.layout, trainer.session
        own = self._own(trainer) if layout.shard > 1 and step >= 0 else {}
        while True:
            trainer.at("the meeting of the replicas", max(step, 0) + 1)
            trainer.parallel.replicas = Replicas(trainer.parallel.bare)  # DDP and its hooks end before others are made
            if layout.shard > 1:
                trainer.hold(Parallel(session.deferred(values=False).model, layout, session.mesh))
            world, lost = self.quorum.join(step, admit), False
            trainer.parallel.mesh = session.mesh = Mesh.make(layout, world, trainer.device.type)
            try:
                if layout.shard > 1:
                    self._lay_out(trainer, own)
                self._share(trainer)
                step = trainer.progress.step
                own = self._own(trainer) if layout.shard > 1 else {}
                self._equip(trainer)
                trainer.parallel.mesh.seed_dropout(trainer.recipe.train.seed, step)
            except Exception as e:
                if not self.quorum.lost(e):
                    raise
                lost = True
            if not lost:
                break
        self._hand_over(trainer)
        if before:
            self._tell(trainer, before, why, self.quorum.members[0], time.monotonic() - began)

    def _own(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        """What this process holds of weights and optimizer: not copied."""
        weights = {f"model.{h.name}": h.local.data for h in trainer.parallel.local_parameters}
        return weights | state_tensors(trainer.parallel.trained(), trainer.optimizer)

    def _lay_out(self, trainer: Trainer, own: dict[str, torch.Tensor]) -> None:
        """Split weights: what FSDP2 was doing when a collective failed cannot be undone, and its groups are no more. So
        the model is laid out anew over these members, and gets this process's part back, which is the same in each
        epoch. Collective."""
        session = trainer.session
        forget_meshes()
        trainer.hold(session.lay_out(session.deferred(values=trainer.recipe.adapter is not None)))
        parameters = {h.name: h.local for h in trainer.parallel.local_parameters}
        for key, tensor in own.items():
            kind, _, name = key.partition(".")
            if kind == "model":
                parameters[name].data.copy_(tensor)
            else:
                trainer.optimizer.state[parameters[name]][kind] = tensor

    def _share(self, trainer: Trainer) -> None:
        """New members get weights, optimizer, position and scale from the first, and of split weights each process from
        the first that has the same part. Collective."""
        if not any(m.new for m in self.quorum.members):
            return
        parallel, optimizer, precision = trainer.parallel, trainer.optimizer, trainer.precision
        mine, first, group = self._mine(), parallel.mesh.rank("replicate") == 0, parallel.mesh.group("replicate")
        weights = {f"model.{h.name}": h.local.data for h in parallel.stored}
        tensors = weights | state_tensors(parallel.trained(), optimizer)
        told: list[Any] = [None]
        if first:
            told = [{
                "progress": dataclasses.asdict(trainer.progress), "last_step": trainer.last_step,
                "scaler": precision.state(), "seconds": trainer.clock.seconds, "losses": self.metrics.unread(),
                "evaluate_batch": trainer.recipe.evaluate.batch, "base": self.base,
                "tensors": {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()},
            }]  # fmt: skip
        dist.broadcast_object_list(told, group=group, group_src=0)
        self.quorum.observer("weights are sent" if first else "weights arrive" if mine.new else "weights pass by")
        got, state = told[0], {}
        if mine.new and got["base"] != self.base:
            what = "other weights than the run began with, beside which its adapter means nothing"
            raise EnvironmentFault(f"model.init={trainer.recipe.model.init}: {what}. Put those back.")
        for key, (shape, dtype) in got["tensors"].items():
            sent = tensors[key] if first else torch.empty(shape, dtype=dtype, device=_place(tensors, key, trainer))
            dist.broadcast(sent, group=group, group_src=0)
            if not mine.new:
                continue
            if key.startswith("model."):
                tensors[key].copy_(sent)
            else:
                state[key] = sent
        trainer.clock.synchronise()
        if self.quorum.aborted is not None:
            raise Aborted
        if mine.new:
            load_state_tensors(parallel.trained(), optimizer, state)
            trainer.progress, trainer.last_step = Progress(**got["progress"]), got["last_step"]
            trainer.clock.seconds, trainer.recipe.evaluate.batch = got["seconds"], got["evaluate_batch"]
            precision.load_state(got["scaler"])
            self.metrics.take_over(trainer, got["losses"])

    def _mine(self) -> Member:
        return next(m for m in self.quorum.members if m.name == self.quorum.name)

    def _equip(self, trainer: Trainer) -> None:
        """The trainer as these members need it: DDP, the share of every batch, random numbers. Collective."""
        parallel, mesh = trainer.parallel, trainer.parallel.mesh
        trainer.warm = False
        if mesh.size("shard") == 1:
            parallel.joined, parallel.summed_by_engine = True, ()
            if mesh.world.size > 1:
                use_replicas(parallel, parallel.bare)
        else:
            dist.all_reduce(torch.ones((), device=trainer.device))  # who came is there with all its processes
        trainer.loader.cut(mesh.rank(*DATA), mesh.size(*DATA))
        self.recut = True

    def _hand_over(self, trainer: Trainer) -> None:
        """Who is rank 0 now writes for all: first what the one before may not have written."""
        if not trainer.parallel.mesh.world.first or any(isinstance(hook, RunLog) for hook in trainer.hooks):
            return
        self.log = log = self.open_log()
        trainer.hooks.insert(0, log)
        log.start(trainer)
        for rows, line in self.recent:
            log.logged(trainer, rows, line)
        self.quorum.observer("the log handed over")

    def _tell(self, trainer: Trainer, before: list[Member], why: str, giver: Member, seconds: float) -> None:
        """What changed: who of the members before (`before`) is lost, who came, and with whose weights."""
        members, step = self.quorum.members, trainer.progress.step
        there, came = {m.name for m in members}, [m for m in members if m.new]
        ends = dict[str, str | None]()
        for m in before:
            if m.name not in there:
                name = f"replica {m.replica} "
                ends[name] = ends.get(name) or self.quorum.end_of(m)
        texts = [why if name in why else name + (end or f"is lost ({why})") for name, end in ends.items()]
        texts += [f"replica {m.replica} came, with the weights of replica {giver.replica}" for m in came if not m.part]
        rest = f"step {step + 1} with {self.quorum.there} of {self.quorum.wanted} replicas, after {duration(seconds)}"
        conditions = {"why": "; ".join(texts) or why or "who asked to come in is gone again"}
        conditions |= {"replicas": [m.name for m in members], "seconds": round(seconds, 3)}
        trainer.log([Row("elastic/epoch", self.quorum.epoch, "", step, conditions)])
        trainer.say(f"{conditions['why']}: {rest}")


def _place(tensors: dict[str, torch.Tensor], key: str, trainer: Trainer) -> torch.device:
    """Where a tensor of this name is wanted: a step counter lies beside its parameter."""
    return tensors[key].device if key in tensors else trainer.device
