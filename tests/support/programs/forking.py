"""Forks a run, killed at a step that changes files. Arguments: step, RUN@step-N, OUT. Step 0 kills at none and prints
the number of steps."""

import os
import sys
from pathlib import Path

from thermopile.tools.cli import main

STEPS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "open"}


def fork(kill_at, source, out):
    done, made = [0], (out, str(Path(out).with_name(f".{Path(out).name}.")))

    def count(event, arguments):
        if event in STEPS and any(str(argument).startswith(made) for argument in arguments[:2]):
            done[0] += 1
            if done[0] == kill_at:
                os._exit(9)

    sys.addaudithook(count)
    main(["fork", source, "--out", out], standalone_mode=False)
    return done[0]


if __name__ == "__main__":
    sys.stdout, stdout = sys.stderr, sys.stdout
    print(fork(int(sys.argv[1]), *sys.argv[2:]), file=stdout)
