r"""Spellings of one thing: characters, commands of LaTeX and words, and what :mod:`.normalization` makes of them."""

from __future__ import annotations

import re
import unicodedata

_GREEK = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
_LETTERS = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi omega
Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
_FRACTIONS = {
    one: unicodedata.normalize("NFKD", one).split("\N{FRACTION SLASH}") for one in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
CHARACTERS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{EM DASH}": "-",
        "\N{HYPHEN}": "-",
        "\N{NON-BREAKING HYPHEN}": "-",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "\N{MIDDLE DOT}": r"\cdot ",
        "\N{DOT OPERATOR}": r"\cdot ",
        "\N{ASTERISK OPERATOR}": r"\cdot ",
        "\N{DIVISION SIGN}": "/",
        "\N{DIVISION SLASH}": "/",
        "\N{FRACTION SLASH}": "/",
        "\N{SQUARE ROOT}": r"\sqrt ",
        "\N{CUBE ROOT}": r"\sqrt[3]",
        "\N{INFINITY}": r"\infty ",
        "\N{DEGREE SIGN}": r"\degree ",
        "\N{LESS-THAN OR EQUAL TO}": r"\leq ",
        "\N{GREATER-THAN OR EQUAL TO}": r"\geq ",
        "\N{NOT EQUAL TO}": r"\neq ",
        "\N{ALMOST EQUAL TO}": r"\approx ",
        "\N{PLUS-MINUS SIGN}": r"\pm ",
        "\N{ELEMENT OF}": r"\in ",
        "\N{UNION}": r"\cup ",
        "\N{INTERSECTION}": r"\cap ",
        "\N{EMPTY SET}": r"\emptyset ",
        "\N{N-ARY SUMMATION}": r"\sum ",
        "\N{INTEGRAL}": r"\int ",
        "\N{DOUBLE-STRUCK CAPITAL R}": r"\mathbb{R}",
        "\N{DOUBLE-STRUCK CAPITAL Z}": r"\mathbb{Z}",
        "\N{DOUBLE-STRUCK CAPITAL N}": r"\mathbb{N}",
        "\N{LEFT FLOOR}": r"\lfloor ",
        "\N{RIGHT FLOOR}": r"\rfloor ",
        "\N{LEFT CEILING}": r"\lceil ",
        "\N{RIGHT CEILING}": r"\rceil ",
        "\N{RIGHTWARDS ARROW}": r"\to ",
        "\N{LOGICAL AND}": r"\AND ",
        "\N{LOGICAL OR}": r"\OR ",
        "\N{PRIME}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{FULLWIDTH DOLLAR SIGN}": "$",
        "\N{MICRO SIGN}": "\N{GREEK SMALL LETTER MU}",
        **dict.fromkeys("\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}\N{HAIR SPACE}", r"\,"),
        **{character: f"^{{{digit}}}" for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
        **{character: f"_{{{digit}}}" for digit, character in enumerate("₀₁₂₃₄₅₆₇₈₉")},
        **{one: rf"\frac{{{top}}}{{{bottom}}}" for one, (top, bottom) in _FRACTIONS.items()},
        **{one: rf"\{name} " for one, name in zip(_GREEK, _LETTERS.split(), strict=True)},
    }
)
FUNCTION_NAMES = """
arcsinh arccosh arctanh arcsin arccos arctan arccot sinh cosh tanh coth sin cos tan cot sec csc ln log exp gcd lcm max min
""".strip()
"""Functions that plain text may have without a backslash; a name stands before those that it begins with."""
SYNONYMS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac "),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom "),
        (r"\\(?:leqslant|leqq|le)(?![A-Za-z])|<=", r"\\leq "),
        (r"\\(?:geqslant|geqq|ge)(?![A-Za-z])|>=", r"\\geq "),
        (r"\\(?:ne|not\s*=)(?![A-Za-z])|!=", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:[lr]?vert|mid)(?![A-Za-z])", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\(?:varnothing|empty)(?![A-Za-z])|\\O(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:land|wedge)(?![A-Za-z])", r"\\AND "),
        (r"\\(?:lor|vee)(?![A-Za-z])", r"\\OR "),
        (r"\\(?:approxeq|simeq|doteq)(?![A-Za-z])", r"\\approx "),
        (r"\\(?:rightarrow|longrightarrow)(?![A-Za-z])", r"\\to "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z])|\\textdegree(?![A-Za-z])", r"\\degree "),
        (r"\\(?:pounds|textsterling)(?![A-Za-z])", "£"),
        (r"\\(?:cent|cents|textcent)(?![A-Za-z])|¢", r"\\text{cents}"),
        (r"\\mathbb\s*([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
        (r"\\(?:R|reals)(?![A-Za-z])", r"\\mathbb{R}"),
        (r"\\[lc]dots(?![A-Za-z])|…|\.\.\.+", r"\\dots "),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\(?:smallsetminus|backslash)(?![A-Za-z])", r"\\setminus "),
        (r"\\(?:euro|EUR|texteuro)(?![A-Za-z])(?:\{\})?", "€"),
        (r"\\textdollar(?![A-Za-z])|\\\$", "\N{FULLWIDTH DOLLAR SIGN}"),
        (r"\\?%", r"\\%"),
        (r"\\ast(?![A-Za-z])|(?<!\*)\*(?!\*)", r"\\cdot "),
        (r"\*\*", "^"),
        (r"\\(?:bar|overline)\s*(?=[0-9])", r"\\overline "),
        (r"\\(?:tg)(?![A-Za-z])", r"\\tan "),
        (r"\\left\|", "|"),
    )
)
WORD_SIGNS = {
    "percent": r"\%",
    "percentage": r"\%",
    "per cent": r"\%",
    "pct": r"\%",
    "degrees": r"\degree ",
    "degree": r"\degree ",
    "deg": r"\degree ",
    "infinity": r"\infty ",
    "euros": "€",
    "euro": "€",
    "eur": "€",
    "dollars": "$",
    "dollar": "$",
    "usd": "$",
    "us dollars": "$",
    "pounds sterling": "£",
    "gbp": "£",
    "yen": "¥",
    "rupees": "₹",
    "rs": "₹",
    "rs.": "₹",
    "inr": "₹",
}
