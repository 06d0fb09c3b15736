"""Templates and prompts."""

import pytest

from scalerl_tasks import Prompt, TemplateError, arithmetic_operations, check_template, render_prompt

ASK = Prompt(id="1", text="What is {x} + {prompt}?", answer="4", solution="2 + 2 = 4")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, ASK.text),
        ("{prompt}", ASK.text),
        ("Q: {prompt}\nA:", f"Q: {ASK.text}\nA:"),
        (r"{prompt} Put it in \boxed{}.", rf"{ASK.text} Put it in \boxed{{}}."),
        (r"{prompt} \boxed{{answer}}", rf"{ASK.text} \boxed{{answer}}"),
        ("{{prompt}} {prompt}", f"{{prompt}} {ASK.text}"),
        ("{prompt} { 1 } {2} }{", f"{ASK.text} {{ 1 }} {{2}} }}{{"),
    ],
)
def test_render_prompt_replaces_only_placeholder(template, expected):
    assert render_prompt(ASK, template).user == expected


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{promt}", "promt"),
        ("{prompt} {answer}", "answer"),
        ("no place", "{prompt}"),
        ("{{prompt}}", "{prompt}"),
        ("", "{prompt}"),
    ],
)
def test_check_template_names_bad_placeholder(template, names):
    with pytest.raises(TemplateError, match=names):
        check_template(template)
    with pytest.raises(TemplateError, match=names):
        render_prompt(ASK, template)


def test_messages_begin_with_system_text():
    assert render_prompt(ASK, "{prompt}", "Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ASK.text},
    ]
    assert [m["role"] for m in render_prompt(ASK).messages] == ["user"]


def test_worked_solution_falls_back_to_answer():
    assert ASK.worked_solution == "2 + 2 = 4"
    assert Prompt("1", "q", "4").worked_solution == "4"
    with pytest.raises(ValueError, match="no solution and no answer"):
        _ = Prompt("1", "q", "").worked_solution


@pytest.mark.parametrize(
    ("metadata", "operations"),
    [
        ({"num_terms": 2}, 1),
        ({"num_terms": 1}, 0),
        ({"num_terms": True}, None),
        ({"num_terms": "3"}, None),
        ({}, None),
    ],
)
def test_arithmetic_operations(metadata, operations):
    assert arithmetic_operations(metadata) == operations
