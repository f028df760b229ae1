"""warnings.log: every warning, one line, and nobody misses it elsewhere."""

import logging
import re
import subprocess
import sys

from thermopile.tools.train import warnings_log

log = logging.getLogger("thermopile.trainer.somewhere")


def test_a_warning_becomes_a_line_with_its_time(tmp_path):
    path = tmp_path / "warnings.log"
    with warnings_log(path):
        log.info("not this")
        log.warning("the disk is full: %s.\nTraining goes on", "/data")
        logging.getLogger("other").warning("nor this")
    (line,) = path.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} the disk is full: /data\. Training goes on", line), (
        line
    )


def test_a_second_run_appends_and_names_its_rank(tmp_path):
    path = tmp_path / "warnings.log"
    for rank in (None, 3):
        with warnings_log(path, rank):
            log.error("trouble")
    first, second = path.read_text().splitlines()
    assert first.endswith(" trouble")
    assert "rank" not in first
    assert second.endswith(" [rank 3] trouble")


def test_a_warning_goes_nowhere_through_a_link_and_ends_nothing(tmp_path):
    outside, path = tmp_path / "outside", tmp_path / "warnings.log"
    outside.write_text("precious")
    path.symlink_to(outside)
    with warnings_log(path):
        log.warning("trouble")
    assert outside.read_text() == "precious"


def test_a_run_without_warnings_makes_no_file_and_none_is_written_after_it(tmp_path):
    with warnings_log(tmp_path / "warnings.log"):
        log.info("all is well")
    log.warning("later")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_made_changes_nothing(tmp_path, capfd):
    with warnings_log(tmp_path / "missing" / "warnings.log"):
        log.warning("trouble")
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_changes_nothing(tmp_path, capfd, file_size_limit):
    with file_size_limit(0), warnings_log(tmp_path / "warnings.log"):
        log.warning("trouble")
    assert (tmp_path / "warnings.log").read_text() == ""
    assert "Traceback" not in capfd.readouterr().err


def test_warnings_reach_stderr_as_before(tmp_path):
    program = (
        "import logging, pathlib, sys\n"
        "from thermopile.tools.train import warnings_log\n"
        "with warnings_log(pathlib.Path(sys.argv[1])):\n"
        "    logging.getLogger('thermopile.trainer').warning('trouble')\n"
        "logging.getLogger('thermopile.trainer').warning('later')\n"
    )
    path = tmp_path / "warnings.log"
    done = subprocess.run([sys.executable, "-c", program, path], check=True, capture_output=True, text=True)
    assert done.stderr == "trouble\nlater\n"
    assert path.read_text().endswith("trouble\n")
