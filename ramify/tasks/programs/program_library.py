"""The library that programs call: words, the functions that they stand for, and what the library
says of a wrong call.

    50@w3@5@w9@2            a problem: begin with 50, do w3 with operand 5, then w9 with operand 2
    50@w3@f7@5@w9@f0@2      a program for it, which names the function that each word stands for; real Python
    from ops import f10;…   two of the functions have to be imported first

    ok                                       the number
    a wrong function for a checked word      TypeError: not @w3@f7 but @w3@f12
    a function that was not imported         ImportError: from ops import f10;
    a wrong function for any other word      another number, and no word of it

Which word stands for which function is a secret that all problems share: what a policy has to
learn. Functions are affine maps mod 97. Written so that each error names the rule that was broken
in the very tokens of a program that keeps it.
"""

from __future__ import annotations

import functools
import random
import re

import msgspec

MODULUS = 97
NUM_WORDS = 24
NUM_CHECKED = 16
"""Words with a smaller number are checked: a wrong function raises."""
IMPORTED = (10, 20)
"""Functions that have to be imported."""
MAX_OPERAND = 9
_PROGRAM = re.compile(
    r"(?P<imports>(?:from ops import f\d{1,2};){0,2})(?P<start>\d{1,2})(?P<steps>(?:@w\d{1,2}@f\d{1,2}@\d)+)"
)
_STEP = re.compile(r"@w(\d{1,2})@f(\d{1,2})@(\d)")
_IMPORT = re.compile(r"from ops import f(\d{1,2});")
_OF_SOURCE = re.compile(r"# library (\d{1,18})\n")
_ASKED = re.compile(r"(\d{1,2})((?:@w\d{1,2}@\d)+)")


class ProgramStep(msgspec.Struct, frozen=True):
    """One operation of a program."""

    word: int
    function: int
    operand: int


class Program(msgspec.Struct, frozen=True):
    """What a policy writes."""

    start: int
    steps: tuple[ProgramStep, ...]
    imports: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        imports = "".join(f"from ops import f{number};" for number in self.imports)
        return f"{imports}{self.start}" + "".join(
            f"@w{s.word}@f{s.function}@{s.operand}" for s in self.steps
        )

    @classmethod
    def read(cls, text: str) -> Program | None:
        """The program that ``text`` is, to the letter; None for anything else."""
        found = _PROGRAM.fullmatch(text)
        if found is None:
            return None
        steps = tuple(ProgramStep(*map(int, each)) for each in _STEP.findall(found["steps"]))
        imports = tuple(map(int, _IMPORT.findall(found["imports"])))
        known = all(s.word < NUM_WORDS and s.function < NUM_WORDS for s in steps) and set(
            imports
        ) <= set(IMPORTED)
        return cls(int(found["start"]), steps, imports) if known else None


class ProgramProblem(msgspec.Struct, frozen=True):
    """What is asked: a start value, and words with their operands."""

    start: int
    steps: tuple[tuple[int, int], ...]
    """(word, operand)"""

    @property
    def text(self) -> str:
        return f"{self.start}" + "".join(f"@w{word}@{operand}" for word, operand in self.steps)

    @classmethod
    def read(cls, text: str) -> ProgramProblem | None:
        """The problem at the beginning of ``text``, which may go on with a hint."""
        found = _ASKED.match(text)
        if found is None:
            return None
        return cls(
            int(found[1]),
            tuple((int(w), int(n)) for w, n in re.findall(r"@w(\d{1,2})@(\d)", found[2])),
        )

    def program(self, functions: dict[int, int], imports: tuple[int, ...] = ()) -> Program:
        """The program that takes ``functions`` (word -> function) for right."""
        return Program(
            self.start,
            tuple(ProgramStep(word, functions[word], operand) for word, operand in self.steps),
            imports,
        )


class RuleViolation(msgspec.Struct, frozen=True):
    """The rule that a program broke."""

    word: int | None
    """None where an import is missing."""
    function: int
    """The one that is right; or that has to be imported."""


class ProgramLibrary(msgspec.Struct, frozen=True):
    """The secret and the functions."""

    secret: int
    """What it was drawn from."""
    right: tuple[int, ...]
    """Word -> its function."""
    maps: tuple[tuple[int, int, int], ...]
    """Function -> (a, b, c) of ``(a·x + b·n + c) mod 97``."""

    def apply(self, function: int, value: int, operand: int) -> int:
        a, b, c = self.maps[function]
        return (a * value + b * operand + c) % MODULUS

    def solve(self, problem: ProgramProblem) -> int:
        value = problem.start
        for word, operand in problem.steps:
            value = self.apply(self.right[word], value, operand)
        return value

    def run(self, program: Program) -> int | RuleViolation:
        """The number that ``program`` comes to, or the first rule that it breaks."""
        value = program.start
        for step in program.steps:
            if step.function in IMPORTED and step.function not in program.imports:
                return RuleViolation(None, step.function)
            right = self.right[step.word]
            if step.function != right and step.word < NUM_CHECKED:
                return RuleViolation(step.word, right)
            value = self.apply(step.function, value, step.operand)
        return value

    def message(self, program: Program, broken: RuleViolation) -> str:
        """What Python says of it: the last line of the traceback."""
        if broken.word is None:
            return f"ImportError: from ops import f{broken.function};"
        used = next(s.function for s in program.steps if s.word == broken.word)
        return f"TypeError: not @w{broken.word}@f{used} but @w{broken.word}@f{broken.function}"

    def false_friends(self, word: int) -> tuple[int, ...]:
        """The three functions that ``word`` is easily mistaken for."""
        others = [number for number in range(NUM_WORDS) if number != self.right[word]]
        return tuple(random.Random(f"programs/friends/{word}").sample(others, 3))

    def source(self) -> str:
        """The library as the module ``ops`` of a session: real Python, for any sandbox."""
        return _SOURCE.format(
            secret=self.secret,
            right=self.right,
            maps=self.maps,
            checked=NUM_CHECKED,
            imported=IMPORTED,
            modulus=MODULUS,
        )

    @staticmethod
    def of_source(source: str) -> ProgramLibrary:
        """The library whose ``source`` this is. Raises ValueError for anything else."""
        found = _OF_SOURCE.match(source)
        known = library(int(found[1])) if found else None
        if known is None or known.source() != source:
            raise ValueError("this is not the source of a library")
        return known


@functools.cache
def library(secret: int = 0) -> ProgramLibrary:
    """The library whose secret is drawn from ``secret``."""
    rng = random.Random(f"programs/library/{secret}")
    right = rng.sample(range(NUM_WORDS), NUM_WORDS)
    maps = [
        (rng.randrange(1, MODULUS), rng.randrange(1, MODULUS), rng.randrange(MODULUS))
        for _ in range(NUM_WORDS)
    ]
    return ProgramLibrary(secret, tuple(right), tuple(maps))


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
"""A second module: under the names of what has to be imported, as long as it is not, stands nothing
that can be called."""
