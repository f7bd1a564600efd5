"""Workers that die, hang, err or are told to stop: the run ends, says why in one sentence, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradus.errors import UserError
from gradus.launch import local
from gradus.parallel import status

HOST = re.escape(socket.gethostname())

# a stand-in for a training process; what happens to whom in which attempt is told by its arguments
WORKER = '''
import os, signal, sys, time, traceback
from pathlib import Path
from types import SimpleNamespace
from gradus.errors import exit_code
from gradus.parallel.processes import end_with_parent
end_with_parent()
from gradus.parallel.status import Status, watched
folder, what, who = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
world = SimpleNamespace(rank=rank, size=size, first=rank == 0)
mine = str(rank) in who
(folder / f"pid-{rank}-{restart}").write_text(str(os.getpid()))
if rank == 0:
    print("rank 0 says", *sys.argv[4:])
else:
    print("rank 1 on standard output")
up = f"up-{os.environ['MASTER_PORT']}"  # of this attempt
(folder / f"{up}-{rank}").write_text("")
while what != "early" and len(list(folder.glob(f"{up}-*"))) < size:  # once one has ended, the launcher gives the others a second only
    time.sleep(0.01)

if what == "user":
    if mine:
        print("error: data.train=x: no such file. Give another.", file=sys.stderr)
        os._exit(2)
    time.sleep(30)
if what == "early" and mine:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "environment":
    print(os.environ["OMP_NUM_THREADS"], os.environ["PYTHONUNBUFFERED"], os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"])
    os._exit(0)
if what in ("wait", "deaf"):
    def save(number, frame):
        time.sleep(0.2)
        (folder / f"saved-{rank}").write_text(str(number))
        os._exit(128 + number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, save if what == "wait" else lambda number, frame: None)
    (folder / f"ready-{rank}").write_text("")
    time.sleep(60)
if what == "restart":
    if restart == 0 and mine:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30 if restart == 0 else 0)
    print("attempt", restart, sys.argv[4:])
    os._exit(0)
if what == "fault":
    if mine and restart < 2:
        print("error: run/metrics.jsonl: the disk is full (0.00 GB free): free some space.", file=sys.stderr)
        os._exit(74)
    time.sleep(30 if restart < 2 else 0)
    os._exit(0)
if what == "diverged":
    Status(folder, world).close()
    if rank == 0:
        print("error: run: its logits are not finite", file=sys.stderr)
    os._exit(1)
if what == "raise":
    Status(folder, world).at("reading data", 37)
    if mine:
        raise ValueError("row 12 of train.parquet is not text")
    time.sleep(30)

import torch, torch.distributed as dist
from gradus.parallel import world as worlds
here = worlds.find()
(folder / f"here-{rank}-{restart}").write_text("")
while len(list(folder.glob(f"here-*-{restart}"))) < size:  # one may import far longer than the other: not what is waited for here
    time.sleep(0.01)
worlds.join(here, timeout=3 if what == "stop" else 60)
status = Status(folder, here)
with watched(folder, here):
    for step in range(1, 100):
        status.at("reading data", step)
        if step == 37 and mine:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "data":  # what a data set says that is read over a network
                sys.excepthook = lambda *error: (traceback.print_exception(*error), sys.stderr.flush(), os._exit(exit_code(error[1])))
                raise ConnectionResetError(f"Connection reset by peer, in start {restart}")
        status.at("the gradient all-reduce")
        if step == 38 and mine and what == "inside":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))
status.close()
worlds.leave(0)
'''


@pytest.fixture
def case(tmp_path, capfd):
    """run(what, ranks) → (exit code, standard output, standard error); checks that no worker is left."""
    worker, folder = tmp_path / "worker.py", tmp_path / "run"
    worker.write_text(WORKER)
    folder.mkdir()

    def run(what: str, who: str, *argv: str, n: int = 2, grace: float = 1.0, **more) -> tuple[int, str, str]:
        arguments = [str(folder), what, who, *argv]
        code = local.run(n, arguments, folder=folder, timeout=10, command=(sys.executable, str(worker)), grace=grace, **more)
        out, error = capfd.readouterr()
        assert not alive(folder)
        return code, out, error

    return run


def alive(folder: Path) -> list[int]:
    """The workers of that folder that still run."""
    found = []
    for file in folder.glob("pid-*"):
        try:
            state = Path(f"/proc/{file.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(int(file.read_text()))
    return found


def test_all_goes_well_and_what_a_worker_is_told(case, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code, out, error = case("environment", "", "$HOME", "a b")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert code == 0 and error == "" and out.splitlines() == ["rank 0 says $HOME a b", f"{share} 1 0 127.0.0.1"]


@pytest.mark.slow
def test_a_rank_is_killed(case):
    """The first; of the second test_a_rank_is_killed_in_a_collective tells."""
    code, _, error = case("kill", "0")
    assert code == 1
    assert re.match(rf"error: rank 0 on {HOST} was killed by SIGKILL \(exit code -9\) at step 37 while reading data\. If nobody killed", error)
    assert error.count("\n") == 1


def test_a_run_that_came_to_its_end_and_diverged_is_not_started_again(case):
    code, out, error = case("diverged", "", max_restarts=2)
    assert (code, error) == (1, "error: run: its logits are not finite\n") and out.count("rank 0 says") == 1


def test_a_rank_is_killed_in_a_collective(case):
    code, _, error = case("inside", "1")
    assert code == 1 and "rank 1" in error and "at step 38 while in the gradient all-reduce" in error


@pytest.mark.slow
def test_a_rank_is_killed_before_it_came_anywhere(case):
    code, _, error = case("early", "1")
    assert code == 1 and re.match(rf"error: rank 1 on {HOST} was killed by SIGKILL \(exit code -9\) while starting", error)


@pytest.mark.slow
def test_a_rank_ends_with_a_traceback(case):
    code, _, error = case("raise", "1")
    assert code == 1
    assert re.match(rf"error: rank 1 on {HOST} ended with exit code 1 at step 37 while reading data; the last lines it wrote:\n", error)
    assert error.rstrip().endswith("ValueError: row 12 of train.parquet is not text") and error.count("Traceback") == 1
    code, _, error = case("raise", "0")
    assert error.count("Traceback") == 1, "rank 0 writes it itself"
    assert error.rstrip().splitlines()[-1] == f"error: rank 0 on {socket.gethostname()} ended with exit code 1 at step 37 while reading data"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_hangs(case, rank):
    code, _, error = case("stop", str(rank))
    assert code == 1
    assert re.match(
        rf"error: rank {rank} on {HOST} did not reach the gradient all-reduce of step 37: it was last seen (?:[3-9]|\d\d) s ago at step 37 reading data\.( rank {1 - rank} on {HOST} waited 3 s \(layout\.timeout\), after which a process counts as lost\.)?\n$",
        error,
    ), error


@pytest.mark.slow
@pytest.mark.parametrize("who", ["01", "0", "1"])
def test_a_mistake_of_the_user_is_said_once(case, who):
    code, _, error = case("user", who, max_restarts=3)
    start = f"rank 1 on {socket.gethostname()}: " if who == "1" else ""
    assert (code, error) == (2, f"error: {start}data.train=x: no such file. Give another.\n")


def test_a_restart_goes_on(case):
    code, out, error = case("restart", "1", max_restarts=2, again=("--again",))
    assert code == 0 and out.splitlines() == ["rank 0 says", "rank 0 says --again", "attempt 1 ['--again']"]
    first, second = error.splitlines()
    assert "rank 1" in first and "SIGKILL" in first and second == "starting again from the last checkpoint: 1 of 2"


@pytest.mark.slow
@pytest.mark.parametrize("who", ["0", "1", "01"])
def test_a_fault_of_the_machine_is_started_again(case, who):
    code, _, error = case("fault", who, max_restarts=2)
    assert code == 0 and error.count("the disk is full") == 2 and error.count("starting again") == 2
    assert case("fault", who, max_restarts=0)[0] == 74, "and its code is kept when restarts run out"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "starts"), [(0, 1), (1, 2)])
def test_an_error_of_the_data_is_no_lost_rank(case, tmp_path, rank, starts):
    """Whatever its words. The error that came first is shown, and kept of each start."""
    code, _, error = case("data", str(rank), max_restarts=starts - 1, grace=10.0)  # the other notices at once, and writes what it saw
    assert code == 74 and "did not reach" not in error and error.count("Traceback") >= starts
    for start in range(starts):
        assert f"ConnectionResetError: Connection reset by peer, in start {start}\n" in error
    told = re.findall(rf"error: rank {rank} on {HOST} ended with exit code 74 at step 37 while reading data", error)
    assert len(told) == starts or rank == 0, "rank 0 says it itself, where there is time"
    ranks = tmp_path / "run" / "ranks"
    for start, last in zip(reversed(range(starts)), ("", ".1")):  # the newest has the plain name
        kept = (ranks / f"rank-000{rank}.error{last}").read_text()
        assert kept.startswith("Traceback") and kept.endswith(f"in start {start}\n")
    other = (ranks / f"rank-000{1 - rank}.error").read_text()
    assert "gloo" in other, "that of the rank that only lost the other, too"


WHOLE = """
import os
from gradus.data import loader
if os.environ["RANK"] == "1":
    original, asked = loader._Fetch.sample, []
    def sample(self, index, epoch):
        asked.append(index)
        if len(asked) > 30:
            raise ConnectionResetError("Connection reset by peer")
        return original(self, index, epoch)
    loader._Fetch.sample = sample
from gradus.proof import prove
prove.Planner = None
from gradus.__main__ import main
main()
"""


@pytest.mark.slow
def test_a_whole_run_whose_data_fail_on_one_rank(tmp_path, capfd):
    (tmp_path / "worker.py").write_text(WHOLE)
    folder = tmp_path / "runs" / "a"
    words = ["train", "copy-task", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8"]
    words += ["schedule.warmup_steps=2", "batch.samples=16", "train.steps=4", "layout.device=cpu", f"log.dir={folder}"]
    code = local.run(2, words, folder=folder, timeout=60, command=(sys.executable, str(tmp_path / "worker.py")))
    error = capfd.readouterr().err
    assert code == 74, error
    assert re.search(rf"error: rank 1 on {HOST} ended with exit code 74 at step \d while reading data; the last lines it wrote:\n", error), error
    assert "ConnectionResetError: Connection reset by peer" in error and "did not reach" not in error
    kept = (folder / "ranks" / "rank-0001.error").read_text()
    assert "raise ConnectionResetError" in kept and "OSError" in kept, "the traceback inside the data, and that of the run"


@pytest.mark.slow
def test_restarts_run_out(case):
    code, _, error = case("early", "1", max_restarts=1)
    assert code == 1 and error.count("SIGKILL") == 2 and error.count("starting again") == 1


def test_nothing_is_left_of_a_run_that_came_to_nothing(tmp_path, capfd):
    folder = tmp_path / "runs" / "copy" / "1"
    command = (sys.executable, "-c", "import sys; print('error: no', file=sys.stderr); sys.exit(2)")
    assert local.run(2, [], folder=folder, timeout=5, command=command, grace=1.0) == 2
    assert capfd.readouterr().err == "error: no\n" and not (tmp_path / "runs").exists()


def start(tmp_path: Path, what: str) -> subprocess.Popen:
    """A parent of two workers, when both are ready."""
    (tmp_path / "worker.py").write_text(WORKER)
    code = (
        "import sys; from gradus.launch import local; from pathlib import Path; "
        f"sys.exit(local.run(2, [{str(tmp_path)!r}, {what!r}, ''], folder=Path({str(tmp_path)!r}), timeout=20, grace=0.5, "
        f"command=(sys.executable, {str(tmp_path / 'worker.py')!r})))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert time.monotonic() < end and parent.poll() is None, parent.communicate()
        time.sleep(0.02)
    return parent


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on_and_workers_save(tmp_path, number):
    parent = start(tmp_path, "wait")
    parent.send_signal(number)
    _, error = parent.communicate(timeout=60)
    assert parent.returncode == 128 + number and error == ""
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2
    assert not alive(tmp_path)


@pytest.mark.slow
def test_a_second_signal_ends_workers_that_do_not_listen(tmp_path):
    """Whom it waits for is said before, and how to resume after it."""
    number = signal.SIGINT
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    parent = start(tmp_path, "deaf")
    parent.send_signal(number)
    time.sleep(0.8)
    assert parent.poll() is None and len(alive(tmp_path)) == 2, "they have their time to save"
    said = parent.stderr.readline() + parent.stderr.readline()
    assert re.match(r"\nstopping: the processes have 20 s .* to save and end; ranks 0 and 1 .* A second signal ends all of them\.", said)
    parent.send_signal(number)
    _, error = parent.communicate(timeout=60)
    assert error == f"Resume from the last checkpoint with: gradus train {tmp_path} --resume --processes 2\n"
    assert parent.returncode == 128 + number and not alive(tmp_path)


def test_workers_do_not_outlive_a_parent_that_was_killed(tmp_path):
    parent = start(tmp_path, "deaf")
    assert len(alive(tmp_path)) == 2
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 30
    while alive(tmp_path) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(tmp_path)


def test_words_that_make_no_sense(monkeypatch):
    told = {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="torchrun started this, as process 1 of 4"):
        local.train(2, "copy-task", [])


def test_the_command_line(capsys):
    from gradus.cli import main

    for word, least in (("--processes=0", 1), ("--max-restarts=-1", 0)):
        assert main(["train", "copy-task", word]) == 2
        assert f"{word}: must be at least {least}" in capsys.readouterr().err
    assert main(["train", "copy-task", "--max-restarts", "2"]) == 2
    assert "--max-restarts has no effect without --processes" in capsys.readouterr().err
    assert main(["train", "copy-task", "--resume", "--auto-resume", "--processes", "2"]) == 2
    assert "Give one of them." in capsys.readouterr().err
    assert main(["train", "copy-task", "--processes", "2", "layout.timeout=1e30"]) == 2
    assert "layout.timeout: 1e30 is more than a plausible size: at most 10,000,000." in capsys.readouterr().err
    assert main(["train", "copy-task", "--processes", "2", "optimizer.lrr=1"]) == 2
    assert json.dumps(capsys.readouterr().err).count("error:") == 1


def test_workers_import_nothing_from_the_working_folder(tmp_path, monkeypatch):
    from gradus.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # so that it is put back afterwards
    monkeypatch.delenv("PYTHONSAFEPATH")
    Path("colorsys.py").write_text("raise SystemExit(3)")
    command = (sys.executable, "-m", "colorsys")  # Python's own does nothing
    assert local.run(1, [], folder=tmp_path / "a", timeout=10, command=command) == 1
    assert main(["recipes"]) == 0
    assert local.run(1, [], folder=tmp_path / "b", timeout=10, command=command) == 0


def test_a_worker_knows_what_the_user_typed(tmp_path, monkeypatch, capfd):
    """A report shows it; a worker's own command lacks --processes."""
    monkeypatch.setattr(sys, "argv", ["gradus", "train", "copy-task", "--processes", "2"])
    told = "import sys; from gradus.parallel.status import typed; sys.argv[1:] = ['train', 'copy-task', 'log.dir=x']; print(typed('train'))"
    assert local.run(2, [], folder=tmp_path, timeout=10, command=(sys.executable, "-c", told)) == 0
    assert capfd.readouterr().out == "gradus train copy-task --processes 2\n"
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert status.typed("train") is None


def test_how_to_go_on_with_a_run_that_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(local, "attempt", lambda *_: (1, None))
    for saved in (False, True):
        if saved:
            (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
        assert local.train(2, "copy-task", [f"log.dir={tmp_path}"]) == 1
        told = f"Resume from the last checkpoint with: gradus train {tmp_path} --resume --processes 2\n"
        assert capsys.readouterr().err == (told if saved else "")


@pytest.mark.parametrize(("codes", "started"), [([2], 1), ([0], 1), ([1, 1, 1, 1], 3), ([1, 0], 2), ([74, 74, 0], 3)])
def test_what_is_started_again_and_what_is_not(codes, started, tmp_path, monkeypatch, capsys):
    """A user's mistake would be made again; a fault may pass. `attempt` gives each attempt's exit code and what it has to tell."""
    tries = []
    monkeypatch.setattr(local, "attempt", lambda *arguments: tries.append(arguments) or (codes[len(tries) - 1], "what went wrong" if codes[len(tries) - 1] else None))
    code = local.run(2, [], folder=tmp_path / "run", timeout=1.0, max_restarts=2)
    assert len(tries) == started and code == codes[started - 1]
    assert capsys.readouterr().err.count("starting again") == started - 1
