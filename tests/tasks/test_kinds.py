"""Tasks describe themselves: nobody else compares a task's name, imports its class or keeps a table of tasks."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from gradus import models
from gradus.recipe.schema import MODELS, TASKS, CopyTask, TaskConfig
from gradus.tasks import kinds
from gradus.tasks.base import Task
from gradus.tasks.copy import Copy
from gradus.tasks.kinds import TaskKind

HEADS = {head for config in TASKS.values() for head in config.heads}
CLASSES = {task.__name__ for name in TASKS for task in kinds.lookup(name).tasks.values()}


# ---------------------------------------------------------------- who names a task


def of_a_task(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression may be a task's name: what is called so, or a variable that was given one. A task's head, or what it is
    asked, is none."""
    match node:
        case ast.Name(id=name):
            return name in known or bool(re.fullmatch(r"\w*task(_?name)?", name))
        case ast.Attribute(attr="name", value=value):
            return of_a_task(value, known)
        case ast.Attribute(attr=name):
            return bool(re.fullmatch(r"\w*task(_?name)?", name))
        case ast.Subscript(value=value, slice=ast.Constant(value=key)):
            return key in ("task", "task.name") or (key == "name" and of_a_task(value, known))
        case ast.Call(func=ast.Attribute(attr="get" | "pop", value=value), args=[ast.Constant(value=key), *_]):
            return key in ("task", "task.name") or (key == "name" and of_a_task(value, known))
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=key), *_]):
            return key == "task" or (key == "name" and of_a_task(value, known))
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[value]) | ast.NamedExpr(value=value):
            return of_a_task(value, known)
    return False


def words(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def keys(node: ast.AST) -> set[str]:
    match node:
        case ast.Dict(keys=listed):
            return set().union(*(words(key) for key in listed if key is not None))
        case ast.Call(func=ast.Name(id="dict"), keywords=given, args=args):
            return {k.arg for k in given if k.arg} | set().union(*map(words, args))
        case ast.Call(func=ast.Attribute(attr="fromkeys"), args=[listed, *_]):
            return words(listed)
    return set()


def named_tasks(text: str) -> Iterator[str]:
    """Each place of a program that knows a task by its name."""
    tree, known, tables = ast.parse(text), set(), set()
    for node in ast.walk(tree):  # variables that have a task's name, and tables that are kept
        pairs = []
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                    pairs += zip(target.elts, value.elts) if tuples else [(target, value)]
            case ast.AnnAssign(target=target, value=ast.AST() as value) | ast.NamedExpr(target=target, value=value):
                pairs.append((target, value))
        for target, value in pairs:
            if isinstance(target, ast.Name):
                known |= {target.id} if of_a_task(value, known) else set()
                tables |= {target.id} if keys(value) & TASKS.keys() else set()
    for node in ast.walk(tree):
        found = False
        match node:
            case ast.ImportFrom(module=module, names=names):
                inside = (module or "").removeprefix("gradus.tasks")
                found = (module or "").startswith("gradus.tasks") and (
                    inside[1:] in TASKS or any(name.name in {*TASKS, *CLASSES} for name in names)
                )
            case ast.Import(names=names):
                found = any(name.name.removeprefix("gradus.tasks.") in TASKS and "." in name.name for name in names)
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                found = any(of_a_task(side, known) for side in sides) and bool(set().union(*map(words, sides)) & TASKS.keys())
                found |= bool(set().union(*map(words, sides)) & CLASSES)
            case ast.Match(subject=subject, cases=cases):
                found = of_a_task(subject, known) and any(words(case.pattern) & TASKS.keys() for case in cases)
            case ast.Dict() | ast.Call() if keys(node) & TASKS.keys():
                found = bool(keys(node) & (TASKS.keys() - HEADS - {"translation"}) or len(keys(node) & TASKS.keys()) > 2)
            case ast.Constant(value="causal_lm" | "span_corruption"):  # words that mean nothing else
                found = True
        match node:
            case ast.Subscript(value=table, slice=key) | ast.Call(func=ast.Attribute(attr="get", value=table), args=[key, *_]):
                kept = isinstance(table, ast.Name) and table.id in tables
                found |= of_a_task(key, known) and (kept or bool(keys(table) & TASKS.keys()))
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith" | "__eq__", value=value)):
                found |= of_a_task(value, known) and bool(words(node) & TASKS.keys())
        if found:
            yield f"{node.lineno}: {ast.unparse(node)[:80]}"


def test_no_task_is_named_outside_tasks_recipe_and_tests():
    root, found = Path(models.__file__).parents[1], []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.relative_to(root).parts[0] not in ("tasks", "recipe") and any(word in text for word in (*TASKS, *CLASSES)):
            found += [f"{path.relative_to(root)}:{at}" for at in named_tasks(text)]
    assert found == []


@pytest.mark.parametrize("text", [
    'recipe.task.name == "copy"', '"masked_lm" != r.task.name', 'task["name"] == "classification"', 'task.name in ("masked_lm", "copy")',
    'run["task"]["name"] in {"translation"}', 'x = recipe.task.name\nif x == "classification": pass', 'task == "masked_lm"',
    'model, task = r.model, r.task.name\nok = task in ("masked_lm",)', 'sections["task"].get("name") == "copy"', 'getattr(task, "name") == "copy"',
    'match recipe.task.name:\n    case "copy": pass', 'T = {"copy": 1, "translation": 2}', 'dict(copy=1)', 'dict.fromkeys(("copy", "masked_lm"), 1)',
    'heads = {"masked_lm": 1, "classification": 2}\nheads[task.name]', '{"masked_lm": 1}.get(recipe.task.name)', 'task.name.startswith("masked_lm")',
    "from gradus.tasks.copy import Copy", "from gradus.tasks import copy", "from gradus.tasks.translation import Translation as T", "import gradus.tasks.masked_lm",
    'type(task).__name__ == "MaskedLM"', 'kind = "causal_lm"', '(name := recipe.task.name) == "copy"', '{"text": "causal_lm", "pairs": "translation"}',
    'str(recipe.task.name) == "copy"', 'config["task.name"] == "translation"',
])  # fmt: skip
def test_a_task_that_is_named_is_found(text):
    assert list(named_tasks(text))


@pytest.mark.parametrize("text", [
    'head == "classification"', 'config.head in ("masked_lm", "pretraining")', 'recipe.task.head == "classification"', 'getattr(config, "head", None) == "masked_lm"',
    'model.model_copy(update={"head": "classification", "pooler": True})', 'heads = {"masked_lm": 1, "classification": 2}\nheads[config.head]',
    'name in ("cat", "copy")', 'yield "copy", 3 * nbytes', 'isinstance(row.get("translation"), dict)', 'row["translation"]', 'recipe.data.kind == "synthetic"',
    "from gradus.tasks.base import Task", "from gradus.tasks.kinds import task_class", "import copy", "from gradus import tasks", 'task_class(recipe).varies',
    'groups[run.config.name, run.config.task.name]', 'f"task {recipe.task.name} has no right answers"', '"classification" in TASKS[run["task"]["name"]].heads',
    'batch["task"] == 3', 'json.dumps({"task": {"name": name}})', '"""causal: the text of a docstring, of causal language models"""',
])  # fmt: skip
def test_what_names_no_task_is_left_alone(text):
    assert list(named_tasks(text)) == []


# ---------------------------------------------------------------- descriptions


def test_every_task_of_a_recipe_is_described_and_learned():
    for name, config in TASKS.items():
        kind = kinds.lookup(name)
        assert kind.name == name and kind.config is config
        learned = {c.learns[name] for c in MODELS.values() if name in c.learns}
        assert learned == kind.tasks.keys(), "each kind of data from which a family learns it has a class, and no other"
    drafts = {data: kinds.drafted(data) for data in ("labelled", "images", "text", "pairs")}
    assert drafts == {"labelled": "classification", "images": "classification", "text": "causal_lm", "pairs": "translation"}


class Bare(Task):
    def collate(self, samples):
        return {}


class Named(TaskConfig):
    name: Literal["copy"] = "copy"


class Other(TaskConfig):
    name: Literal["other"] = "other"


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"tasks": {"text": Bare}}, r"task copy lacks Bare.evaluate\(\), Bare.losses\(\)"),
        ({"tasks": {}}, "task copy lacks tasks"),
        ({"drafts": ("pairs",)}, r"task copy lacks tasks\['pairs'\]"),
        ({"learners": {"gpt": "text"}}, r"task copy lacks tasks\['text'\]"),
    ],
)
def test_what_a_description_lacks_is_named(changes, why):
    with pytest.raises(TypeError, match=why):
        dataclasses.replace(kinds.lookup("copy"), **changes)


def test_a_name_is_taken_once():
    kinds.register(kinds.lookup("copy"))  # the same again is no error
    with pytest.raises(TypeError, match=r"Named: task copy is CopyTask's\. Choose another name"):
        kinds.register(TaskKind(config=Named, tasks={"synthetic": Copy}))
    with pytest.raises(TypeError, match=r"Other: learners: no family gtp\. Known: seq2seq, "):
        kinds.register(TaskKind(config=Other, tasks={"synthetic": Copy}, learners={"gtp": "synthetic"}))
    assert "other" not in TASKS
    assert TASKS["copy"] is CopyTask and kinds.lookup("copy").config is CopyTask
