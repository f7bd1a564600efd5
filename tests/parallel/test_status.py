"""Records of where each process stands, and the sentences made from them."""

# ruff: noqa: E402

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1])]  # also in the processes that a test starts
import distributed

from gradus.errors import UserError
from gradus.parallel import status
from gradus.parallel.status import LOST, Status, diagnose, lost, read
from gradus.parallel.world import World, free_port

HOST = re.escape(socket.gethostname())


def put(folder, rank: int, what: str, step: int | None = 37, *, ago: float = 31.0, pid: int = 2**22 + 5, host: str = "far", lost=False, count=100):
    """A record as another host's process left it."""
    record = {"rank": rank, "pid": pid, "host": host, "count": count, "step": step, "time": time.time() - ago, "what": what}
    path = status.record_path(folder, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record | ({"lost": True} if lost else {})))


def test_a_record_is_rewritten_in_place(tmp_path):
    here = Status(tmp_path, World(1, 2))
    assert read(tmp_path, 1).place == ("before the first step", "starting")
    here.at("the gradient all-reduce", 37)
    here.at("reading data")
    path = status.record_path(tmp_path, 1)
    assert path.name == "rank-0001.json" and path.stat().st_size == status.SIZE
    record = read(tmp_path, 1)
    assert (record.rank, record.pid, record.host) == (1, os.getpid(), socket.gethostname())
    assert (record.step, record.what, record.count) == (37, "reading data", 3) and abs(record.time - time.time()) < 5
    here.close()
    assert read(tmp_path, 1).what == "done"
    again = Status(tmp_path, World(1, 2))  # a resume
    assert read(tmp_path, 1).step is None
    again.close()


def test_the_longest_record_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 100)
    here = Status(tmp_path, World(9_999, 10_000))
    here.count = 10**9
    here.at("x" * 64, 10**8)
    assert read(tmp_path, 9_999).step == 10**8
    status._leave_word(tmp_path, 9_999, RuntimeError("Timed out waiting 86400000ms for recv"), lost=True)
    assert read(tmp_path, 9_999).lost and status.record_path(tmp_path, 9_999).stat().st_size == status.SIZE
    with pytest.raises(AssertionError):
        here.at("x" * 65)
    here.close()


def test_one_process_keeps_no_record(tmp_path):
    here = Status(tmp_path, World())
    here.at("reading data", 1)
    here.close()
    assert not list(tmp_path.iterdir())


def test_a_record_costs_microseconds(tmp_path):
    here, best = Status(tmp_path, World(0, 2)), 1.0
    for _ in range(20):
        start = time.perf_counter()
        for step in range(100):
            here.at("reading data", step)
        best = min(best, (time.perf_counter() - start) / 100)
    here.close()
    assert best < 500e-6


def test_a_rank_that_died(tmp_path):
    put(tmp_path, 0, "the gradient all-reduce", lost=True)
    put(tmp_path, 1, "the gradient all-reduce", host="node7")
    text = diagnose(tmp_path, 2, {0: LOST, 1: -9})
    assert text.startswith("rank 1 on node7 was killed by SIGKILL (exit code -9) at step 37 while in the gradient all-reduce")
    assert "killed by SIGSEGV (exit code -11)" in diagnose(tmp_path, 2, {0: LOST, 1: -11})
    status.log_path(tmp_path, 1).write_text("\n".join(f"line {i}" for i in range(30)) + "\n\nRuntimeError: no\n")
    text = diagnose(tmp_path, 2, {0: LOST, 1: 1})
    assert text.startswith("rank 1 on node7 ended with exit code 1 at step 37 while in the gradient all-reduce; the last lines it wrote:\n  line 19\n")
    assert text.endswith("  RuntimeError: no")


def test_the_cause_is_told_from_its_effects(tmp_path):
    for rank in range(4):
        put(tmp_path, rank, "the gradient all-reduce")
    put(tmp_path, 2, "reading data", count=99)
    status.log_path(tmp_path, 1).write_text("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234\n")
    status.log_path(tmp_path, 3).write_text("KeyError: 'text'\n")
    assert diagnose(tmp_path, 4, {0: LOST, 1: 1, 2: None, 3: 1}).startswith("rank 3 on far ended with exit code 1")
    assert diagnose(tmp_path, 4, {0: 1, 1: 1, 2: -9, 3: 1}).startswith("rank 2 on far was killed by SIGKILL")
    assert ", and so did rank 2;" in diagnose(tmp_path, 4, {0: LOST, 1: -15, 2: -15, 3: 1}) + ";"
    assert status.died(tmp_path, {0: LOST, 1: 2, 2: 1, 3: 1}) == [1]


def test_a_rank_that_hangs(tmp_path):
    put(tmp_path, 0, "the gradient all-reduce", ago=30, lost=True)
    put(tmp_path, 2, "the gradient all-reduce", ago=30, lost=True)
    put(tmp_path, 1, "reading data", host="node7", count=99)
    wanted = (
        "rank 1 on node7 did not reach the gradient all-reduce of step 37: it was last seen 31 s ago at step 37 reading data."
    )
    assert diagnose(tmp_path, 3, {0: LOST, 1: None, 2: LOST}) == wanted
    assert diagnose(tmp_path, 3) == wanted, "also where there is no parent"


def test_the_watchdog_of_nccl(tmp_path):
    """It ends with SIGABRT those that waited, not the one that they waited for."""
    put(tmp_path, 0, "the gradient all-reduce", ago=30)
    put(tmp_path, 1, "reading data", count=99)
    put(tmp_path, 2, "the gradient all-reduce", ago=30)
    status.log_path(tmp_path, 2).write_text("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, Timeout(ms)=30000)\n")
    assert diagnose(tmp_path, 3, {0: -6, 1: None, 2: -6}).startswith("rank 1 on far did not reach the gradient all-reduce of step 37")
    status.log_path(tmp_path, 1).write_text("double free or corruption\n")
    assert diagnose(tmp_path, 3, {0: LOST, 1: -6, 2: LOST}).startswith("rank 1 on far was killed by SIGABRT")


def test_other_ends(tmp_path):
    put(tmp_path, 0, "the gradient all-reduce", lost=True)
    assert diagnose(tmp_path, 3, {0: LOST, 1: None, 2: None}).startswith("ranks 1 and 2 never wrote a record")
    put(tmp_path, 1, "the gradient all-reduce", ago=5)
    put(tmp_path, 2, "the gradient all-reduce", ago=5)
    assert "rank 1 on far did not leave the gradient all-reduce of step 37: it was last seen 5 s ago" in diagnose(tmp_path, 3, {0: LOST, 1: None, 2: None})
    put(tmp_path, 1, "done", 36)
    assert "rank 1 on far did not reach the gradient all-reduce of step 37: it was last seen 31 s ago at step 36 done." in diagnose(tmp_path, 2, {0: LOST, 1: 0})
    put(tmp_path, 0, "the gradient all-reduce", lost=True, ago=35)
    put(tmp_path, 1, "the gradient all-reduce", lost=True, ago=2)
    assert diagnose(tmp_path, 2).startswith("rank 1 on far did not leave the gradient all-reduce of step 37"), "it came when the others had given up"
    # PyTorch 2.13's own words, under layout.timeout=1
    status.error_path(tmp_path, 0).write_text("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 1000ms for send operation to complete\n")
    assert diagnose(tmp_path, 2).endswith(" rank 0 on far waited 1 s (layout.timeout), after which a process counts as lost."), "no traceback of gloo"


def test_a_process_of_this_host_that_is_gone(tmp_path):
    """Without a parent, the table of processes tells."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    put(tmp_path, 0, "the gradient all-reduce", lost=True)
    put(tmp_path, 1, "the gradient all-reduce", pid=gone.pid, host=status.host())
    assert re.match(rf"rank 1 on {HOST} is gone \(its process {gone.pid} has ended\) at step 37 while in the gradient all-reduce", diagnose(tmp_path, 2))


@pytest.mark.parametrize("text", [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:39485",
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete",
    "[gloo/transport/tcp/pair.cc:525] Read error [10.0.0.3]:5: Connection reset by peer",
    "Application timeout caused pair closure",
    "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
    "NCCL error in: ProcessGroupNCCL.cpp:268, remote process exited or there was a network error, ncclRemoteError: A call failed",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600001 ms",
    "wait timeout after 300000ms, keys: /worker/1",
])  # fmt: skip
def test_errors_that_speak_of_peers(text):
    assert status.speaks_of_peers(text)


def test_other_errors_are_left_workers(tmp_path):
    here = Status(tmp_path, World(0, 2))
    gloo = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:39485"
    for error in (
        RuntimeError("shape mismatch"), ValueError("Connection closed by peer"), UserError("no such file"), KeyError("x"), ConnectionResetError(gloo),
        BrokenPipeError("Broken pipe"), TimeoutError("wait timeout after 5ms"), UserError(gloo), RuntimeError(gloo), dist.DistNetworkError(gloo),
    ):  # fmt: skip  (the last two: not raised by PyTorch, but here)
        try:
            raise error
        except Exception as e:
            assert lost(tmp_path, e, World(0, 2)) is None
    with pytest.raises(ZeroDivisionError), status.watched(tmp_path, World(0, 2)):
        raise ZeroDivisionError
    assert not read(tmp_path, 0).lost
    assert lost(tmp_path, RuntimeError("Connection closed by peer"), World()) is None
    here.close()


def test_an_error_of_its_own_is_kept(tmp_path):
    """Its traceback and its exit code; that of an earlier start stays too."""
    for start in range(3):
        here = Status(tmp_path, World(1, 2))
        with pytest.raises(ConnectionResetError), status.watched(tmp_path, World(1, 2)):
            raise ConnectionResetError(f"Connection reset by peer {start}")
        here.close()
    kept = {p.name: p.read_text() for p in (tmp_path / "ranks").glob("*.error*")}
    assert sorted(kept) == ["rank-0001.error", "rank-0001.error.1", "rank-0001.error.2"]
    for name, start in (("rank-0001.error.1", 0), ("rank-0001.error.2", 1), ("rank-0001.error", 2)):
        assert kept[name].startswith("Traceback") and kept[name].endswith(f"ConnectionResetError: Connection reset by peer {start}\n")
    status.clear(tmp_path)
    assert sorted(p.name for p in (tmp_path / "ranks").iterdir()) == [f"rank-0001.error.{n}" for n in (1, 2, 3)]


def test_torchrun_is_told_which_error_ended_a_rank(tmp_path, monkeypatch):
    """torchrun's own reader of the file finds it, and in it the error; a rank that lost another tells it nothing."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    here = Status(tmp_path, World(1, 2))
    with pytest.raises(ZeroDivisionError), status.watched(tmp_path, World(1, 2)):
        raise ZeroDivisionError("no samples")
    here.close()
    failure = ProcessFailure(local_rank=1, pid=os.getpid(), exitcode=1, error_file=str(tmp_path / "error.json"))
    assert failure.message["message"] == "ZeroDivisionError: no samples"
    assert 'raise ZeroDivisionError("no samples")' in failure.message["extraInfo"]["py_callstack"]


def test_what_passes_is_no_error(tmp_path):
    here = Status(tmp_path, World(1, 2))
    with pytest.raises(StopIteration), status.watched(tmp_path, World(1, 2), passing=(StopIteration,)):
        raise StopIteration
    assert not list(tmp_path.glob("ranks/*.error")) and read(tmp_path, 1).code is None
    here.close()


def test_the_rank_that_failed_first_is_named_first(tmp_path):
    for rank in range(3):
        put(tmp_path, rank, "reading data")
        status.log_path(tmp_path, rank).write_text(f"OSError of rank {rank}: Connection reset by peer\n")
    for rank, at in ((1, 2000), (2, 1000)):
        status.error_path(tmp_path, rank).write_text("Traceback\n")
        os.utime(status.error_path(tmp_path, rank), (at, at))
    text = diagnose(tmp_path, 3, {0: LOST, 1: 1, 2: 74})
    assert text.startswith("rank 2 on far ended with exit code 74 at step 37 while reading data, and so did rank 1; the last lines it wrote:\n")
    assert text.endswith("  OSError of rank 2: Connection reset by peer")
    assert diagnose(tmp_path, 3, {0: LOST, 1: 1, 2: -6}).startswith("rank 1 on far ended with exit code 1"), "an abort may follow from it"


def test_the_connection_itself_failed(tmp_path):
    """No rank is gone and none is late: all gave up, and the error that came first is shown."""
    for rank, at in ((0, 2000), (1, 1000)):
        put(tmp_path, rank, "the gradient all-reduce", lost=True)
        status.error_path(tmp_path, rank).write_text(f"Traceback\nRuntimeError: [gloo] Connection reset, seen by {rank}\n")
        os.utime(status.error_path(tmp_path, rank), (at, at))
    for codes in ({0: LOST, 1: LOST}, None):
        assert diagnose(tmp_path, 2, codes).endswith("\nThe first error, of rank 1 on far:\n  Traceback\n  RuntimeError: [gloo] Connection reset, seen by 1")


def _meet(world: World, folder: str, who: int):
    """What this rank makes of it when `who` is late for the third all-reduce: (code, text)."""
    here = Status(folder, world)
    dist.all_reduce(torch.zeros(1))  # all are there before the short time begins
    group = dist.new_group(timeout=datetime.timedelta(seconds=1.5))
    try:
        for step in range(1, 10):
            here.at("reading data", step)
            if step == 3 and world.rank == who:
                time.sleep(4.5)
                return None
            here.at("the gradient all-reduce")
            dist.all_reduce(torch.ones(3), group=group if step == 3 else None)  # before it, a slow machine may take its time
    except RuntimeError as e:
        return lost(folder, e, world, patience=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 2])
def test_without_a_parent_the_others_name_the_rank_that_hangs(tmp_path, who):
    answers = distributed.run(3, _meet, str(tmp_path), who)
    (text,) = [a[1] for rank, a in enumerate(answers) if rank != who and a[1]]  # one of the others tells the user
    assert re.match(rf"rank {who} on {HOST} did not reach the gradient all-reduce of step 3: it was last seen [1-9]\d? s ago at step 3 reading data", text)


WORKER = """
import os, signal, sys
import torch, torch.distributed as dist
from gradus.parallel import world as worlds
from gradus.parallel.status import Status, watched
here = worlds.find()
worlds.join(here, timeout=120)
status = Status(sys.argv[1], here)
with watched(sys.argv[1], here):
    for step in range(1, 10):
        status.at("forward and backward", step)
        if step == 3 and here.rank == int(sys.argv[2]):
            if sys.argv[3:]:
                raise ConnectionResetError(104, "Connection reset by peer")
            os.kill(os.getpid(), signal.SIGKILL)
        status.at("the gradient all-reduce")
        dist.all_reduce(torch.ones(3))
"""


def _workers(folder: Path, *argv: str) -> tuple[list[subprocess.Popen], list[str]]:
    """Three workers without a parent, ended, and what each wrote to standard error."""
    port, processes = str(free_port()), []
    for rank in range(3):
        variables = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", WORKER, str(folder), *argv]
        processes.append(subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True))
    return processes, [p.communicate(timeout=300)[1] for p in processes]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 2])
def test_without_a_parent_the_others_name_the_rank_that_died(tmp_path, who):
    processes, errors = _workers(tmp_path, str(who))
    assert [p.returncode for p in processes] == [-9 if rank == who else LOST for rank in range(3)], errors
    said = [error for error in errors if error]
    assert len(said) == 1 and re.match(
        rf"error: rank {who} on {HOST} is gone \(its process {processes[who].pid} has ended\) at step 3 while forward and backward\n$", said[0]
    ), errors


def test_without_a_parent_all_end_with_the_code_of_the_rank_that_failed(tmp_path):
    """srun and mpirun give one code for all: that of a fault of the machine must be known by it."""
    processes, errors = _workers(tmp_path, "1", "raise")
    # Python's own end, in this stand-in, is 1, or an abort where a thread of gloo's is still at work
    assert [p.returncode for p in processes] in ([74, 1, 74], [74, -6, 74]), errors
    assert "Traceback" in errors[1] and "ConnectionResetError: [Errno 104] Connection reset by peer\n" in errors[1]
    said = [error for error in (errors[0], errors[2]) if error]
    assert len(said) == 1 and re.match(rf"error: rank 1 on {HOST} ended with exit code 74 at step 3 while forward and backward", said[0]), errors
