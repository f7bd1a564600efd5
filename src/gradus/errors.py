"""What a user did wrong, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend. The command line prints it as one line and exits with 2, without a traceback.

    The text says what is wrong, where, the nearest right thing, and what to do.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the nearest known name, else ' Known: a, b, c.'"""
    known = sorted({str(k) for k in known})
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    if near:
        return f" Did you mean {near[0]}?"
    return f" Known: {', '.join(known)}." if known else ""


def need(package: str, extra: str, what: str):
    """Import an optional package, or say which extra brings it.

    Raises UserError when the package is missing.
    """
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as e:
        how = f"pip install 'gradus[{extra}]', or in a checkout: pip install -e '.[{extra}]'"
        raise UserError(f"{what} needs the package {package.split('.')[0]} ({e}). Install it: {how}") from None
