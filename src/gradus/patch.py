"""An attribute that is another one for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """While a block lasts, `owner.name` is `new`. owner: a module, a class or an object that has that attribute."""
    assert hasattr(owner, name), f"{owner} has no {name}"
    own = vars(owner)
    is_own, before = name in own, own.get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:  # of the class
            delattr(owner, name)
