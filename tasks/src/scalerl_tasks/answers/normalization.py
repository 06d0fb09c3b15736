r"""Brings an answer, in LaTeX or as people type it, into one form of LaTeX, before it is read.

After :func:`normalize`: functions and Greek letters are commands, arguments of ``\frac``, ``\sqrt`` and ``\binom`` have braces,
spacing and sizing commands are gone, words are ``\text{…}``, units among them, thousands marks that are certain
(``1{,}000``, ``1\,000``) are gone, and the signs are ``\%``, ``\degree`` and the currency characters. ``\AND`` and ``\OR`` join.
All steps are linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from scalerl_tasks.answers.spellings import CHARACTERS, FUNCTION_NAMES, SYNONYMS, WORD_SIGNS
from scalerl_tasks.answers.units import is_unit

_PLAIN_NUMBER = re.compile(r"-?(?:[1-9][0-9]*|0)(?:\.[0-9]+)?")
_TEXT_COMMAND = re.compile(
    r"\\(text|textrm|textnormal|textbf|textit|textsf|texttt|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname\*?|rm|bf)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_OLD_FONT = re.compile(r"\{\s*\\(?:rm|bf|it|sf)\s+((?:[^{}]|\{[^{}]*\})*)\}")
_SPACING = re.compile(
    r"\\[,;:> ]|\\(?:quad|qquad|thinspace|enspace|displaystyle|textstyle|limits|nolimits|hfill|nobreak|tiny|small|normalsize"
    r"|large|Large|LARGE|huge|Huge|rm|bf|it|sf|tt|boldmath)(?![A-Za-z])|~|\\$"
)
# Colours and lines around an answer: only what they hold counts.
_DECORATION = re.compile(
    r"\\(?:color|textcolor)\s*(?:\[[A-Za-z]*\])?\{[^{}]*\}|\\(?:underline|uline|underbar|mathstrut|strut)(?![A-Za-z])"
)
_HSPACE = re.compile(r"\\(?:h|v)space\*?\{[^{}]*\}|\\h?phantom\{[^{}]*\}")
_SIZING = re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*(\.(?=\s*[^0-9]|\s*$))?")
_CERTAIN_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!)\s*(?=[0-9]{3}(?![0-9]))")
_DECIMAL_COMMA = re.compile(r"(?<=[0-9])\{,\}\s*(?=[0-9])")
_THIN_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,;: ]|~)(?=[0-9]{3}(?![0-9]))")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9./^_{}])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9/]| *[0-9]| */)")
_SCIENTIFIC = re.compile(
    r"(?<![A-Za-z0-9.\\])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([+-]?[0-9]+)(?![0-9.A-Za-z])"
)
_DOTTED = re.compile(r"(?<=[0-9.])\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?")
# Three repetitions before the dots: 0.333..., 1.272727\ldots
_ELLIPSIS = re.compile(r"(?<![0-9.])([0-9]*\.[0-9]{0,12}?)([0-9]{1,6}?)\2{2,12}\s*\\dots(?![A-Za-z])")
_REPEATING = re.compile(r"(?<![0-9])([0-9]*)\.([0-9]*)\\overline\{?([0-9]+)\}?")
_MIXED_SLASH = re.compile(r"(?<![0-9.^_])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9.])")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose([^{}]*)\}")
_COMBINATIONS = re.compile(r"(?:\{\})?[_^]\{?([0-9]+)\}?\s*C_\{?([0-9]+)\}?")
_ORDINAL = re.compile(
    r"(?<=[0-9])\s*\^?\{?\s*(?:\\text\{(?:st|nd|rd|th)\}|(?:st|nd|rd|th)(?![A-Za-z]))\s*\}?"
)
_RATIO_WORD = re.compile(r"(?<=[0-9])\s*(?:\\text\{to\}|(?<=\s)to(?=\s))\s*(?=[0-9])")
_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}")
_PLAIN_FUNCTION = re.compile(
    rf"(?<![\\A-Za-z])(?:(sqrt|{'|'.join(FUNCTION_NAMES.split())})(?=\s*[\^_(]|\s*\\?[a-z0-9]|[0-9])(?![A-Za-z])|(pi|theta|alpha|beta|gamma"
    r"|lambda|infinity|infty|inf|oo)(?![A-Za-z]))"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z])")
_AROUND_TEXT = re.compile(r"(\\text\{[^{}]*\})")
_MERGE = re.compile(r"\\text\{([^{}]*)\}\s*\\text\{([^{}]*)\}")
_JOINT = re.compile(r",?\s*\\text\{\s*,?\s*(and|or)\s*,?\s*\}\s*,?")
_BARE_JOINT = re.compile(r",?\s*(?<![A-Za-z\\])(and|or)(?![A-Za-z])\s*,?")
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1}
_ARGUMENT_COMMAND = re.compile(r"\\(?:frac|binom|sqrt)(?![A-Za-z])")
_ONE_ARGUMENT = re.compile(r"\s*(\\[A-Za-z]+|[0-9A-Za-z])")
_LEADING = re.compile(
    r"^\s*(?:\\text\{)?\s*(?:(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is)?\s*:?|approximately|approx\.?|about|roughly"
    r"|exactly|therefore,?|thus,?|hence,?|so,?|it\s+is|a\s+total\s+of|total\s+of)(?![A-Za-z])\s*\}?\s*[:=]?\s*",
    re.IGNORECASE,
)

TEXT = re.compile(r"\\text\{([^{}]*)\}")
"""Words, after :func:`normalize`."""


def normalize(text: str) -> str:
    r"""The text in one form of LaTeX; see the module.

    >>> normalize(r"\dfrac12\, \mathrm{cm}^2")
    '\\frac{1}{2} \\text{cm}^2'
    >>> normalize("3 sqrt(2) * pi")
    '3 \\sqrt{2} \\cdot \\pi'
    """
    if _PLAIN_NUMBER.fullmatch(text):
        return text  # most answers
    s = text.translate(CHARACTERS)
    s = _CERTAIN_COMMA.sub("", s)
    s = _DECIMAL_COMMA.sub(".", s)
    s = _THIN_THOUSANDS.sub("", s)
    s = s.replace("\\!", "").replace("{:}", ":")
    s = _DECORATION.sub(" ", s)
    s = _HSPACE.sub(" ", s)
    if "matrix" not in s and "array" not in s and "cases" not in s:
        s = re.sub(r"\\\\(?=[A-Za-z])", r"\\", s)  # "\\frac" of a string that was escaped twice
        s = s.replace("\\\\", " ")
    else:
        s = s.replace("\\\\", r"\cr ")
    s = _OLD_FONT.sub(r"\\text{\1}", s)
    s = _TEXT_COMMAND.sub(_as_text, s)
    s = _SIZING.sub("", s)
    s = _SPACING.sub(" ", s)
    s = _without_dollars(_outside_text(s, _with_synonyms)).replace("\N{FULLWIDTH DOLLAR SIGN}", "$")
    s = _LEADING.sub("", s)
    s = _JOINT.sub(lambda match: rf" \{match[1].upper()} ", s)
    s = _outside_text(s, lambda part: _BARE_JOINT.sub(lambda match: rf" \{match[1].upper()} ", part))
    s = _RATIO_WORD.sub(" : ", s)
    s = _UNIT_FRACTION.sub(r"\\text{\1/\2}", s)
    s = _ORDINAL.sub("", s)
    s = _DOTTED.sub(lambda match: rf"\overline{{{match[1]}{match[2] or ''}{match[3] or ''}}}", s)
    s = _ELLIPSIS.sub(r"\1\\overline{\2}", s)
    s = _REPEATING.sub(_repeating, s)
    s = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), s)
    s = _MIXED_SLASH.sub(r"\1\\frac{\2}{\3}", s)
    s = _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", s)
    s = _COMBINATIONS.sub(r"\\binom{\1}{\2}", s)
    s = _CHOOSE.sub(r"\\binom{\1}{\2}", s)
    s = _outside_text(s, _with_commands_and_words)
    while True:
        merged = _MERGE.sub(r"\\text{\1 \2}", s)
        if merged == s:
            break
        s = merged
    s = TEXT.sub(_signs, s)
    return re.sub(r"\s+", " ", s).strip().rstrip(".,;: ").strip()


def without_text(latex: str) -> str:
    """The text with its words bare; the last one may lack its end."""
    return re.sub(r"\\(?:text|mathrm)\s*\{", "", TEXT.sub(r"\1", latex))


def _outside_text(s: str, change: Callable[[str], str]) -> str:
    parts = _AROUND_TEXT.split(s)
    parts[::2] = map(change, parts[::2])
    return "".join(parts)


def _with_synonyms(part: str) -> str:
    for pattern, replacement in SYNONYMS:
        part = pattern.sub(replacement, part)
    return part


def _with_commands_and_words(part: str) -> str:
    part = _PLAIN_FUNCTION.sub(_as_command, part)
    return _WORD.sub(_as_word, _braced_arguments(_brackets_to_braces(part)))


def _without_dollars(s: str) -> str:
    """Without the ``$`` that delimit mathematics; one before a number that no other closes is money."""
    for delimiter in ("\\(", "\\)", "\\[", "\\]"):
        s = s.replace(delimiter, " ")
    s = s.replace("$$", " ")
    if s.count("$") % 2:
        return s.replace("$", "\N{FULLWIDTH DOLLAR SIGN}")
    return s.replace("$", " ")


def _as_text(match: re.Match[str]) -> str:
    command, inside = match[1], match[2].strip()
    if inside in (r"\$", "$", "\N{FULLWIDTH DOLLAR SIGN}"):
        return "\N{FULLWIDTH DOLLAR SIGN}"
    inside = re.sub(r"[{}$]", "", inside).strip()
    inside = re.sub(r"\s+", " ", re.sub(r"\\[,;: ]", " ", inside))
    if not inside:
        return " "
    if command.startswith("operatorname") and inside.isalpha():
        return rf"\{inside} "
    if command.startswith("math") and len(inside) == 1:
        before = match.string[max(0, match.start() - 8) : match.start()].rstrip(" \\,;:!~")
        is_after_number = before[-1:].isdigit() or before[-1:] in ("}", ")")
        return rf"\text{{{inside}}}" if is_after_number and is_unit(inside) else inside
    if inside in ("\\%", "%"):
        return r"\%"
    return rf"\text{{{inside}}}"


def _signs(match: re.Match[str]) -> str:
    inside = match[1].strip()
    return WORD_SIGNS.get(inside.lower().rstrip("."), match[0])


def _as_command(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    return rf"\{'infty' if name in ('infinity', 'inf', 'oo') else name} "


def _as_word(match: re.Match[str]) -> str:
    r"""Words as ``\text``: of four letters, or a unit or word after a number; shorter ones are products of variables."""
    word = match[0]
    before = match.string[max(0, match.start() - 12) : match.start()]
    if before.endswith((r"\begin{", r"\end{", r"\mathbb{")):
        return word
    spaced = before.endswith(" ")
    before = before.rstrip()
    after_value = before[-1:].isdigit() or before[-1:] in ("}", ")", "/", "i")
    if len(word) >= 4 and len(set(word.lower())) > 1:
        return rf"\text{{{word}}}"
    if after_value and is_unit(word) and (spaced or before[-1:].isdigit() or before.endswith("/")):
        return rf"\text{{{word}}}"
    if len(word) == 3 and spaced and after_value and re.search("[aeiou]", word):
        return rf"\text{{{word}}}"
    if word.lower() in WORD_SIGNS or word in ("no", "No", "NO", "yes", "Yes", "YES", "odd", "DNE"):
        return rf"\text{{{word}}}"
    return word


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match[1] or "0", match[2], match[3]
    if len(whole) + len(fixed) + len(period) > 64:
        return match[0]
    scale = 10 ** len(fixed)
    nines = 10 ** len(period) - 1
    top = int(whole) * scale * nines + int(fixed or "0") * nines + int(period)
    return rf"\frac{{{top}}}{{{scale * nines}}}"


def _brackets_to_braces(s: str) -> str:
    r"""``\sqrt(x)`` and ``^(x)`` with braces in place of the brackets."""
    out: list[str] = []
    stack: list[bool] = []
    for at, character in enumerate(s):
        if character == "(":
            before = s[max(0, at - 8) : at].rstrip()
            stack.append(before.endswith(("\\sqrt", "^")))
            out.append("{" if stack[-1] else "(")
        elif character == ")" and stack:
            out.append("}" if stack.pop() else ")")
        else:
            out.append(character)
    return s if any(stack) else "".join(out)


def _braced_arguments(s: str) -> str:
    r"""``\frac12``, ``\frac1{2}``, ``\frac\pi2``, ``\sqrt2``: each argument of one token gets its braces."""
    out: list[str] = []
    at = 0
    for match in _ARGUMENT_COMMAND.finditer(s):
        if match.start() < at:
            continue
        out.append(s[at : match.end()])
        at = match.end()
        command = match[0]
        if command == r"\sqrt":
            bracket = re.compile(r"\s*\[[^\[\]]*\]").match(s, at)
            if bracket is not None:
                out.append(bracket[0].strip())
                at = bracket.end()
            digits = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)").match(s, at)
            if digits is not None:  # \sqrt12 is meant as the root of 12
                out.append(f"{{{digits[1]}}}")
                at = digits.end()
                continue
        for _ in range(_ARGUMENTS[command]):
            one = _ONE_ARGUMENT.match(s, at)
            if one is None or one[1] in _ARGUMENTS:
                brace = re.compile(r"\s*\{").match(s, at)
                end = None if brace is None else _closing(s, brace.end() - 1)
                if end is None:
                    break
                assert brace is not None
                out.append("{" + _braced_arguments(s[brace.end() : end]) + "}")
                at = end + 1
            else:
                out.append(f"{{{one[1]}}}")
                at = one.end()
    out.append(s[at:])
    return "".join(out)


def _closing(s: str, start: int) -> int | None:
    """Index of the brace that closes the one at ``start``."""
    depth = 0
    for at in range(start, len(s)):
        depth += (s[at] == "{") - (s[at] == "}")
        if depth == 0:
            return at
    return None
