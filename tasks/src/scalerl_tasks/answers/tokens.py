r"""Tokens of an expression in LaTeX: numerals, commands, letters and marks, and the place of a reader among them."""

from __future__ import annotations

import re
from typing import Final

END: Final = ""
"""In place of a token, after the last one."""
_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(\\[A-Za-z]+\*?|\\.)|(.))", re.DOTALL)
_MAX_TOKENS = 1500


class UnreadableError(ValueError):
    """The text is no expression or structure of these grammars, or too long or nested."""


class Tokens:
    """The tokens of a text, read one after the other.

    Raises:
        UnreadableError: there are too many.
    """

    def __init__(self, latex: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        text, at = latex.rstrip(), 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None or len(self._tokens) > _MAX_TOKENS:
                raise UnreadableError("too long")
            number, command, other = match.groups()
            kind = "number" if number else "command" if command else "letter" if other.isalpha() else "mark"
            self._tokens.append((kind, number or command or other))
            at = match.end()

    def peek(self, ahead: int = 0) -> str:
        """The next token, or the one ``ahead`` of it."""
        at = self._at + ahead
        return self._tokens[at][1] if 0 <= at < len(self._tokens) else END

    def kind(self, ahead: int = 0) -> str:
        """Kind of a token: ``number``, ``command``, ``letter`` or ``mark``."""
        at = self._at + ahead
        return self._tokens[at][0] if 0 <= at < len(self._tokens) else END

    def next(self) -> str:
        """Read a token."""
        text = self.peek()
        if text == END:
            raise UnreadableError("the text ends within an expression")
        self._at += 1
        return text

    def expect(self, text: str) -> None:
        """Read the token ``text``."""
        if self.next() != text:
            raise UnreadableError(f"no {text!r}")

    def raw_argument(self) -> list[str]:
        """Read a token, or those of a group in braces."""
        if self.peek() != "{":
            return [self.next()]
        found: list[str] = []
        depth = 0
        while True:
            text = self.next()
            depth += (text == "{") - (text == "}")
            if depth == 0:
                return found[1:]
            found.append(text)
