"""How long an import takes in a fresh process, and what it loads."""

import os
import subprocess
import sys


def fastest_import(statements, heavy, folder):
    """The CPU time of the statements, in s, and which of the heavy modules they load. Bytecode is kept in the folder.

    It is the fastest of three: the first compiles modules, as an installation does, and other processes slow any down.
    """
    probe = f"import sys, time\n{statements}\nprint(time.process_time(), *[m for m in {heavy} if m in sys.modules])"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    variables |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder)}
    taken, loaded = [], set()
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, env=variables)
        seconds, *modules = done.stdout.split()
        taken.append(float(seconds))
        loaded.update(modules)
    return min(taken), loaded
