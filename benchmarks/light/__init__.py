"""The stages of `benchmarks/first_light.py`. Makes this checkout and stand-ins for missing packages importable."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
for folder in (BENCHMARKS, BENCHMARKS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
if (STAND_INS := str(BENCHMARKS / "light" / "stand_ins")) not in sys.path:
    sys.path.append(STAND_INS)  # last, so that installed packages come first
