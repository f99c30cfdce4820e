"""The words of programs: what a word-level tokenizer of them knows. A problem, its program and what
the library says of it are written in the same ones, so that taking a hint is copying.

    50 @w3 @5      50 @w3 @f7 @5      TypeError: not  @w3 @f7  but  @w3 @f12      hint: use  @w3 @f12      FINAL( 42 )
"""

from __future__ import annotations

from ramify.tasks.programs.program_library import IMPORTED, MAX_OPERAND, MODULUS, NUM_WORDS

HINT = "\nhint: "
"""What stands between a problem and a hint, in the message of the problem."""
USE = "use "
"""What a hint begins with."""
NO_PROGRAM = "SyntaxError: no program"
WORDS = (
    *(str(number) for number in range(MODULUS)),
    *(f"@{operand}" for operand in range(1, MAX_OPERAND + 1)),
    *(f"@w{number}" for number in range(NUM_WORDS)),
    *(f"@f{number}" for number in range(NUM_WORDS)),
    *(f"from ops import f{number};" for number in IMPORTED),
    "FINAL(",
    ")",
    HINT,
    USE,
    "TypeError: not ",
    " but ",
    "ImportError: ",
    NO_PROGRAM,
)


def answer(number: int) -> str:
    """The reply that gives ``number`` as the answer."""
    return f"FINAL({number})"
