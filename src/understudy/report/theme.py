"""How every figure looks: colours, fonts, sizes, and the one way in which a user's words enter a figure."""

from __future__ import annotations

import html

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

# 680 px are 180 mm at 96 px an inch, the width of a page: a font of 11 px is then 8 pt in print.
WIDTH = 680
FONT = 11
SMALL = 9
INK = "#222222"
GREY = "#777777"
RULE = "#e3e3e3"
UNKNOWN = "#d4d4d4"  # cells without a number
SHADE = "#9a8f80"  # warm-up
NODE = "#4d4d4d"

# Okabe and Ito's colours without black and yellow: told apart with any colour vision, and on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SYMBOLS = {"circle": "●", "square": "■", "triangle-up": "▲"}
# Viridis from light to dark, without the yellow that a thin line on white would lose.
SEQUENTIAL = sample_colorscale("Viridis_r", [float(at) for at in np.linspace(0.12, 1, 12)])
DIVERGING = "RdBu"

# "&", "<", ">" are markup to plotly, "$" opens mathematics and "%" a hover template.
MARKUP = str.maketrans({"$": "&#36;", "%": "&#37;"})


def escape(words: object, *, longest: int = 60) -> str:
    """Return words that plotly shows as they are, cut in the middle where they are too long for a title.

    >>> escape("a<b>&c")
    'a&lt;b&gt;&amp;c'
    """
    text = " ".join(str(words).split())
    if len(text) > longest:
        text = f"{text[: longest // 2]}…{text[len(text) - longest + longest // 2 + 1 :]}"
    return html.escape(text, quote=False).translate(MARKUP)


def layer_colours(count: int) -> list[str]:
    """Return one colour a layer; more layers than the palette holds are coloured by depth.

    >>> layer_colours(2)
    ['#0072B2', '#D55E00']
    """
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    return list(sample_colorscale("Viridis", [float(at) for at in np.linspace(0, 0.9, count)]))


def key(words: str, colour: str, symbol: str = "circle") -> str:
    """Return an entry of a legend that stands in a panel's title: the symbol, and words in its colour."""
    return f'<span style="color:{colour}">{SYMBOLS.get(symbol, symbol)} {words}</span>'


def panel_title(figure: go.Figure, words: str, row: int, col: int, *, lift: int = 2) -> None:
    """Write words above the left end of a panel."""
    figure.add_annotation(
        text=words,
        x=0,
        y=1,
        xref="x domain",
        yref="y domain",
        xanchor="left",
        yanchor="bottom",
        yshift=lift,
        showarrow=False,
        font={"size": FONT, "color": INK},
        row=row,
        col=col,
    )


def dress(figure: go.Figure, title: str, model: object, *, height: int, legend: bool = False) -> go.Figure:
    """Give a figure the common look: its size, a title with the model's name, quiet axes, a legend above the panels."""
    name = f" <span style='color:{GREY}'>{escape(model)}</span>" if model else ""
    figure.update_layout(
        width=WIDTH,
        height=height,
        title={
            "text": f"<b>{title}</b>{name}",
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"l": 10, "t": 10},
            "font": {"size": 12},
        },
        font={"family": "Helvetica, Arial, Liberation Sans, sans-serif", "size": FONT, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        margin={"l": 52, "r": 14, "t": 70 if legend else 56, "b": 42},
        showlegend=legend,
        legend={
            "orientation": "h",
            "tracegroupgap": 0,
            "font": {"size": FONT - 1},
            "x": 8 / WIDTH,
            "xref": "container",
            "xanchor": "left",
            "y": 1 - 26 / height,
            "yref": "container",
            "yanchor": "top",
            "bgcolor": "rgba(0,0,0,0)",
        },
        hoverlabel={"bgcolor": "white", "font": {"color": INK}},
    )
    return figure


def quiet_axes(figure: go.Figure) -> None:
    """Draw axes as thin lines with a faint horizontal grid."""
    line = {"showline": True, "linecolor": GREY, "linewidth": 1, "ticks": "outside", "ticklen": 3, "tickcolor": GREY}
    font = {"title_font": {"size": FONT}, "tickfont": {"size": FONT - 1}, "title_standoff": 6}
    figure.update_xaxes(showgrid=False, zeroline=False, nticks=6, **line, **font)
    figure.update_yaxes(gridcolor=RULE, zeroline=False, **line, **font)


def colour_bar(words: str) -> dict[str, object]:
    """Return the settings of a colour bar as high as the panels, with its title along it."""
    title = {"text": words, "side": "right", "font": {"size": FONT}}
    return {"title": title, "tickfont": {"size": FONT - 1}, "thickness": 10, "len": 1, "ypad": 0, "outlinewidth": 0}
