"""A task of finding evidence passages in scientific papers.

The policy first chooses the relevant papers. The passages answer a question.

    context = {"P1": "# Title\\n\\n## Abstract\\n…\\n\\n## Methods\\n…", "P2": …}

    root    papers()                                        titles and abstracts
            rlm_query_batched(questions, [context["P2"], context["P5"]])
    child   search("lodavine yield"), extract_section("Results")      passages with their positions
            FINAL([[1840, 1912]])                           characters of the child's paper
    root    FINAL([["P2", 1840, 1912], ["P5", 77, 151]])

    evidence()                                              generated from a seed
    evidence(papers=(20, 40), chars=(20_000, 60_000))       any number and length of papers
    evidence(test="test.jsonl")                             files of papers, or of QASPER

The score is the F1 of the characters. A call below the root gets its own reward if its context is
one of the papers. The planted facts are paraphrased, and half of them use only the short name of
what was studied. Distractors have the same substance with another outcome, the same outcome with
another substance, or both without an effect. How to search is up to the policy.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.clients.base import Client
from ramify.errors import ConfigError
from ramify.sandbox.base import Session, digest_of
from ramify.tasks.base import SPLITS, Item, RolloutInitialState, Score, generated
from ramify.tasks.data import Row, dataset, rows_of
from ramify.tasks.scoring.answer_text import interval_f1
from ramify.tasks.scoring.rubric import Rubric, RubricScorer
from ramify.types.trajectory import Trajectory

Place = tuple[str, int, int]
"""A passage: (id of its paper, index of its first character, index after its last character)."""
SECTIONS = ("Introduction", "Methods", "Results", "Discussion")
MIN_CHARS = 1_500
RUBRIC = Rubric(
    ("every passage answers the question", "no passage that answers it is missing"), scale=4
)
_ABOUT = """\
`context` is a dict: paper id -> its text. `papers()` lists id, title and abstract of each. Give
each paper that matters to a child: rlm_query_batched([question, …], [context[id], …]). The child's
context is that text, in which search(words) and extract_section(name) find passages as
(start, end, text); it returns a list of [start, end]. Answer with FINAL([[id, start, end], …])."""
_SOURCE = '''
__all__ = ["papers", "search", "extract_section"]
import re

def _parts(text):
    """(name, start, end) of each section, with the title first."""
    heads = [(m.start(), m.end(), m.group(2)) for m in re.finditer(r"(?m)^(#{1,2}) (.+)$", text)]
    ends = [head[0] for head in heads[1:]] + [len(text)]
    return [(name, begin, end) for (_, begin, name), end in zip(heads, ends)]

def _paper():
    text = namespace.get("context")
    if not isinstance(text, str):
        raise TypeError("give one paper to a child: rlm_query(question, context[id])")
    return text

def papers():
    """[(id, title, abstract)] of the papers in the context."""
    found = namespace.get("context")
    found = found if isinstance(found, dict) else {"": found}
    listed = []
    for id, text in found.items():
        parts = _parts(text)
        title = parts[0][0] if parts else ""
        abstract = next((text[a:b].strip() for name, a, b in parts if name == "Abstract"), "")
        listed.append((id, title, abstract))
    return listed

def search(query):
    """[(start, end, sentence)] of the sentences with a word of the query, the best first."""
    text, words = _paper(), set(re.findall(r"\\w[\\w-]*", query.lower()))
    found = []
    for m in re.finditer(r"[^\\s#][^\\n]*?(?:[.?!](?=\\s)|$)", text, re.M):
        hits = len(words & set(re.findall(r"\\w[\\w-]*", m.group().lower())))
        if hits:
            found.append((-hits, m.start(), m.end(), m.group()))
    return [(a, b, s) for _, a, b, s in sorted(found)]

def extract_section(name):
    """(start, end, text) of the section called name."""
    text = _paper()
    for found, a, b in _parts(text):
        if found.lower() == name.lower():
            return (a, b, text[a:b])
    raise KeyError(f"no section {name!r}: " + ", ".join(part[0] for part in _parts(text)[1:]))
'''
_STARTS = ("Lo", "Ka", "Ve", "Mi", "Ta", "Ru", "Ne", "Zo", "Pi", "Da")
_MIDDLES = ("da", "vi", "ru", "te", "lo", "ma", "ki", "so")
_ENDS = ("vine", "lol", "trex", "mycin", "dor", "zan")
_OUTCOMES = (
    *("yield", "growth", "survival", "memory", "sleep", "pain", "fever", "weight", "stress"),
    *("fertility", "toxicity", "adhesion", "porosity", "corrosion", "latency", "drift"),
)
_FACTS = (
    "{s} raised {o} by {n} percent.",
    "With {s}, {o} was {n} percent lower than in the controls.",
    "A dose of {n} mg of {s} left {o} unchanged.",
    "In all {n} trials {o} went up once {s} was given.",
    "We saw {o} fall in {n} groups that had received {s}.",
)
_NO_EFFECT = (
    "Whether {s} has any effect on {o} was not examined.",
    "Others have discussed {s} and {o} in reviews.",
)
_FILLER = (
    "Samples were kept at {n} degrees until {m} were ready.",
    "The protocol of the {m} was approved in year {n}.",
    "Data of {n} sites were pooled by the {m}.",
    "Each of the {m} was measured {n} times.",
    "Funding came from {n} sources, and the {m} had no role in it.",
)
_THINGS = ("devices", "observers", "cohorts", "plates", "wards", "models", "archives", "panels")


class PaperEvidenceTask(msgspec.Struct, frozen=True):
    """A task that asks which passages of several papers answer a question.

    Implements ``tasks.Task``.
    """

    splits: Mapping[str, Sequence[Item]]
    judge: RubricScorer | None = None
    """Optional judge that also grades the passages. Its grade is the reward ``judged``."""
    weights: Mapping[str, float] = {}
    name: str = "evidence"

    async def prepare(self, item: Item) -> RolloutInitialState:
        return RolloutInitialState(context=dict(item.context), about=_ABOUT, on_session=_install)

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        given = parse_cited_passages(trajectory.answer, item.context)
        rewards = {"f1": _f1(given, item.gold, item)}
        if self.judge is not None:
            texts = "\n".join(item.context[id][a:b] for id, a, b in given or ())
            rewards["judged"] = self.judge(texts, item)
        calls = dict(_child_scores(item, trajectory))
        metrics = {}
        if calls:
            metrics["children_f1"] = sum(each["f1"] for each in calls.values()) / len(calls)
        chosen, right = {each[0] for each in given or ()}, {each[0] for each in item.gold}
        metrics["papers_found"] = len(chosen & right) / len(right) if right else 1.0
        return Score(rewards, calls, metrics)


def evidence(
    *,
    papers: tuple[int, int] = (4, 6),
    chars: tuple[int, int] = (1_500, 4_000),
    facts: tuple[int, int] = (2, 4),
    distractors: int = 3,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    judge: Callable[[], Client] | None = None,
    judge_weight: float = 0.5,
    seed: int = 0,
) -> PaperEvidenceTask:
    """Return a task whose questions ask for evidence passages in several papers.

    Args:
        papers: Bounds of the number of papers, at least 2.
        chars: Bounds of the length of a paper in characters, at least 1,500.
        facts: Bounds of the number of planted facts, at most two in a paper.
        distractors: Number of distracting sentences in each paper.
        train: A ``.jsonl`` or ``.parquet`` file, or rows, that replace the generated split: rows
            with ``question``, ``papers`` and ``evidence``, or rows of QASPER. The same for
            ``validation`` and ``test``.
        judge: Makes the client of a judge, whose grade is a second reward.
        judge_weight: Its weight; that of F1 is the rest of 1.
        seed: Seed of the generated items.

    Raises ConfigError for options with which no question can be asked.
    """
    for name, (low, high), least in (
        ("papers", papers, 2),
        ("chars", chars, MIN_CHARS),
        ("facts", facts, 1),
    ):
        if not least <= low <= high:
            raise ConfigError(
                f"evidence: {name}=({low}, {high}); give at least {least}, the smaller first"
            )
    if facts[1] > 2 * papers[0] or not 0 <= distractors <= chars[0] // 150:
        raise ConfigError(
            f"evidence: facts={tuple(facts)} must be at most two for each of {papers[0]} papers, "
            f"and distractors={distractors} from 0 to chars/150"
        )
    make = functools.partial(_make, papers, chars, facts, distractors)
    splits = dict(generated("evidence", make, seed=seed))
    for split, source in zip(SPLITS, (train, validation, test), strict=True):
        if source is not None:
            splits[split] = _load_items(split, source, papers[1])
    if judge is None:
        return PaperEvidenceTask(splits)
    weights = {"f1": 1 - judge_weight, "judged": judge_weight}
    return PaperEvidenceTask(splits, RubricScorer(RUBRIC, judge), weights)


async def _install(session: Session) -> None:
    await session.install("evidence", _SOURCE)


# --- scoring --------------------------------------------------------------------------------------


def parse_cited_passages(answer: Any, context: Mapping[str, str]) -> list[Place] | None:
    """Parse an answer into the passages that it names.

    It may be ``[[id, start, end], …]``, the same as JSON text, or quotes that each occur exactly
    once. Returns None for anything else.
    """
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except ValueError:
            answer = [answer]
    if not isinstance(answer, list | tuple):
        return None
    if len(answer) == 3 and isinstance(answer[1], int):
        answer = [answer]
    found: list[Place] = []
    for part in answer[:1000]:
        place = (
            _locate_quote(part, context) if isinstance(part, str) else _parse_passage(part, context)
        )
        if place is None:
            return None
        found.append(place)
    return found


def _parse_passage(part: Any, context: Mapping[str, str]) -> Place | None:
    if not isinstance(part, list | tuple) or len(part) != 3:
        return None
    id, start, end = part
    ends = isinstance(start, int) and isinstance(end, int)
    if not ends or not isinstance(id, str) or id not in context:
        return None
    return (id, start, end) if 0 <= start <= end <= len(context[id]) else None


def _locate_quote(part: str, context: Mapping[str, str]) -> Place | None:
    if not part.strip():
        return None
    found = [
        (id, text.find(part), text.count(part)) for id, text in context.items() if part in text
    ]
    if len(found) != 1 or found[0][2] != 1:
        return None
    return found[0][0], found[0][1], found[0][1] + len(part)


def _f1(given: Sequence[Place] | None, gold: Sequence[Place], item: Item) -> float:
    """Return the character-level F1 score of the passages in an answer.

    Without an answer, the score is 0.
    """
    if given is None:
        return 0.0
    lengths = [len(text) + 1 for text in item.context.values()]
    begins = dict(zip(item.context, itertools.accumulate([0, *lengths]), strict=False))
    along = [
        [(begins[id] + start, begins[id] + end) for id, start, end in each]
        for each in (given, gold)
    ]
    return interval_f1(along[0], msgspec.structs.replace(item, gold=along[1]))


def _child_scores(item: Item, trajectory: Trajectory) -> Any:
    """Yield the paper id and the rewards of each child call that reads one paper."""
    ids = {digest_of(text): id for id, text in item.context.items()}
    for call in trajectory.calls:
        id = ids.get(call.context.digest) if call.context is not None else None
        if id is None or call.parent is None:
            continue
        gold = [tuple(place) for place in item.gold if place[0] == id]
        pairs = call.answer if isinstance(call.answer, list | tuple) else None
        if pairs is not None and len(pairs) == 2 and isinstance(pairs[0], int):
            pairs = [pairs]
        own = [[id, *pair] for pair in pairs if isinstance(pair, list | tuple)] if pairs else pairs
        given = parse_cited_passages(own, item.context)
        yield call.id, {"f1": float(given == []) if not gold else _f1(given, gold, item)}


# --- generating -----------------------------------------------------------------------------------


def _make(
    papers: tuple[int, int],
    chars: tuple[int, int],
    facts: tuple[int, int],
    distractors: int,
    rng: random.Random,
) -> Item:
    substance, outcome = _substance(rng), rng.choice(_OUTCOMES)
    num = rng.randint(*papers)
    spread = rng.sample([*range(num), *range(num)], min(rng.randint(*facts), 2 * num))
    context: dict[str, str] = {}
    gold: list[Place] = []
    for index in range(num):
        id = f"P{index + 1}"
        own = spread.count(index)
        text, planted = _paper(rng, substance, outcome, own, rng.randint(*chars), distractors)
        context[id] = text
        gold += [(id, start, end) for start, end in planted]
    question = f"Which passages report the effect of {substance} on {outcome}?"
    wrong = _random_wrong_passages(rng, context, gold)
    right = [list(place) for place in gold]
    return Item(question, context, right, f"{len({g[0] for g in gold})} papers", wrong=wrong)


def _paper(
    rng: random.Random, substance: str, outcome: str, facts: int, chars: int, distractors: int
) -> tuple[str, list[tuple[int, int]]]:
    """Generate the text of one artificial paper.

    Returns its text and the (start, end) positions of the facts planted in it.
    """
    short = f"{substance[:2].upper()}-{rng.randint(10, 99)}"
    is_near = facts > 0 or rng.random() < 0.5
    about = substance if is_near else _substance(rng)
    other = rng.choice([each for each in _OUTCOMES if each != outcome])
    said = _sentence
    sentences: dict[str, list[tuple[str, bool]]] = {name: [] for name in SECTIONS}
    for name in SECTIONS:
        for _ in range(max(1, (chars - 500) // (len(SECTIONS) * 52))):
            sentences[name].append((said(rng, _FILLER), False))
    planted = [
        (said(rng, _FACTS, substance if rng.random() < 0.5 else short, outcome), True)
        for _ in range(facts)
    ]
    for _ in range(distractors):
        kind = rng.randrange(3)
        planted.append(
            (
                said(rng, _FACTS, about, other)
                if kind == 0
                else said(rng, _FACTS, _substance(rng), outcome)
                if kind == 1
                else said(rng, _NO_EFFECT, about, outcome),
                False,
            )
        )
    for each in planted:
        section = sentences[rng.choice(SECTIONS[1:])]
        section.insert(rng.randint(0, len(section)), each)
    sentences["Introduction"].insert(0, (f"We write {short} for {about}.", False))
    shown = outcome if facts else other
    head = f"# {about} and {shown}\n\n## Abstract\nA study of {about}, with {shown} as an outcome."
    return _join_sections(head, sentences)


def _join_sections(
    head: str, sentences: Mapping[str, Sequence[tuple[str, bool]]]
) -> tuple[str, list[tuple[int, int]]]:
    parts, at, found = [head], len(head), []
    for name, section in sentences.items():
        parts.append(f"\n\n## {name}\n")
        at += len(parts[-1])
        for text, is_fact in section:
            if is_fact:
                found.append((at, at + len(text)))
            parts.append(text + " ")
            at += len(text) + 1
    return "".join(parts), found


def _sentence(
    rng: random.Random, forms: Sequence[str], substance: str = "", outcome: str = ""
) -> str:
    number, thing = rng.randint(2, 90), rng.choice(_THINGS)
    return rng.choice(forms).format(s=substance, o=outcome, n=number, m=thing)


def _substance(rng: random.Random) -> str:
    return rng.choice(_STARTS) + rng.choice(_MIDDLES) + rng.choice(_ENDS)


def _random_wrong_passages(
    rng: random.Random, context: Mapping[str, str], gold: Sequence[Place]
) -> list[list[Any]]:
    """Choose random passages that do not overlap the right ones.

    There are as many of them as right ones. They serve as an example of a wrong answer.
    """
    found: list[list[Any]] = []
    while len(found) < len(gold):
        id = rng.choice(list(context))
        start = rng.randrange(len(context[id]) - 80)
        if all(id != g[0] or start + 80 <= g[1] or start >= g[2] for g in gold):
            found.append([id, start, start + 80])
    return found


# --- files ----------------------------------------------------------------------------------------


def _load_items(split: str, source: Any, num_papers: int) -> Sequence[Item]:
    rows = list(_flatten_rows(rows_of(source), num_papers))
    if not rows:
        raise ConfigError(f"evidence: {split}={source!r:.60} has no question with evidence")
    loaded = dataset({split: rows}, item=row_to_item, reward=interval_f1, name="evidence")
    return loaded.splits[split]


def row_to_item(row: Row) -> Item:
    """Convert a row of a data set about scientific papers to a task item.

    The row has ``question``, ``papers`` (each with ``id`` or ``paper_id``, ``title``, ``abstract``,
    ``full_text``) and ``evidence`` (each with ``paper_id`` and ``text``). Raises KeyError if a
    column is missing, and ValueError if a piece of evidence is in no paper.
    """
    context = {str(each.get("id") or each["paper_id"]): _text_of(each) for each in row["papers"]}
    gold = [_find_evidence(each, context) for each in row["evidence"]]
    if not gold:
        raise ValueError("its evidence is empty")
    return Item(row["question"], context, gold, str(row.get("kind") or ""), wrong=[])


def _find_evidence(piece: Row, context: Mapping[str, str]) -> list[Any]:
    id, text = str(piece["paper_id"]), str(piece["text"]).strip()
    start = context[id].find(text) if id in context else -1
    if start < 0 or not text:
        raise ValueError(f"the evidence {text[:40]!r} is not in paper {id!r}")
    return [id, start, start + len(text)]


def _text_of(paper: Row) -> str:
    parts = [f"# {paper['title']}", f"## Abstract\n{paper.get('abstract') or ''}"]
    for name, paragraphs in _sections(paper["full_text"]):
        parts.append(f"## {name or 'Section'}\n" + "\n".join(paragraphs))
    return "\n\n".join(parts)


def _sections(full_text: Any) -> Any:
    """Return the name and the paragraphs of each section of a paper.

    The full text is a list of sections, or two columns as in the QASPER data set.
    """
    if isinstance(full_text, Mapping):
        return zip(full_text["section_name"], full_text["paragraphs"], strict=True)
    return ((each["section_name"], each["paragraphs"]) for each in full_text)


def _flatten_rows(rows: Sequence[Row], num_papers: int) -> Any:
    """Convert the rows of a data file to the format that ``row_to_item`` reads.

    A row of the data set QASPER has one paper and several questions. It becomes one row for each
    question, whose context has ``num_papers`` papers: the right one and those that follow it in
    the file. Questions are left out if their paper does not contain the evidence.
    """
    for index, row in enumerate(rows):
        if "qas" not in row:
            yield row
            continue
        others = [rows[(index + step) % len(rows)] for step in range(min(num_papers, len(rows)))]
        # The right paper must not always be the first.
        turn = random.Random(str(row["id"])).randrange(len(others))
        for question, evidence in _questions_with_evidence(row["qas"]):
            text = _text_of(row)
            found = [each for each in evidence if each.strip() and each.strip() in text]
            if found:
                pieces = [{"paper_id": row["id"], "text": each} for each in found]
                papers = others[turn:] + others[:turn]
                yield {"question": question, "papers": papers, "evidence": pieces}


def _questions_with_evidence(qas: Any) -> Any:
    """Yield each question about a paper with its evidence paragraphs.

    They belong to the first answer that has any. The list is empty if no answer has evidence.
    """
    if isinstance(qas, Mapping):  # columns instead of rows
        rows = [dict(zip(qas, values, strict=True)) for values in zip(*qas.values(), strict=True)]
    else:
        rows = list(qas)
    for row in rows:
        answers = row["answers"]
        answers = answers["answer"] if isinstance(answers, Mapping) else answers
        found = [(each.get("answer") or each).get("evidence") or [] for each in answers]
        yield row["question"], next((each for each in found if each), [])
