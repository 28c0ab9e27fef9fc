"""Whether a server is installed on this machine, looked at as the process launcher would start it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import NamedTuple

from backends import process
from backends.launch import Adapter, version_in

# A folder that only has the module's name is found as a namespace, without an origin.
_FIND_MODULE = """
import importlib.util as u, sys
name = sys.argv[1]
found = u.find_spec(name)
if found is None or found.origin is None: sys.exit(1)
try:
    import importlib.metadata as m
    print(m.version(m.packages_distributions()[name][0]))
except Exception:
    pass
"""


class Installed(NamedTuple):
    """`what` would be run: a program, or a module. `version`: None where it does not tell. `command`: what precedes the
    arguments."""

    what: str
    version: tuple[int, ...] | None
    command: tuple[str, ...]


def installed(adapter: Adapter, python: str | None = None) -> Installed | None:
    """The server as the interpreter `python` (default: this one) or the PATH has it; None: it is not there. Raises
    OSError or subprocess.TimeoutExpired when that interpreter cannot be run."""
    program, interpreter = adapter.process_command[0], python or sys.executable
    if program != "{python}":
        path = shutil.which(program)
        if path is not None and (python is None or adapter.package is None):
            return Installed(path, None, adapter.process_command)
        if adapter.package is None:
            return None
        module, script = adapter.package
        command: tuple[str, ...] = (interpreter, str(script))
    else:
        module = adapter.process_command[2].partition(".")[0]
        command = (interpreter, *adapter.process_command[1:])
    completed = subprocess.run(
        [interpreter, "-c", _FIND_MODULE, module],
        env=process.inherited(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return Installed(module, version_in(completed.stdout), command) if completed.returncode == 0 else None
