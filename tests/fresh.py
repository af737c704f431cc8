"""Runs a script in an interpreter of its own, where its peak memory can be told."""

from __future__ import annotations

import subprocess
import sys

# ru_maxrss would start at the parent's peak on Linux; VmHWM is the new program's own.
PEAK = """
def peak():
    '''The most bytes this process has held.'''
    import pathlib, resource
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""


def printed(script: str) -> str:
    """Returns what the script prints; it may call `peak()`."""
    command = [sys.executable, "-c", PEAK + script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout
