"""Print the machine as JSON: GPUs, driver, CPU, cores and versions. A script, for a process of its own."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
    cpu = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
           if line.startswith("model name")]  # fmt: skip
    return {
        "gpus": gpus, "driver": _driver(), "cuda": torch.version.cuda, "cpu": (cpu or ["unknown"])[0],
        "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": {package: _version(package) for package in PACKAGES},
    }  # fmt: skip


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    print(json.dumps(describe()))
