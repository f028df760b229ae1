"""Send a run's numbers to MLflow, into a database beside its other files (after `pip install mlflow`):

PYTHONPATH=examples thermopile train --preset glyphs --data data/glyphs --out runs/glyphs \\
  --set 'trackers=["mlflow_tracker:MLflow"]'
mlflow ui --backend-store-uri sqlite:///runs/glyphs/mlflow.db
"""

import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param


class MLflow:
    def __init__(self, directory, settings, run_id):
        self.client = MlflowClient(f"sqlite:///{directory.absolute()}/mlflow.db")
        # A resumed run has the id that it had before.
        found = self.client.search_runs(["0"], f"tags.thermopile = '{run_id}'")
        self.run = (found or [self.client.create_run("0", tags={"thermopile": run_id}, run_name=directory.name)])[0]
        params = [Param(key, str(value)) for key, value in settings.items() if key not in self.run.data.params]
        self.client.log_batch(self.run.info.run_id, params=params)

    def add(self, line):
        now, numbers = int(time.time() * 1000), {name: value for name, value in line.items() if name != "histograms"}
        metrics = [Metric(name, value, now, line["step"]) for name, value in numbers.items() if name != "step"]
        self.client.log_batch(self.run.info.run_id, metrics=metrics)

    def close(self):
        self.client.set_terminated(self.run.info.run_id)
