"""The report's figures, drawn with matplotlib, wide and narrow; the page's CSS has their colours.

Colours are Okabe and Ito's and cividis, which are safe for colour-blind readers; sides also differ in marker. Many
dots and the cells of a plane are a raster inside the figure, in colours that show on light and on dark paper.
"""
