"""Prompt templates: the text around a question. Imports no torch."""

from __future__ import annotations

from ..errors import SpecError

AS_IT_IS = "{question}"  # the template that changes nothing
# The default of earlier versions, for stored jobs: see Spec.of_stored.
MATH = "Solve this math problem step by step:\n\n{question}\n\nSolution:"
NAMED = {"as-is": AS_IT_IS, "math": MATH, "qa": "Question: {question}\nAnswer:"}
MOST_QUESTIONS = 16  # occurrences of {question}: each is a copy of the prompt in memory
AS_TRAINED = "as-trained"  # that of the model's training, of options that are not resolved yet
HELP = f"its text with {{question}}, or a name ({', '.join(NAMED)})"


def check(template: str) -> None:
    """Raise SpecError if a template has no place for the question, or too many."""
    questions = template.count("{question}")
    if questions > MOST_QUESTIONS:
        raise SpecError(
            "template", f"must have {{question}} at most {MOST_QUESTIONS} times, got {questions}"
        )
    if not questions:
        names = ", ".join(NAMED)
        raise SpecError(
            "template", f"must be {names}, or contain {{question}}, got {template[:60]!r}"
        )


def changes(template: str) -> bool:
    """Whether prompts are put into a template; AS_TRAINED that was not resolved leaves them."""
    return template not in (AS_IT_IS, AS_TRAINED)


def fill(template: str, question: str) -> str:
    """Return a question in a template."""
    return template.replace("{question}", question) if changes(template) else question
