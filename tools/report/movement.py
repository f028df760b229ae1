"""The page's sections on how temperatures moved: over all snapshots and between two."""

from __future__ import annotations

from functools import partial

from ..inspection import summary
from ..inspection.drift import Drift
from ..inspection.run import Inspection
from ..inspection.through_time import QUANTILES, ThroughTime
from .figures.joint import draw_drift
from .figures.over_time import draw_tau_over_time
from .html import Cell, Row, count, figure, table, text
from .sheets import Cards


def through_time(inspection: Inspection, found: ThroughTime) -> str:
    steps = [moment.snapshot.step for moment in found.moments]
    caption = (
        f"Quantiles of tau over the samples visited by then, at every snapshot with visited samples ({len(steps)}), "
        f"step {steps[0]:,} to {steps[-1]:,}; {found.samples_read:,} samples of each"
    )
    if found.every > 1:
        caption += f", one in {found.every} blocks of the state"
    caption += f". {summary.settings(inspection)}."
    content = figure(partial(draw_tau_over_time, found), "Tau over the steps of the run", caption)
    words = [_last_move(found, side) for side in found.sides] if len(found.moments) > 1 else []
    said = f"<p>{text(' '.join(words), most=1000)}</p>" if words else ""
    return content + said + _moments(found)


def _last_move(found: ThroughTime, side: str) -> str:
    """Describe how far the quantiles moved since the previous snapshot; near 0 tau has settled overall."""
    before, after = found.moments[-2:]
    moved = [
        f"{new / old - 1:+.1%} ({share * 100:g}%)"
        for share, old, new in zip(QUANTILES, before.tau[side].quantiles, after.tau[side].quantiles, strict=True)
    ]
    steps = after.snapshot.step - before.snapshot.step
    return (f"From {before.snapshot.tag} to {after.snapshot.tag}, {steps:,} steps, the quantiles of the {side} "
            f"temperatures moved by {', '.join(moved)}.")  # fmt: skip


def _moments(found: ThroughTime) -> str:
    head = ["snapshot", "step", "visited"]
    for side in found.sides:
        head += [f"{side} {share * 100:g}%" if share != 0.5 else f"{side} median" for share in QUANTILES]
        head.append(f"{side} at tau_min")
    rows: list[Row] = []
    for moment in found.moments:
        row: Row = [moment.snapshot.tag, count(moment.snapshot.step), count(moment.visited)]
        for side in found.sides:
            tau = moment.tau[side]
            row += [Cell(summary.tau(value), value) for value in tau.quantiles]
            row.append(Cell(summary.share(tau.share_at_tau_min), tau.share_at_tau_min))
        rows.append(row)
    return table("Quantiles of tau at every snapshot; tau has no unit.", head, rows)


def drift(inspection: Inspection, found: Drift) -> str:
    caption = (
        f"Tau of every sample at {found.earlier.tag} against its tau at {found.later.tag}; on the dashed line it "
        f"did not change. {found.visited:,} samples were visited by both. {summary.settings(inspection)}."
    )
    content = figure(partial(draw_drift, found), f"Tau at {found.earlier.tag} and at {found.later.tag}", caption)
    title = f"From {found.earlier.tag} to {found.later.tag}; tau has no unit."
    return content + table(title, ["tau", *(side.name for side in found.sides)], summary.drift_table(found))


def movers(found: Drift, cards: Cards) -> str:
    """Return contact sheets of the samples whose tau moved most."""
    return "".join(
        cards.sheet(
            f"{side.name}: samples whose tau {direction} most", "",
            [(mover.sample_id, f"tau {summary.tau(mover.before)} → {summary.tau(mover.after)}") for mover in most],
        )
        for side in found.sides
        for direction, most in (("rose", side.most_risen), ("fell", side.most_fallen))
        if most
    )  # fmt: skip
