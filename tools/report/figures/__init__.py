"""The report's figures, drawn with matplotlib, in a light and a dark style, wide and narrow.

Colours are Okabe and Ito's and cividis, which are safe for colour-blind readers; sides also differ in marker. Text
from the data is never drawn: matplotlib would read `$` as mathematics and lacks most scripts.
"""
