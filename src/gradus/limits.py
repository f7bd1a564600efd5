"""Every limit on what comes in, in one place: sizes a person could mean, files of a stated size and depth, numbers on
the command line, the page.

Each is far above the largest that is published or built, and low enough that whatever passes comes to an end: an
answer, or one line that says why there is none.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from gradus.errors import UserError

# ---- sizes of a recipe (recipe/schema.py)
LAYERS = 2_000  # DeepNet, the deepest published, has 1,000
WIDTH = 2**20  # d_model; MT-NLG 530B has 20,480
HEADS = 2**16  # PaLM has 48
FF = 2**23  # d_ff: 8 × the widest model
VOCABULARY = 2**27  # the largest published has about a million
EXPERTS = 2**20  # PEER (He 2024) has a million, Switch 2,048
LENGTH = 2**24  # seq_len; Llama 4 Scout has 10 million
PARAMETERS = 1e15  # in all: a thousand times the largest published
CLASSES = 2**22  # Amazon-3M, the largest classification set, has 2.8 million; each takes a name and a row of the head
IMAGE = 2**14  # pixels per side
BATCH = 2**30  # samples or tokens of a step; GPT-4's is put at 60 million tokens
STEPS = 10**12  # also of a schedule, and between two checkpoints
TOKENS = 1e18  # of --tokens; Qwen 3 saw 3.6e13
EPOCHS = 1e6
SAMPLES = 10**12  # of a data set that is limited
MADE = 10**9  # samples of the copy task; its order and lengths are held
COPIED = 2**12  # symbols of one of them: each takes arithmetic on a number of so many digits
SEED = 2**63 - 1  # what PyTorch's generators take
AXIS = 2**20  # devices along one axis of the layout, and in all
THREADS = 1_024  # of one process: more than a machine of four sockets has
WORKERS = 512  # loaders of one process
PROCESSES = 512  # started on this machine by one command
ROUNDS = 10_000  # of a study: each starts processes for every configuration
CONFIGURATIONS = 1_000  # of a study: a round of so many takes an hour at least
GRID = 100_000  # combinations of a study's grid, before only_with
EPSILON = 1.0  # of a norm or an optimizer
RATE = 1e30  # a learning rate: above it fp32 has no square
FIGURE = 1e18  # what a source says of a run: s, bytes, samples/s
REAL = 1e12  # a rate, a factor, a number of MB: above it is a slip of the keyboard
QUANTITY = 1e24  # bytes, operations/s, W or s of a device: all memory in the world has about 1e22 bytes; least: 1 / it

# ---- files
MB, GB = 10**6, 10**9
RECIPE_FILE = MB  # the largest packaged one has 2 kB
CONFIG_FILE = 100 * MB  # config.json, and the index of shards: 9 MB for DeepSeek-V3
TOKENIZER_FILE = 200 * MB  # Gemma 3's has 33 MB
HARDWARE_FILE = 10 * MB
ROWS_FILE = 4 * GB  # metrics.jsonl
DEPTH = 64  # mappings and lists inside one another; a tokenizer.json has about 10
RECIPE_NODES = 100_000  # keys and values after YAML's aliases are written out
NODES = 2_000_000  # the same of the hardware files
TOKEN_IDS = 2**24  # the highest id that a tokenizer may have; tables of that length are held
LINE = 2**28  # characters of one line of data
UNPACKED, RATIO = 256 * MB, 250  # what a packed file may always unpack to, and how many times its size beyond
MODULES = 100_000  # entries of a list of adapter_config.json; a mixture of 64 experts in 60 layers has 12,000 Linears
EXPRESSION, EXPRESSIONS = 1_000, 50  # characters of an expression for modules there, and expressions beside plain names
FIELD = 2**22  # characters that are read of a labelled text; War and Peace has 3.2 million
TOKEN = 256  # characters of a token of a text that a model reads; those of published vocabularies have at most 128
WORD = 1_000  # characters of a word from which a tokenizer is made: a longer one counts in parts
RENDERED = 2**24  # characters that a chat template may write
BUILT = 2**28  # characters that it may build for that, lists and objects counted as 256
RENDERING = 60.0  # s that it may take; of the published ones Gemma 4's takes longest, about 6 for a thousand turns

# ---- the page
BODY = 256 * 1024  # bytes of a request; a config.json that names 1,000 classes has 70 kB
OVERRIDES, TEXT = 100, 400  # settings of a request, characters of one
RECEIVING = 10.0  # s in which a request must have come in, however slowly it is sent
CONNECTIONS = 64  # at a time
PLANNERS = 3  # plans at a time, each in a process of its own
PLANNING = 120.0  # s of one plan or search; the largest preset on a million devices takes about 20
PLANNING_MEMORY = 16 * GB  # of one such process

CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # Linux: this process's control groups, and all


# ---------------------------------------------------------------- files


def regular(path: str | Path, most: float = math.inf) -> Path:
    """The path, where it is a regular file of at most `most` bytes.

    Raises UserError for another kind of file (reading a FIFO, a device or a socket could wait without end), for a
    larger one and for what Git LFS puts in a file's place; the caller handles FileNotFoundError and its like.
    """
    path = Path(path)
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise UserError(f"{path}: cannot be read: a folder, pipe, socket or device. Give a regular file.")
    if about.st_size > most:
        raise UserError(f"{path}: {about.st_size:,} bytes; such a file has at most {most:,.0f}. Is it the right one?")
    if 0 < about.st_size < 1000 and path.read_bytes().startswith(b"version https://git-lfs"):
        raise UserError(f"{path}: a pointer of Git LFS, not the file itself. In its folder: git lfs pull")
    return path


def read_text(path: str | Path, most: float) -> str:
    """The text of a regular file of at most `most` bytes, in UTF-8. Raises UserError with one line for whatever keeps
    it from being read."""
    path = Path(os.path.expanduser(path))
    try:
        return regular(path, most).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not a text file in UTF-8 (byte {e.start}).") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
        raise UserError(f"{str(path)!r}: cannot be read: {getattr(e, 'strerror', e)}.") from None


def read_json(path: str | Path, most: float, **options: Any) -> Any:
    """The content of a JSON file: not deeper than DEPTH, no half characters (lone surrogates). options: of json.loads.
    Raises UserError with one line."""
    return parse_json(read_text(path, most), path, **options)


def read_object(path: str | Path) -> dict[str, Any]:
    """`read_json` of an object, such as a config.json."""
    content = read_json(path, CONFIG_FILE)
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def parse_json(text: str | bytes, where: object, **options: Any) -> Any:
    try:
        content = json.loads(text, **options)
        shallow(content, where)
        if not (isinstance(text, str) and "\\u" not in text):
            json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError as e:
        raise UserError(f"{where}: line {e.lineno}, column {e.colno}: not valid JSON: {e.msg}.") from None
    except RecursionError:
        raise UserError(f"{where}: nested deeper than {DEPTH} levels.") from None
    except ValueError as e:  # not UTF-8, half a character (a lone surrogate), or more digits than Python takes
        raise UserError(f"{where}: not valid JSON: {str(e).split(';')[0]}.") from None
    return content


def shallow(tree: Any, where: object, most: float = math.inf) -> None:
    """Raises UserError where mappings and lists are nested deeper than DEPTH, or there are more than `most` values. An
    alias counts each time."""
    level, n = [tree], 0
    for _ in range(DEPTH):
        below: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
            n += len(children)
            if n > most:
                raise UserError(f"{where}: more than {most:,} values, with aliases expanded. Is it the right file?")
            below += [child for child in children if isinstance(child, dict | list)]
        if not below:
            return
        level = below
    raise UserError(f"{where}: nested deeper than {DEPTH} levels.")


@functools.cache
def _loader() -> Any:
    """Of plain YAML. A key that is given twice is an error."""
    import yaml

    class Once(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
                if key.value in seen:
                    problem = f"{key.value} is given twice. Keep one"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    return Once


def parse_yaml(text: str, where: object, loader: Any = None, most: float = NODES) -> Any:
    """The content of a YAML text, of at most `most` values, with the limits of JSON. Raises UserError with one line."""
    import yaml

    quick = _loader()
    try:
        depth = 0
        for event in () if loader else yaml.parse(text, quick):  # loading calls itself in C: too deep, the process dies
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:
                raise RecursionError
        content = yaml.load(text, loader or quick)
        shallow(content, where, most)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None) or getattr(e, "context_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = getattr(e, "problem", None) or getattr(e, "reason", None) or "cannot be read"
        raise UserError(f"{where}: {place}not valid YAML: {what}.") from None
    except RecursionError:
        raise UserError(f"{where}: nested deeper than {DEPTH} levels.") from None
    except (ValueError, TypeError, OverflowError, AttributeError) as e:  # a date such as 2026-99-99, a list as a key
        reason = str(e).splitlines()[0][:120]
        raise UserError(f"{where}: a value that YAML cannot hold ({reason}). Put it in quotes.") from None
    return content


# ---------------------------------------------------------------- the command line


def numbers(text: str, option: str, most: int = PROCESSES) -> list[int]:
    """`8,16,32` → [8, 16, 32], each once, in their order. Raises UserError."""
    entries = [word.strip() for word in text.split(",")]
    for word in entries:
        if not re.fullmatch(r"[0-9]{1,18}", word) or not 1 <= int(word) <= most:
            what = f"{repr(word[:40]) if word else 'an empty entry'} is not a whole number from 1 to {most:,}"
            raise UserError(f"{option} {text[:80]}: {what}. Write for example {option} 1,2,4")
    return list(dict.fromkeys(map(int, entries)))


def shown(text: str) -> str:
    """An error as a screen holds it: what was given may be as long as it likes, and lines as many."""
    lines = [line if len(line) <= 1000 else f"{line[:600]} ... {line[-300:]}" for line in text.splitlines()]
    return "\n".join(lines if len(lines) <= 40 else [*lines[:40], f"... and {len(lines) - 40} more lines"])


def words(arguments: list[str]) -> None:
    """Raises UserError for a word of the command line that is not text in UTF-8, or holds a zero byte. Python turns
    bytes that are not UTF-8 into half characters (lone surrogates)."""
    for word in arguments:
        if "\0" in word:
            raise UserError(f"{word!r}: contains a zero byte. Remove it.")
        if word != word.encode(errors="replace").decode():
            raise UserError(f"{word!r}: not text in UTF-8. Rename the file, or retype the characters.")


def memory() -> float:
    """Bytes that this machine has; infinity where it does not say."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return math.inf
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processors() -> int:
    """Those that this process may use, by its affinity and by its quota."""
    return int(min(cores(), cpu_quota()))


def cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float:
    """Processors whose time this process's control groups may use (docker run --cpus), rounded up; infinity for no
    limit."""
    quota = min(map(_quota_of, control_groups("cpu")), default=math.inf)
    return max(1, math.ceil(quota)) if quota < math.inf else quota


def control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control groups and of those above, of version 2 and of version 1's controller
    (cpu, memory). Empty where the system has none."""
    with contextlib.suppress(OSError):
        for line in CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                group = PurePosixPath(path)
                for folder in (group, *group.parents):  # in a container, the whole path may not be there
                    yield CGROUPS / (controller if controllers else "") / str(folder).strip("/")


def _quota_of(group: Path) -> float:
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # ValueError: `max`, no limit
            microseconds, period = map(int, " ".join((group / name).read_text() for name in names).split())
            return microseconds / period if microseconds > 0 else math.inf
    return math.inf


def start_threads(n: int, option: str) -> None:
    """Start n threads and end them. Raises UserError where there cannot be so many: PyTorch's library of threads would
    end the process without a line."""
    stop, threads = threading.Event(), []
    try:
        for _ in range(n if n > processors() else 0):
            threads += [thread := threading.Thread(target=stop.wait)]
            thread.start()
    except (RuntimeError, MemoryError):
        threads.pop()
        at_most = f"this process can start {len(threads)} threads (ulimit -u, ulimit -v)"
        raise UserError(f"{option}: {at_most}. Use {processors()}, the number of processors.") from None
    finally:
        stop.set()
        for thread in threads:
            thread.join()
