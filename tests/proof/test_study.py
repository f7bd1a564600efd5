"""The harness: what is measured is kept, alternates, is compared with its base, and is measured once."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.cli import main
from gradus.errors import FAULT, UserError
from gradus.parallel.world import World
from gradus.proof import harness, results, runners, study, study_file, study_rows, study_store, timing
from gradus.proof.study_store import SAMPLES, StudyStore
from gradus.rows import Row, read_rows

TINY = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "schedule.warmup_steps=4",
        "batch.samples=8", "train.steps=8", "evaluate.samples=0", "layout.device=cpu", "layout.threads=1"]  # fmt: skip
SLEEPER = """
import time
from gradus.proof.timing import Subject

def sleeper(recipe, options):
    seen = [0]
    def step(batch):
        seen[0] += 2
        time.sleep(options["seconds"])
        return 1.0 / seen[0]
    return Subject(lambda: None, step, lambda: seen[0])
"""


def written(folder: Path, text: str) -> Path:
    (folder / "own.py").write_text(SLEEPER)
    (folder / "some.yaml").write_text(text)
    return folder / "some.yaml"


OWN = """
runner: own.py:sleeper
steps: 3
warm_up: 1
rounds: 2
configurations:
  slow: {options: {seconds: 0.1}}
  fast: {options: {seconds: 0.005}}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    file = written(folder, OWN)
    assert main(["study", str(file), "--to", str(folder / "out")]) == 0
    return file, folder / "out", {(r["name"], r["configuration"]): r for r in read_rows(folder / "out/rows.jsonl")}


def test_a_runner_of_ones_own_is_timed_and_compared(own):
    _, folder, rows = own
    assert rows["samples_per_s", "slow"]["value"] < 20.1 and rows["samples_per_s", "fast"]["value"] < 401  # a sleep may be longer, not shorter
    ratio = rows["ratio", "fast"]
    by_round = [f / s for f, s in zip(rows["samples_per_s", "fast"]["samples"], rows["samples_per_s", "slow"]["samples"])]
    assert ratio["against"] == "slow" and ratio["samples"] == pytest.approx(by_round)
    assert ratio["value"] == pytest.approx(statistics.median(by_round)) and ratio["value"] > 1
    assert ("ratio", "slow") not in rows and rows["deviation/loss", "fast"]["value"] == 0
    samples = read_rows(folder / "samples.jsonl")
    assert [(s["round"], s["configuration"]) for s in samples] == [(1, "slow"), (1, "fast"), (2, "slow"), (2, "fast")], "rounds alternate"
    assert all(len(s["ranks"][0]["spent"]) == 3 and len(s["ranks"][0]["warm_up"]) == 1 for s in samples), "every step is kept"


def test_what_was_stopped_goes_on_and_nothing_is_measured_twice(own, tmp_path):
    file, folder, _ = own
    lines = (folder / "samples.jsonl").read_text().splitlines()
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "study.json").write_bytes((folder / "study.json").read_bytes())
    (cut / "samples.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:40])  # killed while it wrote the last one
    assert main(["study", str(file), "--to", str(cut)]) == 0
    again = (cut / "samples.jsonl").read_text().splitlines()
    assert again[:3] == lines[:3] and len(again) == 4 and json.loads(again[3])["configuration"] == "fast"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sends signals to a group")
def test_a_study_that_is_killed_keeps_its_samples(tmp_path):
    file = written(tmp_path, OWN.replace("rounds: 2", "rounds: 500"))
    command = [sys.executable, "-m", "gradus", "study", str(file), "--to", str(tmp_path / "out")]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as p:
        end = time.monotonic() + 60
        while not ((tmp_path / "out/samples.jsonl").exists() and (tmp_path / "out/samples.jsonl").read_text().count("\n") > 1):
            assert time.monotonic() < end and p.poll() is None
            time.sleep(0.05)
        os.killpg(p.pid, 2)
        assert p.wait(30) == 130 and "Traceback" not in p.stderr.read()
    assert len(read_rows(tmp_path / "out/samples.jsonl")) >= 2


@pytest.mark.slow
def test_a_grid_of_trainings_planned_measured_and_against_an_axis(tmp_path, capsys):
    file = written(tmp_path, f"""
recipe: copy-task
set: {json.dumps(TINY)}
steps: 3
rounds: 1
grid:
  batch: {{whole: , halves: {{set: [layout.micro_batch=4]}}}}
  processes: {{one: , two: {{processes: 2}}}}
against: whole
""")
    assert main(["study", str(file), "--to", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]) == 2, "no such page"
    (tmp_path / "page.md").write_text("before\n<!-- some -->\nold\n<!-- end of some -->\nafter\n")
    assert main(["study", str(file), "--to", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("before\n<!-- some -->\n| configuration |") and "old" not in page and page.endswith("<!-- end of some -->\nafter\n")
    rows = read_rows(tmp_path / "out/rows.jsonl")
    measured = {(r["configuration"], r["name"]): r for r in rows if r["kind"] == "measured"}
    assert measured["halves · two", "ratio"]["against"] == "whole · two" and ("whole · two", "ratio") not in measured
    assert measured["halves · two", "deviation/loss"]["value"] < 1e-5, "the layout changes nothing"
    table = results.Table(rows)
    for name in table.names:
        planned, peak = table.planned[name, "memory/allocated"]["value"], measured[name, "memory/allocated"]["value"]
        assert planned == pytest.approx(peak, rel=0.03)
    assert "tensors: planned with a median error of" in capsys.readouterr().out


@pytest.mark.slow
def test_seeds_are_whole_trainings(tmp_path):
    file = written(tmp_path, f"recipe: copy-task\nset: {json.dumps(TINY)}\nrunner: train\nseeds: [0, 1]\nconfigurations: {{one: }}\n")
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 0
    rows = {r["name"]: r for r in read_rows(tmp_path / "out/rows.jsonl") if r["kind"] == "measured"}
    loss = rows["valid/loss"]
    assert len(set(loss["samples"])) == 2 and loss["value"] == pytest.approx(sum(loss["samples"]) / 2) and loss["std"] > 0
    assert "±" in results.shown("valid/loss", loss["value"], loss)


def test_what_a_configuration_fails_of_is_told_in_its_row(tmp_path, capsys):
    more = "  broken: {runner: own.py:nothing}\n  raising: {}\n"  # the last without its option
    file = written(tmp_path, OWN.replace("rounds: 2", "rounds: 1") + more)
    assert main(["study", str(file), "--to", str(tmp_path / "out"), "--only", "broken,raising"]) == 0
    failed = {r["configuration"]: r["value"] for r in read_rows(tmp_path / "out/rows.jsonl") if r["name"] == "failed"}
    assert failed == {
        "broken": "runner=own.py:nothing: the file has no nothing.",
        "raising": "does not run here (KeyError: 'seconds'). The study's workers.log has the traceback.",
    }
    assert "broken: runner=" in capsys.readouterr().out and 'options["seconds"]' in (tmp_path / "out/workers.log").read_text()


def grid(axes: int, names: int) -> str:
    return "recipe: copy-task\nrunner: none\ngrid:\n" + "".join(f"  x{i}: {{{', '.join(f'n{i}_{j}: ' for j in range(names))}}}\n" for i in range(axes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected keys"),
        (r'{"\ud800": 1}', "keys: input should be a valid string"),
        ("recipe: copy-task", "give configurations or grid."),
        ("recipe: copy-task\nconfiguration: {}", "configuration: unknown key. Did you mean configurations?"),
        ("recipe: copy-task\nconfigurations: {a: {sett: []}}", "configurations.a.sett: unknown key. Did you mean set?"),
        ("recipe: copy-task\nconfigurations: {a: }\nsteps: 0", "steps: input should be greater than or equal to 1"),
        ("recipe: copy-task\nconfigurations: {a: {set: [model.layers=2]}}", "a: command line: model.layers: unknown key"),
        ("recipe: copy-tusk\nconfigurations: {a: }", "Did you mean copy-task?"),
        ("configurations: {a: }", "a: no recipe."),
        ("recipe: copy-task\nconfigurations: {a: }\nagainst: b", "against=b: no such name"),
        ("recipe: copy-task\nconfigurations: {a: {runner: no.py:f}}", "runner=no.py:f: no such runner"),
        ("recipe: copy-task\nconfigurations: {a: }\nseeds: [1]", "seeds are of whole trainings"),
        ("recipe: copy-task\nconfigurations: {a: {options: {b: 1}}}", "options are for your own runner"),
        ("recipe: copy-task\ngrid: {x: {a: }, y: {a: }}", "a is a name on two axes"),
        ("recipe: copy-task\nrecipe: copy-task\nconfigurations: {a: }", "line 2, column 1: not valid YAML: recipe is given twice. Keep one."),
        ("recipe: copy-task\nconfigurations: {a: {set: []}, a: {set: []}}", "a is given twice"),
        ("recipe: copy-task\nconfigurations: {'': }", "'': not a name"),
        ("recipe: copy-task\nconfigurations: {\"a\\nb\": }", "'a\\nb': not a name"),
        ("recipe: copy-task\nconfigurations: {a: }\nrounds: 1000000000", "rounds: input should be less than or equal to 10000"),
        ("recipe: copy-task\nrunner: train\nconfigurations: {a: }\nseeds: [-1]", "seeds.0: input should be greater than or equal to 0"),
        ("recipe: copy-task\nrunner: train\nconfigurations: {a: }\nseeds: [1, 1]", "seeds=[1, 1]: give each once"),
        ("recipe: copy-task\nconfigurations: {a: {source: {loss: .nan}}}", "input should be a finite number"),
        ("configurations: {a: {runner: note.txt:f}}", "runner=note.txt:f: no such runner"),
        ("recipe: copy-task\nrunner: none\nconfigurations: {a b: , a-b: }", "'a-b' is too like 'a b': both would have one folder. Rename one."),
        (grid(4, 10), "10,000 configurations; at most 1,000. Leave names out, or use only_with."),
        (grid(12, 10), "the grid has 1,000,000,000,000 combinations; at most 100,000."),
        ("recipe: copy-task\nconfigurations: {a: {processes: 3}}", "a: copy-task: batch.samples=128 does not divide among 3"),
    ],
)
def test_mistakes_in_a_file_are_one_clear_line(text, said, tmp_path, capsys):
    (tmp_path / "note.txt").write_text("def f(recipe, options): pass")
    file = written(tmp_path, text)
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.startswith("error:") and not (tmp_path / "out").exists()


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    file = written(tmp_path, OWN)
    with pytest.raises(UserError, match="is not empty, and holds no study"):
        harness.run(study_file.load(file)[0], tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_processes_below_the_study_are_its_own():
    """What a child computes counts as its parent's, and not as another child's; and the processors were busy with it."""
    codes = ("print(flush=True)\nwhile True: pass", "import time\nprint(flush=True)\ntime.sleep(60)")
    burn, idle = (subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in codes)
    try:
        for p in (burn, idle):
            p.stdout.readline()  # it has started
        busy = timing._busy_ticks()  # the whole is read before its parts, and after them: what is computed meanwhile is no part's alone
        before = {pid: sum(timing._ticks_below(pid)) for pid in (os.getpid(), burn.pid, idle.pid)}
        end = time.monotonic() + 30
        while (done := sum(timing._ticks_below(burn.pid)) - before[burn.pid]) < 20 and time.monotonic() < end:
            time.sleep(0.05)
        assert done >= 20 and timing._busy_ticks() - busy >= done - 2
        assert sum(timing._ticks_below(os.getpid())) - before[os.getpid()] >= done and sum(timing._ticks_below(idle.pid)) - before[idle.pid] <= 2
    finally:
        for p in (burn, idle):
            p.kill()
            p.communicate()


def test_steps_are_taken_again_where_others_disturb(monkeypatch):
    shares = iter([0.8, 0.05])
    monkeypatch.setattr(timing.OtherPrograms, "share", lambda self: next(shares))
    taken = []
    subject = timing.Subject(lambda: None, lambda batch: taken.append(1) or float(len(taken)), lambda: len(taken))
    found = timing.time_it(subject, timing.Window(2, 1, os.getpid()))
    assert found.retaken == 1 and found.others == 0.05 and len(taken) == 5 and found.samples == 2
    assert found.losses == [2.0, 3.0], "of the first two timed steps, disturbed or not"


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_the_middle_round_is_one_that_was_measured(rates):
    samples = [study_store.Sample(i, values={"samples_per_s": (r, "")}) for i, r in enumerate(rates)]
    middle = study_store.middle_of(samples).speed
    assert sum(r <= middle for r in rates) * 2 >= len(rates) and sum(r >= middle for r in rates) * 2 >= len(rates)


def of_samples(samples) -> StudyStore:
    """As if these had been measured: configuration → samples."""
    store = StudyStore.__new__(StudyStore)
    store.samples, store.common = samples, {}
    return store


def test_a_row_is_the_median_of_the_samples_that_its_range_is_of():
    """Of two rounds too, and of each figure by itself: the memory of the round of median speed is not the median of memory."""
    made, speeds, bytes_of = study.Study("x", [study.Configuration("a", None)]), (1.0, 3.0), (7.0, 5.0)
    samples = [study_store.Sample(i, values={"samples_per_s": (s, ""), "memory/process": (b, "bytes")}) for i, (s, b) in enumerate(zip(speeds, bytes_of), 1)]
    rows = {row.name: row for row in study_rows.rows_of(made, of_samples({"a": samples}), [], {})}
    assert rows["samples_per_s"].value == 2.0 and rows["memory/process"].value == 6.0
    assert (rows["samples_per_s"].conditions["low"], rows["samples_per_s"].conditions["high"]) == speeds


def test_a_study_is_of_one_machine(tmp_path, monkeypatch):
    made = study.Study("x", [study.Configuration("a", None)])
    StudyStore(made, tmp_path).add(made.configurations[0], study_store.Sample(1, values={"samples_per_s": (1.0, "")}))
    StudyStore(made, tmp_path)
    monkeypatch.setattr(study_store, "conditions", lambda: {"cpu": "another"})
    with pytest.raises(UserError, match=r"samples of another machine .*; this is another\. Go on there, or give another --to"):
        StudyStore(made, tmp_path)


def test_rows_are_in_the_order_of_the_configurations():
    """A source's figures, which are known before anything is measured, do not put their configuration before the others."""
    made = study.Study("x", [study.Configuration("a", None), study.Configuration("b", None)])
    store = of_samples({"a": [study_store.Sample(1, values={"loss": (1.0, "")})], "b": []})
    said = Row("loss", 2.0, "", None, {"configuration": "b", "kind": "source"})
    assert [row.conditions["configuration"] for row in study_rows.rows_of(made, store, [said], {})] == ["a", "b"]


def test_two_configurations_of_one_name_are_refused(tmp_path, capsys):
    """Their names are joined by the same mark that one of them has in it: one of the two was left out."""
    file = written(tmp_path, "recipe: copy-task\nrunner: none\ngrid:\n  p: {'a · b': {only_with: [c]}, a: {only_with: [b · c]}}\n  q: {c: , b · c: }\n")
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 2
    assert "'a · b · c' is the name of two configurations: {'p': 'a', 'q': 'b · c'} and {'p': 'a · b', 'q': 'c'}. Rename one." in capsys.readouterr().err


@pytest.fixture
def unmeasured(monkeypatch):
    """Starts no process: what would be measured fails."""

    def fail(*args, log):
        raise UserError("nothing is measured here")

    monkeypatch.setattr(harness, "start", fail)


def test_it_fails_where_every_configuration_did(unmeasured, own, tmp_path, capsys):
    file = written(tmp_path, OWN)
    assert main(["study", str(file), "--to", str(tmp_path / "out"), "--json"]) == 1
    assert {json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()} == {"nothing is measured here"}
    more = written(tmp_path, OWN.replace("rounds: 2", "rounds: 3"))  # without samples: the folder is free
    assert main(["study", str(more), "--to", str(tmp_path / "out")]) == 1
    lines = (own[1] / "samples.jsonl").read_text().splitlines()
    half = tmp_path / "half"
    half.mkdir()
    (half / "study.json").write_bytes((own[1] / "study.json").read_bytes())
    (half / "samples.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["configuration"] == "slow"))
    assert main(["study", str(own[0]), "--to", str(half)]) == 0, "one was measured"


@pytest.mark.parametrize("name", ["study.json", "samples.jsonl", "plan.jsonl"])
@pytest.mark.parametrize("content", ["", "{", "[]\n", "{}\n", "5\n", "null\n", '{"name": "a", "value": 1}\n{"name": "b", "value": 2}\n', "wrong"])
def test_a_damaged_folder_is_one_clear_line(name, content, own, unmeasured, tmp_path, capsys):
    shutil.copytree(own[1], tmp_path / "out")
    text = (own[1] / name).read_text()
    wrong = text.replace('"round": 1', '"round": "x"').replace('"study": "', '"study": ["').replace('"elapsed": ', '"elapsed": "x", "e": ')
    (tmp_path / "out" / name).write_text(wrong if content == "wrong" else content)
    code, error = main(["study", str(own[0]), "--to", str(tmp_path / "out")]), capsys.readouterr().err.strip()
    if code == 2:
        assert len(error.splitlines()) == 1 and str(tmp_path / "out") in error, error
    else:  # of these nothing was left to take: measured, or planned, again
        assert not error and name != "study.json" and (content in ("", "{", "null\n") or (name, content) == ("plan.jsonl", "wrong"))


@pytest.mark.parametrize("after", ["nothing", "the start"])
def test_a_full_disk_is_one_line_and_leaves_nothing(after, tmp_path, monkeypatch, capsys, unmeasured):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # without a file's name, as write() raises it

    def write_text(self, *args, **options):
        if after == "nothing" or SAMPLES in self.name:
            raise full
        return whole(self, *args, **options)

    whole = Path.write_text
    file = written(tmp_path, OWN)
    monkeypatch.setattr(Path, "write_text", write_text)
    assert main(["study", str(file), "--to", str(tmp_path / "deep" / "out")]) == FAULT
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and "the disk is full (" in error and "what was measured is kept" in error
    assert (tmp_path / "deep").exists() == (after == "the start") and not list(tmp_path.rglob(".writing*"))


def test_a_full_disk_while_samples_are_written(tmp_path, monkeypatch, capsys, unmeasured):
    file = written(tmp_path, OWN)
    monkeypatch.setattr(study_store.RowFile, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == FAULT
    assert "samples.jsonl: the disk is full (" in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="locks of files")
def test_two_studies_in_one_folder(own, unmeasured, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(own[1], out)
    hold = f"import fcntl, time\nf = open({str(out / '.lock')!r}, 'w')\nfcntl.lockf(f, fcntl.LOCK_EX)\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert main(["study", str(own[0]), "--to", str(out)]) == 2
        assert f"{out}: another study writes there. Wait until it ends, or give another --to" in capsys.readouterr().err
        other.kill()
    assert main(["study", str(own[0]), "--to", str(out)]) == 0 and not (out / ".lock").exists()


@pytest.mark.parametrize("code", ["sys.exit(0)", "raise KeyboardInterrupt", "return None"])
def test_whatever_a_runner_does_is_its_own_failure(code, tmp_path, capsys):
    (tmp_path / "own.py").write_text(f"import sys\ndef f(recipe, options):\n    {code}\n")
    with pytest.raises(UserError, match="does not run here"):
        runners.own_steps(str(tmp_path / "own.py"), "f", None, {}, timing.Window(1, 0, os.getpid()), World())


CHILD = """#!{python}
import signal, sys, time
from pathlib import Path
def stop(number, frame):
    time.sleep(0.6)  # longer than a program that only waits gives it
    Path({folder!r}, "saved").write_text(str(number))
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
Path({folder!r}, "started").touch()
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts a script as a program")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_stopped_saves_itself_first(number, tmp_path, monkeypatch):
    child = tmp_path / "python"
    child.write_text(CHILD.format(python=sys.executable, folder=str(tmp_path)))
    child.chmod(0o755)
    file = written(tmp_path, f"recipe: copy-task\nset: {json.dumps(TINY)}\nrunner: train\nplan: false\nconfigurations: {{one: }}\n")

    def stop():
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    monkeypatch.setattr(sys, "executable", str(child))
    if number == signal.SIGINT:
        assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 130
    else:
        with pytest.raises(SystemExit, match="143"):
            main(["study", str(file), "--to", str(tmp_path / "out")])
    assert (tmp_path / "saved").read_text() == str(int(number))


def test_a_table_is_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"torch {p} · batch {n} · 128 tokens · 64 new" for p in ("fp32", "bf16") for n in (1, 32)]
    figures = {"latency/median": 0.0123, "latency/p90": 0.0145, "latency/first_token": 0.01, "decode/tokens_per_s": 4321.0, "samples_per_s": 81.3,
               "ratio": 2.4, "memory/process": 4e8, "size/weights": 1e8, "time/load": 0.3, "time/first_call": 0.2, "roof": 0.4}  # fmt: skip
    unit = {"latency/median": "s", "latency/p90": "s", "latency/first_token": "s", "memory/process": "bytes", "size/weights": "bytes", "time/load": "s"}
    rows = [Row(n, v, unit.get(n, ""), None, {"configuration": c, "kind": "measured"}).known() for c in names for n, v in figures.items()]
    lines = list(results.lines(rows))
    assert max(map(len, lines)) <= 80 and sum(line.startswith("torch bf16 · batch 32  ") for line in lines) > 1, "each part has the names"
    assert lines[0].startswith("configuration (128 tokens · 64 new)")
    monkeypatch.delenv("COLUMNS")
    assert len(list(results.lines(rows))) == 5, "a file has one table"


def test_a_column_that_is_not_there_is_told(own, tmp_path, capsys):
    shutil.copytree(own[1], tmp_path / "out")
    file = written(tmp_path, OWN + "columns: [samples_per_s, los]\n")
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 0
    assert "note: columns: los: nothing has that name. Did you mean loss?" in capsys.readouterr().out
