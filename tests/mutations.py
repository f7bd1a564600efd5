"""The planted mistakes of tests/planted.py, each seen by a test of `make test`: what a faster test must not lose.

python tests/mutations.py                    tries all, in a copy of src, and says which were not caught (exit code 1)
python tests/mutations.py 3 17               these alone
python tests/mutations.py plan ddp bert      those of a room, a layout, a family, a task or a verb
python tests/mutations.py --sample 15 NAME   so many, others for each NAME, as .ci/run does with that of the commit
python tests/mutations.py --choose           for those that have no test yet: which one sees it, of those that run its lines (after `make coverage`)
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))
from planted import LIST, Mutation  # noqa: E402

LARGE = (  # libraries that the forks then have, none of which imports gradus
    *(f"torch.distributed.{name}" for name in ("fsdp", "tensor.parallel", "checkpoint", "pipelining")), "torch._dynamo", "hypothesis.strategies", "pydantic",
    "peft", *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "bert", "llama", "mixtral", "t5", "vit", "marian", "bart")), "xdist",
)  # fmt: skip
AT_ONCE, TRIED = 12, 4  # of --choose: tests in one process, and how many such


def room(mutation: Mutation) -> str:
    return mutation.file.split("/")[0].removesuffix(".py")


def words_of(number: int) -> set[str]:
    mutation = LIST[number - 1]
    return {str(number), room(mutation), mutation.layout, *mutation.of.split()} - {""}


def log_of(mutation: Mutation, copy: Path, tests: list[str], seconds: float = 600.0) -> str | None:
    """The log of the tests where src is `copy`, with the mistake in it, if one of them failed; else None. In a fork, which has the large libraries
    already. A mistake that makes a test wait for ever has been seen too."""
    file = copy / "gradus" / mutation.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    child = multiprocessing.get_context("fork").Process(target=run_tests, args=(tests, copy))
    child.start()
    child.join(seconds)
    if child.exitcode is None:
        child.kill()
        child.join()
    file.write_text(text, encoding="utf-8")
    return (copy / "log").read_text(errors="replace") if child.exitcode in (pytest.ExitCode.TESTS_FAILED, -9) else None


def run_tests(names: list[str], copy: Path) -> None:
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", GRADUS_PLANTED="1")  # no bytecode of a file that comes back
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    os.chdir(REPOSITORY)
    with open(copy / "log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os._exit(pytest.main(["-x", "-m", "not slow and not docs", "-p", "no:cacheprovider", *names]))


def touching(mutation: Mutation) -> list[str]:
    """The tests that run a line of it, by `make coverage`: those of its own file and the golden curves first, then one of each other file of its room, one of each file, and
    so on; the dear ones last."""
    from coverage import CoverageData

    data = CoverageData(os.environ.get("COVERAGE_DATA", str(REPOSITORY / ".coverage")))
    data.read()
    (path,) = (file for file in data.measured_files() if file.endswith(f"gradus/{mutation.file}"))
    before, _, _ = (REPOSITORY / "src/gradus" / mutation.file).read_text(encoding="utf-8").partition(mutation.old)
    first = before.count("\n") + 1
    lines = range(first, first + mutation.old.strip("\n").count("\n") + 1)
    contexts = data.contexts_by_lineno(path)
    names = {context.rpartition("|")[2] for line in lines for context in contexts.get(line, ())} - {""}
    if not (REPOSITORY / "src/gradus" / mutation.file).read_text(encoding="utf-8").splitlines()[first - 1].startswith(" "):
        names = {context.rpartition("|")[2] for of in contexts.values() for context in of} - {""}  # what an import runs, any test of the file may use
    stem = Path(mutation.file).stem

    files: dict[str, list[str]] = {}
    for name in sorted(names):
        files.setdefault(name.partition("::")[0], []).append(name)
    own = [file for file in files if re.search(rf"test_({stem}|golden)\b", file)]
    rooms = [file for file in files if file not in own and file.startswith(f"tests/{room(mutation)}")]
    others = [file for file in files if file not in own and file not in rooms]
    turns = [itertools.chain.from_iterable(itertools.zip_longest(*(files[file] for file in kind))) for kind in (own, rooms, others)]
    seconds = REPOSITORY / ".pytest_cache/v/gradus/seconds"  # of the last run
    dear = {name for name, (took, *_) in json.loads(seconds.read_text()).items() if took > 1} if seconds.is_file() else set()
    return sorted(filter(None, itertools.chain.from_iterable(turns)), key=lambda name: name in dear)


def choose(mutation: Mutation, copy: Path) -> str:
    tests = touching(mutation)
    if not tests:
        return "no test runs it"
    left = tests[: AT_ONCE * TRIED]
    while left:
        log = log_of(mutation, copy, left[:AT_ONCE])
        if log is None:
            left = left[AT_ONCE:]
            continue
        seen = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", log, flags=re.M)
        if not seen:
            return f"waits for ever, or ends the process: one of {left[:AT_ONCE]}"
        if log_of(mutation._replace(new=mutation.old), copy, [seen[1]]) is None:
            return seen[1].removeprefix("tests/")
        left.remove(seen[1])  # it fails here without the mistake too
    return f"NOT SEEN by {min(len(tests), AT_ONCE * TRIED)} of {len(tests)} tests"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", nargs="*", help="numbers, rooms, layouts, families, tasks, verbs")
    parser.add_argument("--sample", nargs=2, metavar=("N", "NAME"))
    parser.add_argument("--choose", action="store_true")
    args = parser.parse_args(words)
    numbers = list(range(1, len(LIST) + 1))
    known = set().union(*map(words_of, numbers))
    if unknown := set(args.of) - known:
        sys.exit(f"{', '.join(sorted(unknown))}: not a number, room, layout, family, task or verb of the list: {', '.join(sorted(known))}")
    numbers = [number for number in numbers if not args.of or words_of(number) & set(args.of)]
    if args.sample:
        numbers = sorted(sorted(numbers, key=lambda n: hashlib.sha256(f"{args.sample[1]} {n}".encode()).digest())[: int(args.sample[0])])
    for name in LARGE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    missed, start, fit = 0, time.time(), sorted({f"tests/{LIST[number - 1].test}" for number in numbers if LIST[number - 1].test})
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(REPOSITORY / "src", Path(folder) / "src")
        shutil.copy(REPOSITORY / "pyproject.toml", folder)  # so that it is a checkout, as far as launch asks
        if not args.choose and (log := log_of(LIST[0]._replace(new=LIST[0].old), copy, fit, 3600.0)):
            sys.exit(f"a test that fails without a mistake shows nothing:\n{log[-3000:]}")
        for number in numbers:
            mutation, began = LIST[number - 1], time.time()
            if args.choose:
                if not mutation.test:
                    print(f"{number:3} {mutation.file}: {choose(mutation, copy)} ({time.time() - began:.0f} s)", flush=True)
                continue
            fine = bool(mutation.test) and log_of(mutation, copy, [f"tests/{mutation.test}"]) is not None
            missed += not fine
            what = ", ".join(sorted(words_of(number) - {str(number)}))
            print(f"{number:3} {'caught' if fine else 'NOT CAUGHT'}: {what}: {mutation.file}, {mutation.test} ({time.time() - began:.0f} s)", flush=True)
    print(f"{len(numbers)} planted mistakes, {missed} not caught, {time.time() - start:.0f} s")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
