from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # the *_parts.py, and what all tests share
from report_parts import folders  # noqa: E402, F401
from study_parts import harness  # noqa: E402, F401
