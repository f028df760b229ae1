"""A run's temperatures in pandas: python examples/temperatures.py runs/glyphs"""

import sys

import thermopile


def main(path):
    temperatures = thermopile.open_run(path).temperatures()  # of the newest snapshot; at="step-400" is another
    side = temperatures.sides[0]
    rows = temperatures.frame(columns=["key", "group", f"{side}/tau", "visits"])  # indexed by sample id
    seen = rows[rows["visits"] > 0].rename(columns={f"{side}/tau": "tau"})
    classes = seen.groupby("group")["tau"].agg(["size", "mean"]).sort_values("mean")
    print(f"classes of {path} with the lowest and with the highest mean tau:")
    print(classes.head(3).to_string(), classes.tail(3).to_string(header=False), sep="\n")
    print(f"Spearman's correlation of class size and mean tau: {classes.corr('spearman').iloc[0, 1]:+.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
