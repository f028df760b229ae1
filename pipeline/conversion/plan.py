"""The plan of a conversion, made before it starts: which samples go into which shard, in which order."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field

from ...storage.files import sha256_of
from ...storage.sealed_json import flat
from ..dataset.index import ImagePolicy
from ..sources import Asked, Facts, Source


class ConvertSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of a conversion."""

    seed: int = Field(default=0, ge=0)
    """Seed of the permutation of the source's listing."""
    image: ImagePolicy = ImagePolicy()
    vocab_size: Annotated[int, Field(ge=300)] | Literal[0] = 1024
    """Vocabulary size of the tokenizer trained on the captions: 256 bytes, 3 special tokens, the rest merges. 0: chosen
    by the captions."""
    context_length: Annotated[int, Field(ge=4)] | Literal[0] = 32
    """Tokens per caption; 0: likewise."""
    tokenizer: Path | None = None
    """A tokenizer.json to use instead of training one."""
    on_error: Literal["skip", "fail"] = "skip"
    """Whether a bad sample is left out and listed, or fails the conversion."""
    max_error_rate: float = Field(default=0.1, ge=0, le=1)
    """A larger share of bad samples fails the conversion, since the source must be broken."""

    def suited_to(self, source: Source, tell: Callable[[str], None]) -> Self:
        """Choose vocabulary and context by the captions where they are 0, if the source can tell before it is read."""
        if not (lengths := source.lengths(Asked(0, None, self.vocab_size, self.context_length, self.tokenizer))):
            return self
        tell(str(lengths))
        return self.model_copy(update={"vocab_size": lengths.vocab_size, "context_length": lengths.context_length})


class Plan(BaseModel, frozen=True, extra="forbid"):
    """Everything that determines a dataset's bytes: a conversion resumes only under the same plan."""

    source: dict[str, Any]
    samples: int | None
    """Samples in the source; None for tars, which are not counted before they are read."""
    selected: int | None
    selection: str | None
    """sha256 of the selected source indices, or for tars the name of their rule; None if all are selected."""
    seed: int
    image: ImagePolicy
    vocab_size: int | None
    """Vocabulary size of the tokenizer to train, or for tars the one asked for."""
    context_length: int | None
    tokenizer: str | None
    """sha256 of a given tokenizer."""
    shards: int | None
    """None for tars, whose groups are in `facts`."""
    facts: Facts | None = None
    """None until a process begins. Not in the digest, since everything above determines them."""
    marks: dict[str, str]
    """Source.marks. Like made_at, not in the digest: copying the files does not change the dataset."""
    made_at: int
    """In nanoseconds since 1970. Ties shards to this plan, not to an equal one made later, perhaps of other files."""

    @classmethod
    def of(cls, source: Source, settings: ConvertSettings, asked: Asked) -> Self:
        """Return the plan of a conversion, without its facts."""
        pairs, tokenizer = source.mode != "images", asked.tokenizer
        return cls(
            source=source.describe(),
            **source.extent(asked.selection),
            seed=settings.seed,
            image=settings.image,
            vocab_size=(asked.vocab_size or None) if pairs and not tokenizer else None,
            context_length=(asked.context_length or None) if pairs else None,
            tokenizer=sha256_of(tokenizer) if pairs and tokenizer else None,
            marks=source.marks(),
            made_at=time.time_ns(),
        )

    @property
    def parts(self) -> int:
        """Number of shards, or of groups of tars, each with a marker of its own."""
        return self.shards if self.shards is not None else len((self.facts and self.facts.groups) or ())

    def digest(self) -> str:
        """Return the sha256 that dataset.json records: equal plans give equal datasets."""
        return hashlib.sha256(json.dumps(self._settings(), sort_keys=True).encode()).hexdigest()

    def _settings(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"marks", "made_at", "facts"})

    def differences(self, begun: Self) -> list[str]:
        """Return readable differences from the plan that a conversion was started with; at most three for files."""
        now, then = flat(self._settings()), flat(begun._settings())
        if begun.facts and begun.facts.groups is not None:  # what is not asked for is taken from the plan
            then |= {"vocab_size": begun.facts.vocab_size, "context_length": begun.facts.context_length}
            now |= {name: then[name] for name in ("vocab_size", "context_length", "tokenizer") if now[name] is None}
        names = [name for name in now | then if now.get(name) != then.get(name)]
        found = [f"{name} was {_short(then.get(name))} and is now {_short(now.get(name))}" for name in names]
        files = sorted({name for name, _ in self.marks.items() ^ begun.marks.items()})
        return found + [f"{file} has changed" for file in files[:3]]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:16]}…"
