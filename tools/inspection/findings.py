"""All that one look at a run found out."""

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
    """A run, and what was found; None for a part that there is not, or that was not asked for."""

    inspection: Inspection
    survey: Survey | None
    notes: list[str]
    """In plain words, why a part is missing."""
    drift: Drift | None = None
    details: Mapping[int, Details] = field(default_factory=dict)
    """Of the samples that are shown with their pictures, by id."""
    through_time: ThroughTime | None = None
    map: EmbeddingMap | None = None

    @property
    def warnings(self) -> list[str]:
        """What a person should know at once, in plain words."""
        return warnings(self.inspection, self.survey) if self.survey else []


def shown_ids(survey: Survey, drift: Drift | None) -> list[int]:
    """Ids of the samples that are shown with their pictures, as often as they are."""
    sides = drift.sides if drift else []
    movers = [mover for side in sides for mover in (*side.most_risen, *side.most_fallen)]
    return [sample_id for sheet in survey.sheets for sample_id in sheet.sample_ids] + [m.sample_id for m in movers]
