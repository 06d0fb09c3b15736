r"""Reads one mathematical expression, in LaTeX as :func:`~.normalization.normalize` leaves it, into sympy.

A recursive-descent reader with a grammar of its own: no text is evaluated, numerals are exact rationals, and the time is
linear in the text, except for sympy's own evaluation. Implicit multiplication binds tighter than ``/``, as in math-verify.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]

from scalerl_tasks.answers.evaluation_bounds import (
    MAX_ARGUMENT_BITS,
    TooLargeError,
    bits_of,
    bounded,
    factorial,
    power,
)
from scalerl_tasks.answers.functions import ACCENTS, GREEK, INVERSES, MULTI, UNARY
from scalerl_tasks.answers.tokens import END, Tokens, UnreadableError

_MAX_DEPTH = 60
_MAX_RADICAND_BITS = 2000.0
_MAX_TERMS = 10_000
_MAX_LIMIT_BITS = 16.0  # of the number of terms at the points of comparison
_MULTIPLY = frozenset((r"\cdot", r"\times", "*", r"\ast"))
_DIVIDE = frozenset(("/", r"\div", ":"))
_CLOSERS = {
    "(": ")",
    "[": "]",
    "{": "}",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
}


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
    reader = _Reader(latex)
    value = reader.sum()
    if reader.peek() != END:
        raise UnreadableError(f"unexpected {reader.peek()!r}")
    return value


class _Reader(Tokens):
    def __init__(self, latex: str) -> None:
        super().__init__(latex)
        self._depth = 0
        self._bound: list[str] = []
        """Names bound by a sum, product, integral or limit around the current place."""
        self._differentials: list[str | None] = []
        """For each integral around the current place, its variable, once that was read."""
        self._bars = 0
        letters = {text for kind, text in self._tokens if kind == "letter"}
        self._keep_case = any(text.lower() in letters for text in letters if text != text.lower())

    def sum(self) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        value = self._term()
        while self.peek() in ("+", "-"):
            sign = self.next()
            term = self._term()
            value = sympy.Add(value, term if sign == "+" else sympy.Mul(sympy.S.NegativeOne, term))
        self._depth -= 1
        return value

    def _term(self) -> Any:
        negative = self._signs_are_negative()
        value = self._product()
        while True:
            if self.peek() in _MULTIPLY:
                self.next()
                value = sympy.Mul(value, self._signed_product())
            elif self.peek() in _DIVIDE:
                self.next()
                value = sympy.Mul(value, power(self._signed_product(), sympy.S.NegativeOne))
            elif self.peek() in (r"\bmod", r"\mod"):
                self.next()
                value = sympy.Mod(value, self._signed_product())
            else:
                return sympy.Mul(sympy.S.NegativeOne, value) if negative else value

    def _signed_product(self) -> Any:
        negative = self._signs_are_negative()
        value = self._product()
        return sympy.Mul(sympy.S.NegativeOne, value) if negative else value

    def _signs_are_negative(self) -> bool:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.next() == "-"
        return negative

    def _product(self) -> Any:
        """Factors side by side; an integer before a proper fraction of integers is a mixed number."""
        start = self._at
        value = self._factor()
        while self._starts_factor():
            if self.kind() == "number" and self.kind(-1) == "number" and self.peek(-2) not in ("^", "_"):
                raise UnreadableError("two numbers side by side")
            whole = self.kind(-1) == "number" and self._at == start + 1 and value.is_Integer
            fraction = whole and self._is_plain_fraction()
            factor = self._factor()
            if fraction and factor.is_Rational and 0 < factor < 1:
                value = value + factor
            else:
                value = sympy.Mul(value, factor)
        return value

    def _is_plain_fraction(self) -> bool:
        r"""Whether the next tokens are ``\frac{digits}{digits}``."""
        return self.peek() == r"\frac" and all(
            self.peek(1 + 3 * k) == "{" and self.kind(2 + 3 * k) == "number" and self.peek(3 + 3 * k) == "}"
            for k in (0, 1)
        )

    def _starts_factor(self) -> bool:
        kind, text = self.kind(), self.peek()
        if kind in ("number", "letter"):
            return True
        if kind == "command":
            return (
                text in UNARY
                or text in MULTI
                or text in GREEK
                or text in ACCENTS
                or text in _CLOSERS
                or text in _PREFIXES
            )
        return text in ("(", "{", "[") or (text == "|" and not self._bars)

    def _factor(self) -> Any:
        base = self._base()
        while True:
            mark = self.peek()
            if mark == "^":
                self.next()
                if self.peek() in (r"\top", "T"):
                    raise UnreadableError("a transpose")
                base = power(base, self._argument())
            elif mark == "!":
                self.next()
                base = factorial(base)
            elif mark == r"\%":
                self.next()
                base = sympy.Mul(base, sympy.Rational(1, 100))
            elif mark == r"\degree":
                self.next()
                base = sympy.Mul(base, sympy.pi / 180)
            else:
                return base

    def _argument(self) -> Any:
        """What follows ``^``, ``_`` or a command: a group, or a single token with its sign."""
        if self.peek() == "{":
            return self._group("{")
        if self.peek() in ("+", "-"):
            sign = self.next()
            value = self._base()
            return value if sign == "+" else sympy.Mul(sympy.S.NegativeOne, value)
        return self._base()

    def _group(self, opener: str) -> Any:
        self.expect(opener)
        bars, self._bars = self._bars, 0
        value = self.sum()
        self._bars = bars
        self.expect(_CLOSERS[opener])
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
        kind, text = self.kind(), self.peek()
        if kind == "number":
            self.next()
            try:
                return sympy.Rational(text)
            except (TypeError, ValueError) as error:  # more digits than Python converts
                raise UnreadableError("a number with too many digits") from error
        if text in ("(", "[", "{"):
            return self._group(text)
        if text == "|":
            self.next()
            self._bars += 1
            value = self.sum()
            self.expect("|")
            self._bars -= 1
            return sympy.Abs(value)
        if text in (r"\lfloor", r"\lceil"):
            value = self._group(text)
            return bounded(sympy.floor if text == r"\lfloor" else sympy.ceiling)(value)
        if kind == "letter" or text in GREEK:
            return self._symbol()
        if text in UNARY or text in MULTI:
            return self._function()
        read = _PREFIXES.get(text)
        if read is not None:
            self.next()
            return read(self)
        if text in ACCENTS:
            return self._accent()
        raise UnreadableError(f"unexpected {text!r}")

    def _accent(self) -> Any:
        name = self.next() + "".join(self.raw_argument())
        return sympy.Symbol(name + self._subscript(), real=True)

    def _symbol(self) -> Any:
        name = self.next()
        if (
            name == "d"
            and self._differentials
            and self._differentials[-1] is None
            and (self.kind() == "letter" or self.peek() in GREEK)
        ):
            self._differentials[-1] = self._letter(self.next())
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
        self.next()
        return "_" + "".join(self.raw_argument())

    def _function(self) -> Any:
        name = self.next()
        if name in MULTI:
            self.expect("(")
            arguments = [self.sum()]
            while self.peek() == ",":
                self.next()
                arguments.append(self.sum())
            self.expect(")")
            if any(bits_of(argument) > MAX_ARGUMENT_BITS for argument in arguments):
                raise TooLargeError(f"an argument of {name}")
            return MULTI[name](*arguments)
        apply = bounded(UNARY[name])
        if name == r"\sqrt":
            return self._root()
        if name in (r"\log", r"\lg") and self.peek() == "_":
            self.next()
            base = self._argument()
            if bits_of(base) > MAX_ARGUMENT_BITS:
                raise TooLargeError("a logarithm's base")
            apply = bounded(lambda x: sympy.log(x, base))
        exponent = None
        if self.peek() == "^":
            self.next()
            exponent = self._argument()
            if exponent == -1 and name in INVERSES:
                apply, exponent = bounded(INVERSES[name]), None
        if self.peek() in ("(", "[", "{"):
            value = apply(self._group(self.peek()))
        else:
            value = apply(self._bare_argument())
        return value if exponent is None else power(value, exponent)

    def _bare_argument(self) -> Any:
        r"""The argument of a function without brackets: ``\sin 2x``, ended by the next function."""
        if self.peek() == "-":
            self.next()
            return sympy.Mul(sympy.S.NegativeOne, self._bare_argument())
        value = self._factor()
        while self._starts_factor() and self.peek() not in UNARY and self.peek() not in ("(", "["):
            value = sympy.Mul(value, self._factor())
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
        return sympy.Mul(top, power(bottom, sympy.S.NegativeOne))

    def binomial(self) -> Any:
        top, bottom = self._argument(), self._argument()
        if top.is_Integer and abs(top) > 100_000:
            return sympy.binomial(top, bottom, evaluate=False)
        return sympy.binomial(top, bottom)

    def series(self, kind: Callable[..., Any]) -> Any:
        self.expect("_")
        self.expect("{")
        name = self._letter(self.next()) + self._subscript()
        self.expect("=")
        lower = self.sum()
        self.expect("}")
        self.expect("^")
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
            self.next()
            limits.append(self._argument())
            self.expect("^")
            limits.append(self._argument())
        self._differentials.append(None)
        body = self.sum()
        name = self._differentials.pop()
        if name is None:
            raise UnreadableError("an integral without its variable")
        symbol = sympy.Symbol(name, real=True)
        return sympy.Integral(body, (symbol, *limits) if limits else symbol)

    def limit(self) -> Any:
        self.expect("_")
        self.expect("{")
        name = self._letter(self.next())
        if self.next() not in (r"\to", r"\rightarrow"):
            raise UnreadableError("a limit without its point")
        at = self.sum()
        side = "+-"
        if self.peek() == "^":
            self.next()
            side = "".join(self.raw_argument())
        self.expect("}")
        self._bound.append(name)
        body = self._term()
        self._bound.pop()
        if side not in ("+", "-", "+-"):
            raise UnreadableError("a limit without its side")
        if at in (sympy.oo, -sympy.oo):
            side = "-" if at is sympy.oo else "+"
        return sympy.Limit(body, sympy.Symbol(name, real=True), at, side)


_CONSTANTS = {"i": sympy.I, "e": sympy.E}
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
