"""The colours of decoders and of the parts of a step, the same in every plot and in the viewer.

Each has a tone for light and one for dark backgrounds. The decoders, and the parts, are distinguishable with every kind
of colour vision (tests/lab/test_plotting.py); plots also give each decoder a marker.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """One hue in two tones, as #rrggbb."""

    light: str  # on a light background
    dark: str  # on a dark background


DECODERS = {
    "standard": Colour("#626362", "#a29a9b"),
    "threshold": Colour("#0b2e8f", "#4077f6"),
    "factor": Colour("#39b0f0", "#4fb5f5"),
    "wino": Colour("#f09026", "#e67d13"),
    "saber": Colour("#a17708", "#fad935"),
    "asrd": Colour("#c81ea8", "#d93fbb"),
    "loo": Colour("#2ea283", "#3df2c3"),
    "native": Colour("#6158f3", "#610bdc"),
    "random-revocation": Colour("#4a220a", "#7f5b32"),
    "LLaDA's loop": Colour("#000000", "#ffffff"),
}
OTHER_DECODER = Colour("#b9b34a", "#b9c46a")  # a decoder of the user's own

PARTS = {
    "embed": Colour("#9b3fbe", "#895be5"),
    "forward": Colour("#c3bdb0", "#5d5449"),
    "head": Colour("#545145", "#bab6a8"),
    "statistics": Colour("#182665", "#6da6f6"),
    "commit": Colour("#d963a0", "#bd6591"),
    "cache": Colour("#90980f", "#fce872"),
}

SERIES = (  # what is neither: with and without an edit, models
    Colour("#1f6f8b", "#63b8d6"),
    Colour("#b34a10", "#ef8a4a"),
    Colour("#a8b433", "#e2ee77"),
    Colour("#4a2a80", "#8a63d8"),
)


def decoder_colour(name: str) -> Colour:
    """The colour of a decoder; all that are not the package's own share one."""
    return DECODERS.get(name, OTHER_DECODER)


def custom_properties(theme: str) -> str:
    """The colours of a theme, "light" or "dark", as CSS: --decoder-NAME, --decoder-other, --part-NAME."""
    colours = {f"decoder-{name}": colour for name, colour in DECODERS.items() if name.replace("-", "").isalpha()}
    colours["decoder-other"] = OTHER_DECODER
    colours |= {f"part-{name}": colour for name, colour in PARTS.items()}
    return " ".join(f"--{name}: {getattr(colour, theme)};" for name, colour in colours.items())
