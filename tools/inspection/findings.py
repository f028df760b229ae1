"""The result of inspecting a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .advice import warnings
from .details import Details
from .drift import Drift
from .embedding_map import EmbeddingMap
from .run import Inspection
from .survey import Survey
from .through_time import ThroughTime


@dataclass(frozen=True)
class Findings:
    """A run and its findings; parts that do not exist or were not requested are None."""

    inspection: Inspection
    survey: Survey | None
    notes: list[str]
    """Why parts are missing."""
    drift: Drift | None = None
    details: Mapping[int, Details] = field(default_factory=dict)
    """Id -> details of the samples shown with pictures."""
    through_time: ThroughTime | None = None
    map: EmbeddingMap | None = None

    @property
    def warnings(self) -> list[str]:
        """Warnings from `advice`."""
        return warnings(self.inspection, self.survey) if self.survey else []


def shown_ids(survey: Survey, drift: Drift | None) -> list[int]:
    """Return the ids of samples shown with pictures, repeated as often as they are shown."""
    sides = drift.sides if drift else []
    movers = [mover for side in sides for mover in (*side.most_risen, *side.most_fallen)]
    return [sample_id for sheet in survey.sheets for sample_id in sheet.sample_ids] + [m.sample_id for m in movers]
