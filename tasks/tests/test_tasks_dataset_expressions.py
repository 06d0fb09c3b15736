"""Expressions over the columns of a row."""

import pytest

from scalerl_tasks import SourceError
from scalerl_tasks.dataset.expressions import Expression, NoValue

ROW = {
    "a": {"b": [{"c": 3}, {"c": "x"}]},
    "s": '{"t": ["5/8"]}',
    "n": 2,
    "no": None,
    "odd name-1": 7,
    "text": "abc",
    "nan": float("nan"),
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b[0].c", 3),
        ("a.b[-1].c", "x"),
        ('a["b"][1].c', "x"),
        ("s.t[0]", "5/8"),
        ("number(s.t[0])", 0.625),
        ("number('Level 5')", 5),
        ("number('1,234.5')", 1234.5),
        ("1 - n / 4", 0.5),
        ("odd name-1", 7),
        ("n > 1 and len(text) <= 3", True),
        ("1 < n < 2", False),
        ("not n == 2", False),
        ("text in ['abc', 'd'] or missing > 1", True),
        ("'b' in text", True),
        ("no == null", True),
        ("missing is null", True),
        ("missing != 3", True),
        ("lower('ABC') == text", True),
        ("json(a.b)", '[{"c": 3}, {"c": "x"}]'),
        ("-n", -2),
    ],
)
def test_expression_value(text, value):
    assert Expression(text, ROW, "f")(ROW) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a.b[2].c", "a.b has 2 items"),
        ("a.x", "a has no 'x' (it has b)"),
        ("a[0]", "a is an object, not a list"),
        ("n.x", "n is a number, not an object"),
        ("text.x", "text is the text 'abc', which is not JSON"),
        ("textt", "there is no column 'textt'; did you mean 'text'?"),
        ("no", "is null"),
        ("nan", "is NaN"),
        ("no > 1", "None and 1 cannot be ordered"),
        ("nan < 1", "None and 1 cannot be ordered"),
        ("text > 1", "number(…) reads the number in a text"),
        ("1 - text", "'abc' is text, not a number"),
        ("number(text)", "there is no number in 'abc'"),
        ("number('3/0')", "divides by zero"),
        ("n / (n - 2)", "zero"),
    ],
)
def test_expression_without_a_value_says_why(text, says):
    with pytest.raises(NoValue) as caught:
        Expression(text, ROW, "f")(ROW)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')",
        "n ** 9",
        "[x for x in a]",
        "lambda: 1",
        "a.b[n]",
        "text.upper()",
        "f'{n}'",
        "n if n else 1",
        "(n := 3)",
        "a b",
        "'",
        "(" * 500,
    ],
)
def test_expression_of_more_than_the_syntax_is_refused(text):
    with pytest.raises(SourceError, match=r"^f: "):
        Expression(text, ROW, "f")(ROW)
