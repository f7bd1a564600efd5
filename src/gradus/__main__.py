"""`python -m gradus VERB ...`: what `gradus VERB ...` does; the form in which a run starts its own workers."""

from __future__ import annotations

import sys

from gradus.parallel.processes import end_with_parent


def main() -> None:
    end_with_parent()
    try:
        from gradus.cli import main

        code = main()
    except KeyboardInterrupt:  # while importing
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
