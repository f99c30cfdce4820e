"""Tells whether a question has the form of a task's training questions.

Small policies are trained on a single task, and can only answer questions of its form.

    form = task_question_pattern("ledger")
    form.fits("count rows of 'red'", "bavo,red,17")     # True
    form.fits("Which host failed?", "web-3 ERROR")      # False: a policy for ledgers would guess

Only built-in tasks are looked up, because the file of another one would have to be executed.
``engine/out_of_scope_warning.py`` warns about a question that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ramify.plugins import load_object

_FORMS = {"ledger": "ramify.tasks.ledger.question_pattern:LEDGER_FORM"}


class TaskQuestionPattern(msgspec.Struct, frozen=True):
    """The form of the questions and contexts of one built-in task."""

    about: str
    """Description for users, worded to complete "it knows only …"."""
    fits: Callable[[str, Any], bool]
    """(question, context) -> True if both have the form. Reads only the beginning of the
    context.
    """


def task_question_pattern(task: str) -> TaskQuestionPattern | None:
    """Return the form of a built-in task's questions, or None if no form is defined."""
    place = _FORMS.get(task)
    if place is None:
        return None
    form: TaskQuestionPattern = load_object(place, f"the question form of '{task}'")
    return form
