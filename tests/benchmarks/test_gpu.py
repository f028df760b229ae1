"""`make gpu`: what it runs where, what it says, and its page; never how fast anything was."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from thermopile.benchmarks.on_gpu.copies import overlapped
from thermopile.benchmarks.on_gpu.earlier import Earlier
from thermopile.benchmarks.on_gpu.findings import Findings, read
from thermopile.benchmarks.on_gpu.page import to_markdown
from thermopile.benchmarks.on_gpu.parts import PARTS, Part
from thermopile.benchmarks.on_gpu.running import NO_TIME, Runner, missing

CHECKOUT = Path(__file__).parents[2]
GPU = [sys.executable, "-m", "benchmarks.gpu"]
MACHINE = {
    "gpus": [{"name": "a card", "bytes": 80 * 2**30, "capability": "9.0"}], "driver": "580", "cuda": "13.0",
    "cpu": "a CPU", "cores": 16, "ram_bytes": 10**11, "python": "3.12.3", "versions": {"torch": "2.13.0"},
}  # fmt: skip


def start(*words, **environment):
    command = list(map(str, [*GPU, *words]))
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.wide
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and all parts would run")
def test_without_a_gpu_one_line_says_so_and_the_page_stays(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text("as it was")
    done = start("--page", page)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"Nothing was measured. no GPU: torch {torch.__version__} finds none\n"
    assert page.read_text() == "as it was"


@pytest.mark.wide
def test_without_a_package_the_parts_that_need_it_are_not_run_and_the_others_are(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'ffcv':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    page, search = tmp_path / "gpu.md", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    parts = [word for part in ("training", "dali", "objective") for word in ("--part", part)]
    done = start("--device", "cpu", "--small", "--page", page, *parts, PYTHONPATH=search)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["training, dali: not run: ffcv is missing"]
    text = page.read_text("utf-8")
    assert "\n## Not run\n\n- ffcv is missing: Training on real data; DALI\n" in text
    assert "isogclr on pairs" in text


@pytest.mark.soak
def test_a_step_is_measured_until_the_largest_batch_and_the_page_names_the_machine(tmp_path):
    page = tmp_path / "docs" / "gpu.md"
    page.parent.mkdir()
    done = start("--device", "cpu", "--small", "--page", page, "--part", "step-checkpointed")
    assert (done.returncode, done.stderr) == (0, "")
    text = page.read_text("utf-8")
    assert f"torch {torch.__version__}" in text
    assert "\n| 16 |" in text  # timed before the memory was filled
    (row,) = [line for line in text.splitlines() if line.startswith("| 32 |")]
    step, samples = re.fullmatch(r"\| 32 \| ([\d,.]+) ms \| ([\d,]+) \| – \| [\d.]+% \|", row).groups()
    assert float(samples.replace(",", "")) == pytest.approx(32e3 / float(step.replace(",", "")), rel=0.01)
    assert list(page.parent.iterdir()) == [page]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_part_runs_on_a_cpu_at_its_small_size(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("from support import torchvision_operators")  # for open_clip
    search = os.pathsep.join([str(tmp_path), str(CHECKOUT / "tests"), os.environ.get("PYTHONPATH", "")])
    page = tmp_path / "gpu.md"
    done = start("--device", "cpu", "--small", "--minutes", 60, "--page", page, PYTHONPATH=search)
    can_run = [part for part in PARTS if not missing(part.needs)]
    assert done.returncode == (len(can_run) < len(PARTS)), done.stderr
    text = page.read_text("utf-8")
    for part in can_run:
        assert f"## {part.title}\n" in text
    assert text.count("This part took") == len(can_run)


@pytest.mark.wide
def test_one_rank_trains_as_one_of_several_with_the_losses_of_one_alone(tmp_path, monkeypatch):
    from thermopile.benchmarks.on_gpu import runs  # which imports all that a trainer needs
    from thermopile.trainer.encoders import data_parallel

    monkeypatch.setenv("MASTER_ADDR", "")
    averaged, wrap = [], data_parallel.DistributedDataParallel
    monkeypatch.setattr(
        data_parallel,
        "DistributedDataParallel",
        lambda *words, **named: averaged.append(words) or wrap(*words, **named),
    )
    runs.one_rank(Findings("nccl", tmp_path, "cpu", True))
    assert len(averaged) == 1
    checks = read("nccl", tmp_path)["checks"]
    assert [check["held"] for check in checks] == [True] * 3
    assert not torch.distributed.is_initialized()


@pytest.mark.wide
def test_a_run_on_dali_names_a_damaged_jpeg_in_a_line_and_its_memory_is_looked_at(tmp_path):
    page = tmp_path / "gpu.md"
    done = start("--device", "cpu", "--small", "--page", page, "--part", "dali-damage", "--part", "dali-memory")
    assert (done.returncode, done.stderr) == (0, "")
    text = page.read_text("utf-8")
    assert re.search(r"\n\| garbage \| 1 \| 5 \| Error: sample \d+ .* does not decode: ", text)
    assert re.search(r"\n\| 40 \| \d+ MB \| – \|\n", text)


@pytest.mark.wide
def test_real_training_is_killed_and_resumed_without_a_step_twice_and_its_report_is_kept(tmp_path):
    from thermopile.benchmarks.on_gpu import real

    (tmp_path / "parts").mkdir()
    real.measure(Findings("real", tmp_path / "parts", "cpu", True, tmp_path / "kept"))
    found = read("real", tmp_path / "parts")
    assert [check["found"] for check in found["checks"]] == ["40 in 40", "1,280"]
    assert all(check["held"] for check in found["checks"])
    assert [row[0] for row in found["tables"][0]["rows"]] == [
        "clip", "isogclr", "fastclip_v3", "isogclr, killed after step 15, resumed",
    ]  # fmt: skip
    assert (tmp_path / "kept" / "real-report" / "report.html").is_file()


def test_a_folder_to_look_at_is_kept_where_the_user_said_or_else_the_page_says_how(tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "page.html").touch()
    for kept in (None, tmp_path / "kept"):
        Findings("part", tmp_path, "cpu", True, kept).keep_folder("of-part", tmp_path / "report")
        (note,) = read("part", tmp_path)["notes"]
        assert ("with `FOUND=folder`" in note) == (kept is None)
    assert (tmp_path / "kept" / "of-part" / "page.html").is_file()


SLOW = """
import sys, time
if "--worker" in sys.orig_argv:
    open(f"{__file__}.{sys.orig_argv[-1]}", "w").close()
    time.sleep(4 if sys.orig_argv[-1] == "objective" else 600)
"""


@pytest.mark.wide
@pytest.mark.parametrize("interrupted", [False, True])
def test_with_slow_parts_the_page_holds_what_was_measured_whether_the_time_ends_or_the_command(tmp_path, interrupted):
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    page, search = tmp_path / "gpu.md", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    parts = [word for part in ("objective", "nccl", "tests") for word in ("--part", part)]
    command = [*GPU, "--device", "cpu", "--small", "--minutes", "2", "--page", page, *parts]
    running = subprocess.Popen(
        command, cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": search}, text=True, stderr=subprocess.PIPE
    )
    if interrupted:
        while not (tmp_path / "sitecustomize.py.nccl").exists():
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
    _, complaints = running.communicate()
    assert running.returncode not in (0, -signal.SIGTERM)
    text = page.read_text("utf-8")
    assert "isogclr on pairs" in text
    assert text.count("## ") == 3 - interrupted
    if interrupted:
        assert text.endswith("**Interrupted.**\n")
    else:
        assert re.search(r"\*\*Ended after \d+ s\.\*\*", text)
        assert f"tests: {NO_TIME}" in complaints


WORKER = """
import sys, time
from pathlib import Path
from thermopile.benchmarks.on_gpu.findings import Findings

name = sys.argv[-1]
found = Findings(name, Path({folder!r}), "cpu", True)
found.row("a table", {{"batch": "1"}})
if name == "hangs":
    time.sleep(600)
if name == "fails":
    raise ValueError("what went wrong")
if name == "dies":
    import os
    os.kill(os.getpid(), 9)
if name == "grows":
    for number in range(100_000):
        found.row("a table", {{"batch": str(number)}}, again=True)
        time.sleep(0.01)
found.check("a figure", "≤ 1", "2", name != "runs")
"""


@pytest.fixture
def command(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(folder=str(tmp_path)))
    return [sys.executable, str(worker)]


@pytest.fixture
def runner(command, tmp_path):
    return Runner(command, tmp_path, 600)


def part(name, needs=(), seconds=60, usual=0):
    return Part(name, name.capitalize(), "", needs, usual, seconds)


def test_a_part_that_hangs_fails_or_is_killed_keeps_what_it_found_and_the_next_one_runs(runner):
    for each in (part("hangs", seconds=1), part("fails"), part("dies"), part("runs")):
        runner.run(each)
    assert [outcome.problem for outcome in runner.outcomes] == [
        "ended after 1 s", "failed: ValueError: what went wrong",
        "failed: killed by signal 9, possibly out of memory", "",
    ]  # fmt: skip
    for outcome in runner.outcomes:
        assert outcome.found["tables"] == [{"title": "a table", "heading": ["batch"], "rows": [["1"]]}]
    assert runner.complaints()[0] == "missed: a figure: 2, asked ≤ 1"
    assert "hangs: ended after 1 s" in runner.complaints()


def test_a_part_whose_packages_are_missing_is_not_run(runner):
    runner.run(part("first", needs=("json", "no_such_module", "nvidia.no_such_module")))
    runner.run(part("second", needs=("pytest_timeout",)))
    assert [outcome.problem for outcome in runner.outcomes] == [
        "not run: no_such_module, nvidia.no_such_module are missing", "",
    ]  # fmt: skip


@pytest.mark.wide
def test_parts_end_with_the_time_of_all_and_what_was_measured_is_on_the_page(command, tmp_path):
    runner = Runner(command, tmp_path, 5)
    for each in (part("first"), part("too long", usual=6), part("grows"), part("late")):
        runner.run(each)
    problems = [outcome.problem for outcome in runner.outcomes]
    assert re.fullmatch(r"ended after \d s", problems.pop(2))
    assert problems == ["", NO_TIME, NO_TIME]
    assert re.search(r"## Grows\n\na table:\n\n\| batch \|\n\| --- \|\n\| \d+ \|\n\n\*\*Ended",
                     to_markdown(MACHINE, runner.outcomes))  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "held"),
    [
        ([part("good")], True), ([part("good"), part("long", usual=10**6)], True),
        ([part("good"), part("runs")], False),
        ([part("good"), part("fails")], False), ([part("good"), part("lacking", needs=("no_such_module",))], False),
    ],
    ids=["good", "no time", "missed", "failed", "missing"],
)  # fmt: skip
def test_a_missed_figure_and_a_part_that_cannot_run_fail_the_whole_but_not_one_without_time(runner, parts, held):
    for each in parts:
        runner.run(each)
    assert runner.held == held


def test_what_an_earlier_command_found_on_this_machine_is_kept_but_not_what_missed_or_failed(runner, tmp_path):
    found = tmp_path / "found"
    for each in (part("good"), part("runs"), part("fails")):
        runner.run(each)
        Earlier(found, MACHINE).keep(runner.outcomes[-1])
    later = Earlier(found, MACHINE | {"ram_bytes": 1})
    assert later.outcome(part("good")) == runner.outcomes[0]
    assert later.outcome(part("runs")) is later.outcome(part("fails")) is None
    with pytest.raises(SystemExit, match=r"Nothing was measured\. --found .*: File exists"):
        Earlier(found / "machine.json", MACHINE)
    for other in ((MACHINE | {"driver": "581"},), (MACHINE, "small")):
        with pytest.raises(SystemExit, match=r"Nothing was measured\. --found .*: it is of another machine"):
            Earlier(found, *other)


@pytest.mark.wide
def test_a_second_command_runs_what_the_first_did_not_and_both_are_on_the_page(tmp_path):
    page = tmp_path / "gpu.md"
    common = ("--device", "cpu", "--small", "--found", tmp_path / "found", "--page", page, "--part", "objective")
    for more, ran in (((), ["objective"]), (("--part", "exact-vit"), ["exact-vit"]), ((), [])):
        done = start(*common, *more)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ran
    assert "isogclr on pairs" in page.read_text("utf-8")


TEST_FILE = """
import os, signal, pytest

@pytest.mark.gpu
@pytest.mark.parametrize("name", ["passes", "fails", "skips", "dies", "late"])
def test(name):
    if name == "skips":
        pytest.skip("a reason")
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    assert name != "fails", "what went wrong"
"""


def test_tests_that_ran_are_counted_though_a_later_one_ends_their_process(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_gpu.py").write_text(TEST_FILE)
    code = ("from pathlib import Path; from thermopile.benchmarks.on_gpu import findings, suite\n"
            f"suite.MARK, suite.TESTS = 'gpu', Path({str(tmp_path)!r})\n"
            f"suite.tests(findings.Findings('tests', suite.TESTS, 'cpu', True), 'not compiled')")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    found = read("tests", tmp_path)
    (table,) = found["tables"]
    assert dict(zip(table["heading"], *table["rows"], strict=True)) == {
        "passed": "1", "failed": "1", "skipped": "1", "not run": "0",
    }  # fmt: skip
    failed, skipped = found["notes"]
    assert failed.startswith("Failed: `test_gpu.py::test[fails]`: ")
    assert "what went wrong" in failed
    assert skipped == "Skipped: a reason."


def test_a_folder_without_wheels_is_one_line_with_the_cure(tmp_path):
    done = start("--wheels", tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"Nothing was measured. --wheels {tmp_path}: it holds no wheels; make gpu-wheels fills build/gpu-wheels\n"
    )


def test_a_folder_to_which_not_all_pieces_were_brought_is_one_line(tmp_path):
    (tmp_path / "digests").write_text(f"{'0' * 64}\n" * 3)
    (tmp_path / "piece-2").touch()
    done = start("--wheels", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path}: it lacks 1, 3 of 3 pieces; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.wide
def test_wheels_of_a_folder_are_on_the_path_of_all_parts_and_nowhere_afterwards(tmp_path):
    with ZipFile(tmp_path / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "")
        wheel.writestr("brought-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
        wheel.writestr("brought-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("brought-1.dist-info/RECORD", "")
    (tmp_path / "pairs").mkdir()
    code = (
        "import os, subprocess, sys; from thermopile.benchmarks import gpu; from pathlib import Path\n"
        "gpu._add_wheels(Path(sys.argv[1]), Path(sys.argv[2])); import brought\n"
        "subprocess.run([sys.executable, '-c', 'import brought'], check=True); print(os.environ['THERMOPILE_PAIRS'])\n"
    )
    command = [sys.executable, "-c", code, tmp_path, tmp_path / "site"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "pairs")
    assert subprocess.run([sys.executable, "-c", "import brought"], capture_output=True).returncode == 1


def test_the_page_says_what_was_held_missed_and_not_run(runner):
    runner.run(part("runs"))
    for name in ("other", "third"):
        runner.run(part(name, needs=("no_such_module",)))
    text = to_markdown(MACHINE, runner.outcomes)
    assert "| GPU 0 | a card, 80 GiB, compute capability 9.0 |" in text
    assert "| a figure | ≤ 1 | 2 | **missed** |" in text
    assert "## Runs\n\na table:\n\n| batch |\n| --- |\n| 1 |\n" in text
    assert text.endswith("## Not run\n\n- no_such_module is missing: Other; Third\n")


@pytest.mark.parametrize("seed", range(20))
def test_the_overlapped_share_is_that_of_a_slow_count(seed):
    chance = random.Random(seed)

    def some(most):
        begins = [chance.randrange(60) for _ in range(chance.randrange(most))]
        return [(begin, begin + chance.randrange(1, 20)) for begin in begins]

    copied, computed = [*some(5), (3, 9)], some(8)
    instants = [instant for begin, end in copied for instant in range(begin, end)]
    hidden = [any(begin <= instant < end for begin, end in computed) for instant in instants]
    assert overlapped(copied, computed) == pytest.approx(sum(hidden) / len(instants))
