"""Vocabulary of programs for a word-level tokenizer. Problems, programs and error messages use the
same tokens, so that a policy follows a hint by copying it.

    50 @w3 @5      50 @w3 @f7 @5      TypeError: not  @w3 @f7  but  @w3 @f12
    hint: use  @w3 @f12               FINAL( 42 )
"""

from __future__ import annotations

from ramify.tasks.programs.program_library import IMPORTED, MAX_OPERAND, MODULUS, NUM_WORDS

PROGRAM_HINT = "\nhint: "
"""Separator between a problem and its hint, within the same message.

Example:
    "50 @w3 @5" + PROGRAM_HINT + "use @w3 @f12"
"""
USE = "use "
"""First token of a hint."""
NO_PROGRAM = "SyntaxError: no program"
PROGRAM_WORDS = (
    *(str(number) for number in range(MODULUS)),
    *(f"@{operand}" for operand in range(1, MAX_OPERAND + 1)),
    *(f"@w{number}" for number in range(NUM_WORDS)),
    *(f"@f{number}" for number in range(NUM_WORDS)),
    *(f"from ops import f{number};" for number in IMPORTED),
    "FINAL(",
    ")",
    PROGRAM_HINT,
    USE,
    "TypeError: not ",
    " but ",
    "ImportError: ",
    NO_PROGRAM,
)
"""Every token of the task, for a policy made from scratch.

Example:
    train.PolicySpec(shape=SHAPE, words=tasks.PROGRAM_WORDS)
"""


def answer(number: int) -> str:
    """Return the reply that gives ``number`` as the answer."""
    return f"FINAL({number})"
