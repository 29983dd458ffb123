"""Another user of the same machine, and what that user may try."""

import os
import subprocess
import sys

import pytest

NOBODY = 65534
needed = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
# The interpreter may be in a folder that this user cannot read, so everything is imported before.
BECOME = f"""
import encodings.idna, json, os, socket, stat, sys, time
from pathlib import Path
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""


def act(code, *arguments, check=True):
    """Runs Python code as another user; its output."""
    command = [sys.executable, "-I", "-S", "-c", BECOME + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout
