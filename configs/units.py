"""Sizes and durations as readable text; `values.py` parses user input."""

from __future__ import annotations


def format_size(num_bytes: float) -> str:
    """Return bytes in powers of ten: `812 MB`, `1.98 GB`."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def format_duration(seconds: float) -> str:
    """Return a duration in two units at most: `0.42 s`, `3.2 s`, `42 s`, `3m 20s`, `3d 4h`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"
