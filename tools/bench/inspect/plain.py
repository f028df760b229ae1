"""The same look without `thermopile inspect`: an exported state in pandas, as one would write it in a notebook.

All rows lie in memory. No pictures, captions, intervals or permuted control.
"""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

_ENDS = 72


def write_page(state: Path, shards: Path, page: Path) -> None:
    """Read what `thermopile state export` wrote, and the samples table's classes, and write an HTML page."""
    import pandas as pd

    frame = pd.read_parquet(state)
    parts = (pd.read_parquet(file, columns=["group"])["group"] for file in sorted(shards.glob("*.parquet")))
    frame["group"] = pd.concat(parts, ignore_index=True).astype("category")
    fields = [name for name in frame.columns if "/" in name]
    taus = [name for name in fields if name.endswith("/tau")]
    groups = frame.groupby("group", observed=True)[taus].mean()
    groups["size"] = frame["group"].value_counts()
    content = [
        frame[fields].describe(percentiles=[0.05, 0.25, 0.5, 0.75, 0.95]).to_html(),
        frame[taus].corr(method="spearman").to_html(),
        groups.corr(method="spearman").to_html(),
        groups.sort_values("size", ascending=False).to_html(),
        *(frame.nsmallest(_ENDS, tau).to_html() for tau in taus),
        *(frame.nlargest(_ENDS, tau).to_html() for tau in taus),
        *(_histogram(frame[name].to_numpy()) for name in [*fields, "visits", "last_step"]),
    ]
    page.write_text("<meta charset=utf-8>" + "".join(content), "utf-8")


def _histogram(values: NDArray[Any]) -> str:
    from matplotlib.figure import Figure

    figure, file = Figure(), BytesIO()
    figure.subplots().hist(values, bins=100)
    figure.savefig(file, format="png")
    return f'<img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
