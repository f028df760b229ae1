"""Print the machine as JSON: GPUs, driver, CPU, cores and versions. A script, for a process of its own."""

import json
import platform
import shutil
import subprocess
import sys
from typing import Any

from thermopile.tools.bench.machine import describe_machine

PACKAGES = ("torch", "nvidia-dali-cuda130", "ffcv", "transformers", "numba", "numpy", "zarr", "icechunk")


def describe() -> dict[str, Any]:
    """Return the machine; a package that is not installed has the version `missing`."""
    try:
        import torch
    except ImportError as error:
        raise SystemExit(f"torch is missing in {sys.executable}: {error}") from None
    gpus = []
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        gpus.append({"name": found.name, "bytes": found.total_memory, "capability": f"{found.major}.{found.minor}"})
    machine = describe_machine(*PACKAGES)
    return {
        "gpus": gpus, "driver": _driver(), "cuda": torch.version.cuda, "python": platform.python_version(),
        "cpu": machine["cpu"], "cores": machine["cores"], "ram_bytes": machine["ram_bytes"],
        "versions": {package: machine[package] for package in PACKAGES},
    }  # fmt: skip


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else "unknown"


if __name__ == "__main__":
    print(json.dumps(describe()))
