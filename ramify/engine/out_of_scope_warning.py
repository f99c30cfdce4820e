"""Warn if a trained policy is asked a question that lies outside its training task.

A policy that was trained from random weights knows nothing but its task. Asked about anything else
it still answers, and nothing in the answer shows that it is a guess. ``policy.json`` names the
task, and ``tasks/question_pattern.py`` knows the form of its questions.

Policies that began as a general model are not checked, nor are attempts at a task, which measure
what a policy can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.clients.base import Client
from ramify.clients.model_config import Model
from ramify.engine.prompt_scaffold import trained_policy_settings
from ramify.tasks.question_pattern import task_question_pattern

_OF_A_TASK = "task"
"""Key in a run's configuration that marks the run as an attempt at a task item."""


def scope_warning(
    model: Model | Client, question: str, context: Any, config: Mapping[str, Any]
) -> str | None:
    """Return a warning if a question is outside what ``model`` was trained for.

    ``model`` answers the root call. Otherwise return None. Clients that the caller created, such as
    that of a training run, are not checked. ``config`` holds the settings and the metadata of the
    run.
    """
    if not isinstance(model, Model) or _OF_A_TASK in config:
        return None
    card = trained_policy_settings(model)
    if not card.task:
        return None
    form = task_question_pattern(card.task)
    if form is None:
        return (
            f"{model.name} was trained from random weights on the task '{card.task}' alone: do not "
            "trust its answer about anything else"
        )
    if form.fits(question, context):
        return None
    return (
        f"{model.name} knows only {form.about}: this question or its input has another form, so "
        "do not trust the answer; ask a general model, such as openai:gpt-5-mini"
    )
