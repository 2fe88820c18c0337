"""How the benchmark writes: progress on stderr, tables and lists on stdout."""

import sys
from collections.abc import Mapping, Sequence

__all__ = ["print_pairs", "print_table", "progress"]


def progress(text: str) -> None:
    """Say on stderr what is being done: one line, rewritten, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def print_pairs(title: str, pairs: Mapping[str, str]) -> None:
    """Print `name: text` lines under a title; nothing if there are none."""
    if pairs:
        print(f"\n{title}")
        for name, text in pairs.items():
            print(f"  {name}: {_short(text)}")


def _short(text: str) -> str:
    """The line that says most: a compiler's first error, else the first line."""
    lines = text.strip().splitlines() or ["(no reason given)"]
    return next((line for line in lines if " error" in line), lines[0])[:200]


def print_table(rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print rows with the first `left` columns set left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  " + "  ".join(cells).rstrip())
