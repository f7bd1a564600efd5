"""The description of a task: all that recipes, plans, predictions and `gradus new` know of it. What must be known of it
without torch (its keys, the heads that it trains) stands in its section (`gradus.recipe.schema`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from gradus.recipe import schema

if TYPE_CHECKING:
    from gradus.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """A task, described. Raises TypeError that names everything that is missing.

    config    its section of a recipe: its name, its keys, the heads that it trains
    tasks     kind of data → the class that learns from it: batches, losses, metrics, and what `predict` says
    learners  family → kind of data, of families whose configurations do not say in `learns` that they learn it
    drafts    the kinds of data for which `gradus new` writes this task; of several tasks the one registered last
    comment   what it then writes of it, a sentence
    """

    config: type[schema.TaskConfig]
    tasks: Mapping[str, type[Task]]
    learners: Mapping[str, str] = field(default_factory=dict)
    drafts: tuple[str, ...] = ()
    comment: str = ""

    def __post_init__(self):
        lacks = [f"{t.__name__}.{name}()" for t in self.tasks.values() for name in sorted(t.__abstractmethods__)]
        lacks += [f"tasks[{kind!r}]" for kind in {*self.learners.values(), *self.drafts} - {*self.tasks}]
        if lacks or not self.tasks:
            raise TypeError(f"task {self.name} lacks {', '.join(lacks) or 'tasks'}")

    @property
    def name(self) -> str:
        return self.config.model_fields["name"].default


_known: dict[str, TaskKind] = {}  # registered, or looked up before


def register(kind: TaskKind) -> None:
    """Make a further task known to recipes and all that reads them. Every process does so before it reads a recipe.
    Raises TypeError where another task has the name."""
    schema.register_task(kind.config, kind.learners)
    _known[kind.name] = kind


def lookup(name: str) -> TaskKind:
    """The task of this name, which a recipe has; those of this room are imported when first asked for."""
    if name not in _known:
        _known[name] = import_module(f"gradus.tasks.{name}").KIND
    return _known[name]


def task_class(recipe: schema.Recipe) -> type[Task]:
    """What learns the recipe's task from its kind of data."""
    return lookup(recipe.task.name).tasks[recipe.data.kind]


def drafted(data: str) -> str:
    """The name of the task that `gradus new` writes for a kind of data."""
    return next(name for name in reversed(schema.TASKS) if data in lookup(name).drafts)
