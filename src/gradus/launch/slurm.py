"""`gradus launch slurm`: a batch script that trains on a cluster, saves before its time limit, and resumes by
itself."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

from gradus import files
from gradus.errors import FAULT, UserError, reason
from gradus.launch import one_line, preview, read, train_options, train_words
from gradus.limits import AXIS
from gradus.options import option, whole
from gradus.parallel.status import LOST

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
}  # fmt: skip
TIME = re.compile(r"([0-9]{1,9}-)?[0-9]{1,9}(:[0-9]{1,9}){0,2}")
TAIL = 10  # lines


SEVERAL = {"action": "append", "default": []}
# by sbatch's own names where it has them
OPTIONS = (
    *train_options(nargs="?"),
    option("-J --job-name NAME", "name of the job (default: the recipe's name)"),
    option("-D --chdir DIR", "to which all paths are relative (default: this folder)", default="."),
    option("-o --output FILE", "what the job prints (default: slurm-%%j.out in the run folder)"),
    option("-e --error FILE", "its error output (default: the same file)"),
    option("-N --nodes N", "machines (default 1)", whole(AXIS), default=1),
    option("-n --ntasks N", "processes in all, instead of --ntasks-per-node", whole(AXIS)),
    option("--ntasks-per-node N", "processes per node (default: one per GPU; without GPUs, one)", whole(AXIS)),
    option("-c --cpus-per-task N", "processors per process", whole(AXIS)),
    option("--gpus N|TYPE:N", "GPUs per node (--gres gpu:N); 0 (default): none", default="0"),
    option("-t --time LIMIT", "minutes, HH:MM:SS or D-HH:MM:SS (default: the partition's)"),
    option("-p --partition NAME", "queue to submit to (sinfo lists them)"),
    option("-A --account NAME", "project that is charged"),
    option("-q --qos NAME", "quality of service: limits and priority"),
    option("--directive TEXT", "any other of sbatch's, e.g. mem=64G; may be repeated", **SEVERAL),
    option("--module NAME", "module to load, after a purge; may be repeated", **SEVERAL),
    option("--venv DIR", "to activate, or none (default: the one this command runs in)"),
    option("--container IMAGE", "run inside this image"),
    option(
        "--container-command COMMAND",
        "that runs the image (default: apptainer exec, or apptainer exec --nv with GPUs)",
    ),
    option("--offline", f"set {', '.join(OFFLINE)}"),
    option("--setup LINE", "shell line to run before training; may be repeated", **SEVERAL),
    option(
        "--signal NAME@SECONDS",
        "this long before the limit: save, requeue, resume (default USR1@120); none: never", default="USR1@120",
    ),
    option("--max-requeues N", "times to requeue (default 100)", whole(10**6, 0), default=100),
    option("--to FILE", "where to write the script (default: job.sbatch in the run folder)"),
    option("--dry-run", "write the script, do not submit it"),
    option("--follow", "show the log until the job has ended"),
    option("--status JOBID", "the state of a job and the end of its log, instead of starting one"),
)  # fmt: skip


def launch(args: Namespace) -> int:
    """Write the script, submit it, show its state.

    Raises UserError for a mistake in the options or the recipe, and for what Slurm refuses.
    """
    from gradus.train.folder import own

    if args.status:
        if args.recipe:
            raise UserError(f"--status {args.status}: it starts nothing. Leave {args.recipe} out.")
        return _show(args.status, args.follow)
    if not args.recipe:
        raise UserError("gradus launch slurm: RECIPE is missing. Give a recipe, or --status JOBID.")
    if not args.dry_run and not shutil.which("sbatch"):
        raise UserError("no sbatch here: this machine submits no Slurm jobs. Write the script with --dry-run.")
    tasks = check(args)
    folder = Path(os.path.expanduser(args.chdir)).resolve()
    if not folder.is_dir():
        raise UserError(f"--chdir={args.chdir}: no such folder. Give the job's working folder; it must exist here too.")
    try:
        while True:
            with contextlib.chdir(folder):
                recipe, run = read(args, tasks)
            deaths = recipe.layout.max_deaths if recipe.layout.elastic else None
            if deaths and recipe.layout.shard > 1:
                text = f"layout.shard={recipe.layout.shard} with layout.elastic: each replica gets one process here"
                raise UserError(f"{text}. Leave one of the two out, or start each replica by itself (docs/elastic.md).")
            if deaths and (args.ntasks or tasks == 1):
                why = f"--ntasks={args.ntasks} leaves open where each replica runs" if args.ntasks else "one replica"
                raise UserError(f"layout.elastic=true: {why}. Give --nodes and --ntasks-per-node, two or more in all.")
            text = script(args, recipe.name, run, folder, deaths)
            file = files.writable(folder / (args.to or f"{run}/job.sbatch"))
            if own(recipe.log, folder / run):  # Slurm makes no folders for its files
                break
        for name in (args.output, args.error, args.to):
            if name and "%" not in str(Path(name).parent):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{e.filename or file}: cannot be written ({reason(e)}). Give another --to.") from None
    if args.dry_run:
        print(f"{text}\nwritten to {file}. Submit it with: sbatch {shlex.quote(str(file))}", flush=True)
        kind = args.gpus.rpartition(":")[0] or None
        with contextlib.chdir(folder):
            print(*preview(args, recipe, tasks, kind), sep="\n")
        return 0
    job = _call(["sbatch", "--parsable", str(file)]).split(";")[0]
    per = f"{tasks} process{'es' if tasks > 1 else ''} on {args.nodes} node{'s' if args.nodes > 1 else ''}"
    print(f"submitted job {job}: {recipe.name}, {per}, by {file}", flush=True)
    code = _show(job, args.follow)
    if not args.follow:
        print(f"again: gradus launch slurm --status {job} [--follow]")
    return code


# ---------------------------------------------------------------- the script


def check(args: Namespace) -> int:
    """The number of processes in all. Raises UserError for the first option that makes no sense."""
    gpus, venv = _gpus(args), args.venv if args.venv != "none" else None
    tasks = args.ntasks or args.nodes * (args.ntasks_per_node or gpus or 1)
    seconds = _seconds(args.time) if args.time is not None else 0
    before = _signal(args)[1] if args.signal != "none" else 0
    activate = Path(os.path.expanduser(venv or "")) / "bin" / "activate"
    own = next((text.lstrip("-") for text in args.directive if text.lstrip("-").split("=")[0] in DIRECTIVES), None)
    for wrong, text in (
        (args.ntasks and args.ntasks_per_node,
         f"--ntasks={args.ntasks} and --ntasks-per-node={args.ntasks_per_node} say the same thing. Give one of them."),
        (tasks < args.nodes, f"--ntasks={args.ntasks}: {args.nodes} nodes need a process each."),
        (gpus and tasks > args.nodes * gpus,
         f"{tasks} processes on {args.nodes} × {gpus} GPUs: each process takes one GPU. "
         f"Give --ntasks-per-node={gpus} or fewer."),
        (0 < seconds <= before,
         f"--signal={args.signal}: the limit is only {seconds:,} s (--time={args.time}). "
         f"Give a longer --time or a later signal, e.g. USR1@{seconds // 4}."),
        (args.container_command and not args.container,
         f"--container-command={args.container_command}: cannot take effect without --container IMAGE."),
        (args.container and venv,
         f"--venv={venv} cannot take effect inside --container={args.container}. Give one of them."),
        (venv and not args.dry_run and not activate.is_file(),
         f"--venv={venv}: holds no bin/activate. Give the folder of a virtual environment."),
        (own, f"--directive={own}: is an option of its own. Give --{own}."),
    ):  # fmt: skip
        if wrong:
            raise UserError(text)
    return tasks


# what the script says by itself, in this order; anything else may come by --directive
DIRECTIVES = (
    "job-name", "chdir", "output", "error", "open-mode", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gres",
    "time", "partition", "account", "qos", "signal", "requeue",
)  # fmt: skip


# What `script` does about replicas that come and go. On a node they share all that the job has there (--overlap): NCCL
# has to see the others' GPUs, and the first step would take the memory of all.
REPLICAS = r"""
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
coproc store { exec <store>; }  # in which the replicas agree; it prints where it listens
store_pid=$store_PID
read -ru "${store[0]}" line || exit 1
export GRADUS_STORE="${nodes[0]}:${line##*:}" GRADUS_REPLICAS=<tasks> LOCAL_WORLD_SIZE=<per_node>

start() {  # replica $1 after $2 seconds, as a job step on its node
    sleep "$2"
    export GRADUS_REPLICA=$1 LOCAL_RANK=$(($1 % <per_node>))
    exec srun --nodelist="${nodes[$1 / <per_node>]}" --nodes=1 --ntasks=1 --overlap --kill-on-bad-exit=0 <command>
}

for ((i = 0; i < <tasks>; i++)); do
    start $i 0 &
    pids[i]=$! since[i]=$SECONDS deaths[i]=0
done
while sleep 1 && kill -0 "$store_pid" 2> /dev/null && [ ${#pids[@]} -gt 0 ]; do
    for i in "${!pids[@]}"; do
        kill -0 "${pids[i]}" 2> /dev/null && continue
        wait "${pids[i]}"
        code=$?
        case $code in
            <ends>) break 2 ;;
            0 | 1) [ -e <summary> ] && break 2 ;;  # the run is complete, or diverged
        esac
        [ "$code" -eq 0 ] && code=<fault>  # srun's, where the node died
        how="ended with exit code $code"
        echo "$i $how" >&"${store[1]}"  # so that the others do not wait for it
        deaths[i]=$((SECONDS - since[i] > 600 ? 1 : deaths[i] + 1))
        if [ "${deaths[i]}" -ge <max_deaths> ]; then
            echo "gradus: replica $i $how; it died <max_deaths> times in a row (layout.max_deaths), and stays away"
            unset "pids[i]"
            continue
        fi
        delay=$((deaths[i] < 6 ? 1 << deaths[i] - 1 : 30))
        echo "gradus: replica $i $how; starting it again in $delay s"
        start $i $delay &
        pids[i]=$! since[i]=$SECONDS
    done
done
# the store ends with <lost> where no replica is left that has the weights: the last one's code counts
kill -0 "$store_pid" 2> /dev/null || wait "$store_pid" || [ $? -eq <lost> ] || code=<fault>
for ((s = 0; s < <patience>; s++)); do  # the others end by themselves
    kill -0 "${pids[@]}" 2> /dev/null || break
    sleep 1
done"""


def script(args: Namespace, name: str, run: str, folder: Path, deaths: int | None = None) -> str:
    """The batch script: directives, set-up, one srun, and what to do with its exit code. deaths (layout.max_deaths):
    the processes are replicas that come and go, each with an srun of its own."""
    gpus = _gpus(args)
    lines = ["#!/bin/bash", *_directives(args, name, run, folder, bool(deaths)), ""]
    if args.module:
        lines += ["module purge", *(f"module load {_quoted('--module', m)}" for m in args.module)]
    venv = args.venv or (sys.prefix if sys.prefix != sys.base_prefix and not args.container else "none")
    if venv != "none":
        lines.append(f"source {_quoted('--venv', str(Path(os.path.expanduser(venv))))}/bin/activate || exit 1")
    if args.offline:
        lines.append("export " + " ".join(f"{variable}=1" for variable in OFFLINE))
    if args.cpus_per_task:
        lines.append(f"export OMP_NUM_THREADS={args.cpus_per_task}")
    lines += [one_line("--setup", line) for line in args.setup]
    step, inside = ["srun", "--kill-on-bad-exit=1"], []
    if args.cpus_per_task:
        step.append(f"--cpus-per-task={args.cpus_per_task}")  # since 22.05 a step does not take it over from its job
    if args.container:
        inside = shlex.split(args.container_command or "apptainer exec" + (" --nv" if gpus else ""))
        inside.append(one_line("--container", args.container))
    train = [*inside, "gradus", *train_words(args, run)]
    lines += [
        "",
        'echo "gradus: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"',
        *([_replicas(args, run, inside, train, deaths)] if deaths else [shlex.join([*step, *train]), "code=$?"]),
    ]
    if args.signal != "none":
        saved = f"got {args.signal.split('@')[0]} and saved; requeued, to resume from there"
        fault = "hit a fault of the machine; requeued, to resume from the last checkpoint"
        for code, why in ((128 + _signal(args)[0], saved), (FAULT, fault)):
            lines += [
                f'if [ "$code" -eq {code} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {args.max_requeues} ]; then',
                f'    echo "gradus: job $SLURM_JOB_ID {why}"',
                '    scontrol requeue "$SLURM_JOB_ID" && exit',
                "fi",
            ]
    lines += ['[ "$code" -eq 0 ] && echo "gradus: job $SLURM_JOB_ID finished"', 'exit "$code"']
    return "\n".join(lines) + "\n"


def _replicas(args: Namespace, run: str, inside: list[str], train: list[str], deaths: int) -> str:
    per_node = args.ntasks_per_node or _gpus(args) or 1
    number, seconds = _signal(args) if args.signal != "none" else (0, 120)
    # what a step has of its job is all processors of its node: with fewer, Slurm gives all steps there the same ones
    processors = [f"--cpus-per-task={args.cpus_per_task * per_node}"] if args.cpus_per_task else []
    values = {
        "store": shlex.join([*inside, "python3", "-m", "gradus.parallel.quorum", "0"]),
        "tasks": args.nodes * per_node, "per_node": per_node, "command": shlex.join([*processors, *train]),
        "ends": f"2 | {128 + number}" if number else "2", "summary": shlex.quote(f"{run}/summary.json"),
        "max_deaths": deaths, "fault": FAULT, "lost": LOST, "patience": seconds,
    }  # fmt: skip
    return re.sub(r"<(\w+)>", lambda name: str(values[name[1]]), REPLICAS)


def _directives(args: Namespace, name: str, run: str, folder: Path, elastic: bool) -> list[str]:
    """The lines by which sbatch learns what the job needs."""
    gpus = _gpus(args)
    ours = {
        "job-name": args.job_name or name,
        "chdir": str(folder),
        "output": args.output or f"{run.replace('%', '%%')}/slurm-%j.out",
        "open-mode": "append",  # a job that goes on writes behind what it wrote
        "ntasks-per-node": None if args.ntasks else args.ntasks_per_node or gpus or 1,
        "gres": f"gpu:{args.gpus}" if gpus else None,
        "signal": None if args.signal == "none" else args.signal,
    }
    values = {key: ours[key] if key in ours else getattr(args, key.replace("-", "_")) for key in DIRECTIVES[:-1]}
    options = {f"--{key}": str(value) for key, value in values.items() if value is not None}
    lines = [f"#SBATCH {option}={_directive(option, value)}" for option, value in options.items()]
    if args.signal != "none":
        lines.append("#SBATCH --requeue")
    if elastic:
        lines.append("#SBATCH --no-kill")  # the job, where a node dies
    return lines + [f"#SBATCH --{one_line('--directive', text.lstrip('-'))}" for text in args.directive]


def _quoted(option: str, value: str) -> str:
    return shlex.quote(one_line(option, value))


def _directive(option: str, value: str) -> str:
    """As sbatch reads its lines: like a shell, but a backslash escapes inside every kind of quotes."""
    return _quoted(option, value).replace("\\", "\\\\")


def _gpus(args: Namespace) -> int:
    match = re.fullmatch(r"(?:[\w.-]+:)?([0-9]{1,6})", args.gpus)
    if not match:
        raise UserError(f"--gpus={args.gpus}: give a number of GPUs per node, or TYPE:NUMBER, e.g. 4 or a100:4.")
    return int(match[1])


def _seconds(limit: str) -> int:
    """The seconds of a time limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. 0 means no limit."""
    if not TIME.fullmatch(limit):
        raise UserError(f"--time={limit}: not a time limit. Give minutes, HH:MM:SS or D-HH:MM:SS, e.g. 2-00:00:00.")
    days, _, clock = limit.rpartition("-")
    first = "" if days or clock.count(":") == 2 else "0:"  # minutes come first
    hours, minutes, seconds = [*map(int, f"{first}{clock}".split(":")), 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _signal(args: Namespace) -> tuple[int, int]:
    """(number, seconds before the limit)."""
    name, _, seconds = args.signal.partition("@")
    if name not in ("USR1", "TERM") or not seconds.isdigit() or not 0 < int(seconds) <= 65535:
        raise UserError(f"--signal={args.signal}: give USR1 or TERM and seconds before the limit, e.g. USR1@120.")
    return int(getattr(signal, f"SIG{name}")), int(seconds)


# ---------------------------------------------------------------- the job


def _call(command: list[str]) -> str:
    """What Slurm's command printed. Raises UserError with what it complained of."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}  # ours: sbatch hands it to the job
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, env=environment)
    except FileNotFoundError:
        raise UserError(f"no {command[0]} here: Slurm is not installed. Run this on a login node.") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]}: no answer within two minutes. Is Slurm's controller up? Ask: sinfo") from None
    if done.returncode:
        lines = [re.sub(rf"^{command[0]}: (error: )?", "", line) for line in done.stderr.strip().splitlines()]
        raise UserError(f"{command[0]}: {'; '.join(lines) or 'no reason given'}.")
    return done.stdout.strip()


class Job:
    """What Slurm says of a job now. `state` as Slurm names it; `log` the file that it writes, if known."""

    def __init__(self, number: str):
        if not re.fullmatch(r"\d+(_\d+)?", number):
            raise UserError(f"--status={number}: not a job number. Slurm's are like 1234; squeue --me lists yours.")
        try:
            text = _call(["scontrol", "show", "job", number])
        except UserError as e:
            if "Invalid job id" not in str(e):
                raise
            forgotten = "Slurm does not know it (any more). Finished jobs are soon forgotten"
            raise UserError(f"job {number}: {forgotten}; try sacct -j {number}") from None
        self.of = collections.defaultdict(str, re.findall(r"(?:^|\s)(\w+)=(\S*)", text))
        log = re.search(r"^\s*StdOut=(.*)$", text, re.MULTILINE)
        self.number, self.state, self.log = number, self.of["JobState"], Path(log[1] if log else "")
        self.restarts, self.ended = int(self.of["Restarts"] or 0), self.state in ENDED

    def __str__(self):
        of, ran = self.of, self.ended or self.state in ("RUNNING", "COMPLETING")
        parts = {
            f"job {self.number}: {self.state}": True,
            f"on {of['NodeList']}, {of['RunTime']} of {of['TimeLimit']}": ran,
            f"because of {of['Reason']}": of["Reason"] not in ("None", ""),
            f"restarts {self.restarts}": self.restarts,
            f"exit code {of['ExitCode'].split(':')[0]}": self.ended,
        }
        return ", ".join(part for part, shown in parts.items() if shown)


def _read(log: Path, place: int = 0) -> bytes:
    """What stands in the log from a place in bytes on; nothing where it is not there yet."""
    with contextlib.suppress(OSError), log.open("rb") as f:
        f.seek(place)
        return f.read()
    return b""


def _show(number: str, follow: bool) -> int:
    """Print the state and the end of the log; follow: then all that comes, until the job has ended.

    0 where it is not followed, or completed; else 1.
    """
    job = Job(number)
    log = _read(job.log)
    text, place = "\n".join(log.decode(errors="replace").splitlines()[-TAIL:]), len(log)
    print(f"{job}\n{job.log}:\n{text}" if text else job, flush=True)
    try:
        while follow and not job.ended:
            time.sleep(1.0)
            before, job = job, Job(number)
            if (job.state, job.restarts) != (before.state, before.restarts):
                print(job, flush=True)
            new = _read(job.log, place)
            place += len(new)
            print(new.decode(errors="replace"), end="", flush=True)
    except KeyboardInterrupt:
        print(f"\njob {number} continues. Follow it again: gradus launch slurm --status {number} --follow")
        return 130
    return 0 if not follow or job.state == "COMPLETED" else 1
