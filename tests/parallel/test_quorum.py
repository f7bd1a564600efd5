"""Who takes part in a step, and what counts: the votes of replicas that come and go, without a process that dies."""

from __future__ import annotations

import datetime
import json
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import EnvironmentFault, UserError
from gradus.parallel import quorum
from gradus.parallel.quorum import Member, Quorum, Timeouts, tell_gone
from gradus.parallel.status import LOST
from gradus.parallel.world import World
from gradus.recipe.schema import Layout


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def several(store, n: int, step_timeout: float = 1.0, **keys) -> list[Quorum]:
    """Of replicas in this process, whose epoch has no group."""
    layout = Layout(elastic=True, step_timeout=step_timeout, timeout=60.0, **keys)
    made = [Quorum(World(rank, n, rank, n, "test", "127.0.0.1", store.port), layout) for rank in range(n)]
    for q in made:
        q.epoch, q._of_group = 1, set()
        q.members = [Member(other.name, other.replica, "here", 0, other.world.rank % q.parts) for other in made]
    return made


def at_once(quorums: list[Quorum], do) -> list:
    """What `do(quorum)` gives of each, all at a time; an error where it raised one."""
    answers: dict[int, object] = {}

    def call(i: int) -> None:
        try:
            answers[i] = do(quorums[i])
        except Exception as e:
            answers[i] = e

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(quorums))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [answers.get(i) for i in range(len(quorums))]


@pytest.fixture
def closing():
    made: list[Quorum] = []
    yield made
    for q in made:
        q._ended.set()


@given(step=st.floats(1.0, 1e6), longest=st.floats(1.0, 1e7))
def test_each_timeout_is_shorter_than_the_next_or_the_layout_is_refused(step, longest):
    layout = Layout(elastic=True, step_timeout=step, timeout=longest)
    try:
        times = Timeouts.of(layout)
    except UserError as e:
        assert longest <= 1.5 * step and f"layout.timeout={3 * step:g}" in str(e)
        return
    assert list(times) == sorted(set(times)) and times.silent == step and times.collective == longest


def test_a_step_counts_once_all_have_voted_and_never_after_an_abort(store, closing):
    quorums = several(store, 3)
    closing += quorums
    assert at_once(quorums, lambda q: q.commit("step 1")) == [True] * 3
    assert at_once(quorums, lambda q: q.commit("step 2")) == [True] * 3
    # two vote, the third aborts: neither of the two waits for it any longer, nor does it count for the third
    def third(q: Quorum):
        if q is not quorums[2]:
            return q.commit("step 3")
        time.sleep(0.3)
        q.abort("a test")
        time.sleep(0.3)
        return q.commit("step 3")

    began = time.monotonic()
    assert at_once(quorums, third) == [False] * 3
    assert time.monotonic() - began < 5 and all(q.aborted == "a test" for q in quorums)


def test_an_aborted_step_stays_aborted_for_who_votes_late(store, closing):
    """Also when the others have gone on, and have voted since; what was committed is not kept for ever."""
    quorums = several(store, 3)
    closing += quorums
    at_once(quorums, lambda q: q.commit("step 1"))
    at_once(quorums, lambda q: q.commit("step 2"))
    assert not store.check(["verdict/1/step 1"]) and store.check(["verdict/1/step 2"])
    quorums[0].abort("a test")
    assert at_once(quorums[:2], lambda q: q.commit("step 3")) == [False, False]
    for q in quorums[:2]:
        q.epoch, q.members, q.aborted, q._old = 2, q.members[:2], None, []  # as `join` does
    assert at_once(quorums[:2], lambda q: q.commit("step 3")) == [True, True]
    assert at_once(quorums[:2], lambda q: q.commit("step 4")) == [True, True]
    assert store.get("verdict/1/step 3") == b"abort" and quorums[2].commit("step 3") is False


def test_who_waits_to_be_a_member_is_told_by_the_votes(store, closing):
    quorums = several(store, 2)
    closing += quorums
    at_once(quorums, lambda q: q.commit("step 1"))
    assert [q.asked for q in quorums] == [False, False]
    store.add("wants/2", 1)
    store.set("wants/2/1", "{}")
    at_once(quorums, lambda q: q.commit("step 2"))
    assert [q.asked for q in quorums] == [True, True]


def test_a_process_that_was_seen_to_end_aborts_at_once_and_a_silent_one_after_the_time_out(store, closing):
    quorums = several(store, 3, step_timeout=1.0)
    closing += quorums
    for q in quorums:
        q.training = True
    time.sleep(0.5)
    assert [q.aborted for q in quorums] == [None] * 3
    quorums[2]._ended.set()  # it gives no sign of life any more
    began = time.monotonic()
    while quorums[0].aborted is None and time.monotonic() - began < 20:
        time.sleep(0.01)
    assert 0.9 < time.monotonic() - began < 10 and quorums[0].aborted.startswith("replica 2 has given no sign of life for")

    others = several(store, 2, step_timeout=50.0 / 3)
    closing += others
    for q in others:
        q.training, q.epoch = True, 7
    began = time.monotonic()
    tell_gone(store, others[1].name, "ended with SIGKILL")
    while others[0].aborted is None and time.monotonic() - began < 10:
        time.sleep(0.01)
    assert time.monotonic() - began < 3 and others[0].aborted == "replica 1 ended with SIGKILL"


def test_a_process_that_did_not_look_itself_gives_nobody_up(store):
    """It was stopped, as all were: time in which it did not look does not count."""
    pulse = quorum._Pulse(store)
    store.add("beat/0.1", 1)
    assert pulse.gone(["0.1"], 5.0) == {}
    pulse.looked -= 100.0
    assert pulse.gone(["0.1"], 5.0) == {}
    for _ in range(7):
        pulse.looked -= 1.0
        gone = pulse.gone(["0.1"], 5.0)
    assert list(gone) == ["0.1"]


def test_members_form_the_next_epoch_without_the_dead_and_the_late_are_fenced(store, closing):
    quorums = several(store, 3)
    closing += quorums
    for q in quorums:
        q._ended.set()  # its watch would end the process of who is given up
    store.set("members/1", '[{"name": "0.1", "replica": 0, "host": "here", "step": 0}, {"name": "1.1", "replica": 1, "host": "here", "step": 0},'
                           ' {"name": "2.1", "replica": 2, "host": "here", "step": 0}]')  # fmt: skip
    tell_gone(store, "1.1", "ended with SIGKILL")
    answers = at_once([quorums[0], quorums[2]], lambda q: q._agreed(5, True))
    assert [epoch for epoch, _ in answers] == [2, 2]
    assert [m.name for m in answers[0][1]] == [m.name for m in answers[1][1]] == ["0.1", "2.1"]
    with pytest.raises(EnvironmentFault, match="replica 1 was given up"):
        quorums[1]._agreed(5, True)


def split(store, n: int) -> list[Quorum]:
    """Of replicas that are two processes each, none of which looks for the end of others: who is given up ends its process."""
    quorums = several(store, n, step_timeout=10.0, shard=2)
    for q in quorums:
        q._ended.set()
    return quorums


def split_epoch(store, names: list[str]) -> None:
    """The members of epoch 1, whose replicas are two processes each."""
    places = [(name, *map(int, name.partition(".")[0].split("/"))) for name in names]
    store.set("members/1", json.dumps([{"name": n, "replica": r, "host": "here", "step": 0, "part": part} for n, r, part in places]))


def test_a_replica_of_several_processes_dies_as_a_whole(store):
    """The others do not wait for what is left of it, which ends at once."""
    quorums = split(store, 6)
    names = [q.name for q in quorums]
    assert names == ["0/0.1", "0/1.1", "1/0.1", "1/1.1", "2/0.1", "2/1.1"] and [q.wanted for q in quorums] == [3] * 6
    split_epoch(store, names)
    tell_gone(store, "1/0.1", "ended with SIGKILL")
    began = time.monotonic()
    answers = at_once([q for q in quorums if q.name not in ("1/0.1", "1/1.1")], lambda q: q._agreed(5, True))
    assert time.monotonic() - began < 10, "they have waited for the rest of replica 1"
    assert [[m.name for m in members] for _, members in answers] == [["0/0.1", "0/1.1", "2/0.1", "2/1.1"]] * 4
    with pytest.raises(EnvironmentFault, match="replica 1"):
        quorums[3]._agreed(5, True)


def test_a_newcomer_of_several_processes_comes_in_once_all_are_there(store):
    """Half of it is no member, nor does it make the members meet; together they come last, in their order."""
    quorums = split(store, 4)
    old, new = quorums[2:], quorums[:2]
    split_epoch(store, [q.name for q in old])
    for q in old:
        q.members = q.members[2:]
    for q in new:
        q.epoch = 0
    threads = [threading.Thread(target=new[1]._agreed, args=(-1, True), daemon=True)]
    threads[0].start()
    while not store.check(["wants/2/1"]):
        time.sleep(0.01)
    at_once(old, lambda q: q.commit("step 1"))
    assert [q.asked for q in old] == [False, False]
    answers = at_once(old, lambda q: q._agreed(1, True))
    assert [[m.name for m in members] for _, members in answers] == [["1/0.1", "1/1.1"]] * 2
    for q in old:
        q.epoch = 2
    threads.append(threading.Thread(target=new[0]._agreed, args=(-1, True), daemon=True))
    threads[1].start()
    while not store.check(["wants/3/2"]):
        time.sleep(0.01)
    at_once(old, lambda q: q.commit("step 2"))
    assert [q.asked for q in old] == [True, True]
    answers = at_once(old, lambda q: q._agreed(2, True))
    assert [[m.name for m in members] for _, members in answers] == [["1/0.1", "1/1.1", "0/0.1", "0/1.1"]] * 2
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_replicas_that_each_lost_a_process_are_all_lost(store):
    quorums = split(store, 4)
    split_epoch(store, [q.name for q in quorums])
    tell_gone(store, "0/0.1", "ended with SIGKILL")
    tell_gone(store, "1/1.1", "ended with SIGKILL")
    answers = at_once(quorums[1:3], lambda q: q._agreed(5, True))
    assert all("no replica is left that has the weights" in str(answer) for answer in answers)
    assert store.check(["orphaned"])


def test_a_replica_that_got_half_of_the_weights_is_lost_with_those_who_sent_them(store):
    quorums = split(store, 4)
    split_epoch(store, [q.name for q in quorums])
    for q in quorums[:2]:
        tell_gone(store, q.name, "ended with SIGKILL")

    def ask(q: Quorum):
        try:
            return q._agreed(5 if q is quorums[2] else -1, True)
        finally:
            tell_gone(store, q.name, "ended with exit code 3")

    answers = at_once(quorums[2:], ask)
    assert all("no replica is left that has the weights" in str(answer) for answer in answers)


@pytest.mark.parametrize(("stepped", "ends"), [(True, True), (False, False)])
def test_who_has_stepped_in_an_epoch_that_it_came_new_to_is_fenced_too(stepped, ends, store, closing, monkeypatch, capsys):
    """As all did to the first. One that has no weights yet asks again."""
    codes = []
    monkeypatch.setattr(quorum.os, "_exit", lambda code: (codes.append(code), q._ended.set()))
    (q,) = several(store, 1)
    closing.append(q)
    q.members, q._stepped = [Member(q.name, 0, "here"), Member("1.1", 1, "here")], stepped
    store.add("beat/1.1", 1)
    store.set("members/2", '[{"name": "1.1", "replica": 1, "host": "here", "step": 5}]')
    q.abort("it was stopped")
    end = time.monotonic() + (10.0 if ends else 1.0)
    while not codes and time.monotonic() < end:
        time.sleep(0.01)
    assert bool(codes) == ends == ("replica 0 was given up (it was stopped)" in capsys.readouterr().err)
    assert q.aborted == "it was stopped"


def test_a_collective_of_a_step_waits_little_longer_than_the_longest_step(store, closing):
    """gloo forgets who sends into a connection that was just shut: only its time-out ends that wait."""
    (q,) = several(store, 1, step_timeout=1.0)
    closing.append(q)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        seen = []
        for longest in (0.0, 0.5):  # of the first step nothing is known
            q.longest = longest
            for what, in_step in (("the all-reduce of counts", True), ("the gradient norm", True), ("the evaluation", False)):
                q.at(what, in_step)
                seen.append(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    finally:
        dist.destroy_process_group()
    assert seen == [60.0, 60.0, 60.0, 2.5, 2.5, 60.0]


def test_a_newcomer_finds_that_nobody_is_left(store, closing):
    quorums = several(store, 1)
    closing += quorums
    store.set("members/1", '[{"name": "9.1", "replica": 9, "host": "here", "step": 0}]')
    store.add("beat/9.1", 1)
    tell_gone(store, "9.1", "ended with SIGKILL")
    quorums[0].epoch = 0
    assert quorums[0].newcomer
    with pytest.raises(EnvironmentFault, match="no replica is left that has the weights"):
        quorums[0]._agreed(-1, True)


def test_newcomers_whose_giver_died_find_that_nobody_is_left(store, closing):
    quorums = several(store, 1)
    closing += quorums
    q = quorums[0]
    store.set("members/1", '[{"name": "9.1", "replica": 9, "host": "here", "step": 7}, {"name": "0.1", "replica": 0, "host": "here", "step": -1}]')
    store.add("beat/9.1", 1)
    tell_gone(store, "9.1", "ended with SIGKILL")
    with pytest.raises(EnvironmentFault, match="no replica is left that has the weights"):
        q._agreed(-1, True)


def test_too_few_replicas_wait_and_say_so_at_last(store, closing):
    quorums = several(store, 1, step_timeout=1.0, min_replicas=2)
    closing += quorums
    q = quorums[0]
    store.set("members/1", '[{"name": "0.1", "replica": 0, "host": "here", "step": 0}]')
    q.times = q.times._replace(collective=1.0)
    with pytest.raises(EnvironmentFault, match=r"1 of 1 replicas are left, and layout\.min_replicas=2: none came back within"):
        q._agreed(5, True)
    assert q._agreed(5, admit=False)[0] == 2  # what is no step waits for nobody


def test_who_is_asked_to_stop_waits_for_no_replica(store, closing):
    """But takes the step in which all agree to stop, and saves; not where one alone was asked."""
    quorums = several(store, 2, step_timeout=1.0, min_replicas=3)
    closing += quorums
    store.set("members/1", '[{"name": "0.1", "replica": 0, "host": "here", "step": 0}, {"name": "1.1", "replica": 1, "host": "here", "step": 0}]')
    quorums[0].stopping = lambda: True
    threading.Timer(1.0, lambda: setattr(quorums[1], "stopping", lambda: True)).start()
    began = time.monotonic()
    answers = at_once(quorums, lambda q: q._agreed(5, True))
    assert [epoch for epoch, _ in answers] == [2, 2] and [m.name for m in answers[0][1]] == ["0.1", "1.1"]
    assert 0.9 < time.monotonic() - began < 20


def test_shut_connections_end_a_wait_and_listeners_stay(store, closing):
    (q,) = several(store, 1)
    closing.append(q)
    listener, ours = socket.create_server(("127.0.0.1", 0)), socket.socket()
    q._before, q._of_group = quorum._sockets() - {s for s in quorum._sockets() if s.split()[0] in (str(ours.fileno()), str(listener.fileno()))}, None
    ours.connect(listener.getsockname())
    other, _ = listener.accept()
    threading.Timer(0.2, q._disconnect).start()
    assert ours.recv(1) == b""
    socket.create_connection(listener.getsockname()).close()  # it still listens
    for s in (listener, ours, other):
        s.close()


def test_a_store_that_is_not_there_is_said():
    layout = Layout(elastic=True, step_timeout=1.0, timeout=2.0)
    with pytest.raises(EnvironmentFault, match=r"store was not reached at 127\.0\.0\.1:9"):
        Quorum(World(0, 2, 0, 2, "test", "127.0.0.1", 9), layout)


@pytest.mark.slow  # starts a program
def test_the_store_of_a_script_hears_of_deaths_and_ends_with_the_run_or_the_script():
    """At a free port: who has read it writes who died, and sees by the exit code that nobody is left who has the weights."""
    command = [sys.executable, "-m", "gradus.parallel.quorum", "0"]
    for orphaned, code in ((True, LOST), (False, 0)):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            port = int(program.stdout.readline().rpartition(":")[2])
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))
            assert store.add("started/1", 2) == 2
            print("1 ended with exit code 137", file=program.stdin, flush=True)
            store.wait(["gone/1.2"])
            assert store.get("gone/1.2") == b"ended with exit code 137"
            if orphaned:
                store.set("orphaned", "")
            else:
                program.stdin.close()
            assert program.wait(60) == code
