"""Format durations for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return the two largest units of days, hours and minutes; seconds below a minute."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
