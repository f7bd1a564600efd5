"""`gradus plan --web`: a small page on this machine that plans as its form is filled in. One HTML file, a JSON
interface, nothing else.

GET /             the page (page.html)
GET /api/options  what the form offers: recipes, presets, devices, layout keys, and the plan named on the command line
POST /api/plan    {"recipe", "on", "tokens", "days", "price", "overrides"} → the rows of `gradus plan --json`, each with
                  its value as text; "config": the content of a config.json, which is planned in place of the recipe
POST /api/search, /api/devices, /api/serve (also "batch", "length", "bits"), /api/optimal
                  the same → the lines and the table of `gradus plan --search` and so on

A page of another site must not reach this: the Host header has to be a loopback name or what the server was bound to (a
name that was made to point at this machine, DNS rebinding, is neither), Origin has to be this page's own, and a POST
has to be JSON. Requests name packaged recipes, presets and what the command line named; keys that hold paths are
refused. A config.json comes as its content, and lies in a folder of this server's own while it serves.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import importlib.resources
import ipaddress
import json
import re
import select
import shlex
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradus import hardware, limits
from gradus import recipe as recipes
from gradus.errors import UserError, did_you_mean
from gradus.parallel.processes import Fault, Pool
from gradus.plan import answer as answers
from gradus.plan.answer import Answer, Reply, Request, pinned
from gradus.plan.keys import kind_of, precision_text
from gradus.plan.show import value_text
from gradus.recipe.fields import alternatives, fields_of, is_section
from gradus.recipe.presets import ALIASES, EXAMPLE, PRESETS
from gradus.recipe.schema import Layout

# The layout's keys in the form, those that matter most first; what they may be comes from the schema.
LAYOUT = {
    "precision": "Precision", "micro_batch": "Micro-batch", "checkpointing": "Checkpointing", "shard": "Shard (FSDP)",
    "tensor": "Tensor parallel", "pipeline": "Pipeline stages", "context": "Context parallel",
    "expert": "Expert parallel",
    "replicate": "Replicas by", "shard_optimizer": "Shard optimizer (ZeRO-1)", "schedule": "Pipeline schedule",
    "stages": "Stages per process", "sequence_parallel": "Sequence parallel", "vocab_parallel": "Vocabulary parallel",
    "context_method": "Context method", "reshard": "Reshard after forward",
    "param_dtype": "Gathered weights' dtype",
    "reduce_dtype": "Reduced gradients' dtype", "attention": "Attention", "tf32": "TF32",
    "offload": "Offload to the host",
    "compress": "Compressed gradients",
}  # fmt: skip
MAIN_KEYS = 9
# Keys outside the layout whose present value the form shows where it is left empty.
SHOWN = ("batch.samples", "batch.tokens", "train.steps", "train.epochs", "adapter.rank", "energy.watts", "energy.grid")
NAMES_NO_FILE = ("model.preset", "energy.grid")  # of the keys whose value is a text


# ---------------------------------------------------------------- what is asked and answered

Text = Annotated[str, Field(min_length=1, max_length=limits.TEXT)]
Finite = Field(gt=0, allow_inf_nan=False)
Tokens, Million = Annotated[float, Finite, Field(le=limits.TOKENS)], Annotated[float, Finite, Field(le=1e6)]


def whole(most: int) -> Any:
    """A whole number from 1."""
    return Annotated[int, Field(ge=1, le=most)]


class Asked(BaseModel):
    """A request's body. The descriptions are what an error says was expected."""

    model_config = ConfigDict(extra="forbid", strict=True)
    recipe: Text = Field(description="recipe: expected a short text")
    on: Text | None = Field(None, description="on: expected a short text")
    tokens: Tokens | None = Field(
        None, description=f"--tokens: must be a positive number, at most {limits.TOKENS:g}"
    )
    days: Million | None = Field(None, description="--days: must be a positive number, at most 1,000,000")
    price: Million | None = Field(None, description="--price: must be a positive number, at most 1,000,000")
    config: dict[str, Any] | None = Field(None, description="config: expected what a config.json holds, an object")
    overrides: list[Text] = Field(
        [], max_length=limits.OVERRIDES,
        description=f"overrides: expected a list of at most {limits.OVERRIDES} short texts",
    )  # fmt: skip


class ToServe(Asked):
    """A request's body for /api/serve."""

    batch: whole(limits.BATCH) | None = Field(None, description="--batch: must be a positive whole number")
    length: whole(limits.LENGTH) | None = Field(None, description="--length: must be a positive whole number")
    bits: whole(32) | None = Field(None, description="--bits: must be a whole number from 1 to 32")


def request_of(
    body: Any, started: Request | None, kind: type[Asked] = Asked, configs: str = ""
) -> tuple[Request, dict[str, int]]:
    """(the request in a body, its further settings). configs: a folder for what a config.json holds. Raises UserError
    for whatever is not as `gradus plan` would be asked, or could name a file."""
    try:
        asked = kind.model_validate(body)
    except ValidationError as e:
        key, fields = str((*e.errors()[0]["loc"], "")[0])[: limits.TEXT], kind.model_fields
        if key in fields:
            raise UserError(f"{fields[key].description}.") from None
        if key:
            raise UserError(f"{key}: unknown key of the request.{did_you_mean(key, fields)}") from None
        raise UserError("the request: expected a JSON object.") from None
    known = [*recipes.names(), *PRESETS, *ALIASES]
    if asked.config is not None:
        asked.recipe = _written(asked.config, configs)
    elif asked.recipe not in known and not (started and asked.recipe == started.recipe):
        own = f"Your own recipe: start gradus plan {shlex.quote(asked.recipe)} --web"
        raise UserError(f"recipe={asked.recipe}: not offered here.{did_you_mean(asked.recipe, known)} {own}")
    for override in asked.overrides:
        if not (started and override in started.overrides):
            _names_no_file(override)
    json_file = started.json_file if started and asked.recipe == started.recipe else None
    more = asked.model_dump(exclude=set(Asked.model_fields), exclude_none=True)
    fields = asked.recipe, tuple(asked.overrides), asked.on, asked.tokens, asked.days, json_file, asked.price
    return Request(*fields), more


def _written(config: dict[str, Any], folder: str) -> str:
    """The folder that holds this config.json now."""
    text = json.dumps(config)
    model = re.sub(r"\W", "", str(config.get("model_type")))[:40] or "model"
    path = Path(folder, hashlib.sha256(text.encode()).hexdigest()[:16], model)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(text)
    return str(path)


def _names_no_file(override: str) -> None:
    key, _, value = (part.strip() for part in override.partition("="))
    if value[:1] in ("[", "{") and re.search(r"[&*!]", value):
        refused = "YAML's anchors, aliases and tags are not accepted from the page"
        raise UserError(f"{key}: {refused}. Write the value out.")
    text = any(str in alternatives(field.annotation) for field in fields_of(key))
    if (text and key not in NAMES_NO_FILE) or is_section(key):
        instead = f"Give it on the command line: gradus plan RECIPE {key}=... --web"
        raise UserError(f"{key}: cannot be set from the page, since it can name files. {instead}")


def command(request: Request, *more: str) -> str:
    """What to type for the same plan."""
    words = ["gradus", "plan", request.recipe]
    for flag in ("json_file", "on", "tokens", "days", "price"):
        value = getattr(request, flag)
        words += [f"--{flag}", value if isinstance(value, str) else f"{value:.12g}"] if value else []
    return shlex.join([*words, *more, *request.overrides])


def plan(request: Request, answer: Callable[[Request], Answer]) -> dict[str, Any]:
    """What the page shows: the rows of --json, each with its value as text, and what was left to the recipe or to the
    plan."""
    planned = answer(request)
    keys = [*(f"layout.{key}" for key in LAYOUT), *SHOWN]
    recipe = planned.recipe
    settings = {key: functools.reduce(_attribute, key.split("."), recipe) for key in keys}
    settings["layout.precision"] = precision_text(recipe.layout)
    settings["model.seq_len"] = _attribute(recipe.data, "max_len") or _attribute(recipe.model, "seq_len")
    return {
        "rows": [{**json.loads(row.json()), "text": value_text(row)} for row in planned.rows],
        "headline": planned.headline, "notes": planned.notes, "fits": planned.fits, "devices": planned.n,
        "settings": {k: str(v).lower() if isinstance(v, bool) else v for k, v in settings.items() if v is not None},
        "command": command(pinned(request, planned)),
    }  # fmt: skip


def _attribute(section: Any, name: str) -> Any:
    return getattr(section, name, None)


def options(started: Request | None) -> dict[str, Any]:
    """What the form offers, from the schema, the library and the hardware file."""
    keys, presets = [], {}
    for name, label in LAYOUT.items():
        kind = alternatives(Layout.model_fields[name].annotation)[0]
        choices = ["true", "false"] if kind is bool else [str(c) for c in get_args(kind)] or None
        keys.append({"key": f"layout.{name}", "label": label, "choices": choices, "main": len(keys) < MAIN_KEYS})
    for name, fields in PRESETS.items():
        presets.setdefault(fields["family"], []).append(name)
    return {
        "recipes": [{"name": name, "about": recipes.header(name)[0]} for name in recipes.names()],
        "presets": presets,
        "example": EXAMPLE,
        "devices": list(hardware.devices()),
        "layout": keys,
        "start": dataclasses.asdict(started) if started else None,
    }


CELLS = {  # row → its column
    "search/memory": "memory per device", "search/step": "time per step", "search/time": "total time",
    "search/money": "cost of {of}", "device/memory": "memory", "device/step": "time per step",
    "device/hours": "time per {per}", "device/cost": "cost per {per}", "optimal/parameters": "parameters",
    "optimal/tokens": "tokens", "optimal/flops": "FLOP", "optimal/tokens_per_parameter": "tokens per parameter",
    "optimal/loss": "loss",
}  # fmt: skip


def question(request: Request, ask: Callable[..., Reply], flag: str, **more: int) -> dict[str, Any]:
    """What the page shows of another question than the plan: its first lines and notes, and a table of its rows; a line
    of the table has the settings that the form would take for it, and the numbers of a curve."""
    lines, rows, notes = ask(request, **more)
    entries: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        c = row.conditions
        if row.name not in CELLS or c.get("case", "expected") != "expected":
            continue
        entry = entries.setdefault(tuple(c.get(name) for name in ("rank", "device", "fit")), _entry(c, request))
        if entry["cells"].get("precision") == c.get("precision"):  # a device's best comes first, and alone
            entry["cells"][CELLS[row.name].format_map(c)] = value_text(row)
            entry["values"][row.name.partition("/")[2]] = row.value
    until = lines.index("") if "" in lines else None
    if any(entry["best"] for entry in entries.values()):
        until = 1  # of a search: what wins is in the table
    flags = [flag, *(word for key, value in more.items() for word in (f"--{key}", str(value)))]
    table = list(entries.values())
    return {"lines": lines[:until], "notes": notes, "table": table, "command": command(request, *flags)}


def _entry(c: dict[str, Any], request: Request) -> dict[str, Any]:
    """A line of `question`'s table, without the figures. c: the conditions of a row."""
    best = c.get("best") or []
    wins = ", ".join("fewest devices" if name == "fewest" else name for name in best)
    why = wins or c.get("reason") or "does not fit" * (c.get("fits") is False)
    on = f"{c['devices']}x{kind_of(request.on or '')}" if "rank" in c else c.get("device")
    cells = {name: c[name] for name in ("devices", "device", "precision", "fit") if name in c}
    if "devices" in cells:
        cells["devices"] = f"{c['devices']:,}"
    values = {"devices": c.get("devices")}
    return {"keys": c.get("layout"), "on": on, "best": bool(best), "reason": why, "cells": cells, "values": values}


# ---------------------------------------------------------------- HTTP


class Server(ThreadingHTTPServer):
    """A thread per connection, of which there are so many at a time. planner: answers in this process, one request at a
    time; None: `plan.answer` does, in others."""

    daemon_threads = True

    def __init__(self, host: str, port: int, started: Request | None, planner: Any):
        self.configs = tempfile.TemporaryDirectory(prefix="gradus-")
        self.connections, self.workers, self.one = threading.Semaphore(limits.CONNECTIONS), Pool(), threading.Lock()
        self.run = self.run_alone if planner else self.workers.run
        self.address_family = _family(host)
        super().__init__((host, port), Handler)
        self.host, self.started = host, started
        planner = planner or answers
        self.routes = {"/api/plan": functools.partial(plan, answer=planner.answer)}
        for name in ("search", "devices", "serve", "optimal"):
            self.routes[f"/api/{name}"] = functools.partial(question, ask=getattr(planner, name), flag=f"--{name}")
        self.page = importlib.resources.files("gradus.plan").joinpath("page.html").read_bytes()

    def run_alone(self, function: Callable, argument: Any, gone: Callable[[], bool]) -> Any:
        with self.one:  # tracing has one process-wide fake world
            return None if gone() else function(argument)

    def verify_request(self, request: socket.socket, client_address: Any) -> bool:
        if self.connections.acquire(blocking=False):
            return True
        with contextlib.suppress(OSError):
            request.settimeout(1)
            request.sendall(b"HTTP/1.0 503 Too many connections\r\n\r\n")
        return False

    def process_request_thread(self, request: socket.socket, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # who left in between is no fault
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        self.workers.end()
        self.configs.cleanup()

    @property
    def url(self) -> str:
        host = self.server_address[0]
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "gradus", ""
    timeout = 30  # s, of a client that does not take the answer

    error_message_format, error_content_type = "%(code)d %(message)s\n", "text/plain; charset=utf-8"

    def setup(self) -> None:
        super().setup()
        # what comes in after this, however slowly, is not read: the connection looks as if it had ended
        self.late = threading.Timer(limits.RECEIVING, self._stop_reading)
        self.late.daemon = True
        self.late.start()

    def finish(self) -> None:
        self.late.cancel()
        super().finish()

    def _stop_reading(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._is_own():
            return
        if path == "/":
            policy = {"Content-Security-Policy": _policy(self.server.page)}
            self._send(200, self.server.page, "text/html; charset=utf-8", **policy)
        elif path == "/api/options":
            self._answer(lambda: options(self.server.started))
        elif path == "/favicon.ico":
            self._send(204, b"", "image/x-icon")
        else:
            self._refuse(404, f"{path[:limits.TEXT]}: nothing here. The page is at /")

    def do_POST(self) -> None:
        path, server = self.path.partition("?")[0], self.server
        if not self._is_own():
            return
        if path not in server.routes:
            self._refuse(404, f"{path[:limits.TEXT]}: nothing here. POST to {' or '.join(server.routes)}")
        elif (body := self._body()) is not None:
            self.late.cancel()
            self._answer(lambda: self._planned(path, body))

    def _planned(self, path: str, body: bytes) -> dict[str, Any] | None:
        kind = ToServe if path == "/api/serve" else Asked
        server, asked = self.server, limits.parse_json(body, "the request")
        request, more = request_of(asked, server.started, kind, server.configs.name)
        return server.run(functools.partial(server.routes[path], **more), request, self._gone)

    def _is_own(self) -> bool:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not _own(host, self.server.host, self.connection.getsockname()[0]):
            self._refuse(403, f"Host {host[:limits.TEXT]}: not this machine. Open {self.server.url}")
        elif origin is not None and origin != f"http://{host}":
            self._refuse(403, f"Origin {origin[:limits.TEXT]}: another site's page.")
        else:
            return True
        return False

    def _body(self) -> bytes | None:
        if self.headers.get_content_type() != "application/json":
            return self._refuse(415, "the request: expected Content-Type: application/json.")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,15}", length) or "Transfer-Encoding" in self.headers:
            return self._refuse(411, "the request: expected its Content-Length.")
        length = int(length)
        body = self.rfile.read(min(length, 16 * limits.BODY))  # a large one too: the answer is read when all is sent
        if length > limits.BODY:
            return self._refuse(413, f"the request: {length:,} bytes; at most {limits.BODY:,}.")
        if len(body) < length:
            late = f"not all of its {length:,} bytes came within {limits.RECEIVING:g} s"
            return self._refuse(408, f"the request: {late}.")
        return body

    def _gone(self) -> bool:
        readable = select.select([self.connection], [], [], 0)[0]
        try:
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _answer(self, make: Callable[[], dict[str, Any] | None]) -> None:
        """make: None where the form has moved on while this one waited."""
        try:
            answer = make()
        except UserError as e:
            return self._refuse(400, str(e))
        except Exception as e:  # a fault of the planner: the page stays usable, the terminal has the trace
            if not isinstance(e, Fault):
                traceback.print_exc()
            why = str(e) if isinstance(e, Fault) else f"{type(e).__name__}: {e}"
            return self._refuse(500, f"the plan failed ({why}). The terminal that serves this page has the traceback.")
        if answer is not None:
            self._reply(200, answer)

    def _refuse(self, status: int, text: str) -> None:
        self._reply(status, {"error": text})

    def _reply(self, status: int, found: dict[str, Any]) -> None:
        """Where a config.json lies is the server's own matter: FOLDER stands for it, as in `gradus plan FOLDER`."""
        text = re.sub(rf"(hf:)?{re.escape(self.server.configs.name)}/\w+/\w+", "FOLDER", json.dumps(found))
        self._send(status, text.encode())

    def _send(self, status: int, body: bytes, kind: str = "application/json", **more: str) -> None:
        always = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        try:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **always, **more}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the form has moved on

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing for every request: `_answer` prints what goes wrong."""


def _own(host: str, bound: str, reached: str) -> bool:
    """Whether a Host header names this machine: a loopback name, what the server was bound to, or, where that is every
    address, the one that the connection reached. Any port: it may be forwarded."""
    try:
        name = urlsplit(f"//{host}").hostname if re.fullmatch(r"[A-Za-z0-9.:_\[\]-]{1,255}", host) else None
        known = {"localhost", bound.lower()}
        if bound in ("", "0.0.0.0", "::"):
            known.add(reached.removeprefix("::ffff:"))
        return name in known or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _policy(page: bytes) -> str:
    """The page's own script and style, this server, and nothing else."""

    def of(tag: bytes) -> str:
        inside = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.S)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in inside)

    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; script-src {of(b'script')}; style-src {of(b'style')}; {rest}"


# ---------------------------------------------------------------- the verb


def open_server(host: str, port: int, started: Request | None, planner: Any = None) -> Server:
    """A server that listens. planner: see `Server`. Raises UserError where the port is taken or the address is not this
    machine's."""
    if not 0 <= port <= 65_535:
        raise UserError(f"--port={port}: must be from 0 (any free one) to 65535.")
    try:
        return Server(host, port, started, planner)
    except socket.gaierror:
        default = "The default is 127.0.0.1: from this machine only"
        raise UserError(f"--host={host}: not an address of this machine. {default}.") from None
    except PermissionError:
        raise UserError(f"--port={port}: ports below 1024 need root. Use --port 8000.") from None
    except OSError as e:
        with contextlib.suppress(OSError), socket.create_server((host, 0), family=_family(host)) as other:
            raise UserError(f"--port={port}: taken. A free one: --port {other.getsockname()[1]}") from None
        raise UserError(f"--host={host} --port={port}: cannot listen there: {e.strerror or e}.") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def serve(started: Request | None = None, *, host: str = "127.0.0.1", port: int = 8000) -> int:
    """Serve the page until Ctrl-C; the address is printed. `started`: the plan that the form opens with, whose recipe
    and settings may name files. Raises UserError where it cannot listen (where the port is taken, a free one is named).
    """
    try:
        with open_server(host, port, started) as server:
            print(f"the plan as a page: {server.url}   (Ctrl-C ends)", flush=True)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("\nended", file=sys.stderr)
    return 0
