"""One flipped bit anywhere in a dataset or a run: an error or a warning that names the file, or nothing changes."""

import collections
import json
import os
import subprocess

import pytest

from support.programs import program

HARMLESS = {"told", "told, same result", "unused"}
"""`unused`: the same exit code and result as without the flip, as where FFCV pads its pages."""


def verdicts(line):
    return {each["verdict"] for each in line["found"]}


@pytest.mark.timeout(4 * 60 * 60)
@pytest.mark.parametrize(
    ("kinds", "flips"),
    [
        pytest.param(["pixels", "tensors", "chunk", "weights"], 1, marks=pytest.mark.wide),
        pytest.param([], 180, marks=pytest.mark.soak),
    ],
)
def test_no_command_crashes_hangs_or_gives_another_result_in_silence(tmp_path, kinds, flips):
    """Short, in one kind of file of each part: dataset, checkpoint, state, selection; at full length in all."""
    command = program("flip_bits", tmp_path, "--flips", flips)
    command += ["--kinds", ",".join(kinds)] if kinds else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    harmful = [
        line | {"found": line["found"] if isinstance(line["found"], str) else bad}
        for line in lines
        if isinstance(line["found"], str)
        or (bad := [each for each in line["found"] if each["verdict"] not in HARMLESS])
    ]
    assert not harmful, "\n".join(map(json.dumps, harmful))
    unused = collections.Counter(line["kind"] for line in lines if verdicts(line) == {"unused"})
    print(f"{len(lines)} flips; of these no reader uses {dict(unused)}")
    assert len(lines) == (len(kinds) or 21) * flips
