"""The report's figures, drawn with matplotlib: PNG bytes, in a light and a dark style, wide and narrow.

Colours are Okabe and Ito's and cividis, which colour-blind readers can tell apart; sides differ in marker as well. No
text that comes from the data is drawn: matplotlib would read `$` as mathematics and lacks most scripts.
"""
