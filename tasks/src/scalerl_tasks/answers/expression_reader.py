r"""Reads one mathematical expression, in LaTeX as :func:`~scalerl_tasks.answers.normalization.normalize` leaves it, into sympy.

A recursive-descent reader with a grammar of its own: no text is evaluated, numerals are exact rationals, and the time is
linear in the text, except for sympy's own evaluation. Implicit multiplication binds tighter than ``/``, as in math-verify.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(\\[A-Za-z]+\*?|\\.)|(.))", re.DOTALL)
_MAX_DEPTH = 60
_MAX_TOKENS = 1500
_MAX_RESULT_BITS = (
    20_000  # of a power or factorial that is computed when it is read; larger ones stay as they are
)
_MAX_ARGUMENT_BITS = 50_000.0  # of the argument of a function, which is needed to its last bit
_MAX_EXPONENT_BITS = 50.0
_MAX_EXACT_BITS = 2e5  # of a power of a function's value, which is computed exactly
_MAX_RADICAND_BITS = 2000.0
_SYMBOL_BITS = 4.0
_MAX_TERMS = 10_000
_MAX_LIMIT_BITS = 16.0  # of the number of terms at the points of comparison
MANY_BITS = math.inf
_END = ""

_GREEK = frozenset(
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
_MULTIPLY = frozenset((r"\cdot", r"\times", "*", r"\ast"))
_DIVIDE = frozenset(("/", r"\div", ":"))
_CLOSERS = {
    "(": ")",
    "[": "]",
    "{": "}",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
    r"\lgroup": r"\rgroup",
}
_ACCENTS = frozenset(
    rf"\{name}" for name in ("overline", "bar", "vec", "hat", "tilde", "overrightarrow", "widehat", "mathcal")
)
_UNARY: dict[str, Callable[[Any], Any]] = {
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
_INVERSES = {
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
_MULTI: dict[str, Callable[..., Any]] = {
    r"\gcd": sympy.gcd,
    r"\lcm": sympy.lcm,
    r"\max": sympy.Max,
    r"\min": sympy.Min,
}
FUNCTIONS = frozenset(name[1:] for name in (*_UNARY, *_MULTI))
"""Names of functions that plain text may use without a backslash."""


class TooLargeError(ValueError):
    """The text is an expression, and its value takes too long to compute."""


class UnreadableError(ValueError):
    """The text is not an expression of this grammar."""


def read_expression(latex: str) -> Any:
    r"""A sympy expression with exact numbers and real symbols; ``i`` is the imaginary unit, ``e`` Euler's number.

    Letters are compared without case unless a text has both cases of one, as in ``A - a``.

    Raises:
        UnreadableError: not an expression, or nested too deeply.

    >>> read_expression(r"\frac{1}{2} + 2\frac{1}{2}")
    3
    >>> read_expression("(x-1)(x+1)")
    (x - 1)*(x + 1)
    """
    tokens: list[tuple[str, str]] = []
    at = 0
    text = latex.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) > _MAX_TOKENS:
            raise UnreadableError("too long")
        number, command, other = match.groups()
        kind = "number" if number else "command" if command else "letter" if other.isalpha() else "mark"
        tokens.append((kind, number or command or other))
        at = match.end()
    reader = _Reader(tokens)
    value = reader.sum()
    if reader.peek() != _END:
        raise UnreadableError(f"unexpected {reader.peek()!r}")
    return value


class _Reader:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._bound: list[str] = []
        """Names bound by a sum, product, integral or limit around the current place."""
        self._differentials: list[str | None] = []
        """For each integral around the current place, its variable, once that was read."""
        self._bars = 0
        letters = {text for kind, text in tokens if kind == "letter"}
        self._keep_case = any(text.lower() in letters for text in letters if text != text.lower())

    # --- tokens

    def peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at][1] if 0 <= at < len(self._tokens) else _END

    def _kind(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at][0] if 0 <= at < len(self._tokens) else _END

    def _next(self) -> str:
        text = self.peek()
        if text == _END:
            raise UnreadableError("the text ends within an expression")
        self._at += 1
        return text

    def _expect(self, text: str) -> None:
        if self._next() != text:
            raise UnreadableError(f"no {text!r}")

    # --- grammar

    def sum(self) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        value = self._term()
        while self.peek() in ("+", "-"):
            sign = self._next()
            term = self._term()
            value = _add(value, term if sign == "+" else _multiply(sympy.S.NegativeOne, term))
        self._depth -= 1
        return value

    def _term(self) -> Any:
        if self.peek() in ("+", "-"):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise UnreadableError("nested too deeply")
            sign = self._next()
            value = self._term()
            self._depth -= 1
            return value if sign == "+" else _multiply(sympy.S.NegativeOne, value)
        value = self._product()
        while True:
            if self.peek() in _MULTIPLY:
                self._next()
                value = _multiply(value, self._signed_product())
            elif self.peek() in _DIVIDE:
                self._next()
                value = _multiply(value, _power(self._signed_product(), sympy.S.NegativeOne))
            elif self.peek() in (r"\bmod", r"\mod"):
                self._next()
                value = sympy.Mod(value, self._signed_product())
            else:
                return value

    def _signed_product(self) -> Any:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self._next() == "-"
        value = self._product()
        return _multiply(sympy.S.NegativeOne, value) if negative else value

    def _product(self) -> Any:
        """Factors side by side; an integer before a proper fraction of integers is a mixed number."""
        start = self._at
        value = self._factor()
        while self._starts_factor():
            if self._kind() == "number" and self._kind(-1) == "number" and self.peek(-2) not in ("^", "_"):
                raise UnreadableError("two numbers side by side")
            whole = self._kind(-1) == "number" and self._at == start + 1 and value.is_Integer
            fraction = whole and self._is_plain_fraction()
            factor = self._factor()
            if fraction and factor.is_Rational and 0 < factor < 1:
                value = value + factor
            else:
                value = _multiply(value, factor)
        return value

    def _is_plain_fraction(self) -> bool:
        r"""Whether the next tokens are ``\frac{digits}{digits}``."""
        return self.peek() == r"\frac" and all(
            self.peek(1 + 3 * k) == "{" and self._kind(2 + 3 * k) == "number" and self.peek(3 + 3 * k) == "}"
            for k in (0, 1)
        )

    def _starts_factor(self) -> bool:
        kind, text = self._kind(), self.peek()
        if kind in ("number", "letter"):
            return True
        if kind == "command":
            return (
                text in _UNARY
                or text in _MULTI
                or text in _GREEK
                or text in _ACCENTS
                or text in _CLOSERS
                or text in _PREFIXES
            )
        return text in ("(", "{", "[") or (text == "|" and not self._bars)

    def _factor(self) -> Any:
        base = self._base()
        while True:
            mark = self.peek()
            if mark == "^":
                self._next()
                if self.peek() in (r"\top", "T"):
                    raise UnreadableError("a transpose")
                base = _power(base, self._argument())
            elif mark == "!":
                self._next()
                base = _factorial(base)
            elif mark == r"\%":
                self._next()
                base = _multiply(base, sympy.Rational(1, 100))
            elif mark == r"\degree":
                self._next()
                base = _multiply(base, sympy.pi / 180)
            else:
                return base

    def _argument(self) -> Any:
        """What follows ``^``, ``_`` or a command: a group, or a single token with its sign."""
        if self.peek() == "{":
            return self._group("{")
        if self.peek() in ("+", "-"):
            sign = self._next()
            value = self._base()
            return value if sign == "+" else _multiply(sympy.S.NegativeOne, value)
        return self._base()

    def _group(self, opener: str) -> Any:
        self._expect(opener)
        bars, self._bars = self._bars, 0
        value = self.sum()
        self._bars = bars
        self._expect(_CLOSERS[opener])
        return value

    def _base(self) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        try:
            return self._unguarded_base()
        finally:
            self._depth -= 1

    def _unguarded_base(self) -> Any:
        kind, text = self._kind(), self.peek()
        if kind == "number":
            self._next()
            try:
                return sympy.Rational(text)
            except (TypeError, ValueError) as error:  # more digits than Python converts
                raise UnreadableError("a number with too many digits") from error
        if text in ("(", "[", "{"):
            return self._group(text)
        if text == "|":
            self._next()
            self._bars += 1
            value = self.sum()
            self._expect("|")
            self._bars -= 1
            return sympy.Abs(value)
        if text in (r"\lfloor", r"\lceil"):
            value = self._group(text)
            return _bounded(sympy.floor if text == r"\lfloor" else sympy.ceiling)(value)
        if kind == "letter" or text in _GREEK:
            return self._symbol()
        if text in _UNARY or text in _MULTI:
            return self._function()
        read = _PREFIXES.get(text)
        if read is not None:
            self._next()
            return read(self)
        if text in _ACCENTS:
            return self._accent()
        raise UnreadableError(f"unexpected {text!r}")

    def _accent(self) -> Any:
        name = self._next() + "".join(self._raw_argument())
        return sympy.Symbol(name + self._subscript(), real=True)

    def _symbol(self) -> Any:
        name = self._next()
        if (
            name == "d"
            and self._differentials
            and self._differentials[-1] is None
            and (self._kind() == "letter" or self.peek() in _GREEK)
        ):
            self._differentials[-1] = self._letter(self._next())
            return sympy.S.One
        letter = self._letter(name)
        if letter in ("f", "g", "h") and self.peek() == "(":
            argument = self._group("(")
            return sympy.Symbol(f"{letter}({sympy.expand(argument)})", real=True)
        if self.peek() == "'":
            raise UnreadableError("a derivative")
        letter += self._subscript()
        if letter not in self._bound and (constant := _CONSTANTS.get(letter)) is not None:
            return constant
        return sympy.Symbol(letter, real=True)

    def _letter(self, name: str) -> str:
        if not name.isascii():
            raise UnreadableError(f"unknown letter {name!r}")
        return name if self._keep_case or name.startswith("\\") or name == "E" else name.lower()

    def _subscript(self) -> str:
        if self.peek() != "_":
            return ""
        self._next()
        return "_" + "".join(self._raw_argument())

    def _raw_argument(self) -> list[str]:
        if self.peek() != "{":
            return [self._next()]
        found: list[str] = []
        depth = 0
        while True:
            text = self._next()
            depth += (text == "{") - (text == "}")
            if depth == 0:
                return found[1:]
            found.append(text)

    def _function(self) -> Any:
        name = self._next()
        if name in _MULTI:
            self._expect("(")
            arguments = [self.sum()]
            while self.peek() == ",":
                self._next()
                arguments.append(self.sum())
            self._expect(")")
            if any(bits_of(argument) > _MAX_ARGUMENT_BITS for argument in arguments):
                raise TooLargeError(f"an argument of {name}")
            return _MULTI[name](*arguments)
        apply = _bounded(_UNARY[name])
        if name == r"\sqrt":
            return self._root()
        if name in (r"\log", r"\lg") and self.peek() == "_":
            self._next()
            base = self._argument()
            if bits_of(base) > _MAX_ARGUMENT_BITS:
                raise TooLargeError("a logarithm's base")
            apply = _bounded(lambda x: sympy.log(x, base))
        exponent = None
        if self.peek() == "^":
            self._next()
            exponent = self._argument()
            if exponent == -1 and name in _INVERSES:
                apply, exponent = _bounded(_INVERSES[name]), None
        if self.peek() in ("(", "[", "{"):
            value = apply(self._group(self.peek()))
        else:
            value = apply(self._bare_argument())
        return value if exponent is None else _power(value, exponent)

    def _bare_argument(self) -> Any:
        r"""The argument of a function without brackets: ``\sin 2x``, ended by the next function."""
        if self.peek() == "-":
            self._next()
            return _multiply(sympy.S.NegativeOne, self._bare_argument())
        value = self._factor()
        while self._starts_factor() and self.peek() not in _UNARY and self.peek() not in ("(", "["):
            value = _multiply(value, self._factor())
            if self.peek(-1) == r"\sqrt":
                break
        return value

    def _root(self) -> Any:
        degree = self._group("[") if self.peek() == "[" else sympy.Integer(2)
        radicand = self._group("(") if self.peek() == "(" else self._argument()
        if radicand.is_Rational and bits_of(radicand) > _MAX_RADICAND_BITS:
            raise TooLargeError("a root")  # sympy looks for powers in it
        return sympy.root(radicand, degree)

    def fraction(self) -> Any:
        top = self._argument()
        bottom = self._argument()
        return _multiply(top, _power(bottom, sympy.S.NegativeOne))

    def binomial(self) -> Any:
        top, bottom = self._argument(), self._argument()
        if top.is_Integer and abs(top) > 100_000:
            return sympy.binomial(top, bottom, evaluate=False)
        return sympy.binomial(top, bottom)

    def series(self, kind: Callable[..., Any]) -> Any:
        self._expect("_")
        self._expect("{")
        name = self._letter(self._next()) + self._subscript()
        self._expect("=")
        lower = self.sum()
        self._expect("}")
        self._expect("^")
        upper = self._argument()
        self._bound.append(name)
        body = self._term()
        self._bound.pop()
        symbol = sympy.Symbol(name, real=True)
        terms = upper - lower
        many = (
            terms > _MAX_TERMS
            if terms.is_Rational
            else bits_of(terms) > _MAX_LIMIT_BITS and upper is not sympy.oo
        )
        if many and not (kind is sympy.Sum and body.is_polynomial(symbol)):
            raise TooLargeError("a sum or product of many terms")
        return kind(body, (symbol, lower, upper))

    def integral(self) -> Any:
        limits = []
        if self.peek() == "_":
            self._next()
            limits.append(self._argument())
            self._expect("^")
            limits.append(self._argument())
        self._differentials.append(None)
        body = self.sum()
        name = self._differentials.pop()
        if name is None:
            raise UnreadableError("an integral without its variable")
        symbol = sympy.Symbol(name, real=True)
        return sympy.Integral(body, (symbol, *limits) if limits else symbol)

    def limit(self) -> Any:
        self._expect("_")
        self._expect("{")
        name = self._letter(self._next())
        if self._next() not in (r"\to", r"\rightarrow"):
            raise UnreadableError("a limit without its point")
        at = self.sum()
        side = "+-"
        if self.peek() == "^":
            self._next()
            side = "".join(self._raw_argument())
        self._expect("}")
        self._bound.append(name)
        body = self._term()
        self._bound.pop()
        if side not in ("+", "-", "+-"):
            raise UnreadableError("a limit without its side")
        if at in (sympy.oo, -sympy.oo):
            side = "-" if at is sympy.oo else "+"
        return sympy.Limit(body, sympy.Symbol(name, real=True), at, side)


_CONSTANTS = {"i": sympy.I, "e": sympy.E, r"\pi": sympy.pi}
_PREFIXES: dict[str, Callable[[_Reader], Any]] = {
    r"\frac": _Reader.fraction,
    r"\binom": _Reader.binomial,
    r"\sum": lambda reader: reader.series(sympy.Sum),
    r"\prod": lambda reader: reader.series(sympy.Product),
    r"\int": _Reader.integral,
    r"\lim": _Reader.limit,
    r"\infty": lambda reader: sympy.oo,
    r"\pi": lambda reader: sympy.pi,
    r"\imath": lambda reader: sympy.I,
}


def bits_of(value: Any) -> float:
    """About the logarithm of the largest number that evaluating an expression has to hold; :data:`MANY_BITS` if that takes long."""
    if value.is_Rational:
        return float(max(abs(value.p).bit_length(), value.q.bit_length()))
    if not value.args:
        return _SYMBOL_BITS
    parts = [bits_of(part) for part in value.args]
    largest = max(parts)
    if isinstance(value, sympy.Pow):
        exponent = value.exp
        if exponent.is_Rational and parts[1] < _MAX_EXPONENT_BITS:
            bits = parts[0] * float(abs(exponent))
            exact = exponent.is_Integer and value.base.free_symbols
            return MANY_BITS if exact and bits > _MAX_EXACT_BITS else max(bits, parts[1])
        return parts[0] * 2.0 ** parts[1] if parts[1] < _MAX_EXPONENT_BITS else MANY_BITS
    if isinstance(value, sympy.exp | sympy.factorial | sympy.gamma):
        return max(largest, 2.0) * 2.0**largest if largest < _MAX_EXPONENT_BITS else MANY_BITS
    if isinstance(value, sympy.Mul):
        return sum(parts)
    if isinstance(value, sympy.Function) and not isinstance(value, sympy.Abs | sympy.log):
        return largest if largest <= _MAX_ARGUMENT_BITS else MANY_BITS
    return largest


def _bounded(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, refused for arguments that take long to compute."""

    def apply(argument: Any) -> Any:
        if bits_of(argument) > _MAX_ARGUMENT_BITS:
            raise TooLargeError("the argument of a function")
        return function(argument)

    return apply


def _add(a: Any, b: Any) -> Any:
    return sympy.Add(a, b)


def _multiply(a: Any, b: Any) -> Any:
    return sympy.Mul(a, b)


def _power(base: Any, exponent: Any) -> Any:
    """A power, not computed if that would make a number too large to hold."""
    bits = 0.0
    if base.is_Rational and exponent.is_Rational:
        size = max(abs(base.p).bit_length(), base.q.bit_length())
        bits = size * abs(exponent.p) / exponent.q
        if exponent.p.bit_length() > 64 or bits > _MAX_RESULT_BITS:
            return sympy.Pow(base, exponent, evaluate=False)
    elif exponent.has(sympy.Pow) and not exponent.free_symbols and base.is_Rational:
        return sympy.Pow(base, exponent, evaluate=False)
    return sympy.Pow(base, exponent)


def _factorial(value: Any) -> Any:
    if bits_of(value) > _MAX_EXPONENT_BITS and not value.free_symbols:
        raise TooLargeError("a factorial")
    if value.is_Integer and value > 2000:
        return sympy.factorial(value, evaluate=False)
    return sympy.factorial(value)
