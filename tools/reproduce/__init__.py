"""The comparison of `make reproduce`: the papers' methods on the glyphs, beside what the papers claim."""
