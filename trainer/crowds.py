"""Advice for samples with more negatives as close as the positive than rho allows; needs no torch."""

import math

_LEAST_RHO = 0.05
"""Below it the weights are nearly uniform, so it is not recommended."""


def against_crowds(share: float, *, pairs: bool) -> str:
    """Return advice for when this share of the negatives, above exp(-rho), is as close as the positive."""
    ways = ["thin copies of a picture (`thermopile inspect --duplicates`, then `curate --thin`)"]
    ways += ["give different pictures captions of their own"] * pairs
    if (limit := -math.log(share)) >= _LEAST_RHO:
        ways.append(f"set objective.rho below log(1/share) = {limit:.2f}")
    return f"What helps: {', or '.join(ways)}."
