"""Characters that DejaVu lacks, drawn by Pillow and by matplotlib, with Noto's fonts where they are installed."""

from pathlib import Path

import pytest

from thermopile.tools.report.figures import lettering
from thermopile.tools.report.figures.lettering import Lettering
from thermopile.tools.report.figures.style import LIGHT, png_of

SCRIPTS = {"Chinese": "猫", "Japanese": "かな", "Korean": "사진", "Devanagari": "पहाड़", "Thai": "ภาพ", "Tamil": "தமி"}
FILES = {"NotoSansDevanagari-Regular.ttf", "NotoSansCJK-Regular.ttc"}


@pytest.fixture(scope="module")
def noto():
    """Debian's fonts-noto-core and fonts-noto-cjk."""
    if missing := FILES - {Path(file).name for file in lettering._system_fonts()}:
        pytest.skip(f"{', '.join(sorted(missing))} not installed "
                    "(on Debian: apt-get install fonts-noto-core fonts-noto-cjk)")  # fmt: skip


def labelled(words):
    """A figure with this label, as PNG, and the label as it was drawn."""
    seen = []

    def draw(figure, style):
        axes = figure.subplots()
        axes.set_xlabel(words, parse_math=False)
        seen.append(axes.xaxis.label)

    return png_of(draw, LIGHT), seen[0]


@pytest.mark.usefixtures("noto")
@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_every_script_is_drawn_in_a_plain_noto_font(text):
    letters = Lettering.covering([text], 15)
    assert letters.drawable(text) == text
    for file in letters.fallback.values():
        assert Path(file).name.startswith("NotoSans")
        assert Path(file).stem.endswith("-Regular")


@pytest.mark.usefixtures("noto")
@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_figure_has_letters_of_every_script_and_matplotlib_has_nothing_to_warn_of(text):
    shown, label = labelled(f"$_{text}")
    assert label.get_text() == f"$_{text}"
    assert shown != labelled(f"$_{text[::-1] if len(text) > 1 else '犬'}")[0]  # boxes would be alike


def test_a_character_that_no_font_has_is_written_by_its_number_in_a_figure(monkeypatch):
    monkeypatch.setattr(lettering, "_system_fonts", list)
    _, label = labelled("size of 猫 été")
    assert label.get_text() == "size of [U+732B] été"


def test_a_font_installed_after_matplotlib_made_its_list_is_used(monkeypatch):
    from matplotlib import get_data_path
    from matplotlib.font_manager import fontManager

    script = "\U0001d49c"  # a letter of STIX's, not of DejaVu's
    stix = str(Path(get_data_path()) / "fonts" / "ttf" / "STIXGeneral.ttf")
    monkeypatch.setattr(lettering, "_system_fonts", lambda: [stix])
    monkeypatch.setattr(fontManager, "ttflist", [entry for entry in fontManager.ttflist if entry.fname != stix])
    _, label = labelled(script)
    assert label.get_fontfamily() == ["DejaVu Sans", "STIXGeneral"]
    assert stix in [entry.fname for entry in fontManager.ttflist]


def test_texts_that_dejavu_has_keep_their_font():
    _, label = labelled("class size (samples, log scale) − μ")
    assert label.get_fontfamily() == ["sans-serif"]
