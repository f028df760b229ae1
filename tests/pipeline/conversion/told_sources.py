"""Folders of pictures that wait, fail or kill their process, as files in the folder `told` say; for tasks to import."""

import os
import time

from thermopile.pipeline.sources.folder import FolderSource


class _ToldSource(FolderSource):
    def __init__(self, root, told):
        super().__init__(root)
        self.told = told


class PausingSource(_ToldSource):
    """Gives no sample while as many shards of `told`/out are done as the file `pause_at` says."""

    def __getitem__(self, index):
        if self.is_to_pause():
            mark = self.told / f"pausing-{os.getpid()}"
            mark.touch()
            while self.is_to_pause():
                time.sleep(0.05)
            mark.unlink()
        return super().__getitem__(index)

    def is_to_pause(self):
        done = list(self.told.glob(".out.partial/parts/*.done.json"))
        return len(done) >= int((self.told / "pause_at").read_text())


class FailingOnceSource(_ToldSource):
    """Fails at the first sample, as a file server may that is away for a moment."""

    def __getitem__(self, index):
        try:
            (self.told / "fail_once").unlink()
        except FileNotFoundError:
            return super().__getitem__(index)
        raise OSError(5, "Input/output error", "somewhere")


class DeadlySource(_ToldSource):
    """Has a sample that kills whatever process reads it."""

    def __getitem__(self, index):
        if index == 100:
            os._exit(1)
        return super().__getitem__(index)
