"""Summarise a run's temperatures for the terminal and for the report: sentences and tables."""

from collections.abc import Mapping, Sequence

import numpy as np

from ...trainer.metrics.step_report import percent
from ...trainer.run_directory import read_lineage
from . import Float32s
from .feature_findings.by_features import ByFeatures, EvidentKinds
from .feature_findings.properties import OF_FEATURES
from .features.confirmation import Confirmation
from .opening import Inspection
from .temperatures.associations import END_SHARE, ENDS, Association
from .temperatures.correlation import NEGLIGIBLE, Correlation
from .temperatures.distribution import QUANTILES, Distribution
from .temperatures.drift import Drift
from .temperatures.groups import TauGroups
from .temperatures.kinds import SampleKinds
from .temperatures.misfits import Doubted
from .temperatures.survey import Survey

TERMINAL_QUANTILES = (0.05, 0.5, 0.95)
SETTINGS = ("rho", "gamma", "eta", "tau_step", "tau_init", "tau_min", "tau_max")
HEAD = "tau of the visited samples"
"""Of a table of temperatures."""
_BARS = "▁▂▃▄▅▆▇█"
TableRow = list[str]
"""One line of a summary table: its label, and a cell per side."""
SETTLED = 1.15
"""Factor within which the update rule may still move the median temperature of a side that has settled."""
MAX_GROUP_ROWS = 1000
"""More rows make the page slow to open; beyond this, only the largest and the smallest groups are shown."""
Known = Mapping[str, Correlation]
"""Side -> correlation of group size and mean tau."""
NAMES = {
    "rarest_word": ("captions with rare words", "captions of words that many others have"),
    "word_frequency": ("captions of rarer words on the whole", "captions of more common words on the whole"),
    "class_size": ("samples of small classes", "samples of large classes"),
    "equal_captions": ("captions that few others share", "captions that many others share"),
    "copies": ("pictures without near-copies", "pictures with near-copies"),
    "contrast": ("pictures of little contrast", "pictures of much contrast"),
    "pixels": ("small pictures", "large pictures"),
    "caption_length": ("short captions", "long captions"),
    "own_cosine": ("pictures that the model matches badly", "pictures that the model matches well"),
    "doubt": ("samples that the model tells well from others", "samples that the model tells badly from others"),
    "near_pictures": ("pictures few others lie near in the features", "pictures many others lie near in the features"),
    "near_captions": ("captions few others lie near in the features", "captions many others lie near in the features"),
}
"""Property -> words for low and for high values."""


def facts(inspection: Inspection, survey: Survey | None) -> list[tuple[str, str]]:
    """Return what was inspected as (label, text) pairs; texts hold unescaped paths."""
    lines = [("run", str(inspection.run.path.resolve()))]
    path = inspection.dataset.absolute if inspection.dataset else inspection.config.data.places
    lines.append(("dataset", str(path)))
    if inspection.reader and survey:
        snapshot = inspection.reader.snapshot
        written = f"written {snapshot.written_at:%Y-%m-%d %H:%M} UTC"
        lines.append(("snapshot", f"{snapshot.tag} (step {snapshot.step:,}, epoch {snapshot.epoch}), {written}"))
        lines.append(("samples", _coverage(survey, len(inspection.planted[0]))))
    lines.append(("objective", settings(inspection)))
    return lines + [("" if place else "origin", line) for place, line in enumerate(lineage(inspection))]


def lineage(inspection: Inspection) -> list[str]:
    """Return the tree of the runs that this one was forked from; empty unless it is a fork."""
    found = read_lineage(inspection.run.lineage_file)
    return found.lines() if found else []


def what(inspection: Inspection, survey: Survey) -> str:
    """Describe a figure's data: number of samples, snapshot and settings. Requires a snapshot."""
    tag = inspection.state.snapshot.tag
    return f"{survey.visited:,} visited of {survey.samples:,} samples, {tag}, {settings(inspection)}"


def settings(inspection: Inspection) -> str:
    """Return the objective and its temperature settings, like `isogclr: rho 2, gamma 0.8`."""
    objective = inspection.config.objective
    known = {name: objective.settings.get(name) for name in SETTINGS}
    settings = ", ".join(f"{name} {value:g}" for name, value in known.items() if value is not None)
    return f"{objective.name}: {settings}" if settings else objective.name


def _coverage(survey: Survey, planted: int) -> str:
    """Return the number of samples, which leaves out planted ones, and how often they were visited."""
    is_selection = survey.samples + planted < survey.dataset_samples
    selected = f" selected of {survey.dataset_samples:,}" if is_selection else ""
    without = f" without the {planted:,} planted" if planted else ""
    words = f"{survey.samples:,}{selected}{without}, of which {share(survey.share_visited)} visited"
    if not survey.visited:
        return words
    unvisited = 1 - survey.share_visited
    low, high = (survey.visits.quantile(unvisited + survey.share_visited * at) for at in (0.05, 0.95))
    if low == high:
        words += f", {low:,.0f} time{'s' * (low != 1)}"
    else:
        words += f", 90% of these {low:,.0f} to {high:,.0f} times"
    if survey.never_visited:
        more = ", …" if survey.samples - survey.visited > len(survey.never_visited) else ""
        words += f"; never visited: ids {', '.join(map(str, survey.never_visited))}{more}"
    return words


def solved_quantiles(solved: Mapping[str, Float32s]) -> list[TableRow]:
    """Return rows with quantiles of solved temperatures, by side."""
    rows = []
    for at in TERMINAL_QUANTILES:
        values = [float(np.quantile(of_side, at, method="nearest")) for of_side in solved.values()]
        rows.append([f"{100 * at:g}% quantile", *(tau(value) if 0 < value < np.inf else "none" for value in values)])
    return rows


def solved_table(found: ByFeatures) -> tuple[TableRow, list[TableRow]]:
    """Return head and rows of a table of solved temperatures, and of how far the learned ones are from them."""
    sides, rows = list(found.tau), solved_quantiles(found.tau)
    learned = [found.solved.at_learned(side) for side in sides]
    rows.append(["median of learned / solved", *(f"{each[0]:.2f}" if each else "–" for each in learned)])
    rows.append(["median KL at the learned ones", *(f"{each[1]:.2f}" if each else "–" for each in learned)])
    moves = [found.moves.get(side) for side in sides]
    rows.append(["the rule would move the median by", *(f"{move - 1:+.1%}" if move else "–" for move in moves)])
    for rho in next(iter(found.curves.values())):
        word = f"Spearman with near samples at rho {rho:g}"
        rows.append([word, *(correlation(found.curves[side][rho]) for side in sides)])
    about = f"tau where KL is rho = {found.solved.rho:g}, of {len(found.solved.sample_ids):,} samples"
    return [about, *sides], rows


def first_sentences(found: ByFeatures | None) -> list[str]:
    """Return sentences for the top of the report, the strongest first; empty without features."""
    if found is None:
        return []
    notable = [(side, each) for side, of_side in found.associations.items() for each in of_side if each.is_notable]
    notable.sort(key=lambda one: (one[1].of in OF_FEATURES, -abs(one[1].area - 0.5)))
    moves = {side: f"{factor - 1:+.0%}" for side, factor in found.moves.items() if max(factor, 1 / factor) > SETTLED}
    sentences = [in_words(side, each, settled=side not in moves) for side, each in notable[:4]]
    if moves:
        move = f"the run's own rule would still move their median by {per_side(moves)}"
        sentences.append(f"The temperatures have not settled: while features stay as they are, {move}. Train longer.")
    return sentences


def in_words(side: str, each: Association, *, settled: bool = True) -> str:
    """Return the sentence for an association, with its strength.

    settled: whether the learned temperatures are near the solved ones, of which the association is.
    """
    what, end = NAMES[each.of][each.area > 0.5], "Low" if each.end == "lowest" else "High"
    end = end if settled else f"Once settled, {end.lower()}"
    of_side = "" if side == "sample" else f"{side} "
    share, *bounds = (value if each.area > 0.5 else 1 - value for value in (each.area, each.low, each.high))
    low, high = map(percent, sorted(bounds))
    # What does not hold within the most crowded tenth of samples is said of how the model places them.
    why = "" if each.stands else ", which the model places close together: among samples placed so it hardly shows"
    figures = f"in {percent(share)} of comparisons with the rest, {low.removesuffix('%')} to {high}"
    return f"{end} {of_side}temperatures go with {what} ({figures}){why}."


def associations_table(found: Sequence[Association]) -> tuple[TableRow, list[TableRow]]:
    """Return head and rows of a table of what the ends of a side's temperatures go with, the strongest first."""
    by_end = {(each.of, each.end): each for each in found}
    head = ["area under the curve of", *(f"{end} {END_SHARE:.0%}" for end in ENDS)]
    names = dict.fromkeys(each.of for each in found)
    return head, [[name.replace("_", " "), *(area(by_end.get((name, end))) for end in ENDS)] for name in names]


def area(found: Association | None) -> str:
    """Return `0.80 (0.74 to 0.86)`, and the area in the most crowded tenth where there is one."""
    if found is None:
        return "–"
    within = "" if found.within is None else f", {found.within:.2f} in the most crowded tenth"
    return f"{found.area:.2f} ({found.low:.2f} to {found.high:.2f}{within})"


def table(inspection: Inspection, survey: Survey, quantiles: Sequence[float] = QUANTILES) -> list[TableRow]:
    """Return the figures of every side; there must be at least one side."""
    taus, settings = [side.tau for side in survey.sides], inspection.settings
    rows = [["mean", *(tau(of_side.mean) for of_side in taus)], ["lowest", *(tau(of_side.min) for of_side in taus)]]
    for at in quantiles:
        label = "median" if at == 0.5 else f"{100 * at:g}% quantile"
        rows.append([label, *(tau(of_side.quantile(at)) for of_side in taus)])
    rows.append(["highest", *(tau(of_side.max) for of_side in taus)])
    if (low := settings.get("tau_min")) is not None:
        rows.append([f"share at tau_min ({low:g})", *(share(side.share_at_tau_min) for side in survey.sides)])
    if (high := settings.get("tau_max")) is not None:
        rows.append([f"share at tau_max ({high:g})", *(share(side.share_at_tau_max) for side in survey.sides)])
    for groups in survey.groups:
        found, word = [groups.correlation[side.name] for side in survey.sides], groups.word
        rows += [
            [f"Spearman, {word} size and mean tau", *(correlation(c and c.spearman) for c in found)],
            ["in words", *(c.verdict if c else "unknown" for c in found)],
            ["its p-value", *(p_value(c and c.p_value) for c in found)],
            [f"by chance, {word} labels permuted", *(by_chance(c) for c in found)],
        ]
    return rows


def kind_words(name: str) -> str:
    """Return the name of a kind as readers see it: `too few visits` for `too_few_visits`."""
    return name.replace("_", " ")


def kinds_table(kinds: SampleKinds | None, evident: EvidentKinds | None = None) -> tuple[TableRow, list[TableRow]]:
    """Return head and rows of a table of the samples' kinds: those decided by the state, and those of drawn samples."""
    rows, of_all = [], kinds.counts if kinds else {}
    confirmed, n = kinds.confirmed if kinds else {}, sum(of_all.values())
    for name, number in of_all.items():
        rows.append([kind_words(name), f"{number:,}", f"{n:,}", share(number / n)])
        rows[-1].append("state" if not confirmed.get(name) else f"state, {confirmed[name]:,} by a forward pass")
    for name, number in (evident.counts if evident else {}).items():
        total = len(evident.sample_ids) if evident else 0
        rows.append([kind_words(name), f"{number:,}", f"{total:,}", share(number / total), "features"])
    return ["kind", "samples", "of", "share", "decided by"], rows


def came_back(doubted: Doubted) -> str:
    """Say how many pairs are no longer doubted."""
    return f"{doubted.came_back:,} that were above 0 at an earlier snapshot came back since"


def confirmation(found: Confirmation) -> str:
    """Describe a forward pass and what it found."""
    by = "by the state alone" if found.below is None else f"by margins to {found.below:.3f} (half expected wrong)"
    misfits, silent = found.misfit.sum(), found.silent.sum()
    compared = f"{len(found.sample_ids):,} suspects compared with {found.negatives:,} random samples"
    encoders = f"the {found.weights} weights of checkpoint {found.checkpoint}"
    return f"{compared}, by {encoders}: {misfits:,} are misfits unless stuck, {by}; {silent:,} are silent (w < 0.01)"


def drift_table(found: Drift) -> list[TableRow]:
    """Return how far tau moved, by side."""
    sides = found.sides
    return [
        ["Spearman, tau before and after", *(correlation(side.joint.spearman) for side in sides)],
        ["mean change", *(f"{side.change.mean:+.4f}" for side in sides)],
        ["5% quantile of the change", *(f"{side.change.quantile(0.05):+.4f}" for side in sides)],
        ["95% quantile of the change", *(f"{side.change.quantile(0.95):+.4f}" for side in sides)],
        ["share that rose", *(share(side.share_risen) for side in sides)],
        ["share that fell", *(share(side.share_fallen) for side in sides)],
    ]


def sparkline(values: Distribution) -> str:
    """Return a one-line text histogram from the lowest to the highest value."""
    counts = values.histogram(values.edges(16))
    most = max(1, int(counts.max()))
    # Round up, so that every non-empty bar is visible.
    return "".join(_BARS[-(-int(count) * (len(_BARS) - 1) // most)] if count else "·" for count in counts)


def per_side(figures: Mapping[str, str]) -> str:
    """Return `+0.93 (image) and +0.92 (text)`, or just the figure if there is one side."""
    if len(figures) == 1:
        return next(iter(figures.values()))
    return " and ".join(f"{figure} ({side})" for side, figure in figures.items())


def tau(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def share(value: float | None) -> str:
    """Format a share, 0 … 1, in percent; 0% and 100% are shown only if exact."""
    if value is None:
        return "unknown"
    if 0 < value < 1e-4:
        return "under 0.01%"
    return "over 99.99%" if 1 - 1e-4 < value < 1 else f"{round(100 * value, 2):g}%"


def correlation(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.2f}"


def correlation_figures(found: Correlation) -> str:
    """Return `+0.46, p 2e-6, by chance -0.11 to +0.03`."""
    return f"{correlation(found.spearman)}, p {p_value(found.p_value)}, by chance {by_chance(found)}"


def by_chance(found: Correlation | None) -> str:
    """Return the range of the correlations that permuted labels give."""
    return " to ".join(map(correlation, found.permuted_range)) if found and found.permuted_range else "unknown"


def p_value(value: float | None) -> str:
    if value is None:
        return "unknown"
    return "< 1e-16" if value < 1e-16 else f"{value:.1g}".replace("e-0", "e-")


def listed_groups(groups: TauGroups) -> list[int]:
    """Return the places of the groups to list."""
    places, half = list(range(len(groups.names))), MAX_GROUP_ROWS // 2
    return places if len(places) <= MAX_GROUP_ROWS else places[:half] + places[-half:]


def correlations(survey: Survey, groups: TauGroups) -> Known:
    return {side.name: found for side in survey.sides if (found := groups.correlation[side.name])}


def lede(survey: Survey | None) -> str:
    """Return the main finding: in which direction, how strong and how certain."""
    if survey is None or not survey.sides:
        return "There are no temperatures to show."
    groups = survey.groups[0] if survey.groups else None
    found = correlations(survey, groups) if groups else {}
    if not groups or not found:
        means = per_side({side.name: tau(side.tau.mean) for side in survey.sides})
        return f"The mean temperature tau is {means}."
    visited = int((groups.visited > 0).sum())
    figures = f"Spearman’s correlation of size and mean tau over {visited:,} {groups.plural} is {verdicts(found)}"
    return f"{_relation([*found.values()], groups.plural)}. {figures}."


def _relation(found: list[Correlation], plural: str) -> str:
    """State a relation only if it is unlikely to be chance, and that it is weak where it is."""
    rises = [c.spearman > 0 for c in found]
    clear = all(c.is_likely and c.strength != NEGLIGIBLE for c in found)
    if not clear or any(rises) != all(rises):
        return f"Temperatures do not clearly depend on the size of {plural}"
    high, low = ("high", "low") if rises[0] else ("low", "high")
    if all(c.is_strong for c in found):
        return f"Frequent {plural} have {high} temperatures, rare ones {low}"
    return f"Frequent {plural} have somewhat {high}er temperatures than rare ones"


def verdicts(known: Known) -> str:
    """Return strength, certainty and figures of each side's correlation, with words that all share only once."""
    words = {c.verdict for c in known.values()}
    if len(words) > 1:
        return per_side({side: f"{c.verdict}: {correlation_figures(c)}" for side, c in known.items()})
    return f"{words.pop()}: {per_side({side: correlation_figures(c) for side, c in known.items()})}"
