"""
Colours that people with any colour vision can distinguish, light enough for dark text: Paul Tol's qualitative scheme
`light`.

A colour is never the only sign: every holder has a letter, and every problem of a device is hatched, framed or written.
"""

HOLDERS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00")
"""Of the first holder, of the second, …; a ninth has the first colour again, and another letter."""

SOCKET = "#f6f8fa"
PLACE = "#ffffff"
HOST = "#d8dee4"
SWITCH = "#eaeef2"
NVLINK = "#4d7c0f"
NVLINK_BAR = "#e4f2cd"
TROUBLE = "#cf222e"


def of_holder(holder: int) -> str:
    """The colour of the holder at this position of the legend; colours repeat after the last one."""
    return HOLDERS[holder % len(HOLDERS)]
