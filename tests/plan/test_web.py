"""The page: its JSON interface over real HTTP, and the page itself in headless Chromium, driven by the keyboard."""

from __future__ import annotations

import http.client
import importlib.resources
import itertools
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradus import limits
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.plan import web
from gradus.plan.answer import Request
from gradus.plan.figures import figure
from gradus.plan.hf import recipe_for
from gradus.plan.show import value_text

GB = 1e9


class Planner:
    """Answers at once with numbers that follow from the request alone, so that what the page shows can be held against them."""

    def __init__(self):
        self.asked: list[Request] = []
        self.slow: dict[str, float] = {}  # override → seconds
        self.found = None  # of a search, in place of the three layouts

    def answer(self, request: Request):
        self.asked.append(request)
        for override in request.overrides:
            time.sleep(self.slow.get(override, 0))
        given = dict(o.partition("=")[::2] for o in request.overrides)
        if given.get("layout.tensor") == "3":
            raise UserError("gpt2-small: layout.tensor=3: n_heads=12 is not a multiple of it. Set layout.tensor=2 or 4.")
        if given.get("layout.tensor") == "5":
            raise UserError("- layout: tensor 5 = 5 processes, and 8 were started.\n- batch.samples: 7 cannot be split over 5.")
        if request.recipe == "gpt2-large":
            raise ZeroDivisionError("of the planner's own")
        t = int(given.get("layout.tensor", 1))
        parts = {"weights": 40 * GB / t, "gradients": 20 * GB / t, "optimizer": 30 * GB / t, "activations": 10 * GB, "logits": 5 * GB, "gathered": 0.0}
        rows = [figure("parameters/total", 124_439_808, "parameters", "sum of the components", source="the module")]
        rows += [figure(f"memory/{name}", value, "bytes", f"formula of {name}", {"tensor": t}, "traced") for name, value in parts.items()]
        allocated = sum(parts.values())
        rows += [
            figure("memory/allocated", allocated, "bytes"),
            figure("memory/reserved", allocated + 2 * GB, "bytes"),
            figure("memory/framework", 1 * GB, "bytes"),
            figure("memory/device", allocated + 3 * GB, "bytes", "reserved + framework", {"reserved": allocated + 2 * GB, "framework": 1 * GB}),
            figure("memory/capacity", 80 * GB, "bytes"),
            figure("time/matmul", 0.3, "s"),
            figure("time/comm/tensor", 0.1, "s"),
            figure("time/step", 0.4, "s", low=0.3, high=0.5),
            figure("time/mfu", 0.42, "", convention="full attention matrix"),
            figure("traffic/tensor", 6 * GB, "bytes", calls=96, kinds="all_reduce"),
            figure("traffic/replicate", 3 * GB, "bytes", calls=12, kinds="all_reduce"),
        ]
        rows += [figure("budget/cost", cost, "$", case=case) for case, cost in (("low", 90.0), ("expected", 100.0), ("high", 150.0))]
        rows += [figure("budget/device_hours", 521_000.0 * f, "device-hours", case=case) for case, f in (("low", 0.8), ("expected", 1), ("high", 1.6))]
        rows += [figure("budget/energy", 1.1e12 * f, "J", case=case) for case, f in (("low", 0.8), ("expected", 1), ("high", 1.6))]
        rows += [figure("budget/steps", 123_456, "steps")]
        device = next(r.value for r in rows if r.name == "memory/device")
        fits = None if request.on is None else device <= 80 * GB
        lines = [f"{request.recipe}: 124,439,808 parameters", f"{'fits' if fits else 'NO FIT'}     {device / GB:.0f} GB of 80 GB", "how long  0.4 s per step"]
        return SimpleNamespace(recipe=recipes.load("copy-task"), rows=rows, headline=lines, notes=["the link's efficiency is assumed"], fits=fits, n=8,
                               chosen=request.on == "64xH100", layout_keys="layout.micro_batch=1 layout.tensor=2")  # fmt: skip

    def search(self, request: Request):
        self.asked.append(request)
        if self.found:
            return self.found
        won = {"rank": 1, "devices": 8, "layout": "layout.tensor=2 layout.checkpointing=full layout.bucket_mb=50", "fits": True, "best": ["fastest", "fewest"]}
        half = {"rank": 2, "devices": 4, "layout": "layout.tensor=4 layout.micro_batch=128 layout.reshard=false layout.param_dtype=bf16", "fits": True, "reason": "context traffic within a node and between nodes 10 % of the step"}
        lost = {"rank": 3, "devices": 8, "layout": "", "fits": False, "reason": "does not fit: 28 GB too much"}
        rows = [figure("search/memory", size * GB, "bytes", **c) for size, c in ((40, won), (50, half), (108, lost))]
        rows += [figure("search/step", 0.2, "s", **won), figure("search/step", 0.38, "s", **half)]
        rows += [figure("search/money", 12.0, "$", **won, of="the whole run"), figure("search/time", 7200.0, "s", **won)]
        return ["gpt2 on 8: 3 layouts in 0.1 s", "fastest ..", "", "table"], rows, ["of the search"]

    def devices(self, request: Request):
        self.asked.append(request)
        at = {"fits": True, "layout": "layout.precision=bf16", "precision": "bf16"}
        rows = [figure("device/memory", 9 * GB, "bytes", device="H100-SXM", **at), figure("device/step", 0.1, "s", device="H100-SXM", **at)]
        rows += [figure("device/memory", 9 * GB, "bytes", device="H100-SXM", **at | {"precision": "fp32"})]
        rows += [figure("device/cost", cost, "$", device="H100-SXM", case=case, per="epoch", **at) for case, cost in (("low", 1.0), ("expected", 2.0))]
        return ["one device", "", "table"], [*rows, figure("device/memory", 9 * GB, "bytes", device="T4", **at | {"fits": False})], []

    def serve(self, request: Request, *, batch=1, length=None, bits=None):
        self.asked.append(request)
        if batch == 3:
            raise UserError("--batch=3: not a good number.")
        return [f"to use it: {batch} sequences of {length}, {bits} bits", "fits      15 GB", "excluded  activations"], [], ["of serving"]

    def optimal(self, request: Request):
        self.asked.append(request)
        return ["of two fits", "", "table"], [figure("optimal/tokens", 4.5e11, "tokens", fit=fit) for fit in ("Hoffmann 2022", "Besiroglu 2024")], []


@pytest.fixture
def planner():
    return Planner()


@pytest.fixture
def server(planner):
    with web.open_server("127.0.0.1", 0, None, planner) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server, path="/api/plan", body=None, method="POST", **headers):
    """(status, JSON or bytes, headers)"""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=240)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}})
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, json.loads(text) if "json" in reply.headers.get("Content-Type", "") else text, reply.headers


PLAN = {"recipe": "gpt2-small", "on": "8xA100-80GB", "tokens": 3e9, "days": None, "overrides": ["layout.tensor=2"]}


# ---------------------------------------------------------------- the interface


def test_plan_is_the_rows_with_their_text(server, planner):
    status, found, _ = ask(server, body=PLAN)
    assert status == 200 and planner.asked == [Request("gpt2-small", ("layout.tensor=2",), "8xA100-80GB", 3e9, None)]
    rows = planner.answer(planner.asked[0]).rows
    assert [{k: v for k, v in row.items() if k != "text"} for row in found["rows"]] == [json.loads(row.json()) for row in rows]
    assert [row["text"] for row in found["rows"]] == [value_text(row) for row in rows]
    assert found["fits"] is True and found["notes"] and found["settings"]["layout.precision"] == "fp32" and found["settings"]["batch.samples"]


def test_the_command_gives_the_same_request(server):
    command = ask(server, body={**PLAN, "days": 30.5, "overrides": ["layout.tensor=2", "optimizer.betas=[0.9, 0.95]"]})[1]["command"]
    words = shlex.split(command)
    assert words[:2] == ["gradus", "plan"]
    assert words[2:] == ["gpt2-small", "--on", "8xA100-80GB", "--tokens", "3000000000", "--days", "30.5", "layout.tensor=2", "optimizer.betas=[0.9, 0.95]"]


def test_price_watts_grid_and_lora_are_asked_as_on_the_command_line(server, planner):
    overrides = ["energy.grid=385 g/kWh", "energy.watts=300", "adapter.rank=16"]
    status, found, _ = ask(server, body={**PLAN, "price": 2.1, "overrides": overrides})
    assert status == 200 and planner.asked == [Request("gpt2-small", tuple(overrides), "8xA100-80GB", 3e9, None, None, 2.1)]
    assert shlex.split(found["command"])[-5:] == ["--price", "2.1", *overrides]


def test_a_config_json_is_planned_and_its_place_is_told_to_nobody(server, planner):
    config = {"model_type": "../llama", "hidden_size": 64}
    status, found, _ = ask(server, body={**PLAN, "recipe": "config.json", "config": config})
    folder = Path(planner.asked[0].recipe)
    assert status == 200 and folder.parents[1] == Path(server.configs.name) and folder.name == "llama"
    assert json.loads((folder / "config.json").read_text()) == config
    assert found["command"].startswith("gradus plan FOLDER --on") and found["headline"][0].startswith("FOLDER: ")
    assert server.configs.name not in json.dumps(found)
    status, found, _ = ask(server, body={**PLAN, "recipe": "config.json"})
    assert status == 400 and "config.json: not offered here" in found["error"]


def test_the_folder_of_configurations_goes_with_the_server(planner):
    with web.open_server("127.0.0.1", 0, None, planner) as made:
        kept = Path(made.configs.name)
        assert kept.is_dir()
    assert not kept.exists()


def test_the_length_that_is_shown_is_the_planned_one():
    made = SimpleNamespace(recipe=recipe_for("llama3.1-8b"), rows=[], headline=[], notes=[], fits=None, n=1, chosen=False)
    settings = web.plan(Request("llama3.1-8b"), lambda request: made)["settings"]
    assert settings["model.seq_len"] == 8192 != made.recipe.model.seq_len and settings["layout.precision"] == "bf16"
    made.recipe.layout.shard, made.recipe.layout.precision, made.recipe.layout.param_dtype = 8, "fp32", "bf16"
    assert web.plan(Request("llama3.1-8b"), lambda request: made)["settings"]["layout.precision"].startswith("fp32 master weights, bf16 compute")


def test_the_command_of_a_layout_that_the_plan_chose_says_it(server):
    command = ask(server, body={**PLAN, "on": "64xH100", "overrides": ["layout.checkpointing=full", "batch.samples=64"]})[1]["command"]
    assert shlex.split(command)[3:] == ["--on", "8xH100", "--tokens", "3000000000", "batch.samples=64", "layout.micro_batch=1", "layout.tensor=2"]


def test_search_answers_with_ranked_layouts(server, planner):
    status, found, _ = ask(server, "/api/search", PLAN)
    assert status == 200 and [x["best"] for x in found["table"]] == [True, False, False] and "--search" in found["command"]
    cells = {"devices": "8", "memory per device": "40 GB", "time per step": "200 ms", "cost of the whole run": "$12.00", "total time": "2 h"}
    assert found["table"][0]["cells"] == cells and found["table"][0]["reason"] == "fastest, fewest devices"
    assert found["table"][0]["values"] == {"devices": 8, "memory": 40 * GB, "step": 0.2, "time": 7200.0, "money": 12.0}
    assert found["table"][1]["on"] == "4xA100-80GB" and found["lines"] == ["gpt2 on 8: 3 layouts in 0.1 s"] and found["notes"] == ["of the search"]


def test_the_other_questions_of_the_verb_are_answered(server, planner):
    bare = {**PLAN, "on": None}
    status, found, _ = ask(server, "/api/devices", bare)
    assert status == 200 and found["lines"] == ["one device"] and "--devices" in found["command"]
    assert [(x["on"], x["keys"], x["reason"]) for x in found["table"]] == [("H100-SXM", "layout.precision=bf16", ""), ("T4", "layout.precision=bf16", "does not fit")]
    assert found["table"][0]["cells"] == {"device": "H100-SXM", "precision": "bf16", "memory": "9 GB", "time per step": "100 ms", "cost per epoch": "$2.00"}
    status, found, _ = ask(server, "/api/optimal", bare)
    assert status == 200 and [x["cells"] for x in found["table"]] == [{"fit": fit, "tokens": "450,000,000,000 tokens"} for fit in ("Hoffmann 2022", "Besiroglu 2024")], []
    status, found, _ = ask(server, "/api/serve", {**bare, "batch": 8, "length": 512, "bits": 4})
    assert status == 200 and found["lines"][0] == "to use it: 8 sequences of 512, 4 bits" and found["notes"] == ["of serving"] and found["table"] == []
    assert shlex.split(found["command"])[-7:] == ["--serve", "--batch", "8", "--length", "512", "--bits", "4"] or "--serve --batch 8" in found["command"]
    for body, said in (({"batch": 0}, "--batch: must be a positive whole number"), ({"bits": 33}, "--bits: must be"), ({"length": "9"}, "--length: must be")):
        status, found, _ = ask(server, "/api/serve", {**bare, **body})
        assert status == 400 and said in found["error"]
    assert "batch: unknown key" in ask(server, body={**PLAN, "batch": 8})[1]["error"]


def test_options_offer_every_recipe_preset_device_and_key(server):
    from gradus import hardware
    from gradus.recipe.presets import PRESETS
    from gradus.recipe.schema import Layout

    status, found, _ = ask(server, "/api/options", method="GET")
    assert status == 200 and [r["name"] for r in found["recipes"]] == recipes.names()
    assert [name for names in found["presets"].values() for name in names] == list(PRESETS)
    assert hardware.find(found["devices"][0]).name == found["devices"][0] and "A100-80GB" in found["devices"]
    keys = {k["key"].removeprefix("layout."): k for k in found["layout"]}
    assert {"precision", "micro_batch", "checkpointing", "shard", "tensor", "pipeline", "context", "expert", "replicate"} <= set(keys) <= set(Layout.model_fields)
    assert keys["precision"]["choices"] == ["fp32", "bf16", "fp16", "fp8", "pure_bf16", "pure_fp16"] and keys["tensor"]["choices"] is None
    assert keys["reshard"]["choices"] == ["true", "false"] and keys["param_dtype"]["choices"] == ["fp32", "bf16", "fp16"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 20_000, "nested deeper than 64 levels"),
        ([], "expected a JSON object"),
        ({}, "recipe: expected a short text"),
        ({**PLAN, "recipe": 5}, "recipe: expected a short text"),
        ({**PLAN, "recipe": "gpt2-smal"}, "Did you mean gpt2-small?"),
        ({**PLAN, "recipe": "../../etc/passwd"}, "not offered here"),
        ({**PLAN, "recipe": "hf:some/model"}, "not offered here"),
        ({**PLAN, "on": ["A100"]}, "on: expected a short text"),
        ({**PLAN, "on": "x" * 5000}, "on: expected a short text"),
        ({**PLAN, "tokens": "3e9"}, "--tokens: must be a positive number"),
        ({**PLAN, "tokens": True}, "--tokens: must be a positive number"),
        ({**PLAN, "days": -1}, "--days: must be a positive number"),
        ({**PLAN, "price": 0}, "--price: must be a positive number"),
        ({**PLAN, "config": "llama"}, "config: expected what a config.json holds"),
        (json.dumps(PLAN).replace("3000000000.0", "NaN").encode(), "--tokens: must be a positive number"),
        ({**PLAN, "overrides": "layout.tensor=2"}, "overrides: expected a list"),
        ({**PLAN, "overrides": ["a.b=1"] * 101}, "at most 100"),
        ({**PLAN, "overrides": [{"layout": 1}]}, "overrides: expected a list"),
        ({**PLAN, "override": []}, "override: unknown key of the request. Did you mean overrides?"),
        ({**PLAN, "overrides": ["data.path=/etc/passwd"]}, "data.path: cannot be set from the page, since it can name files"),
        ({**PLAN, "overrides": [" data.path = /etc/passwd"]}, "data.path: cannot be set from the page"),
        ({**PLAN, "overrides": ["model.init=/etc"]}, "model.init: cannot be set from the page"),
        ({**PLAN, "overrides": ["data={path: /etc/passwd}"]}, "data: cannot be set from the page"),
        ({**PLAN, "overrides": ["tokenizer.path=/etc/passwd"]}, "tokenizer.path: cannot be set from the page"),
        ({**PLAN, "overrides": ["optimizer.betas=[&a 0.9, *a]"]}, "optimizer.betas: YAML's anchors"),
        ({**PLAN, "config": {}, "overrides": ["model.init=/etc"]}, "model.init: cannot be set from the page"),
        ({**PLAN, "overrides": ["log.dir=/etc"]}, "log.dir: cannot be set from the page"),
        ({**PLAN, "overrides": ["layout.tensor=3"]}, "gpt2-small: layout.tensor=3: n_heads=12 is not a multiple"),
    ],
)  # fmt: skip
def test_bad_input_is_one_plain_error(server, planner, body, said):
    status, found, _ = ask(server, body=body)
    assert status == 400 and said in found["error"], found
    assert len(planner.asked) == (1 if "layout.tensor=3" in said else 0)


def test_a_fault_of_the_planner_is_told_and_the_server_goes_on(server, capfd):
    status, found, _ = ask(server, body={**PLAN, "recipe": "gpt2-large"})
    assert status == 500 and "ZeroDivisionError: of the planner's own" in found["error"]
    assert "Traceback" in capfd.readouterr().err
    assert ask(server, body=PLAN)[0] == 200


def test_too_large_a_body_is_refused(server, planner):
    status, found, _ = ask(server, body={**PLAN, "recipe": "x" * limits.BODY})
    assert status == 413 and "at most 262,144" in found["error"] and not planner.asked
    with socket.create_connection(server.server_address[:2], timeout=20) as s:
        s.sendall(b"POST /api/plan HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\r\n")
        assert b" 411 " in s.recv(4096)
    assert ask(server, body=b"recipe=gpt2", Content_Type="application/x-www-form-urlencoded")[0] == 415


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example", 403), ("", 403), ("a@localhost", 403),
     ("8.8.8.8", 403), ("192.168.1.5:8000", 403), ("0.0.0.0:8000", 403), ("[2001:db8::1]", 403),
     ("localhost", 200), ("127.0.0.1:9000", 200), ("127.0.0.2", 200), ("[::1]:8000", 200)],
)  # fmt: skip
def test_only_this_machines_names_are_answered(server, planner, host, status):
    for method, path, body in (("GET", "/", None), ("GET", "/api/options", None), ("POST", "/api/plan", PLAN)):
        assert ask(server, path, body, method, Host=host)[0] == status
    assert len(planner.asked) == (1 if status == 200 else 0)


def test_another_sites_page_is_refused(server, planner):
    here = f"127.0.0.1:{server.server_address[1]}"
    for origin, status in (("http://evil.example", 403), ("null", 403), ("http://127.0.0.1:1", 403), (f"https://{here}", 403), (f"http://{here}", 200)):
        assert ask(server, body=PLAN, Origin=origin)[0] == status
    assert len(planner.asked) == 1


def test_what_the_server_was_bound_to_is_its_name():
    """Bound to every address it answers by the one that was reached; another address is no name of this machine."""
    for bound, host, own in (("10.0.0.7", "10.0.0.7:8000", True), ("10.0.0.7", "10.0.0.8", False), ("0.0.0.0", "10.0.0.7", True),
                             ("0.0.0.0", "10.0.0.8", False), ("::", "10.0.0.7:80", True), ("127.0.0.1", "10.0.0.7", False)):  # fmt: skip
        assert web._own(host, bound, "::ffff:10.0.0.7" if bound == "::" else "10.0.0.7") is own, (bound, host)


def test_no_file_but_the_page(server):
    for path in ("/page.html", "/../web.py", "/%2e%2e/web.py", "//etc/passwd", "/api/plan/../../web.py", "/api/plan"):
        assert ask(server, path, method="GET")[0] == 404
    assert ask(server, "/api/nothing", PLAN)[0] == 404
    status, page, headers = ask(server, "/", method="GET")
    assert status == 200 and page.startswith(b"<!doctype html>") and headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in headers["Content-Security-Policy"] and "unsafe" not in headers["Content-Security-Policy"]
    assert not re.search(rb"(src|href)=[\"']?(https?:)?//|@import|url\(", page)


def test_what_the_command_line_named_may_be_a_file(planner):
    started = Request("./mine.yaml", ("data.path=here.txt",), "A100-80GB")
    asked = web.request_of({"recipe": "./mine.yaml", "overrides": ["data.path=here.txt", "layout.tensor=2"]}, started)[0]
    assert asked == Request("./mine.yaml", ("data.path=here.txt", "layout.tensor=2"))
    with pytest.raises(UserError, match=r"data\.path: cannot be set from the page"):
        web.request_of({"recipe": "./mine.yaml", "overrides": ["data.path=there.txt"]}, started)


def test_a_request_that_was_given_up_is_not_planned(server, planner):
    planner.slow["layout.tensor=4"] = 2.0
    slow = threading.Thread(target=ask, args=(server,), kwargs={"body": {**PLAN, "overrides": ["layout.tensor=4"]}})
    slow.start()
    while not planner.asked:
        time.sleep(0.01)
    body = json.dumps({**PLAN, "overrides": ["layout.shard=8"]}).encode()
    with socket.create_connection(server.server_address[:2]) as s:  # waits behind the slow one, and leaves
        s.sendall(b"POST /api/plan HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        time.sleep(0.1)
    slow.join()
    assert ask(server, body=PLAN)[0] == 200
    assert [request.overrides for request in planner.asked] == [("layout.tensor=4",), ("layout.tensor=2",)]


def test_a_taken_port_names_a_free_one(server, planner):
    port = server.server_address[1]
    with pytest.raises(UserError, match=rf"--port={port}: taken\. A free one: --port (\d+)") as e:
        web.serve(port=port)
    free = int(str(e.value).split()[-1])
    with socket.socket() as s:
        s.bind(("127.0.0.1", free))
    with pytest.raises(UserError, match="--port=70000: must be"):
        web.serve(port=70_000)


@pytest.mark.slow
def test_ctrl_c_ends_cleanly():
    code = "from gradus.plan import web; import sys; sys.exit(web.serve(port=0))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert re.search(r"http://127\.0\.0\.1:\d+/", line), line
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in err


# ---------------------------------------------------------------- what the buttons send, to the planner itself

SCRIPT = (importlib.resources.files("gradus.plan") / "page.html").read_text()
SENT = {**{kind: f"api/{kind}" for kind in ("search", "devices", "serve", "optimal")}, "clear": "api/plan", "use": "api/plan", "copy": None, "explain": None}  # button → what a click sends
SHOWN_BY = {"api/plan": ("show",), **{SENT[kind]: ("layouts",) for kind in ("search", "devices", "serve", "optimal")}, "api/options": ("start", "buildForm")}  # → the functions that read the answer
TINY = ("model.n_layers=2", "batch.samples=64")
THREE = "model.n_heads=3"  # heads that no axis splits leave less to trace


def read_by(path: str, name: str) -> set[str]:
    """The keys of `name` that the page's code reads from an answer of `path`."""
    bodies = (re.search(rf"^function {function}\(.*?^}}", SCRIPT, re.S | re.M)[0] for function in SHOWN_BY[path])
    return {key for body in bodies for key in re.findall(rf"\b{name}\.(\w+)", body)} - {"value", "flatMap", "map"}


def test_every_button_and_request_of_the_page_is_in_the_tables():
    written = re.findall(r'<button [^>]*id="(\w+)"', SCRIPT)
    made = re.findall(r'make\("button", \{[^\n]*\}, "(\w+)"\)', SCRIPT)
    assert len(written) + len(made) == len(re.findall(r'<button |"button", \{', SCRIPT)) and {*written, *made} == SENT.keys()
    assert "post(`api/${kind}`" in SCRIPT
    kinds = re.findall(r'\b(\w+): \["[A-Z]', re.search(r"^const QUESTIONS = .*?^};", SCRIPT, re.S | re.M)[0])
    assert {*re.findall(r'(?:post|fetch)\("([^"]+)"', SCRIPT), *(f"api/{kind}" for kind in kinds)} == SHOWN_BY.keys() == {*filter(None, SENT.values()), "api/options"}


@pytest.fixture(scope="module")
def real_server():
    from gradus.plan import answer

    with web.open_server("127.0.0.1", 0, None, answer) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


ASKED = {  # preset or recipe, device, tokens, settings
    "gpt": ("gpt2-small", "2xA100-80GB", 1e9, (*TINY, THREE)),
    "vit": ("vit-ti16", "4xH100-SXM", None, (*TINY, "layout.micro_batch=8")),
    "bert": ("bert-base-uncased", "T4", 1e9, ("model.n_layers=2", "batch.samples=32", "layout.tensor=1")),
    "seq2seq": ("seq2seq-base", "2xRTX-4090", 1e8, ("batch.tokens=4096", "model.n_layers=2", "model.n_decoder_layers=2", "model.d_model=384", THREE)),
    "no fit": ("gpt3-13b", "T4", 1e9, (*TINY, "model.n_heads=5")),
    "no device": ("copy-task", None, None, ("model.n_layers=1",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ASKED)
@pytest.mark.parametrize("path", sorted(filter(None, {*SENT.values()})))
def test_the_planner_answers_every_request_as_the_page_reads_it(real_server, path, case):
    recipe, on, tokens, settings = ASKED[case]
    without = dict(re.findall(r"(\w+): \[\"[^\"]*\", (\[.*?\])\]", re.search(r"^const QUESTIONS = .*?^};", SCRIPT, re.S | re.M)[0]))
    settings = [word for word in settings if word != THREE or path != "api/serve"]  # it splits heads over the devices
    body = {"recipe": recipe, "on": on, "tokens": tokens, "days": None, "overrides": settings}
    body |= dict.fromkeys(json.loads(without.get(path.removeprefix("api/"), "[]")))
    status, found, _ = ask(real_server, f"/{path}", body)
    if (path == "api/search" and on is None) or (path == "api/optimal" and case not in ("gpt", "no fit")):
        said = "--search: on which hardware?" if path == "api/search" else "--optimal: the published fits are for"
        assert status == 400 and found["error"].startswith(said)  # a line of text: all that `errors` reads
        return
    if path == "api/search" and any(key.startswith("layout.") for key in settings):
        assert status == 400 and found["error"].startswith("--search: it chooses layout.")
        return
    if path == "api/serve" and case == "vit":
        assert status == 400 and "n_heads=3 is not a multiple of 4" in found["error"]
        return
    assert status == 200, found
    assert read_by(path, "found") <= found.keys() and read_by(path, "found")
    if path == "api/plan":
        assert all({"name", "value", "unit", "text"} <= row.keys() for row in found["rows"]) and isinstance(found["settings"], dict)
        assert {"memory/device", "memory/allocated", "memory/reserved"} <= {row["name"] for row in found["rows"]}
        assert found["fits"] is (None if on is None else case != "no fit") and found["devices"] >= 1 and found["headline"]
        return
    read = read_by(path, "l")
    assert read == {"keys", "cells", "best", "reason", "on"} and found["lines"] and bool(found["table"]) == (path != "api/serve")
    for entry in found["table"]:
        assert read | {"values"} <= entry.keys() and all(isinstance(text, str) for text in entry["cells"].values())
    if path == "api/search":
        assert all(re.fullmatch(rf"\d+x{re.escape(on.partition('x')[2] or on)}", entry["on"]) for entry in found["table"])
        best = [entry for entry in found["table"] if entry["best"]]
        assert bool(best) == (case != "no fit")
        assert all({"time per step", "memory per device", "total time"} <= entry["cells"].keys() and entry["values"]["step"] for entry in best)


def test_the_options_are_as_the_page_reads_them(real_server):
    status, found, _ = ask(real_server, "/api/options", method="GET")
    assert status == 200 and read_by("api/options", "offered") == found.keys()


# ---------------------------------------------------------------- in the browser


@pytest.fixture
def visit(chromium, server):
    """visit(hash, width=...) → the page after its first plan. Fails on any error of its script and on any request to elsewhere."""
    contexts, wrong = [], []

    def go(fragment="", wait=True, **more):
        width, height = more.pop("width", 1280), more.pop("height", 900)
        context = chromium.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce", **more)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" and "Failed to load resource" not in m.text else None)
        page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith(server.url) else None)
        page.goto(server.url + fragment)
        if wait:
            planned(page)
        return page

    yield go
    for context in contexts:
        context.close()
    assert not wrong


def planned(page, text="✓ Fits|✗ Does not fit|No device"):
    page.wait_for_function(
        "text => new RegExp(text).test(document.getElementById('verdict').textContent) && !document.getElementById('results').ariaBusy"
        " && document.body.dataset.turn", arg=text)  # fmt: skip


@pytest.mark.slow
def test_the_page_loads_with_the_answer(visit, planner):
    page = visit()
    assert planner.asked == [Request("gpt2-small", (), "8xA100-80GB")]
    assert page.inner_text("#verdict") == "✗ Does not fit: 135 % of its memory"
    assert "how long" in page.inner_text("#headline") and "the link's efficiency is assumed" in page.inner_text("#notes")
    assert page.inner_text("#command") == "gradus plan gpt2-small --on 8xA100-80GB"
    assert page.get_attribute("#batch", "placeholder") == f"({recipes.load('copy-task').batch.samples})"
    assert "$90.00" in page.inner_text("#budget") and "$150" in page.inner_text("#budget")
    assert "416,800" in page.inner_text("#budget") and page.inner_text("#budget").count("device-hours") == 1
    assert page.evaluate("getComputedStyle(document.querySelector('.bar > div')).transitionDuration") == "0s"  # no motion, which `visit` does not want


@pytest.mark.slow
def test_planning_by_keyboard_alone(visit, planner):
    page = visit()

    def tab_to(name):
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == name:
                box = page.evaluate("getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth")
                assert box == "solid3px", f"no visible focus on {name}: {box}"
                return
        raise AssertionError(f"{name} is not reached by Tab")

    tab_to("recipe")
    page.keyboard.type("gpt2-m")
    tab_to("batch")
    page.keyboard.type("512")
    tab_to("device")
    page.keyboard.type("H100")
    tab_to("layout.tensor")
    page.keyboard.type("2")
    page.wait_for_function("() => document.getElementById('command').textContent.includes('layout.tensor=2')")
    planned(page)
    device = page.input_value("#device")
    assert device.startswith("H100")
    assert planner.asked[-1] == Request("gpt2-medium", ("batch.samples=512", "layout.tensor=2"), f"8x{device}")
    assert page.inner_text("#verdict").startswith("✓ Fits: 79 %")
    tab_to("search")
    page.keyboard.press("Enter")
    page.wait_for_selector("#found:not([hidden])")
    page.wait_for_function("() => document.activeElement.id === 'found-title'")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the winner's "use"
    page.wait_for_function("() => document.getElementById('command').textContent.includes('bucket_mb=50')")
    assert page.evaluate("document.activeElement.id") == "answer-title"


@pytest.mark.slow
def test_bars_are_as_wide_as_their_numbers(visit, planner):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB&layout.tensor=2")
    rows = {row.name: row.value for row in planner.answer(planner.asked[-1]).rows}
    widths = page.evaluate(
        "() => { const b = document.querySelector('#memory .bar').getBoundingClientRect(), found = {};"
        " for (const e of document.querySelectorAll('#memory .bar [data-part]')) found[e.dataset.part] = e.getBoundingClientRect().width / b.width;"
        " found.mark = (document.querySelector('#memory .mark').getBoundingClientRect().left - b.left) / b.width; return found; }"
    )
    scale = rows["memory/capacity"] * 1.02
    expected = {n: rows[f"memory/{n}"] / scale for n in ("weights", "gradients", "optimizer", "activations", "logits", "framework")}
    expected |= {"allocator's rounding": 2 * GB / scale, "mark": rows["memory/capacity"] / scale}
    assert widths == pytest.approx(expected, abs=0.005)
    parts = page.evaluate("[...document.querySelectorAll('#time .bar [data-part]')].map(e => [e.dataset.part, e.style.width])")
    assert {part: float(width[:-1]) for part, width in parts} == pytest.approx({"matmul": 75, "comm/tensor": 25})
    lines = page.evaluate("[...document.querySelectorAll('#traffic .line')].map(e => e.getBoundingClientRect().width)")
    assert lines[1] / lines[0] == pytest.approx(0.5, abs=0.01)
    text = page.inner_text("#memory")
    for value in ("20 GB", "10 GB", "15 GB", "5 GB", "2 GB", "1 GB", "63 GB", "80 GB", "17 GB"):
        assert value in text
    label = page.get_attribute("#memory .bar", "aria-label")
    assert "weights 20 GB" in label and "capacity 80 GB" in label


@pytest.mark.slow
def test_an_error_stands_by_its_field_and_nothing_is_lost(visit):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB&batch.samples=512&layout.tensor=2")
    page.fill("#layout\\.tensor", "3")
    page.wait_for_selector("#layout\\.tensor[aria-invalid=true]")
    wrong = page.get_attribute("#layout\\.tensor", "aria-describedby")
    assert page.inner_text(f"[id='{wrong}']").strip().endswith("gpt2-small: layout.tensor=3: n_heads=12 is not a multiple of it. Set layout.tensor=2 or 4.")
    assert "n_heads=12" in page.inner_text("#state")
    assert page.inner_text("#verdict").startswith("✓ Fits") and page.input_value("#batch") == "512" and page.input_value("#layout\\.tensor") == "3"
    page.fill("#layout\\.tensor", "5")  # two problems at once: each by its own field
    page.wait_for_selector("#batch[aria-invalid=true]")
    assert page.locator("form [aria-invalid=true]").count() == 2
    page.fill("#layout\\.tensor", "2")
    page.wait_for_function("() => !document.querySelector('[aria-invalid]')")
    assert page.locator("form .wrong:visible").count() == 0
    page.fill("#tokens", "many")
    page.wait_for_selector("#tokens[aria-invalid=true]")
    page.fill("#tokens", "")
    page.fill("#count", "0")
    page.wait_for_selector("#count[aria-invalid=true]")
    assert "positive whole number" in page.inner_text("#wrong-on")


@pytest.mark.slow
def test_only_the_newest_answer_counts(visit, planner):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB")
    planner.slow["layout.tensor=4"] = 1.0
    page.fill("#layout\\.tensor", "4")
    while planner.asked[-1].overrides != ("layout.tensor=4",):
        page.wait_for_timeout(20)
    page.fill("#layout\\.tensor", "2")
    page.wait_for_function("() => document.getElementById('command').textContent.endsWith('layout.tensor=2')")
    page.wait_for_timeout(300)
    assert page.inner_text("#command").endswith("layout.tensor=2") and page.inner_text("#verdict").startswith("✓ Fits: 79 %")


@pytest.mark.slow
def test_typing_asks_once(visit, planner):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB")
    page.clock.install()
    page.clock.pause_at("2100-01-01")  # the pause between two keys is the test's, not the machine's
    page.focus("#tokens")
    for key in "300e9":
        page.keyboard.press(key)
        page.clock.run_for(20)
    page.clock.run_for(5000)
    page.wait_for_function("() => document.getElementById('command').textContent.includes('--tokens')")
    assert [request.tokens for request in planner.asked] == [None, 300e9]


@pytest.mark.slow
def test_the_address_holds_the_plan(visit, planner):
    page = visit("#recipe=copy-task&on=A100-80GB&tokens=3e9&days=30&batch.tokens=4096&layout.precision=bf16&layout.offload=true&optimizer.lr=0.1")
    first = planner.asked[-1]
    assert first.recipe == "copy-task" and (first.tokens, first.days, first.on) == (3e9, 30, "A100-80GB")
    assert set(first.overrides) == {"batch.tokens=4096", "layout.precision=bf16", "layout.offload=true", "optimizer.lr=0.1"}
    page.fill("#layout\\.shard", "8")
    page.wait_for_function("() => document.getElementById('command').textContent.includes('layout.shard=8')")
    before, command = planner.asked[-1], page.inner_text("#command")
    assert "layout.shard=8" in before.overrides and "layout.shard=8" in page.url
    page.reload()
    planned(page)
    assert planner.asked[-1] == before and page.inner_text("#command") == command
    again = visit("#" + page.url.partition("#")[2])
    assert planner.asked[-1] == before and again.inner_text("#command") == command
    page.evaluate("location.hash = 'recipe=gpt2-xl&on=2xA100-80GB'")
    page.wait_for_function("() => document.getElementById('command').textContent === 'gradus plan gpt2-xl --on 2xA100-80GB'")


@pytest.mark.slow
def test_search_then_use(visit, planner):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB&batch.samples=512&layout.tensor=1&layout.pipeline=4&model.dropout=0.1")
    page.click("#search")
    page.wait_for_selector("#found table")
    assert "fastest, fewest devices" in page.inner_text("#found") and "28 GB too much" in page.inner_text("#found")
    page.click("#found button >> nth=0")
    page.wait_for_function("() => document.getElementById('command').textContent.includes('bucket_mb=50')")
    planned(page)
    assert set(planner.asked[-1].overrides) == {"batch.samples=512", "model.dropout=0.1", "layout.tensor=2", "layout.checkpointing=full", "layout.bucket_mb=50"}
    assert page.input_value("#layout\\.tensor") == "2" and page.input_value("#layout\\.pipeline") == "" and page.input_value("#layout\\.checkpointing") == "full"
    page.click("#found button >> nth=1")  # a layout of fewer devices takes their number along
    page.wait_for_function("() => document.getElementById('command').textContent.includes('layout.tensor=4')")
    assert planner.asked[-1].on == "4xA100-80GB" and page.input_value("#count") == "4"
    page.click("#clear")
    page.wait_for_function("() => !document.getElementById('command').textContent.includes('layout.')")
    assert set(planner.asked[-1].overrides) == {"batch.samples=512", "model.dropout=0.1"}


@pytest.mark.slow
def test_layouts_of_another_question_go(visit):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB")
    page.click("#search")
    page.wait_for_selector("#found table")
    page.fill("#layout\\.tensor", "2")  # another layout is the same question
    page.wait_for_function("() => document.getElementById('command').textContent.includes('layout.tensor=2')")
    assert page.is_visible("#found")
    page.fill("#tokens", "1e9")
    page.wait_for_selector("#found", state="hidden")
    assert page.inner_text("#searching") == ""


@pytest.mark.slow
def test_every_field_switch_and_button_is_driven(visit, planner, tmp_path):
    """Whatever the page holds is used once, by what it is: a new element is driven too. `visit` fails on any error of the page's script."""
    page = visit("#recipe=gpt2-small&on=8xA100-80GB&layout.tensor=2")
    for summary in page.locator("summary").all():
        was = summary.evaluate("e => e.parentElement.open")
        summary.click()
        assert summary.evaluate("e => e.parentElement.open") is not was
        summary.click()  # others may lie in it
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    body = "[...document.querySelectorAll('%s')].map(e => e.id)"
    selects, fields = page.evaluate(body % "form select"), page.evaluate(body % "form input, form textarea")
    assert len(selects) + len(fields) == page.locator("input, select, textarea").count() - 1  # "find" stands outside the form
    fields = [name for name in fields if not name.startswith("serve-")]  # of another question than the plan
    files = [name for name in fields if page.get_attribute(f"[id='{name}']", "type") == "file"]
    page.clock.install()  # the pause after a key need not be waited for

    def sent(name: str, text: str, put) -> str:
        before = page.evaluate("Number(document.body.dataset.turn)")
        put(page.locator(f"[id='{name}']"), text)
        page.clock.run_for(400)
        page.wait_for_function("before => Number(document.body.dataset.turn) > before", arg=before)
        return page.inner_text("#command")

    for name in selects:
        options = page.evaluate(f"[...document.getElementById('{name}').options].map(o => o.value)")
        first = page.input_value(f"[id='{name}']")
        for value in [*[value for value in options if value not in (first, "gpt2-large")][-2:], first]:
            command = sent(name, value, lambda e, v: e.select_option(v))
            assert not value or name == "batch-of" or value in command, (name, value, command)
    for name in files:
        kept = tmp_path / name / "config.json"
        kept.parent.mkdir()
        kept.write_text('{"model_type": "llama"}')
        assert "gradus plan FOLDER" in sent(name, kept.parent if name == "folder" else kept, lambda e, v: e.set_input_files(v))
        assert page.input_value("#recipe") == {"config": "config.json", "folder": "folder/config.json"}[name]
    for name in (name for name in fields if name not in files):
        text = {"extra": "optimizer.name=sgd", "layout.tensor": "4"}.get(name, "16")
        assert text in sent(name, text, lambda e, v: e.fill(v)), name
    page.fill("#find", "memory/")  # the details were opened above
    assert page.locator("#rows tbody tr:visible").count() < page.locator("#rows tbody tr").count()
    page.fill("#find", "")
    kinds = ("devices", "serve", "optimal", "search")
    for kind in kinds:
        page.click(f"#{kind}")
        page.wait_for_function("kind => document.querySelector('#found-body > p > code')?.textContent.includes(`--${kind}`)", arg=kind)
    pressed = set(kinds)
    for button in page.locator("button:visible").all():
        name = button.get_attribute("id") or button.inner_text()
        if name in kinds or (name in pressed and name == "use"):
            continue
        pressed.add(name)
        button.click()
    assert pressed == SENT.keys()
    assert page.locator("tr.how:visible").count() == page.locator("#rows button").count() > 20
    planned(page)
    assert page.locator("#state.bad").count() == 0


@pytest.mark.slow
def test_a_plan_of_other_settings_is_grey_and_cannot_be_copied(visit, planner):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB&layout.tensor=2")
    look = "() => [document.querySelector('main').classList.contains('stale'), document.getElementById('copy').disabled, getComputedStyle(document.getElementById('verdict')).color]"
    stale, disabled, green = page.evaluate(look)
    assert (stale, disabled) == (False, False) and page.inner_text("#verdict").startswith("✓ Fits")
    planner.slow["layout.tensor=4"] = 0.6
    page.fill("#layout\\.tensor", "4")
    stale, disabled, colour = page.evaluate(look)  # from the first key on
    assert (stale, disabled) == (True, True) and colour != green
    page.wait_for_function("() => document.getElementById('command').textContent.endsWith('layout.tensor=4')")
    assert page.evaluate(look) == [False, False, green]
    page.fill("#layout\\.tensor", "3")
    page.wait_for_selector("#layout\\.tensor[aria-invalid=true]")
    assert page.evaluate(look) == [True, True, colour] and "the previous plan is shown" in page.inner_text("#state")
    assert not page.locator("#figures").evaluate("e => e.open") and not page.is_visible("#rows")  # all figures are closed at first


@pytest.mark.slow
def test_the_other_questions_stand_on_the_page(visit, planner):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB&tokens=1e9&days=9")

    def pressed(kind):
        page.click(f"#{kind}")
        page.wait_for_function("kind => document.querySelector('#found-body > p > code')?.textContent.includes(`--${kind}`)", arg=kind)
        return planner.asked[-1], page.inner_text("#found")

    request, text = pressed("optimal")
    assert (request.on, request.days, request.tokens) == (None, None, 1e9) and "Besiroglu 2024" in text and "450,000,000,000" in text
    page.click("#serving summary")
    page.fill("#serve-batch", "8")
    page.fill("#serve-length", "512")
    request, text = pressed("serve")
    assert (request.on, request.tokens) == ("8xA100-80GB", None) and "8 sequences of 512, None bits" in text and "batch=8" in page.url
    page.fill("#serve-batch", "3")
    page.click("#serve")
    page.wait_for_selector("#serve-batch[aria-invalid=true]")
    assert "--batch=3: not a good number" in page.inner_text("#searching") and page.locator("main.stale").count() == 0  # the plan still holds
    request, text = pressed("devices")
    assert (request.on, request.days) == (None, None) and "$2.00" in text and text.count("H100-SXM") == 1
    page.click("#found button >> nth=0")
    page.wait_for_function("() => document.getElementById('command').textContent.includes('layout.precision=bf16')")
    assert planner.asked[-1].on == "H100-SXM" and page.input_value("#device") == "H100-SXM"


@pytest.mark.slow
@pytest.mark.parametrize("width", [420, 1280])
def test_the_curve_is_its_numbers_and_its_labels_do_not_collide(visit, planner, width):
    counts, rows = [2**i for i in range(12)], []
    for rank, n in enumerate(reversed(counts), 1):
        c = {"rank": rank, "devices": n, "layout": "", "fits": True, "best": None, "reason": "slower"}
        rows += [figure("search/step", 9.0 / n**0.8, "s", **c), figure("search/time", 8e6 / n**0.8, "s", **c)]
        rows += [figure("search/money", 1234.0 * n**0.2, "$", **c, of="the whole run")]
    planner.found = ["layouts", "", "table"], rows, []
    page = visit("#recipe=gpt2-small&on=2048xA100-80GB", width=width)
    page.evaluate("document.querySelectorAll('.fold').forEach(e => e.open = true)")  # on a phone all but the answer is folded
    page.click("#search")
    page.wait_for_selector("#found svg")
    dots = page.evaluate("[...document.querySelectorAll('#found svg')].map(s => [...s.querySelectorAll('circle')].map(c => [+c.getAttribute('cx'), +c.getAttribute('cy')]))")
    grid = page.evaluate("[...document.querySelectorAll('#found svg')].map(s => [...s.querySelectorAll('.grid')].map(c => +c.getAttribute('y1')))")
    for points, lines, values in zip(dots, grid, ([8e6 / n**0.8 for n in counts], [1234.0 * n**0.2 for n in counts]), strict=True):
        steps = [b[0] - a[0] for a, b in itertools.pairwise(points)]
        assert max(steps) - min(steps) < 0.01  # each doubling as wide
        heights = [lines[0] - y for _, y in points]
        assert [h / heights[0] for h in heights] == pytest.approx([v / values[0] for v in values], rel=1e-6)
    labels = page.evaluate("[...document.querySelectorAll('#found svg')].map(s => [...s.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect().toJSON()]))")
    box = page.evaluate("[...document.querySelectorAll('#found svg')].map(s => s.getBoundingClientRect().toJSON())")
    for texts, around, words in zip(labels, box, ("total time, days", "cost of the whole run, $"), strict=True):
        assert texts[0][0] == words and "devices" in [text for text, _ in texts] and len(texts) > 12
        for i, (text, a) in enumerate(texts):
            assert around["left"] <= a["left"] and a["right"] <= around["right"] + 1, text
            for other, b in texts[:i]:
                assert not (a["left"] < b["right"] and b["left"] < a["right"] and a["top"] < b["bottom"] - 2 and b["top"] < a["bottom"] - 2), (text, other)


@pytest.mark.slow
def test_the_page_searches_and_plans_with_the_planner_itself(chromium, real_server):
    page, wrong = chromium.new_page(), []
    page.set_default_timeout(180_000)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.goto(real_server.url + "#recipe=gpt2-small&on=1xA100-80GB&tokens=1e9&model.n_layers=2&batch.samples=64&layout.checkpointing=full")
    planned(page)
    page.click("#search")
    page.wait_for_selector("#found table")
    assert "total time" in page.inner_text("#found") and "$" in page.inner_text("#found") and "fastest" in page.inner_text("#found tr.best >> nth=0")
    keys = page.get_attribute("#found button >> nth=0", "aria-label").split()[2:]
    page.click("#found button >> nth=0")
    page.wait_for_function("keys => keys.every(k => document.getElementById('command').textContent.includes(k))", arg=keys)
    planned(page, "✓ Fits")
    page.click("#figures summary")
    page.click("#rows button >> nth=20")
    assert page.locator("tr.how:visible").count() == 1 and page.locator("#state.bad").count() == 0
    page.close()
    assert not wrong and keys


@pytest.mark.slow
def test_every_figure_is_explained_on_demand(visit):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB&layout.tensor=2")
    page.click("#figures summary")
    page.fill("#find", "memory/weights")
    assert page.locator("#rows tbody tr:visible").count() == 1
    page.click("#rows button")
    how = page.inner_text("#rows tr.how:visible")
    for said in ("formula of weights", "tensor", "2", "traced", "20,000,000,000 bytes"):
        assert said in how
    assert page.get_attribute("#rows button", "aria-expanded") == "true"


CONTRAST = """() => {
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
  const lum = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const under = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const ratio = (a, b) => { const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const bad = [];
  let seen = 0;
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || ['INPUT', 'SELECT', 'TEXTAREA'].includes(e.tagName);
    if (!own || !e.getClientRects().length || ['OPTION', 'OPTGROUP', 'SCRIPT', 'STYLE'].includes(e.tagName)) continue;
    seen++;
    const r = ratio(parse(getComputedStyle(e).color), under(e));
    if (r < 4.5) bad.push([e.tagName, e.id, e.className, e.textContent.slice(0, 30), r]);
  }
  for (const e of document.querySelectorAll('.bar > [data-part], .line')) {
    const r = ratio(parse(getComputedStyle(e).backgroundColor), under(e.parentElement));
    if (r < 3) bad.push(['segment', e.dataset.part || e.dataset.axis, r]);
  }
  for (const e of document.querySelectorAll('input, select, textarea, button')) {
    if (!e.getClientRects().length) continue;
    const r = ratio(parse(getComputedStyle(e).borderTopColor), under(e.parentElement));
    if (r < 3) bad.push(['border', e.id, r]);
  }
  return [seen, bad];
}"""


@pytest.mark.slow
def test_contrast_is_enough(visit):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB")
    page.click("#search")
    page.wait_for_selector("#found table")
    page.click("#figures summary")
    page.click("#rows button >> nth=1")
    for settings in ("2", "3"):  # fits; an error
        page.fill("#layout\\.tensor", settings)
        page.wait_for_selector("#verdict.yes" if settings == "2" else "#layout\\.tensor[aria-invalid=true]")
        colours = set()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            seen, bad = page.evaluate(CONTRAST)
            assert seen > 100 and not bad, (scheme, bad)
        assert len(colours) == 2


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 1280])
def test_nothing_scrolls_sideways_or_overlaps(visit, width):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB&layout.tensor=2&layout.offload=true&set=optimizer.lr=0.1", width=width, height=844)
    page.evaluate("document.querySelectorAll('.fold').forEach(e => e.open = true)")
    page.click("#search")
    page.wait_for_selector("#found table")
    page.click("#figures summary")
    page.click("#rows button >> nth=3")
    page.fill("#layout\\.tensor", "3")
    page.wait_for_selector("[aria-invalid]")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    over = page.evaluate(
        "w => [...document.querySelectorAll('main *')].filter(e => e.getClientRects().length && !e.closest('.skip, thead')"
        " && e.getBoundingClientRect().right > w + 1).map(e => e.tagName + e.id + e.className)", width)  # fmt: skip
    assert not over
    inside = page.evaluate("[...document.querySelectorAll('.panel')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.id)")
    assert not inside
    if width == 1280:
        assert max(page.evaluate("[...document.querySelectorAll('#found button, #rows button')].map(e => e.getBoundingClientRect().height)")) < 40  # words are not broken
    overlapping = page.evaluate(
        "() => { const all = [...document.querySelectorAll('.panel')].filter(e => e.getClientRects().length).map(e => [e.id, e.getBoundingClientRect()]);"
        " return all.flatMap(([a, p]) => all.filter(([b, q]) => a < b && p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom)"
        ".map(([b]) => a + ' ' + b)); }")  # fmt: skip
    assert not overlapping and page.locator(".panel:visible").count() == 9


@pytest.mark.slow
def test_on_a_phone_all_but_the_answer_is_folded(visit):
    shown = "[...document.querySelectorAll('.panel')].filter(e => e.getClientRects().length && !e.matches('details') && !e.querySelector(':scope > details:not([open])')).map(e => e.id)"
    folded = "[...document.querySelectorAll('.fold')].map(e => e.open)"
    phone, desk = visit(width=420), visit(width=1280)
    assert phone.evaluate(shown) == ["answer"] and not any(phone.evaluate(folded)) and all(desk.evaluate(folded))
    phone.click("#form > details > summary")
    assert phone.is_visible("#recipe") and not phone.is_visible("#layout\\.tensor")
    phone.evaluate("const e = document.getElementById('layout.tensor'); e.value = '3'; e.dispatchEvent(new Event('input', { bubbles: true })); document.querySelector('.fold').open = false")
    phone.wait_for_selector("#layout\\.tensor[aria-invalid=true]")  # a mistake opens the folds that it is in


@pytest.mark.slow
def test_every_field_has_a_label_and_every_button_a_name(visit):
    page = visit()
    page.click("#search")
    page.wait_for_selector("#found table")
    unnamed = page.evaluate("[...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels.length || !e.labels[0].textContent.trim()).map(e => e.id)")
    assert unnamed == [] and page.locator("input, select, textarea").count() > 25
    assert page.evaluate("[...document.querySelectorAll('button')].filter(e => !(e.ariaLabel || e.textContent.trim())).length") == 0
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert page.get_attribute("#said", "aria-live") == "polite" and page.get_attribute("html", "lang") == "en"


@pytest.mark.slow
def test_a_server_that_ended_is_said_and_the_form_kept(visit, server):
    page = visit("#recipe=gpt2-small&on=8xA100-80GB&batch.samples=512")
    page.route("**/api/plan", lambda route: route.abort())
    page.fill("#layout\\.tensor", "2")
    page.wait_for_function("() => document.getElementById('state').textContent.includes('is it still running?')")
    assert page.input_value("#batch") == "512" and page.inner_text("#verdict").startswith("✗")


def test_the_command_lines_plan_opens_the_form(chromium, planner):
    started = Request("./mine.yaml", ("data.path=here.txt", "layout.tensor=2"), "4xA100-80GB", 1e9, 12.0)
    with web.open_server("127.0.0.1", 0, started, planner) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        page = chromium.new_page()
        page.goto(made.url)
        planned(page)
        assert planner.asked == [Request("./mine.yaml", ("layout.tensor=2", "data.path=here.txt"), "4xA100-80GB", 1e9, 12.0)]
        assert page.input_value("#recipe") == "./mine.yaml" and page.input_value("#extra") == "data.path=here.txt"
        page.close()
        made.shutdown()
        thread.join()
