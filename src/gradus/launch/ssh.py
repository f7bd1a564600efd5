"""`gradus launch ssh`: the commands that train on a rented machine, printed or run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from gradus import limits
from gradus.errors import UserError, reason
from gradus.launch import (
    EXTRAS,
    SAFE,
    below,
    checkout,
    inputs,
    one_line,
    portable,
    preview,
    read,
    recipe_file,
    train_options,
    train_words,
    travelling,
)
from gradus.options import option, whole

OPTIONS = (
    *train_options(),
    option("--host USER@HOST", "run the commands on this machine; without it, they are printed"),
    option("-p --port N", "port of ssh there (default 22)", whole(65_535), default=22),
    option("--dry-run", "print the commands, run none"),
    option("--processes N", "to start there, one per GPU (default 1)", whole(limits.PROCESSES), default=1),
    option("--folder DIR", "folder there, below the home folder (default: gradus)", default="gradus"),
    option("--copy", "rsync (must be there too) sends only what changed", choices=["scp", "rsync"], default="scp"),
    option("--python COMMAND", "Python there, 3.11 or newer (default: python3)", default="python3"),
    option("--setup LINE", "line to run instead of the set-up; repeatable", action="append", default=[]),
    option("--follow", "show the log until training has ended, then fetch the run folder"),
)


def launch(args: Namespace) -> int:
    """Print the commands, or run them.

    Raises UserError for a mistake in the options or the recipe, and for a command that fails.
    """
    if args.host is not None and not re.fullmatch(r"(\w[\w.%+-]*@)?[\w\[][\w.:%\[\]-]*", args.host):
        raise UserError(f"--host={args.host}: not a host. Give USER@HOST, and the port with -p.")
    if not below(args.folder):
        raise UserError(f"--folder={args.folder}: give a folder below the home folder there, without spaces.")
    for line in args.setup:
        one_line("--setup", line)
    one_line("--python", args.python)
    printed = args.dry_run or not args.host
    if args.follow and printed:
        raise UserError("--follow cannot take effect where nothing is run. Give --host, without --dry-run.")
    from gradus.train.folder import own

    for tool in ("ssh", args.copy) if not printed else ():
        if not shutil.which(tool):
            raise UserError(f"no {tool} here. Install it (on Debian: apt-get install openssh-client rsync).")
    try:
        while True:
            recipe, run = read(args, args.processes)
            portable(run)
            script, todo = commands(args, recipe, run)
            if own(recipe.log, Path(run)):
                break
        (Path(run) / "job.sh").write_text(script, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{e.filename}: cannot be written ({reason(e)}). Give another log.dir.") from None
    if printed:
        print(f"# {run}/job.sh, which the machine runs:\n" + "".join(f"#   {line}\n" for line in script.splitlines()))
        for why, words in todo.items():
            print(f"# {why}\n{shlex.join(words)}")
        print("", *(f"# {line}" for line in preview(args, recipe, args.processes)), sep="\n")
        return 0
    *before, look, follow, fetch = todo.items()
    for why, words in before:
        print(f"# {why}\n{shlex.join(words)}", flush=True)
        _run(why, words)
    if not args.follow:
        print("training; a lost connection does not stop it. From here:")
        for why, words in (look, follow, fetch):
            print(f"# {why}\n{shlex.join(words)}")
        return 0
    code = subprocess.run(follow[1]).returncode
    if code == 255:
        again = f"Follow it again: {shlex.join(follow[1])}"
        raise UserError(f"the connection to {args.host} is lost; training continues there. {again}")
    _run(*fetch)
    print(f"training ended with exit code {code}; its run folder is {run}")
    return code


def commands(args: Namespace, recipe, run: str) -> tuple[str, dict[str, list[str]]]:
    """(the script that is run there, what for → each command's words, in their order: the last three look at it, follow
    it, fetch it)."""
    host = args.host or "USER@HOST"
    session = "gradus-" + re.sub(r"\W", "-", f"{recipe.name}-{Path(run).name}")
    ssh = ["ssh", *(["-p", str(args.port)] if args.port != 22 else [])]

    def there(*lines: str, terminal: bool = False) -> list[str]:
        return [*ssh, *(["-t"] if terminal else []), host, " && ".join([f"cd {args.folder}", *lines])]

    def copy(sources: Sequence[str | Path], to: str) -> list[str]:
        if args.copy == "rsync":
            return ["rsync", "-az", *(["-e", shlex.join(ssh)] if len(ssh) > 1 else []), *map(str, sources), to]
        return ["scp", "-rq", *(["-P", str(args.port)] if args.port != 22 else []), *map(str, sources), to]

    sources, file, input_paths = checkout(), recipe_file(args.recipe), inputs(recipe)
    folders = [*(["source"] if sources else []), run, *(f"inputs/{key}" for key in input_paths)]
    paths_there = " ".join(f"{args.folder}/{name}" for name in folders)
    settings, name, copies = {}, args.recipe, {}  # what → (paths here, the place there)
    if sources:
        built_from = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "constraints.txt", "src")
        parts = (sources / part for part in built_from)
        copies["the program"] = ([part for part in parts if part.exists()], "source/")
    for key, paths in input_paths.items():
        settings[key] = f"inputs/{key}/{paths[0].name}"
        copies[key] = (paths, f"inputs/{key}/")
    if file:
        # recipe.yaml of a run folder is written by the run itself; a name that a shell there could misread stays here
        safe = re.fullmatch(SAFE, file.name) and file.name != "recipe.yaml"
        name = f"{run}/{file.name if safe else 'given.json' if file.suffix == '.json' else 'given.yaml'}"
        if not safe:
            settings["name"] = recipe.name
        copies["the recipe"] = ([file.resolve()], name)
    arguments, theirs = travelling(args), f"{run}/training_args.json"
    if arguments:
        copies["the TrainingArguments"] = ([arguments], theirs)
    copies["the script"] = ([f"{run}/job.sh"], f"{run}/")
    extras = ",".join(EXTRAS)
    if not sources and not args.setup:
        why = "this gradus is an installed package, which that machine cannot be given"
        raise UserError(f"launch ssh: {why}. Run it from a checkout, or say with --setup LINE what installs it there.")
    setup = args.setup or [
        # what a rented image brings (PyTorch for its GPUs) is used
        f"test -d .venv || {shlex.quote(args.python)} -m venv --system-site-packages .venv",
        f".venv/bin/python -m pip install --quiet --disable-pip-version-check {shlex.quote(f'./source[{extras}]')}",
        "command -v tmux >/dev/null || { apt-get update -qq && apt-get install -qq -y tmux; }",
    ]
    wait = f"tail -n +1 -F {run}/log.txt --pid=$(cat {run}/pid) 2>/dev/null; exit $(cat {run}/exit_code)"
    todo = {
        "make the folders": [*ssh, host, f"mkdir -p {paths_there}"],
        **{f"copy {key}": copy(paths, f"{host}:{args.folder}/{place}") for key, (paths, place) in copies.items()},
        "set it up": there(*(f"{{ {line}; }}" if "||" in line else line for line in setup)),
        "start, inside tmux": there(f"tmux new-session -d -s {session} bash {run}/job.sh"),
        "look at it (leave with Ctrl-b d)": there(f"tmux attach -t {session}", terminal=True),
        "see its log until it has ended": there(f"until test -s {run}/pid; do sleep 0.2; done", wait),
        "fetch the run folder": copy([f"{host}:{args.folder}/{run}"], str(Path(run).parent) + "/"),
    }
    return _script(args, train_words(args, run, name, settings, theirs), run), todo


def _script(args: Namespace, words: Sequence[str], run: str) -> str:
    words = ["gradus", *words, *(["--processes", str(args.processes)] if args.processes > 1 else [])]
    return f"""#!/bin/bash
source .venv/bin/activate
rm -f {run}/exit_code
echo $$ > {run}/pid
{shlex.join(words)} 2>&1 | tee -a {run}/log.txt
echo ${{PIPESTATUS[0]}} > {run}/exit_code
"""


def _run(why: str, words: list[str]) -> None:
    code = subprocess.run(words, stdin=subprocess.DEVNULL).returncode
    if code:
        command = f"{words[0]} ended with exit code {code}. The command was: {shlex.join(words)}"
        raise UserError(f"could not {why}: {command}")
