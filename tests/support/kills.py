"""A kill at any step that changes files."""

import os
import sys

STEPS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}


def killed_at(step, folder, work):
    """Do `work` in a fork, killed at this step of those below `folder`; return whether it came to that step."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [step]

    def kill(event, arguments):
        if event in STEPS and str(folder) in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

    sys.addaudithook(kill)
    work()
    os._exit(0)
