"""The batch script, and a real Slurm: two nodes on this machine, started and stopped by the test."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradus.cli import main
from gradus.launch import slurm
from gradus.parallel.world import World, find, free_port

TINY = [
    "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.n_layers=1", "data.n_train=2000", "data.n_valid=32", "evaluate.every=100", "batch.samples=16",
]  # fmt: skip


def dry(tmp_path: Path, capsys, *words: str) -> str:
    """The script that is written for these words."""
    assert main(["launch", "slurm", "copy-task", "log.dir=RUN", "-D", str(tmp_path), "--venv", "none", "--dry-run", *words]) == 0
    printed = capsys.readouterr().out
    text = (tmp_path / "RUN" / "job.sbatch").read_text()
    assert text in printed
    subprocess.run(["bash", "-n", tmp_path / "RUN" / "job.sbatch"], check=True)
    return text


# ---------------------------------------------------------------- the script


def test_the_script(tmp_path, capsys):
    """As it is with the options of a first job: read it and know what will happen."""
    text = dry(tmp_path, capsys, "--nodes", "2", "--gpus", "4", "--time", "01:00:00", "--partition", "P", "-c", "10", "--module", "cuda/12.4", "--offline")
    assert text == f"""\
#!/bin/bash
#SBATCH --job-name=copy-task
#SBATCH --chdir={tmp_path}
#SBATCH --output=RUN/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=10
#SBATCH --gres=gpu:4
#SBATCH --time=01:00:00
#SBATCH --partition=P
#SBATCH --signal=USR1@120
#SBATCH --requeue

module purge
module load cuda/12.4
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export OMP_NUM_THREADS=10

echo "gradus: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${{SLURM_RESTART_COUNT:-0}} + 1))"
srun --kill-on-bad-exit=1 --cpus-per-task=10 gradus train copy-task log.dir=RUN --auto-resume
code=$?
if [ "$code" -eq 138 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 100 ]; then
    echo "gradus: job $SLURM_JOB_ID got USR1 and saved; requeued, to resume from there"
    scontrol requeue "$SLURM_JOB_ID" && exit
fi
if [ "$code" -eq 74 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 100 ]; then
    echo "gradus: job $SLURM_JOB_ID hit a fault of the machine; requeued, to resume from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID" && exit
fi
[ "$code" -eq 0 ] && echo "gradus: job $SLURM_JOB_ID finished"
exit "$code"
"""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--job-name", "a 'b' #c"], "#SBATCH --job-name='a '\"'\"'b'\"'\"' #c'"),
        (["--output", "logs/%j.out"], "#SBATCH --output=logs/%j.out"),
        (["--error", "logs/%j.err"], "#SBATCH --error=logs/%j.err"),
        (["--ntasks-per-node", "2"], "#SBATCH --ntasks-per-node=2"),
        (["-n", "8", "-N", "4"], "#SBATCH --ntasks=8"),
        (["--gpus", "a100:2"], "#SBATCH --gres=gpu:a100:2"),
        (["--account", "A"], "#SBATCH --account=A"),
        (["--qos", "Q"], "#SBATCH --qos=Q"),
        (["--directive", "mem=64G"], "#SBATCH --mem=64G"),
        (["--directive=--exclusive"], "#SBATCH --exclusive"),
        (["--signal", "TERM@60"], "#SBATCH --signal=TERM@60"),
        (["--signal", "TERM@60"], 'if [ "$code" -eq 143 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then'),
        (["--setup", "ulimit -n 4096"], "ulimit -n 4096"),
        (["train.steps=60", "--gpus", "2"], "srun --kill-on-bad-exit=1 gradus train copy-task train.steps=60 log.dir=RUN --auto-resume"),
        (["--gpus", "2", "--container", "my image.sif"], "srun --kill-on-bad-exit=1 apptainer exec --nv 'my image.sif' gradus train copy-task log.dir=RUN --auto-resume"),
        (["--container", "a.sif", "--container-command", "singularity exec"], "srun --kill-on-bad-exit=1 singularity exec a.sif gradus train copy-task log.dir=RUN --auto-resume"),
    ],
)  # fmt: skip
def test_an_option_is_a_line(tmp_path, capsys, words, line):
    assert line in dry(tmp_path, capsys, *words).splitlines()


@pytest.mark.parametrize("verb", [["slurm", "--dry-run", "--gpus", "a100:2"], ["modal", "--to", "app.py", "--gpu", "A100:2"], ["ssh", "--processes", "2"]])
def test_a_dry_run_prints_the_plan_and_what_is_missing(tmp_path, capsys, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    words = ["shakespeare-char-gpt", "data.path=input.txt", "model.vocab_size=65", "model.init=org/name"]
    assert main(["launch", *verb, *words]) == 0
    printed = " ".join(capsys.readouterr().out.replace("# ", "").split())
    assert "note: data.path=input.txt: missing: no such file or folder here" in printed
    assert "model.init=org/name: no such file or folder here, so it is taken from the hub; for a machine without internet: gradus fetch" in printed
    (tmp_path / "input.txt").write_text("To be, or not to be. " * 200)
    capsys.readouterr()
    assert main(["launch", *verb, "shakespeare-char-gpt", "data.path=input.txt", *TINY[:4], "log.dir=RUN"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("# ", "").split())
    assert "missing" not in printed and "the plan: shakespeare-char-gpt: " in printed
    on = "on which devices is not known here: gradus plan" if verb[0] == "ssh" else "on 2 × A100-80GB"
    assert on in printed and ("fits" in printed) == (verb[0] != "ssh")


def test_without_a_signal_nothing_is_requeued(tmp_path, capsys):
    text = dry(tmp_path, capsys, "--signal", "none")
    assert "scontrol" not in text and "--requeue" not in text and "--signal" not in text


def test_the_environment_of_the_command_is_that_of_the_job(tmp_path, capsys):
    """Without --venv, the one this command runs in is activated."""
    assert main(["launch", "slurm", "copy-task", "log.dir=RUN", "-D", str(tmp_path), "--dry-run"]) == 0
    venv = sys.prefix != sys.base_prefix
    assert (f"source {sys.prefix}/bin/activate || exit 1" in capsys.readouterr().out) == venv


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "gradus launch slurm: RECIPE is missing. Give a recipe, or --status JOBID."),
        (["copy-task", "--time", "soon"], "--time=soon: not a time limit. Give minutes, HH:MM:SS or D-HH:MM:SS"),
        (["copy-task", "--time", "1", "--signal", "USR1@60"], "--signal=USR1@60: the limit is only 60 s (--time=1). Give a longer --time or a later signal, e.g. USR1@15."),
        (["copy-task", "--nodes", "0"], "--nodes=0: must be at least 1."),
        (["copy-task", "--nodes", "two"], "--nodes=two: must be a whole number."),
        (["copy-task", "-N", "4", "-n", "2"], "--ntasks=2: 4 nodes need a process each."),
        (["copy-task", "-n", "2", "--ntasks-per-node", "2"], "--ntasks=2 and --ntasks-per-node=2 say the same thing. Give one of them."),
        (["copy-task", "--gpus", "many"], "--gpus=many: give a number of GPUs per node, or TYPE:NUMBER"),
        (["copy-task", "--gpus", "2", "--ntasks-per-node", "4"], "4 processes on 1 × 2 GPUs: each process takes one GPU. Give --ntasks-per-node=2 or fewer."),
        (["copy-task", "--signal", "KILL@60"], "--signal=KILL@60: give USR1 or TERM and seconds before the limit, e.g. USR1@120."),
        (["copy-task", "--directive", "time=5"], "--directive=time=5: is an option of its own. Give --time=5."),
        (["copy-task", "--container", "a.sif", "--venv", "v"], "--venv=v cannot take effect inside --container=a.sif."),
        (["copy-task", "--container-command", "x"], "--container-command=x: cannot take effect without --container IMAGE."),
        (["copy-task", "-D", "/none/such"], "--chdir=/none/such: no such folder."),
        (["copy-task", "--setup", "a\nb"], "--setup='a\\nb': must be one line."),
        (["copy-task", "train.stepz=5"], "train.stepz: unknown key. Did you mean train.steps?"),
        (["copy-task", "--nodes", "3"], "batch.samples=128 does not divide among 3 processes"),
        (["copy-task", "layout.elastic=true"], "layout.elastic=true: one replica. Give --nodes and --ntasks-per-node, two or more in all."),
        (["copy-task", "layout.elastic=true", "-N", "2", "-n", "2"], "layout.elastic=true: --ntasks=2 leaves open where each replica runs."),
        (["copy-task", "layout.elastic=true", "layout.shard=2", "-N", "4"], "layout.shard=2 with layout.elastic: each replica gets one process here."),
        (["copy-task", "--partitoin", "P"], "--partitoin: unknown option. Did you mean --partition?"),
        (["copy-task", "--status", "7"], "--status 7: it starts nothing. Leave copy-task out."),
    ],
)
def test_mistakes_are_told_before_anything_is_written(tmp_path, capsys, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", *words, *(["--dry-run"] if "--status" not in words else [])]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(told in line for line in lines), lines
    assert not list(tmp_path.iterdir())


def test_without_slurm(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "slurm", "copy-task"]) == 2
    assert capsys.readouterr().err.startswith("error: no sbatch here: this machine submits no Slurm jobs. Write the script with --dry-run")
    assert main(["launch", "slurm", "--status", "7"]) == 2
    assert "no scontrol here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("1:30", 90), ("01:30:00", 5400), ("2-0", 172800), ("1-12", 129600), ("1-01:30", 91800), ("1-01:30:05", 91805), ("0", 0)],
)
def test_time_limits(limit, seconds):
    """The forms in sbatch's manual."""
    assert slurm._seconds(limit) == seconds


@pytest.mark.parametrize(
    ("code", "restarts", "ends_with", "log"),
    [
        (0, 0, 0, ["gradus: job 7 on n1, start 1", "gradus: job 7 finished"]),
        (1, 0, 1, ["gradus: job 7 on n1, start 1"]),
        (138, 0, 0, ["gradus: job 7 on n1, start 1", "gradus: job 7 got USR1 and saved; requeued, to resume from there", "scontrol requeue 7"]),
        (138, 3, 138, ["gradus: job 7 on n1, start 4"]),
        (74, 0, 0, ["gradus: job 7 on n1, start 1", "gradus: job 7 hit a fault of the machine; requeued, to resume from the last checkpoint", "scontrol requeue 7"]),
        (74, 3, 74, ["gradus: job 7 on n1, start 4"]),
        (2, 0, 2, ["gradus: job 7 on n1, start 1"]),
    ],
)
def test_what_the_script_does(tmp_path, capsys, code, restarts, ends_with, log):
    """Run by bash, with stand-ins for what only a cluster has: set-up in order, and requeued only where training was signalled."""
    programs = {
        "srun": f'echo "srun $*" >> steps; exit {code}',
        "scontrol": 'echo "scontrol $*"',
        "module": 'echo "module $*" >> steps',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    dry(tmp_path, capsys, "--module", "a/1", "--module", "b", "--setup", 'echo "setup $HF_HUB_OFFLINE" >> steps', "--offline", "--container", "an image", "--max-requeues", "3")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", "RUN/job.sbatch"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (ends_with, log, "")
    assert (tmp_path / "steps").read_text().splitlines() == [
        "module purge", "module load a/1", "module load b", "setup 1",
        "srun --kill-on-bad-exit=1 apptainer exec an image gradus train copy-task log.dir=RUN --auto-resume",
    ]  # fmt: skip


def test_the_script_of_replicas(tmp_path, capsys):
    """A store, a step per replica on its node, and all of its node's share to each: Slurm gives the same processors to steps that overlap."""
    words = ["layout.elastic=true", "layout.max_deaths=3", "--nodes", "2", "--gpus", "a100:4", "-c", "10", "--container", "an image", "--signal", "TERM@90"]
    text = dry(tmp_path, capsys, *words)
    assert "\n#SBATCH --ntasks-per-node=4\n#SBATCH --cpus-per-task=10\n#SBATCH --gres=gpu:a100:4\n#SBATCH --signal=TERM@90\n#SBATCH --requeue\n#SBATCH --no-kill\n\n" in text
    inside = "apptainer exec --nv 'an image'"
    for line in (
        f"coproc store {{ exec {inside} python3 -m gradus.parallel.quorum 0; }}  # in which the replicas agree; it prints where it listens",
        'export GRADUS_STORE="${nodes[0]}:${line##*:}" GRADUS_REPLICAS=8 LOCAL_WORLD_SIZE=4',
        "    export GRADUS_REPLICA=$1 LOCAL_RANK=$(($1 % 4))",
        '    exec srun --nodelist="${nodes[$1 / 4]}" --nodes=1 --ntasks=1 --overlap --kill-on-bad-exit=0 --cpus-per-task=40 '
        f"{inside} gradus train copy-task layout.elastic=true layout.max_deaths=3 log.dir=RUN --auto-resume",
        "            2 | 143) break 2 ;;",
        '        if [ "${deaths[i]}" -ge 3 ]; then',
        "for ((s = 0; s < 90; s++)); do  # the others end by themselves",
    ):
        assert f"\n{line}\n" in text, line
    assert "<" not in re.sub(r"i < 8|s < 90|\[i\] < 6|1 << |2> /dev", "", text.replace("<&", "")), "every value is filled in"
    assert "            2) break 2 ;;\n" in dry(tmp_path, capsys, *words[:4], "--signal", "none")


@pytest.mark.parametrize(
    ("sruns", "store", "ends_with", "log"),
    [
        (["137 0+", "wait"], "", 0, ["replica 0 ended with exit code 137; starting it again in 1 s", "job 7 finished"]),
        (["0 0 0+", "wait"], "", 0, [*(f"replica 0 ended with exit code 74; starting it again in {s} s" for s in (1, 2)), "job 7 finished"]),
        (["1+", "wait"], "", 1, []),
        (["2", "wait"], "", 2, []),
        (["138", "138"], "", 0, ["job 7 got USR1 and saved; requeued, to resume from there"]),
        (["74 1 1", "1 1 1"], "", 1, [
            *(f"replica {i} ended with exit code {c}; starting it again in {s} s" for i, c, s in ((0, 74, 1), (1, 1, 1), (0, 1, 2), (1, 1, 2))),
            *(f"replica {i} ended with exit code 1; it died 3 times in a row (layout.max_deaths), and stays away" for i in (0, 1)),
        ]),
        (["137 wait", "wait"], "75", 137, ["replica 0 ended with exit code 137; starting it again in 1 s"]),
        (["137 wait", "wait"], "9", 0, [
            "replica 0 ended with exit code 137; starting it again in 1 s", "job 7 hit a fault of the machine; requeued, to resume from the last checkpoint",
        ]),
    ],
)  # fmt: skip
def test_what_the_script_does_about_replicas(tmp_path, capsys, monkeypatch, sruns, store, ends_with, log):
    """Run by bash, with stand-ins: srun ends with the next of its replica's codes (+: and leaves a summary of the run), the store once it has heard
    of a death, where it has a code."""
    programs = {
        "srun": 'echo "$LOCAL_RANK of $LOCAL_WORLD_SIZE, $GRADUS_REPLICAS: $*" >> steps-$GRADUS_REPLICA; set -- $(cat codes-$GRADUS_REPLICA)\n'
        'echo "${*:2}" > codes-$GRADUS_REPLICA; [ "$1" = wait ] && exec /bin/sleep 2; [[ $1 == *+ ]] && touch RUN/summary.json; exit ${1%+}',
        "python3": f'echo "a store of replicas at host:4321"; while read -r line; do echo "$line" >> heard; [ "{store}" ] && exit {store}; done',
        "scontrol": '[ "$1" = show ] && printf "n1\\nn2\\n"; exit 0',
        "sleep": "exec /bin/sleep 0.05",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for i, codes in enumerate(sruns):
        (tmp_path / f"codes-{i}").write_text(codes)
    monkeypatch.setattr(slurm, "preview", lambda *args: [])  # takes longer than all the rest
    dry(tmp_path, capsys, "layout.elastic=true", "layout.max_deaths=3", "--nodes", "2")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(["bash", "RUN/job.sbatch"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    lines = [f"gradus: {line}" for line in ("job 7 on n[1-2], start 1", *log)]
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (ends_with, sorted(lines), "")
    deaths = [line.removeprefix("gradus: replica ").partition(";")[0] for line in lines if "replica" in line]
    assert sorted((tmp_path / "heard").read_text().splitlines() if deaths else []) == sorted(deaths)
    for i in (0, 1):
        step = f"0 of 1, 2: --nodelist=n{i + 1} --nodes=1 --ntasks=1 --overlap --kill-on-bad-exit=0 gradus train copy-task layout.elastic=true layout.max_deaths=3 "
        assert set((tmp_path / f"steps-{i}").read_text().splitlines()) == {step + "log.dir=RUN --auto-resume"}


# ---------------------------------------------------------------- a real Slurm


def _dies_with_the_test():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _of_cluster(conf: Path) -> list[int]:
    """Processes that were started with this configuration."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SLURM_CONF={conf}".encode() in (place / "environ").read_bytes().split(b"\0") and int(place.name) != os.getpid():
                found.append(int(place.name))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A controller and two nodes on this machine, named by addresses that every machine has. Nothing of the system's own Slurm is touched."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
    here = tmp_path_factory.mktemp("slurm")
    host, user = socket.gethostname().split(".")[0], pwd.getpwuid(os.getuid()).pw_name
    controller, first, second = (free_port() for _ in range(3))
    (here / "key").write_bytes(os.urandom(128))
    (here / "key").chmod(0o600)
    (here / "state").mkdir()
    conf = here / "slurm.conf"
    conf.write_text(f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={here}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd-%n.log
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=8
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=8
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    patch = pytest.MonkeyPatch()
    for name in [n for n in os.environ if re.fullmatch(r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_\w+|SLURM_\w+)", n)]:
        patch.delenv(name)
    for name, value in {"SLURM_CONF": str(conf), "OMP_NUM_THREADS": "1", "PATH": f"{os.environ['PATH']}:/usr/sbin"}.items():
        patch.setenv(name, value)
    files = {"socket": "munge.sock", "key-file": "key", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munged.seed"}
    daemons = [
        ["munged", "--force", "--foreground", *(f"--{option}={here}/{name}" for option, name in files.items())],
        ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "127.0.0.1"], ["slurmd", "-D", "-N", "127.0.0.2"],
    ]  # fmt: skip
    running: list[subprocess.Popen] = []
    try:
        for number, command in enumerate(daemons):
            with open(here / f"{command[0]}-{number}.out", "w") as out:
                running.append(subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, preexec_fn=_dies_with_the_test))
            if number == 0:
                _until(lambda: (here / "munge.sock").exists() or running[0].poll() is not None, 60)
        try:
            _until(lambda: _ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"], 90)
        except AssertionError:
            last = {f.name: f.read_text(errors="replace").strip()[-300:] for f in [*here.glob("*.log"), *here.glob("*.out")]}
            pytest.skip(f"Slurm does not start here: {last}")
        yield here
    finally:
        with contextlib.suppress(AssertionError):
            _ask("scancel", "--user", user)
            _until(lambda: not _ask("squeue", "-h"), 60)
        for daemon in reversed(running):
            daemon.terminate()
        for daemon in running:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(20)
        left = _of_cluster(conf)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        patch.undo()
    assert not left, f"still running at the end: {left}"


def _ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def _until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def _submit(capsys, *words: str) -> str:
    assert main(["launch", "slurm", *words]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{printed.splitlines()[0]}", end="")
    return re.search(r"submitted job (\d+)", printed)[1]


@pytest.mark.slow
def test_signalled_requeued_resumed_finished(cluster, tmp_path, capsys, monkeypatch):
    """2 nodes × 2 processes: a signal in the midst of training ends with the numbers of one undisturbed process. Beside it, another
    job reaches its time limit, and Slurm itself sends the signal."""
    monkeypatch.chdir(tmp_path)
    steps = 150
    recipe = ["copy-task", *TINY, f"train.steps={steps}"]
    limited = _submit(capsys, "copy-task", *TINY, "train.steps=1000000", "log.dir=limited", "--time", "10", "--signal", "USR1@115")
    job = _submit(capsys, *recipe, "layout.replicate=ddp", "log.dir=run", "--nodes", "2", "--ntasks-per-node", "2", "--time", "20", "--job-name", "a 'b' #c")
    log = tmp_path / "run" / f"slurm-{job}.out"
    assert "JobName=a 'b' #c" in _ask("scontrol", "show", "job", job)

    other = tmp_path / "limited" / f"slurm-{limited}.out"
    _until(lambda: other.is_file() and "step 20/" in other.read_text(), 240)
    hours, minutes, seconds = map(int, slurm.Job(limited).of["RunTime"].split(":"))
    elapsed = (hours * 60 + minutes) * 60 + seconds
    _ask("scontrol", "update", f"JobId={limited}", f"TimeLimit={-(-(elapsed + 45) // 60)}")  # so that less than 115 s are left
    _until(lambda: log.is_file() and "step 20/" in log.read_text(), 240)
    _ask("scancel", "--signal=USR1", job)
    _until(lambda: slurm.Job(job).restarts == 1, 120)
    _until(lambda: "COMPLETING" not in _ask("scontrol", "show", "nodes") + _ask("scontrol", "show", "job", job), 120)
    assert slurm.Job(job).state in ("PENDING", "RUNNING")
    time.sleep(5)  # the nodes put away what the first start left; Slurm would wait for two minutes
    _ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert main(["launch", "slurm", "--status", job, "--follow"]) == 0
    followed = capsys.readouterr().out
    assert f"job {job}: COMPLETED" in followed and "restarts 1, exit code 0" in followed
    assert main(["train", *recipe, "log.dir=alone"]) == 0

    lines = log.read_text().splitlines()
    story = [
        f"gradus: job {job} on 127.0.0.[1-2], start 1", "stopped; saved run/checkpoints/step-", f"gradus: job {job} got USR1 and saved; requeued",
        f"gradus: job {job} on 127.0.0.[1-2], start 2", "resumed from run/checkpoints/step-", f"step {steps}/{steps}", f"gradus: job {job} finished",
    ]  # fmt: skip
    with capsys.disabled():
        print("", *(line for line in lines if any(part in line for part in story)), sep="\n")
    told = iter(lines)
    assert all(any(part in line for line in told) for part in story), log.read_text()
    resumed = int(re.search(r"resumed from run/checkpoints/step-(\d+)", log.read_text())[1])
    assert 20 <= resumed < steps

    def losses(run: str) -> dict[int, float]:
        rows = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row["value"] for row in rows if row["name"] == "train/loss"}

    ours, alone = losses("run"), losses("alone")
    assert ours.keys() >= set(range(10, steps + 1, 10))
    assert all(ours[k] == pytest.approx(alone[k], rel=2e-5) for k in range(10, steps + 1, 10))

    _until(lambda: slurm.Job(limited).restarts == 1, 120)
    text = other.read_text()
    assert re.search(rf"stopped; saved limited/checkpoints/step-\d+(.|\n)*gradus: job {limited} got USR1 and saved; requeued", text)
    assert list((tmp_path / "limited" / "checkpoints").iterdir())
    _ask("scancel", limited)


ELASTIC = ["copy-task", *TINY, "model.dropout=0", "log.every=1", "layout.threads=1"]


def _replica(job: str, number: int) -> int:
    """The process of a replica that trains."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment, command = ((place / name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
            if {f"SLURM_JOB_ID={job}".encode(), f"GRADUS_REPLICA={number}".encode()} <= {*environment} and command[2:3] == [b"train"]:
                return int(place.name)
    raise AssertionError(f"job {job} has no replica {number}")


def _told_in_turn(capsys, log: Path, *story: str) -> None:
    lines = log.read_text().splitlines()
    with capsys.disabled():
        print("", *(line for line in lines if any(part in line for part in story)), sep="\n")
    told = iter(lines)
    assert all(any(part in line for line in told) for part in story), log.read_text()


def _same_curve(folder: Path, alone: Path, steps: int) -> None:
    """Every step stands once, with the loss of one undisturbed process."""
    ours, right = ([row for row in map(json.loads, (f / "metrics.jsonl").read_text().splitlines()) if row["name"] == "train/loss"] for f in (folder, alone))
    assert [row["step"] for row in ours] == [row["step"] for row in right] == [*range(1, steps + 1)]
    assert [row["value"] for row in ours] == pytest.approx([row["value"] for row in right], rel=2e-5)


@pytest.mark.slow
def test_a_replica_that_is_killed_comes_back_and_the_signal_still_saves(cluster, tmp_path, capsys, monkeypatch):
    """On 2 nodes: rank 0 gets kill -9 and comes back in a step of its own, for which the other waits here (layout.min_replicas); then a signal to
    all, a requeue, and the end."""
    monkeypatch.chdir(tmp_path)
    recipe = [*ELASTIC, "train.steps=400"]
    job = _submit(capsys, *recipe, "layout.elastic=true", "layout.min_replicas=2", "log.dir=run", "--nodes", "2", "--time", "20")
    log = tmp_path / "run" / f"slurm-{job}.out"
    _until(lambda: log.is_file() and "step 20/" in log.read_text(), 240)
    os.kill(_replica(job, 0), signal.SIGKILL)
    _until(lambda: "replica 0 came" in log.read_text(), 120)
    _ask("scancel", "--signal=USR1", job)
    _until(lambda: slurm.Job(job).restarts == 1, 120)
    _until(lambda: "COMPLETING" not in _ask("scontrol", "show", "nodes") + _ask("scontrol", "show", "job", job), 120)
    assert main(["train", *recipe, "log.dir=alone"]) == 0
    _ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert main(["launch", "slurm", "--status", job, "--follow"]) == 0
    assert f"job {job}: COMPLETED" in capsys.readouterr().out
    _told_in_turn(
        capsys, log, f"gradus: job {job} on 127.0.0.[1-2], start 1", "gradus: replica 0 ended with exit code 137; starting it again in 1 s",
        "replica 0 ended with exit code 137; replica 0 came, with the weights of replica 1: step ", "stopped; saved run/checkpoints/step-",
        f"gradus: job {job} got USR1 and saved; requeued", f"gradus: job {job} on 127.0.0.[1-2], start 2", "resumed from run/checkpoints/step-",
        "step 400/400", f"gradus: job {job} finished",
    )  # fmt: skip
    assert int(re.search(r"resumed from run/checkpoints/step-(\d+)", log.read_text())[1]) < 400
    _same_curve(tmp_path / "run", tmp_path / "alone", 400)


@pytest.mark.slow
def test_the_others_train_on_where_a_node_dies(cluster, tmp_path, capsys, monkeypatch):
    """Slurm takes the node out of the job, and ends srun there with 0: the run goes on, and the job ends well."""
    monkeypatch.chdir(tmp_path)
    recipe = [*ELASTIC, "train.steps=300"]
    job = _submit(capsys, *recipe, "layout.elastic=true", "layout.max_deaths=2", "log.dir=run", "--nodes", "2", "--time", "20")
    log = tmp_path / "run" / f"slurm-{job}.out"
    _until(lambda: log.is_file() and "step 20/" in log.read_text(), 240)
    _ask("scontrol", "update", "NodeName=127.0.0.2", "State=DOWN", "Reason=test")
    try:
        assert main(["launch", "slurm", "--status", job, "--follow"]) == 0
    finally:
        _ask("scontrol", "update", "NodeName=127.0.0.2", "State=RESUME")
    _until(lambda: _ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"], 60)
    assert f"job {job}: COMPLETED, on 127.0.0.1," in capsys.readouterr().out
    _told_in_turn(capsys, log, "gradus: replica 1 ended with exit code 74; starting it again in 1 s", "step 300/300", f"gradus: job {job} finished")
    assert "Node failure on 127.0.0.2" in log.read_text() and re.search(r"replica 1 .*: step \d+ with 1 of 2 replicas", log.read_text())
    assert main(["train", *recipe, "log.dir=alone"]) == 0
    _same_curve(tmp_path / "run", tmp_path / "alone", 300)


@pytest.mark.slow
def test_what_slurm_refuses_is_one_line(cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", "copy-task", "--partition", "none-such"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: sbatch: ") and "invalid partition" in err and len(err.splitlines()) == 1
    assert main(["launch", "slurm", "--status", "99999"]) == 2
    assert capsys.readouterr().err == "error: job 99999: Slurm does not know it (any more). Finished jobs are soon forgotten; try sacct -j 99999\n"


@pytest.mark.slow
def test_srun_is_found(cluster, tmp_path):
    """In the environment of a real srun each process finds its place, with pmi2 too; a batch script without srun is alone."""

    def found(name: str) -> World:
        return find(dict(entry.split("=", 1) for entry in (tmp_path / name).read_text().split("\0") if "=" in entry))

    for more in ([], ["--mpi=pmi2"]):
        step = ["srun", "-N2", "-n3", *more, "bash", "-c", f"env -0 > {tmp_path}/$SLURM_PROCID"]
        done = subprocess.run(step, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        port = found("0").port
        assert [found(name) for name in "012"] == [World(r, 3, l, n, "Slurm", "127.0.0.1", port) for r, l, n in ((0, 0, 2), (1, 1, 2), (2, 0, 1))]
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH -N2 -n3 -o /dev/null\nenv -0 > {tmp_path}/batch\n")
    job = _ask("sbatch", "--parsable", str(script))
    _until(lambda: slurm.Job(job).ended, 60)
    assert found("batch") == World()
