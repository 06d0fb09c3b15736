r"""Functions and letters that expressions have, by their commands in LaTeX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]

GREEK = frozenset(
    rf"\{name}"
    for name in [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "varepsilon",
        "zeta",
        "eta",
        "theta",
        "vartheta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
        "upsilon",
        "phi",
        "varphi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Pi",
        "Sigma",
        "Upsilon",
        "Phi",
        "Psi",
        "Omega",
        "ell",
        "hbar",
    ]
)
ACCENTS = frozenset(
    rf"\{name}" for name in ("overline", "bar", "vec", "hat", "tilde", "overrightarrow", "widehat", "mathcal")
)
UNARY: dict[str, Callable[[Any], Any]] = {
    r"\sin": sympy.sin,
    r"\cos": sympy.cos,
    r"\tan": sympy.tan,
    r"\cot": sympy.cot,
    r"\sec": sympy.sec,
    r"\csc": sympy.csc,
    r"\arcsin": sympy.asin,
    r"\arccos": sympy.acos,
    r"\arctan": sympy.atan,
    r"\arccot": sympy.acot,
    r"\sinh": sympy.sinh,
    r"\cosh": sympy.cosh,
    r"\tanh": sympy.tanh,
    r"\coth": sympy.coth,
    r"\arcsinh": sympy.asinh,
    r"\arccosh": sympy.acosh,
    r"\arctanh": sympy.atanh,
    r"\exp": sympy.exp,
    r"\ln": sympy.log,
    r"\log": lambda x: sympy.log(x, 10),
    r"\lg": lambda x: sympy.log(x, 10),
    r"\abs": sympy.Abs,
    r"\floor": sympy.floor,
    r"\ceil": sympy.ceiling,
    r"\sqrt": sympy.sqrt,
    r"\Re": sympy.re,
    r"\Im": sympy.im,
    r"\arg": sympy.arg,
}
INVERSES = {
    r"\sin": sympy.asin,
    r"\cos": sympy.acos,
    r"\tan": sympy.atan,
    r"\cot": sympy.acot,
    r"\sec": sympy.asec,
    r"\csc": sympy.acsc,
    r"\sinh": sympy.asinh,
    r"\cosh": sympy.acosh,
    r"\tanh": sympy.atanh,
}
MULTI: dict[str, Callable[..., Any]] = {
    r"\gcd": sympy.gcd,
    r"\lcm": sympy.lcm,
    r"\max": sympy.Max,
    r"\min": sympy.Min,
}
