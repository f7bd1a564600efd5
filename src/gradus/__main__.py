"""`python -m gradus VERB ...`: what `gradus VERB ...` does; the form in which a run starts its own workers."""

from __future__ import annotations

import sys
import traceback

from gradus.launch.local import die_with_parent


def main() -> None:
    die_with_parent()
    try:
        from gradus.cli import main

        code = main()
    except KeyboardInterrupt:  # while importing
        code = 130
    except Exception:
        traceback.print_exc()
        code = 1
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        from gradus.parallel.world import leave

        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
