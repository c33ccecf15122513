"""How much was executed, for the end of a run: conftest.py adds up what processes have counted."""

from collections import Counter

totals: Counter[str] = Counter()
