"""Replicas that come and go (layout.elastic): who takes part is agreed on in a store that lies outside all of them.

The members of an epoch have one process group. Where one of them dies, whoever sees it first aborts the epoch; a thread
in each process then closes the group's connections, so that nobody waits for the dead, and the survivors form the next
epoch. What a member has computed with the others counts once all have said so: `commit` is one key of the store, set
once, by the last to vote or by the first to abort, and all read it before they go on.

Keys of the store: `started/REPLICA` counts its processes; `beat/NAME` counts while a process lives, `gone/NAME` says
that it does not; `wants/EPOCH` counts who asks to be a member, `wants/EPOCH/I` names the I-th; `members/EPOCH`,
`abort/EPOCH`, `votes/EPOCH/KEY`, `verdict/EPOCH/KEY`; `done`: the run has ended. A process's NAME is REPLICA.N, its
N-th start. What is set by compare-and-set (members, abort, verdict) never changes: the first wins.

A replica whose weights are split is several processes, each a member (REPLICA/PART in place of REPLICA), and is there
with all of them or not at all.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import gc
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from gradus.errors import FAULT, EnvironmentFault, UserError, either
from gradus.parallel.status import LOST, from_collective
from gradus.parallel.world import World
from gradus.recipe.axes import needed
from gradus.recipe.schema import Layout
from gradus.torch_private import abort_nccl, leave_group, set_timeout

POLL = 0.05  # seconds between two looks at the store
RESUME = "Start all again, with a new store, and resume from the last checkpoint: --resume."
PATIENCE = 2.0  # seconds in which an error that peers have caused is explained by an aborted epoch


class Timeouts(NamedTuple):
    """Seconds, each shorter than the next: between two signs of life; without one, a member is gone; after an abort,
    who has not come is no member; a collective fails by itself."""

    beat: float
    silent: float
    gather: float
    collective: float

    @classmethod
    def of(cls, layout: Layout) -> Timeouts:
        """Raises UserError where they would not be in this order."""
        step, longest = layout.step_timeout, layout.timeout
        times = cls(min(0.25, step / 10), step, 1.5 * step, longest)
        if not times.gather < times.collective:
            text = f"layout.step_timeout={step:g} with layout.timeout={longest:g}: members that wait for a dead one"
            raise UserError(f"{text} would fail first. Set layout.timeout={3 * step:g} or more.")
        return times


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a replica. step: how many it has taken; -1: it has no weights yet."""

    name: str
    replica: int
    host: str
    step: int = -1
    part: int = 0  # which of the replica's processes

    @property
    def new(self) -> bool:
        return self.step < 0


class Aborted(Exception):
    """A member is gone, and what was under way counts for nobody."""


class Ended(Exception):
    """The run has ended while this process asked to take part."""


class _Pulse:
    """For how long names in the store have not changed, by this process's own watch: time in which it did not look, as
    it was stopped itself, does not count."""

    def __init__(self, store: dist.Store):
        self.store, self.looked = store, time.monotonic()
        self.seen: dict[str, tuple[bytes, float]] = {}  # name → (its beats, seconds since they changed)

    def gone(self, names: Collection[str], silent: float) -> dict[str, str]:
        """Those that live no more, and why: they were seen to end, or gave no sign of life for `silent` seconds."""
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, 1.0), now
        found = {}
        for name, beats in zip(names, self.store.multi_get([f"beat/{name}" for name in names]) if names else ()):
            before, quiet = self.seen.get(name, (b"", 0.0))
            quiet = quiet + passed if beats == before else 0.0
            self.seen[name] = beats, quiet
            if quiet > silent:
                found[name] = f"has given no sign of life for {quiet:.0f} s"
        if self.store.add("gone", 0):
            ended = [name for name in names if name not in found and self.store.check([f"gone/{name}"])]
            found |= {name: self.store.get(f"gone/{name}").decode() for name in ended}
        return found


def place_of(rank: int, parts: int) -> str:
    """What a process's name begins with; parts: processes of a replica."""
    return f"{rank // parts}/{rank % parts}" if parts > 1 else str(rank)


def split_groups(n: int, parts: int, limit: datetime.timedelta | None = None) -> tuple[dist.ProcessGroup, ...]:
    """Of n processes: this one's with those that hold the same part of the weights, and with the others of its replica.
    Collective."""
    ranks = torch.arange(n).view(-1, parts)
    return tuple(dist.new_subgroups_by_enumeration(r.tolist(), limit)[0] for r in (ranks.T, ranks))


def tell_gone(store: dist.Store, name: str, why: str) -> None:
    """For who has seen a process end."""
    store.compare_set(f"gone/{name}", "", why)
    store.add("gone", 1)


class Quorum:
    """This process's part in it. `members`: of the epoch under way, by rank; `epoch` 0: none is.

    store: where it lies, host and port. wanted: how many replicas the run is to have. Raises EnvironmentFault where the
    store cannot be reached.
    """

    stopping: Callable[[], bool] = staticmethod(lambda: False)  # this process was asked to stop, and to save the run
    observer: Callable[[str], None] = staticmethod(lambda place: None)  # is told where this process is: for tests

    def __init__(self, world: World, layout: Layout, device: str = "cpu"):
        self.place, self.times = (world.address, world.port), Timeouts.of(layout)
        self.world, self.device = world, device
        self.parts = needed(layout)
        self.replica, self.wanted, self.least = world.rank // self.parts, world.size // self.parts, layout.min_replicas
        self.store, self._own = self._connect(), self._connect()  # a store's calls wait for each other: one a thread
        place = place_of(world.rank, self.parts)
        n = self.store.add(f"started/{place}", 1)
        self.name = f"{place}.{n}"
        for earlier in range(1, n):
            tell_gone(self.store, f"{place}.{earlier}", "was started again")
        self.epoch, self.members = 0, list[Member]()
        self.groups: tuple[dist.ProcessGroup, ...] = ()
        self.aborted: str | None = None  # why the epoch under way is over
        self.doing, self.since, self.in_step, self.longest = "", time.monotonic(), False, 0.0
        self._deciding: str | None = None  # the verdict that is waited for
        self.training = False  # before, nobody is given up for being silent: opening data may take minutes
        self._gone: dict[str, str] = {}  # members that live no more, and why
        self._without: dict[int, float] = {}  # replica → since when
        self._before: set[str] = set()  # sockets that are not the group's
        self._of_group: set[str] | None = None  # None: it is being made
        self.asked = self._stepped = False  # whether somebody waits to be a member; whether this process took a step
        self._old: list[str] = []  # keys of the vote before, in this epoch
        self._changing, self._ended = threading.Lock(), threading.Event()  # of the epoch; of the watch
        self.store.add(f"beat/{self.name}", 1)
        threading.Thread(target=self._watch, name="quorum", daemon=True).start()

    def _connect(self) -> dist.Store:
        limit = datetime.timedelta(seconds=self.times.collective)
        try:
            return dist.TCPStore(*self.place, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError as e:
            where, why = f"{self.place[0]}:{self.place[1]}", str(e).splitlines()[0]
            raise EnvironmentFault(f"the replicas' store was not reached at {where} ({why}). Is it running?") from None

    @property
    def newcomer(self) -> bool:
        """Whether a run is under way that this process is not in."""
        return self.epoch == 0 and self.store.check(["members/1"])

    @property
    def there(self) -> int:
        """How many replicas the epoch under way has."""
        return len(self.members) // self.parts

    # ------------------------------------------------------------ who takes part

    def join(self, step: int, admit: bool = True) -> World:
        """Be a member of the next epoch, which has taken `step` steps (-1: this process has no weights; the first epoch
        has none). Returns this process's place in its group, in which a first collective has run. Members that stay
        keep their order; rank 0 is the one that has been there longest. admit=False: nobody comes in, and so few are
        enough as are left.

        Raises Ended where the run has ended, and EnvironmentFault where the others have gone on without this process,
        and where too few replicas are left.
        """
        while True:
            self._leave()
            try:
                epoch, members = self._agreed(step, admit)
            except RuntimeError:
                where = f"{self.place[0]}:{self.place[1]}"
                raise EnvironmentFault(f"the replicas' store at {where} is gone. {RESUME}") from None
            if self.parts > 1 or any(m.new for m in members):
                self.longest = 0.0  # the first step of a process may compile, and of a model that is laid out anew
            elif self.members:  # fewer take longer
                self.longest *= max(1.0, len(self.members) / len(members))
            with self._changing:
                self.epoch, self.members, self.aborted = epoch, members, None
                self._before, self._of_group = _sockets(), None
                self._old = []  # one that was given up may still vote on an aborted epoch's, and must find it aborted
            rank = [member.name for member in members].index(self.name)
            try:
                self._meet(rank)
            except RuntimeError as e:
                self.abort(f"{self.name} did not meet the others ({str(e).splitlines()[0][:80]})")
                continue
            now, there = time.monotonic(), {m.replica for m in members}
            self._without = {r: self._without.get(r, now) for r in range(self.wanted) if r not in there}
            world = dataclasses.replace(self.world, rank=rank, size=len(members), groups=self.groups)
            if self.device == "cuda":  # which GPU is this process's does not change
                return world
            of_host = [m.name for m in members if m.host == members[rank].host]
            return dataclasses.replace(world, local_rank=of_host.index(self.name), local_size=len(of_host))

    def _agreed(self, step: int, admit: bool) -> tuple[int, list[Member]]:
        """(the next epoch that this process is in, its members)."""
        part = self.world.rank % self.parts
        store, me = self.store, Member(self.name, self.replica, socket.gethostname(), step, part)
        epoch = self.epoch + 1
        pulse, began = _Pulse(store), time.monotonic()
        asked = 0
        while True:
            if store.check(["done"]):
                raise Ended
            if store.check([f"members/{epoch}"]):
                members = _members(store, epoch)
                if self.name in (m.name for m in members):
                    return epoch, members
                if not me.new:
                    raise EnvironmentFault(f"replica {self.replica} was given up, and the others have gone on")
                epoch += 1
                continue
            if asked != epoch:
                store.set(f"wants/{epoch}/{store.add(f'wants/{epoch}', 1)}", json.dumps(dataclasses.asdict(me)))
                asked = epoch
                self.observer("asked to be a member")
            if self.stopping():
                store.set(f"stops/{self.name}", "")
            if not me.new or epoch == 1:
                self._close(epoch, pulse, time.monotonic() - began, admit)
            else:
                self._orphaned(epoch, pulse)
            time.sleep(POLL / 2)

    def _close(self, epoch: int, pulse: _Pulse, waited: float, admit: bool) -> None:
        """Name the members of this epoch, once all who can come have come."""
        came = {m.name: m for m in self._asking(epoch)}
        members = _members(self.store, epoch - 1) if epoch > 1 else []
        before = [m.name for m in members]
        gone = self._gone | pulse.gone([*dict.fromkeys([*before, *came])], self.times.silent)
        torn = {m.replica for m in members if m.name in gone}
        gone |= {m.name: "its replica is not whole" for m in members if m.replica in torn and m.name not in gone}
        there = self._whole([m for name, m in came.items() if name not in gone and (admit or not m.new)])
        settled = epoch > 1 and all(name in came or name in gone for name in before)
        if epoch > 1:
            # between two steps another may be writing a checkpoint, and comes when it is done
            patience = self.times.gather if admit else self.times.collective / 2
            complete = settled or waited > patience
        else:
            missing = sorted(set(range(self.wanted)) - {m.replica for m in there})
            complete = not missing
            if waited > self.times.collective:
                text = f"replica{'s' * (len(missing) > 1)} {either(missing, 'and')} did not come within {waited:.0f} s"
                raise EnvironmentFault(f"{text} (layout.timeout). Were all started?")
        if not complete:
            return
        if epoch > 1 and all(m.new for m in there):
            if settled:
                self._lost_all()
            return
        n, stops = len(there) // self.parts, self.store.check([f"stops/{m.name}" for m in there])
        if admit and n < self.least and not stops:
            if waited > self.times.collective:
                left = f"{n} of {self.wanted} replicas are left, and layout.min_replicas={self.least}"
                raise EnvironmentFault(f"{left}: none came back within {waited:.0f} s (layout.timeout).")
            return
        place = {name: i for i, name in enumerate(before)}
        there.sort(key=lambda m: (m.new and epoch > 1, place.get(m.name, 0), m.replica, m.part))
        self.store.compare_set(f"members/{epoch}", "", json.dumps([dataclasses.asdict(m) for m in there]))
        self.observer("the members named")

    def _whole(self, members: list[Member]) -> list[Member]:
        """Those whose replica is there with all its processes, which came together."""
        parts = collections.Counter((m.replica, m.new) for m in members)
        return [m for m in members if parts[m.replica, m.new] == self.parts]

    def _asking(self, epoch: int) -> list[Member]:
        """Who has asked to be in this epoch."""
        keys = [f"wants/{epoch}/{i + 1}" for i in range(self.store.add(f"wants/{epoch}", 0))]
        return [Member(**json.loads(self.store.get(key))) for key in keys if self.store.check([key])]

    def _orphaned(self, epoch: int, pulse: _Pulse) -> None:
        """Raises EnvironmentFault where nobody is left who has the weights: those who were to get them may live."""
        without = {m.name for m in self._asking(epoch) if m.new}
        before = [m.name for m in _members(self.store, epoch - 1) if m.name not in without]
        if len(pulse.gone(before, self.times.gather)) == len(before):
            self._lost_all()

    def _lost_all(self) -> NoReturn:
        self.store.set("orphaned", "")  # for the launcher
        raise EnvironmentFault(f"no replica is left that has the weights. {RESUME}")

    def _meet(self, rank: int) -> None:
        """Make the epoch's groups, never lazily: a first collective runs in each. What gloo waits for while it
        connects, nothing can end: so all are here before, and it waits for no longer than the step time-out."""
        n, ready = len(self.members), f"ready/{self.epoch}"
        self.store.add(ready, 1)
        while self.store.add(ready, 0) < n:
            if self.aborted is not None:
                raise RuntimeError(self.aborted)
            time.sleep(POLL / 5)
        limit = datetime.timedelta(seconds=self.times.silent)
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        store = dist.PrefixStore(f"group/{self.epoch}", self._connect())
        dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=limit)
        self.observer("before the first collective")
        self.groups = split_groups(n, self.parts, limit) if self.parts > 1 else ()
        for group in (dist.group.WORLD, *self.groups):
            for kind in {"cpu", self.device}:
                count = torch.ones((), device=kind)
                dist.all_reduce(count, group=group)
                if count.item() != dist.get_world_size(group):
                    raise RuntimeError("the first collective's sum is wrong")
            set_timeout(group, self.times.collective)
        self._of_group = _sockets() - self._before

    def _leave(self) -> None:
        gc.collect()  # DDP, whose hooks on the parameters end with it
        self.groups = ()
        leave_group()

    # ------------------------------------------------------------ what counts

    def commit(self, key: str) -> bool:
        """Whether all members have come as far as this with what `key` names; False: a member is gone, and none of them
        has. Every member asks once in an epoch. Collective.

        Afterwards `asked` says whether somebody waits to be a member.
        """
        verdict, votes = f"verdict/{self.epoch}/{key}", f"votes/{self.epoch}/{key}"
        self._deciding = verdict
        self.observer("before the vote")
        if self.store.add(votes, 1) == len(self.members):
            asked = self.store.check([f"wants/{self.epoch + 1}/{self.parts}"])
            self.observer("before the verdict")
            self.store.compare_set(verdict, "", "join" if asked else "commit")
            self.observer("after the verdict")
            for old in self._old:  # which all have read, since they voted again
                self.store.delete_key(old)
        self._old = [verdict, votes]
        self.observer("voted")
        self.store.wait([verdict], datetime.timedelta(seconds=self.times.collective))
        answer, self._deciding = self.store.get(verdict), None
        self.asked = answer == b"join"
        self.observer("the verdict read")
        if answer == b"abort":
            return False
        if self.in_step:
            self.longest = max(self.longest, time.monotonic() - self.since)
            if not self._stepped:
                self._stepped = True
                self.store.set(f"stepped/{self.name}", "")  # for the launcher
        return True

    def abort(self, why: str) -> None:
        """End the epoch under way for all of its members."""
        self.store.compare_set(f"abort/{self.epoch}", "", why)

    def lost(self, error: BaseException) -> bool:
        """Whether an error is there since a member is gone; then the epoch is aborted."""
        if isinstance(error, Aborted):
            return True
        if from_collective(error):
            with contextlib.suppress(RuntimeError):  # the store is gone too, as the watch says
                self.abort(f"a connection of {self.name} broke")
        elif not isinstance(error, RuntimeError | ValueError):
            return False
        end = time.monotonic() + PATIENCE
        while self.aborted is None and time.monotonic() < end:
            time.sleep(POLL)
        return self.aborted is not None

    def missing(self) -> dict[int, float]:
        """Replica → seconds since the members go on without it."""
        now = time.monotonic()
        return {replica: now - since for replica, since in self._without.items()}

    def end_of(self, member: Member) -> str | None:
        """How the process of a member ended, where somebody saw it."""
        key = f"gone/{member.name}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def close(self) -> None:
        """The run has ended, for all members."""
        self._ended.set()
        self.store.set("done", "")
        with contextlib.suppress(RuntimeError):
            self._leave()

    # ------------------------------------------------------------ the watch

    def at(self, what: str, in_step: bool) -> None:
        """What the main thread does from now on. in_step: it is in a step, which may take as long as the longest so far
        and the step time-out. So may a collective of gloo, whose time-out alone ends the wait of who sends into a
        connection that was just shut, as one does who was stopped meanwhile."""
        if not (in_step and self.in_step):
            self.since = time.monotonic()
        if in_step != self.in_step and self.device == "cpu" and dist.is_initialized():
            known = in_step and self.longest
            for group in (dist.group.WORLD, *self.groups):
                set_timeout(group, self.longest + 2 * self.times.silent if known else self.times.collective)
        self.doing, self.in_step = what, in_step
        self.observer(what)

    def _watch(self) -> None:
        pulse, beaten = _Pulse(self._own), 0.0
        try:
            while not self._ended.wait(POLL):
                due = time.monotonic() - beaten > self.times.beat
                if due:
                    self._own.add(f"beat/{self.name}", 1)
                    beaten = time.monotonic()
                with self._changing:
                    if self.epoch:
                        self._look(pulse if due else None, self.epoch)
        except RuntimeError:  # the store is gone, and with it the run
            if not self._ended.is_set():
                self.aborted = "the replicas' store is gone"
                self._disconnect()

    def _look(self, pulse: _Pulse | None, epoch: int) -> None:
        own, others = self._own, [m.name for m in self.members if m.name != self.name]
        if pulse:
            self._gone = pulse.gone(others, self.times.silent if self.training else math.inf)
        if pulse and self.aborted is None:
            for name, why in self._gone.items():
                own.compare_set(f"abort/{epoch}", "", f"replica {name.replace('/', '.').partition('.')[0]} {why}")
            waited = time.monotonic() - self.since
            if self.longest and self.in_step and waited > self.longest + self.times.silent:
                why = f"replica {self.replica} has waited {waited:.0f} s in {self.doing}"
                own.compare_set(f"abort/{epoch}", "", why)
        if own.check([f"abort/{epoch}"]):
            if verdict := self._deciding:
                own.compare_set(verdict, "", "abort")
            if self.aborted is None:
                self.aborted = own.get(f"abort/{epoch}").decode()
                self._disconnect()
            following = _members(own, epoch + 1) if own.check([f"members/{epoch + 1}"]) else self.members
            has_weights = self._stepped or any(m.name == self.name and not m.new for m in self.members)
            if has_weights and self.name not in (m.name for m in following):
                print(f"error: replica {self.replica} was given up ({self.aborted})", file=sys.stderr, flush=True)
                os._exit(FAULT)  # whatever it is doing: it may be of no step any more

    def _disconnect(self) -> None:
        """Whoever waits in the group waits no more. gloo knows no abort: its connections are shut, but not the socket
        on which it listens, whose end would end the process."""
        if self.device == "cuda":
            for group in (*self.groups, dist.group.WORLD):
                with contextlib.suppress(RuntimeError, AttributeError):
                    abort_nccl(group)
        for fd in _sockets() - self._before if self._of_group is None else self._of_group & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd.partition(" ")[0]))) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """The store, for replicas that no one program of Gradus starts: python -m gradus.parallel.quorum PORT. It ends with
    status.LOST where none is left that has the weights. PORT 0: a free one, for a program that reads which, writes a
    line for each replica that has ended (REPLICA HOW), and ends the store by closing its input."""
    port = sys.argv[1] if len(sys.argv) == 2 else ""
    if not port.isdigit():
        raise SystemExit("usage: python -m gradus.parallel.quorum PORT")
    store = dist.TCPStore("0.0.0.0", int(port), is_master=True, wait_for_workers=False)
    print(f"a store of replicas at {socket.gethostname()}:{store.port}", flush=True)
    if port == "0":
        threading.Thread(target=_hear, args=(store,), daemon=True).start()
    while not store.check(["orphaned"]):
        time.sleep(POLL)
    os._exit(LOST)


def _hear(store: dist.Store) -> None:
    for line in sys.stdin:
        replica, _, how = line.strip().partition(" ")
        tell_gone(store, f"{replica}.{store.add(f'started/{replica}', 0)}", how)
    os._exit(0)


def _members(store: dist.Store, epoch: int) -> list[Member]:
    return [Member(**member) for member in json.loads(store.get(f"members/{epoch}"))]


def _sockets() -> set[str]:
    """Of this process: number and identity."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (what := os.readlink(f"/proc/self/fd/{fd}")).startswith("socket:"):
                found.add(f"{fd} {what}")
    return found


if __name__ == "__main__":
    main()
