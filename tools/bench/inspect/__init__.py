"""What `thermopile inspect` takes on a run of many samples: time, memory, and the size of its page.

`made_run.py` makes the run and its dataset, `plain.py` is what one would do with pandas instead; each of the two has a
process of its own, whose memory is counted. `sizes.py` says how much is measured.
"""
