"""Twelve lines whose loss would cost users most, each with a way to break it and where its tests are."""

from typing import NamedTuple

from broken_copy import BrokenCopy


class Chosen(NamedTuple):
    name: str
    file: str
    line: str
    """Occurs once in the file."""
    broken: str
    tests: tuple[str, ...]


CHOSEN = (
    Chosen(
        "two ids swapped in the gather", "state_store/rows.py",
        "gather(self.blocks.words, places, values, visits)",
        "gather(self.blocks.words, np.append(places[1::-1], places[2:]), values, visits)",
        ("state_store/test_rows.py", "state_store/test_store.py"),
    ),
    Chosen(
        "fsync dropped", "storage/files.py",
        "os.fsync(file.fileno())",
        "pass",
        ("state_store/test_disk.py", "storage/test_files.py"),
    ),
    Chosen(
        "order off by one", "pipeline/order/order.py",
        "first_place = min(step * len(row),",
        "first_place = min(max(step * len(row) - 1, 0),",
        ("pipeline/order/test_order.py", "pipeline/order/test_served_orders.py"),
    ),
    Chosen(
        "ratio inverted in the estimator", "trainer/objectives/sogclr.py",
        "ratio = (log_g - log_s_eps).exp()",
        "ratio = (log_s_eps - log_g).exp()",
        ("trainer/objectives/test_isogclr.py", "trainer/objectives/test_reference_vectors.py"),
    ),
    Chosen(
        "picture checksum skipped", "pipeline/dataset/stored_sample.py",
        "if checksum(jpeg) != located.jpeg_checksum[row]:",
        "if False:",
        ("pipeline/dataset/test_stored_sample.py",),
    ),
    Chosen(
        "token checksum skipped", "pipeline/dataset/stored_sample.py",
        "if checksum(data) != located.tokens_checksum[row]:",
        "if False:",
        ("pipeline/dataset/test_stored_sample.py",),
    ),
    Chosen(
        "directory sync dropped", "storage/files.py",
        "    sync(to.parent)",
        "    pass",
        ("state_store/test_disk.py", "storage/test_files.py"),
    ),
    Chosen(
        "stale row served", "state_store/rows.py",
        "self.blocks.changed(rows)",
        "pass",
        ("state_store/test_windowed.py",),
    ),
    Chosen(
        "wrong weight's sign", "trainer/objectives/contrastive.py",
        "in_positive - weight)",
        "in_positive + weight)",
        ("trainer/objectives/test_isogclr.py", "trainer/objectives/test_reference_vectors.py"),
    ),
    Chosen(
        "lease ignored", "storage/bucket_lock.py",
        "raise LockedError(name)",
        "return now",
        ("storage/test_bucket_lock.py",),
    ),
    Chosen(
        "window's last block forgotten", "pipeline/order/order.py",
        "np.sort(members))",
        "np.sort(members)[:-1])",
        ("pipeline/order/test_order_windows.py",),
    ),
    Chosen(
        "tau clipped at the wrong end", "trainer/objectives/isogclr.py",
        "return moved.clamp(self.tau_min, self.tau_max)",
        "return moved.where(moved <= self.tau_max, self.tau_min).clamp(self.tau_min)",
        ("trainer/objectives/test_properties.py",),
    ),
)  # fmt: skip


def look_for_chosen(copy: BrokenCopy) -> list[str]:
    """Break the lines one at a time, print the tests that find each, and return the names of those that none finds."""
    print("Chosen mutants", flush=True)
    limit, missed = copy.run_unbroken(sorted({each for chosen in CHOSEN for each in chosen.tests})), []
    for name, file, line, broken, tests in CHOSEN:
        whole = copy.path(file).read_text()
        if whole.count(line) != 1:
            raise SystemExit(f"{name}: this is {whole.count(line)} times in {file}, and should be there once: {line}")
        with copy.with_code(file, whole.replace(line, broken)):
            run = copy.run(tests, limit, to_the_end=True)
        if not run.failed or not run.ran:
            missed.append(name)
        print(f"  {name}, {file}, {run.seconds:.0f} s:", *run.failed or [run.ended], sep="\n    ", flush=True)
    return missed
