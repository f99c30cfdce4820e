"""The toy language of the task ``programs``: its words, their functions, and its errors.

    50@w3@5@w9@2            a problem: start with 50, apply w3 with operand 5, then w9 with operand
                            2
    50@w3@f7@5@w9@f0@2      its program, which names the function of each word; valid Python
    from ops import f10;…   two of the functions must be imported first

    correct                                  the number
    wrong function for a checked word        TypeError: not @w3@f7 but @w3@f12
    function that was not imported           ImportError: from ops import f10;
    wrong function for another word          a wrong number, without an error

Which word stands for which function is a secret that all problems share; a policy has to learn it.
The task needs a word-level tokenizer with the tokens ``PROGRAM_WORDS``. Problems, programs and
error messages use the same tokens, so that a policy can follow a hint by copying it. Functions are
affine maps mod 97. Each error names the broken rule in the tokens that a correct program contains.
"""

from __future__ import annotations

import functools
import random
import re

import msgspec

MODULUS = 97
NUM_WORDS = 24
NUM_CHECKED = 16
"""Words with a number below this are checked: calling a wrong function for such a word raises an
error."""
IMPORTED = (10, 20)
"""Functions that must be imported before use."""
MAX_OPERAND = 9
_PROGRAM = re.compile(
    r"(?P<imports>(?:from ops import f\d{1,2};){0,2})(?P<start>\d{1,2})"
    r"(?P<steps>(?:@w\d{1,2}@f\d{1,2}@\d)+)"
)
_STEP = re.compile(r"@w(\d{1,2})@f(\d{1,2})@(\d)")
_IMPORT = re.compile(r"from ops import f(\d{1,2});")
_OF_SOURCE = re.compile(r"# library (\d{1,18})\n")
_PROBLEM = re.compile(r"(\d{1,2})((?:@w\d{1,2}@\d)+)")


class ToyProgramOperation(msgspec.Struct, frozen=True):
    """One operation of a program in the toy language.

    It consists of a word from the problem, the function called for it, and the operand.
    """

    word: int
    function: int
    operand: int


class ToyProgram(msgspec.Struct, frozen=True):
    """A program that a policy writes in the toy language.

    It consists of a start value, operations and imports.
    """

    start: int
    steps: tuple[ToyProgramOperation, ...]
    imports: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        imports = "".join(f"from ops import f{number};" for number in self.imports)
        return f"{imports}{self.start}" + "".join(
            f"@w{s.word}@f{s.function}@{s.operand}" for s in self.steps
        )

    @classmethod
    def parse(cls, text: str) -> ToyProgram | None:
        """Parse a string as a program in the toy language.

        Returns None unless all of it is a valid program.
        """
        match = _PROGRAM.fullmatch(text)
        if match is None:
            return None
        steps = tuple(
            ToyProgramOperation(*map(int, step)) for step in _STEP.findall(match["steps"])
        )
        imports = tuple(map(int, _IMPORT.findall(match["imports"])))
        is_valid = all(s.word < NUM_WORDS and s.function < NUM_WORDS for s in steps) and set(
            imports
        ) <= set(IMPORTED)
        return cls(int(match["start"]), steps, imports) if is_valid else None


class ProgramWritingExercise(msgspec.Struct, frozen=True):
    """A problem that the policy solves by writing a program.

    It consists of a start value, and words with operands.
    """

    start: int
    steps: tuple[tuple[int, int], ...]
    """(word, operand) of each step."""

    @property
    def text(self) -> str:
        return f"{self.start}" + "".join(f"@w{word}@{operand}" for word, operand in self.steps)

    @classmethod
    def parse(cls, text: str) -> ProgramWritingExercise | None:
        """Parse the problem with which ``text`` begins.

        A hint may follow it. Returns None if ``text`` does not begin with a problem.
        """
        match = _PROBLEM.match(text)
        if match is None:
            return None
        return cls(
            int(match[1]),
            tuple((int(w), int(n)) for w, n in re.findall(r"@w(\d{1,2})@(\d)", match[2])),
        )

    def program_for_meanings(
        self, functions: dict[int, int], imports: tuple[int, ...] = ()
    ) -> ToyProgram:
        """Build a program for this problem in which each word has the given meaning.

        ``functions`` says which function to call for each word.
        """
        return ToyProgram(
            self.start,
            tuple(
                ToyProgramOperation(word, functions[word], operand) for word, operand in self.steps
            ),
            imports,
        )


class ViolatedProgramRule(msgspec.Struct, frozen=True):
    """A rule that a program broke: a wrong function for a word, or a missing import.

    It is the first such rule.
    """

    word: int | None
    """The word for which a wrong function was called, or None if an import is missing."""
    function: int
    """The right function for the word, or the function that must be imported."""


class ToyWordMeanings(msgspec.Struct, frozen=True):
    """The toy language's secret: which function each word means, and what each function computes.

    A policy has to learn this mapping.
    """

    secret: int
    """Seed from which the mapping is drawn."""
    right: tuple[int, ...]
    """Word -> the function that it means."""
    maps: tuple[tuple[int, int, int], ...]
    """Function -> coefficients (a, b, c): it computes ``(a·x + b·n + c) mod 97`` from value x and
    operand n."""

    def apply(self, function: int, value: int, operand: int) -> int:
        a, b, c = self.maps[function]
        return (a * value + b * operand + c) % MODULUS

    def correct_answer(self, problem: ProgramWritingExercise) -> int:
        value = problem.start
        for word, operand in problem.steps:
            value = self.apply(self.right[word], value, operand)
        return value

    def run(self, program: ToyProgram) -> int | ViolatedProgramRule:
        """Run a program in the toy language under this mapping of words to functions.

        Returns its value, or the first rule that it breaks.
        """
        value = program.start
        for step in program.steps:
            if step.function in IMPORTED and step.function not in program.imports:
                return ViolatedProgramRule(None, step.function)
            right = self.right[step.word]
            if step.function != right and step.word < NUM_CHECKED:
                return ViolatedProgramRule(step.word, right)
            value = self.apply(step.function, value, step.operand)
        return value

    def error_message(self, program: ToyProgram, broken: ViolatedProgramRule) -> str:
        """Return the error message for a program that broke a rule.

        It looks like the last line of Python's traceback.
        """
        if broken.word is None:
            return f"ImportError: from ops import f{broken.function};"
        used = next(s.function for s in program.steps if s.word == broken.word)
        return f"TypeError: not @w{broken.word}@f{used} but @w{broken.word}@f{broken.function}"

    def decoy_functions(self, word: int) -> tuple[int, ...]:
        """Return the three wrong functions that a demonstrator may confuse with the meaning of a
        word.

        They never change.
        """
        others = [number for number in range(NUM_WORDS) if number != self.right[word]]
        return tuple(random.Random(f"programs/friends/{word}").sample(others, 3))

    def python_module_source(self) -> str:
        """Return the source code of a Python module ``ops`` that implements the function library.

        The module works in any sandbox.
        """
        return _SOURCE.format(
            secret=self.secret,
            right=self.right,
            maps=self.maps,
            checked=NUM_CHECKED,
            imported=IMPORTED,
            modulus=MODULUS,
        )

    @staticmethod
    def from_source(source: str) -> ToyWordMeanings:
        """Return the function library from which ``source`` was generated.

        Raises ValueError for any other text.
        """
        match = _OF_SOURCE.match(source)
        candidate = generate_word_functions(int(match[1])) if match else None
        if candidate is None or candidate.python_module_source() != source:
            raise ValueError("this is not the source of a library")
        return candidate


@functools.cache
def generate_word_functions(secret: int = 0) -> ToyWordMeanings:
    """Generate the mapping of the toy language's words to functions from a seed.

    The result is cached.
    """
    rng = random.Random(f"programs/library/{secret}")
    right = rng.sample(range(NUM_WORDS), NUM_WORDS)
    maps = [
        (rng.randrange(1, MODULUS), rng.randrange(1, MODULUS), rng.randrange(MODULUS))
        for _ in range(NUM_WORDS)
    ]
    return ToyWordMeanings(secret, tuple(right), tuple(maps))


_SOURCE = """\
# library {secret}
_RIGHT, _MAPS = {right}, {maps}


class _Word:
    def __init__(self, number):
        self.number = number

    def __rmatmul__(self, value):
        return _Asked(value, self.number)


class _Asked:
    def __init__(self, value, word):
        self.value, self.word = value, word

    def __matmul__(self, function):
        if not isinstance(function, _Function):
            raise ImportError(f"from ops import {{function}};")
        right = _RIGHT[self.word]
        if function.number != right and self.word < {checked}:
            raise TypeError(f"not @w{{self.word}}@f{{function.number}} but @w{{self.word}}@f{{right}}")
        return _Step(function.number, self.value)


class _Step:
    def __init__(self, function, value):
        self.function, self.value = function, value

    def __matmul__(self, operand):
        a, b, c = _MAPS[self.function]
        return (a * self.value + b * operand + c) % {modulus}


class _Function:
    def __init__(self, number):
        self.number = number


_numbers = range(len(_RIGHT))
globals().update({{f"w{{n}}": _Word(n) for n in _numbers}}, **{{f"f{{n}}": _Function(n) for n in _numbers}})
__all__ = [f"w{{n}}" for n in _numbers] + [f"f{{n}}" for n in _numbers if n not in {imported}]
"""
NOT_IMPORTED = (
    "".join(f'f{number} = "f{number}"\n' for number in IMPORTED)
    + f"__all__ = {[f'f{n}' for n in IMPORTED]}\n"
)
"""Source of a second module. It binds the name of each function that must be imported to a string,
so that calling it without the import fails."""


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


def answer_reply(number: int) -> str:
    """Return the reply with which a policy gives ``number`` as its final answer."""
    return f"FINAL({number})"
