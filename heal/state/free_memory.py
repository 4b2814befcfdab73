"""How much memory the host has to give."""

import os


def available_bytes() -> int | None:
    """Return how much memory the system could give without swapping; None if it does not say."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
