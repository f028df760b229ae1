"""All that one look at a run found out."""

from __future__ import annotations

from dataclasses import dataclass

from .advice import warnings
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
    through_time: ThroughTime | None = None
    drift: Drift | None = None
    map: EmbeddingMap | None = None

    @property
    def warnings(self) -> list[str]:
        """What a person should know at once, in plain words."""
        return warnings(self.inspection, self.survey) if self.survey else []

    @property
    def shown(self) -> list[int]:
        """Ids of the samples that are shown with their pictures, as often as they are."""
        sheets = self.survey.sheets if self.survey else []
        sides = self.drift.sides if self.drift else []
        movers = [mover for side in sides for mover in (*side.most_risen, *side.most_fallen)]
        return [sample_id for sheet in sheets for sample_id in sheet.sample_ids] + [m.sample_id for m in movers]
