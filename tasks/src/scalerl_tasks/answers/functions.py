r"""Functions and letters that expressions have, by their commands in LaTeX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]

_LETTERS = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi
psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar
"""
_ACCENTS = "overline bar vec hat tilde overrightarrow widehat mathcal"
_OF_SYMPY = "sin cos tan cot sec csc sinh cosh tanh coth exp sqrt"
_INVERTIBLE = "sin cos tan cot sec csc sinh cosh tanh"

GREEK = frozenset(rf"\{name}" for name in _LETTERS.split())
ACCENTS = frozenset(rf"\{name}" for name in _ACCENTS.split())
INVERSES: dict[str, Callable[[Any], Any]] = {
    rf"\{name}": getattr(sympy, f"a{name}") for name in _INVERTIBLE.split()
}
"""What an exponent of -1 makes of a function: ``\\sin^{-1}``."""
UNARY: dict[str, Callable[[Any], Any]] = {
    **{rf"\{name}": getattr(sympy, name) for name in _OF_SYMPY.split()},
    **{rf"\arc{name[1:]}": function for name, function in INVERSES.items()},
    r"\arccot": sympy.acot,
    r"\ln": sympy.log,
    r"\log": lambda x: sympy.log(x, 10),
    r"\lg": lambda x: sympy.log(x, 10),
    r"\abs": sympy.Abs,
    r"\floor": sympy.floor,
    r"\ceil": sympy.ceiling,
    r"\Re": sympy.re,
    r"\Im": sympy.im,
    r"\arg": sympy.arg,
}
MULTI: dict[str, Callable[..., Any]] = {
    r"\gcd": sympy.gcd,
    r"\lcm": sympy.lcm,
    r"\max": sympy.Max,
    r"\min": sympy.Min,
}
