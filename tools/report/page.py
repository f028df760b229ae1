"""RUN/report: the page on a run, the one on single samples, and duplicates.html with examples of duplicates."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape

from ...pipeline.opening import Dataset
from ...storage.files import write_atomically
from ..inspection import summary
from ..inspection.duplicates.finding import NEAR, THRESHOLDS, Duplicates
from ..inspection.findings import Findings, shown_ids
from ..inspection.opening import LATEST, Inspection
from ..inspection.temperatures.samples import InspectedSample, read_samples
from ..inspection.temperatures.survey import Survey
from ..printing import plain_text
from .html import MAX_TEXT_CHARACTERS, document, part
from .sheets import Around, Cards, data_uri, data_uris, listed_ids, listings, read_pictures

REPORT_PAGE, SAMPLES_PAGE, DUPLICATES_PAGE = "report.html", "samples.html", "duplicates.html"
MAX_PAGE_BYTES = 7_800_000
"""Size limit of the page, so that it opens quickly and can be mailed. Pictures get the space that is left."""
EXAMPLES, MEMBERS = 24, 8
"""Clusters of duplicates shown of each kind, and samples shown of a cluster."""
MAX_PICTURE_BYTES = 7_000_000
"""Size limit of the pictures on the page of duplicates."""
LONGEST_TEXTS = (MAX_TEXT_CHARACTERS, 500, 100)
"""Character limits to try for texts on a card, from complete to barely distinguishable."""


def write_report(findings: Findings, folder: Path, *, at: str = LATEST) -> Path:
    """Write the page into `folder` atomically and return its path.

    at: the snapshot that was asked for; any but `latest` has a page of its own, with its tag in the name. Pictures that
    cannot be shown are added to the findings' notes.
    """
    inspection, survey = findings.inspection, findings.survey
    by_group = partial(part, "groups.html", "tau_by_group", inspection, survey, not findings.first_sentences)
    leading = {f"By {groups.word}": by_group(groups) for groups in (survey.groups if survey else ())}
    following = _following(findings)
    used = sum(len(content.encode()) for content in (*leading.values(), *following.values()))
    ends, of_kinds, movers = _sheets(findings, MAX_PAGE_BYTES - used)
    if of_kinds:
        leading["Kinds of samples"] = of_kinds
    if findings.by_features:
        given = findings.by_features, findings.first_sentences
        leading["What temperatures go with"] = part("sections.html", "goes_with", *given)
    if ends:
        leading["Coldest and hottest"] = ends
    if findings.drift:
        following["Drift"] += movers
    dataset = inspection.dataset.name if inspection.dataset else Path(str(inspection.config.data.places)).name
    facts = [f"{dataset}: {summary.what(inspection, survey)}"] if survey else []
    head = Markup("<br>").join(escape(plain_text(line, 1000)) for line in [*facts, *summary.lineage(inspection)])
    name, notes = inspection.run.path.resolve().name, [*findings.warnings, *findings.notes]
    first = " ".join(findings.first_sentences[:1] or [summary.lede(survey)])
    html = document("Temperatures of", name, first, head, notes, leading | following)
    page = folder / REPORT_PAGE
    if at != LATEST and inspection.reader:
        page = page.with_stem(f"{page.stem}-{inspection.reader.snapshot.tag}")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(page, html.encode())
    return page


def _following(findings: Findings) -> dict[str, Markup]:
    """Return the sections after the contact sheets, by title."""
    inspection, survey = findings.inspection, findings.survey
    section, parts = partial(part, "sections.html"), dict[str, Markup]()
    if survey and survey.sides:
        parts["Distribution"] = section("distribution", inspection, survey)
        for groups in [*survey.groups, *([survey.parts] if survey.parts else [])]:
            parts[f"Table by {groups.word}"] = part("groups.html", "group_tables", survey.sides, groups)
    if findings.through_time:
        parts["Through time"] = section("through_time", inspection, findings.through_time)
    if survey and survey.doubted and survey.doubted.shares:
        parts["Doubted pairs"] = section("doubted", survey.doubted)
    if findings.drift:
        parts["Drift"] = section("drift", inspection, findings.drift)
    if survey and findings.map:
        parts["Map"] = section("map", inspection, survey, findings.map)
    if survey and survey.visited and (averages := section("moving_averages", inspection, survey)):
        parts["Moving averages"] = averages
    parts["Run"] = section("run", inspection, survey)
    return parts


def _sheets(findings: Findings, room: int) -> tuple[Markup, Markup, Markup]:
    """Return contact sheets of the ends of tau, of the kinds and of the samples that moved most; empty without them.

    They fit `room` bytes: texts are cut to at most half of it, pictures are reduced.
    """
    survey, drift = findings.survey, findings.drift
    if survey is None or not findings.samples:
        return Markup(), Markup(), Markup()

    def built(pictures: Mapping[int, Markup], longest: int) -> tuple[Markup, Markup, Markup]:
        cards, section = Cards(findings.samples, pictures, longest), partial(part, "sections.html")
        ends, movers = section("ends", survey, cards), section("movers", drift, cards)
        from_features = findings.by_features and findings.by_features.kinds
        kinds = survey.kinds, findings.confirmation, from_features
        return ends, section("of_kinds", *kinds, cards, findings.of_misfits), movers

    for longest in LONGEST_TEXTS:
        size = sum(len(sheets.encode()) for sheets in built({}, longest))
        if size <= room // 2:
            break
    dataset, shown = findings.inspection.dataset, shown_ids(survey, drift, findings.by_features)
    pictures = read_pictures(dataset, shown, findings.notes) if dataset else {}
    uris = data_uris(pictures, shown, room - size - 100 * len(shown))  # and a tag for each
    if pictures and not uris:
        findings.notes.append("There is no room for pictures on the page; group by fewer columns.")
    return built(uris, longest)


def write_samples(
    inspection: Inspection,
    survey: Survey | None,
    samples: Sequence[InspectedSample],
    folder: Path,
    around: Around,
    listed: Mapping[int, InspectedSample],
) -> Path:
    """Write the page into `folder` atomically and return its path. Pictures that cannot be shown are noted.

    around: neighbours of the samples, where they were asked for. listed: all samples that those name, by id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = [sample.sample_id for sample in samples]
    pictures = read_pictures(inspection.dataset, [*ids, *listed], inspection.notes) if inspection.dataset else {}
    uris = data_uris(pictures, neighbours := listed_ids(around.values()), MAX_PAGE_BYTES)
    if neighbours and pictures and not uris:
        inspection.notes.append("There is no room for pictures of neighbours on the page; ask for fewer.")
    parts, cards, curves = {}, Cards(listed, uris, LONGEST_TEXTS[-1]), dict[str, dict[str, list[tuple[int, float]]]]()
    for sample in samples:
        jpeg, found = pictures.get(sample.sample_id), around.get(sample.sample_id)
        for side, ranking in found.negatives.items() if found else ():
            if ranking.curve:
                words = f"{sample.sample_id}, tau {summary.tau(sample.state[f'{side}/tau'])}"
                curves.setdefault(side, {})[words] = ranking.curve
        picture = data_uri(jpeg, "image/jpeg") if jpeg else ""
        shown = listings(sample, found) if found else []
        title = f"Sample {sample.sample_id}"
        parts[title] = part("sections.html", "sample", inspection, sample, picture, shown, cards)
    if curves:
        parts["Weights of the negatives"] = part("sections.html", "weights", summary.settings(inspection), curves)
    name, count = inspection.run.path.resolve().name, f"{len(ids):,} sample{'s' * (len(ids) != 1)}"
    first = f"Everything recorded about {count}."
    facts = summary.what(inspection, survey) if survey else ""
    path = folder / SAMPLES_PAGE
    write_atomically(path, document("Samples of", name, first, facts, inspection.notes, parts).encode())
    return path


def _clusters(found: Duplicates) -> str:
    return f"{len(found.sizes):,} cluster{'s' * (len(found.sizes) != 1)}"


def duplicate_facts(found: Duplicates) -> list[tuple[str, str]]:
    """Return what was found, and by which thresholds, as (label, text) pairs."""
    pairs, sizes = found.counts, found.sizes
    copies = sum(sizes.values()) - len(sizes)
    return [
        ("duplicates", f"{_clusters(found)}; {copies:,} of {found.samples:,} samples could be left out"),
        ("exact", f"samples with the JPEG of an earlier one: {pairs['exact']:,}"),
        ("near", f"{pairs['near']:,} pairs, of {found.compared:,} similar ones compared by pixels"),
        ("blank", f"{pairs['blank'] + 1:,} pictures of one colour" if pairs["blank"] else "at most one picture"),
        (
            "thresholds",
            "near: similarity of the features ≥ {similarity:g}; once aligned, correlation ≥ {correlation:g} "
            "and difference ≤ {difference:g} grey levels".format(**THRESHOLDS),
        ),
    ]


def write_duplicates_page(inspection: Inspection, dataset: Dataset, found: Duplicates, folder: Path) -> Path:
    """Write the page into `folder` atomically and return its path. Pictures that cannot be shown are noted."""
    near = np.flatnonzero((found.reason == NEAR) & (found.cluster >= 0))
    order = near[np.argsort(found.agreement.correlation[near], kind="stable")]
    least_certain = list(dict.fromkeys(found.cluster[order[: 4 * EXAMPLES]].tolist()))[:EXAMPLES]
    groups = {"The largest clusters": list(found.sizes)[:EXAMPLES], "The least certain": least_certain}
    members = found.members([cluster for clusters in groups.values() for cluster in clusters])
    shown = [id for clusters in groups.values() for cluster in clusters for id in members[cluster][:MEMBERS]]
    pictures = read_pictures(dataset, shown, inspection.notes)
    # Without the state: a run that trains may have deleted the snapshot meanwhile.
    samples = read_samples(replace(inspection, reader=None), shown)
    cards = Cards(samples, data_uris(pictures, shown, MAX_PICTURE_BYTES), 100)
    agreement = dict[int, str]()  # of each sample in a cluster with its representative
    for place in np.flatnonzero((found.pairs.first == found.cluster) | (found.pairs.second == found.cluster)).tolist():
        cluster = int(found.cluster[place])
        other = int(found.pairs.first[place] + found.pairs.second[place]) - cluster
        correlation, difference = found.agreement.correlation[place], found.agreement.difference[place]
        words = ("exact copy", f"correlation {correlation:.4f}, difference {difference:.2f}", "blank")
        agreement[other] = words[found.reason[place]]
    given = members, MEMBERS, cards, agreement
    parts = {title: part("sections.html", "clusters", ids, *given) for title, ids in groups.items() if ids}
    parts["Figures"] = part("elements.html", "facts", duplicate_facts(found))
    name = inspection.run.path.resolve().name
    lede = f"{_clusters(found)} of samples with the same picture."
    html = document("Duplicates among the samples of", name, lede, "", inspection.notes, parts)
    write_atomically(folder / DUPLICATES_PAGE, html.encode())
    return folder / DUPLICATES_PAGE
