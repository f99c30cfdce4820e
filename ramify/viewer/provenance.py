"""Find out where the values of a call came from.

The result is a list of links from the call's outputs, code and answer to other calls.

    the answer 332628  ⟵ total ⟵ sums ⟵ 0.0 … 0.11        computed from what they returned
    the output 1414    ⟵ 0.7                               the same value

``data_flow.py`` finds the sub-calls that a printed or returned expression came from. This module
searches the text for the values that those calls returned (texts, numbers, items of lists and
dicts), the longest first. A link is *certain* if the value came back through variables. Otherwise
only the texts are equal, because the model copied the value. A value that more than ``MAX_SOURCES``
calls returned gets no link. The rest of a text computed from calls is one link to all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.types.run_call_node import RunCallNode
from ramify.types.trajectory import Call, Turn, answer_text
from ramify.viewer.data_flow import NOTHING, CellValueOrigins, CellValueTracer, ValueOrigin, union
from ramify.viewer.returned_value_index import (
    NUMBER,
    CellSubcall,
    ReturnedValueSpan,
    ValueOriginIndex,
    find_values,
    is_distinctive,
    leaves,
)
from ramify.viewer.watched_run import WatchedRun

MAX_CALLS = 3_000
"""Maximum number of sub-calls per call whose questions and answers are read to link values to
them."""
MAX_LINKS = 2_000
_MAX_SHOWN = 200
"""Maximum number of sources listed in the link of a computed value."""


class TextProvenanceLink(msgspec.Struct, omit_defaults=True):
    """A link from a piece of text in a call to the calls, the output or the prompt that it came
    from."""

    turn: int
    """Turn that contains the text, or -1 for the answer and the question."""
    cell: int
    part: str
    """Part of the turn: ``stdout``, ``value``, ``code``, ``answer`` or ``question``."""
    start: int
    end: int
    sources: list[str] = []
    """Sub-calls that returned the text, or from whose results it was computed."""
    is_certain: bool = False
    """True if the value came back through variables. False if the link rests only on equal text."""
    is_computed: bool = False
    via: list[list[Any]] = []
    """Variables that the value passed through, as [variable, turn, cell, line], most recently
    assigned first.
    """
    place: list[Any] | None = None
    """The output or prompt where the value was first seen, as [turn, cell, part, start, end]."""


def provenance(run: WatchedRun, id: str) -> dict[str, Any]:
    """Return the links that show where the values of the call ``id`` came from.

    Raises StoreError if there is no such call.
    """
    call, node = run.call_detail(id).call, run.tree.nodes[id]
    returned = ValueOriginIndex()
    links = (
        _CallLinks(call, run, returned).collect_links()
        if call.kind == "rlm"
        else _plain_links(call)
    )
    links += _question_links(run, node, call)
    return {"links": links[:MAX_LINKS], "more": max(0, len(links) - MAX_LINKS)}


# --- a call with a session


class _CallLinks:
    """Collects one call's links to the sub-calls that its values came from.

    The links start in the call's outputs, code and answer. The cells of the call's session are
    traced in order.
    """

    def __init__(self, call: Call, run: WatchedRun, returned: ValueOriginIndex) -> None:
        self._call = call
        self._run = run
        self._returned = returned
        self._flow = CellValueTracer(returned.guess_source_calls)
        self._links: list[TextProvenanceLink] = []
        self._shown: list[tuple[int, int, str, str, bool]] = []
        """All outputs so far as (turn, cell, part, text, whether the text came from the
        context)."""
        self._by_place = _calls_by_place(run, call.id)
        self._asked: list[str] = []
        """Questions of all sub-calls so far."""

    def collect_links(self) -> list[TextProvenanceLink]:
        for index, turn in enumerate(self._call.turns):
            for number, cell in enumerate(turn.cells):
                self._link_cell(index, number, cell.code, cell.stdout, cell.value or "")
        if self._call.answer is not None:
            self._link_answer(self._call.turns)
        return self._links

    def _link_cell(self, turn: int, cell: int, code: str, stdout: str, value: str) -> None:
        made = self._by_place.get((turn, cell), [])
        before = dict(self._flow.env)
        flow = self._flow.trace_cell(
            turn,
            cell,
            code,
            [CellSubcall(node.id, node.kind, question) for node, question, _ in made],
        )
        for node, _, answer in made:
            self._returned.add(node.id, answer)
        self._asked += [question[:2_000] for _, question, _ in made[:200]]
        if not flow.is_parsed:
            self._flow.env = before
        self._link_code(turn, cell, code, flow)
        for part, text, start, each in self._outputs(flow, stdout, value):
            self._link_text((turn, cell, part), text, start, each)
        for part, text in (("stdout", stdout), ("value", value)):
            printed = union([*flow.prints, flow.echo])
            self._shown.append((turn, cell, part, text, printed.from_context))

    def _outputs(
        self, flow: CellValueOrigins, stdout: str, value: str
    ) -> Iterator[tuple[str, str, int, ValueOrigin]]:
        """Yield the outputs of a cell, each as (kind of output, text, offset of the text, origin).

        If each print wrote one line, the standard output is yielded line by line.
        """
        if not flow.is_parsed:
            everything = ValueOrigin(guesses=self._returned.call_ids)
            yield from (("stdout", stdout, 0, everything), ("value", value, 0, everything))
            return
        lines = stdout.splitlines(keepends=True)
        if flow.is_straight and len(lines) == len(flow.prints):
            start = 0
            for line, each in zip(lines, flow.prints, strict=True):
                yield "stdout", line, start, each
                start += len(line)
        else:
            yield "stdout", stdout, 0, union(flow.prints)
        yield "value", value, 0, flow.echo

    def _link_code(self, turn: int, cell: int, code: str, flow: CellValueOrigins) -> None:
        lines = code.split("\n")
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)
        for use in flow.uses:
            # A column of the parser counts bytes.
            column = len(lines[use.line - 1].encode()[: use.column].decode(errors="ignore"))
            start = starts[use.line - 1] + column
            self._add_link(
                (turn, cell, "code"), start, start + len(use.text), use.flow, computed=True
            )

    def _link_text(
        self, place: tuple[int, int, str], text: str, start: int, flow: ValueOrigin
    ) -> None:
        """Link the values in ``text`` to the calls that they came from, given the text's origin
        ``flow``.

        A value that a sub-call returned is linked to that call. The rest of the text is linked to
        all calls that it was computed from.
        """
        if not flow.calls and not flow.guesses:
            return
        spans = find_values(text, self._returned, flow.calls | flow.guesses)
        for span in spans:
            certain = span.calls & flow.calls
            found = ValueOrigin(certain) if certain else ValueOrigin(guesses=span.calls)
            self._add_link(place, start + span.start, start + span.end, found, names=flow.names)
        self._link_computed_numbers(place, text, start, flow, spans)

    def _link_computed_numbers(
        self,
        place: tuple[int, int, str],
        text: str,
        start: int,
        flow: ValueOrigin,
        spans: Sequence[ReturnedValueSpan],
    ) -> None:
        """Link computed numbers in ``text`` to the calls from whose results they were computed.

        Numbers that a call returned are already linked. A text without numbers or returned values
        is linked as a whole.
        """
        if not flow.calls:
            return
        taken = [(span.start, span.end) for span in spans]
        for match in NUMBER.finditer(text):
            if any(a < match.end() and match.start() < b for a, b in taken):
                continue
            if not self._was_given(match[0]):
                self._add_link(
                    place, start + match.start(), start + match.end(), flow, computed=True
                )
                taken.append(match.span())
        stripped = text.strip()
        if not taken and stripped:
            at = start + text.index(stripped)
            self._add_link(place, at, at + len(stripped), flow, computed=True)

    def _was_given(self, number: str) -> bool:
        """Return True if a number already occurs in a question or in an earlier output that shows
        the context."""
        texts = [self._call.question, *(asked for asked in self._asked)]
        texts += [shown for *_, shown, from_context in self._shown if from_context]
        return any(_position(text, number) >= 0 for text in texts)

    def _link_answer(self, turns: Sequence[Turn]) -> None:
        text = answer_text(self._call.answer)
        flow = self._flow.final
        # It is text unless code of the last cell that ran gave it.
        if flow is None or not any(turn.cells for turn in turns[-2:]):
            flow = ValueOrigin(guesses=self._returned.call_ids)
        self._link_answer_items(text, 0, self._call.answer, flow)
        self._seen_before(text)
        if not any(link.part == "answer" for link in self._links):
            self._from_variables(text, flow)

    def _from_variables(self, text: str, flow: ValueOrigin) -> None:
        """Link an answer computed from the context to the variables and the output that it came
        from.

        The output is the last one that shows the context.
        """
        via = self._source_variables(flow.names)
        printed = [each for each in self._shown if each[4] and each[3].strip()]
        if not via and not (flow.from_context and printed):
            return
        place: list[Any] | None = None
        if printed:
            turn, cell, part, shown, _ = printed[-1]
            place = [turn, cell, part, 0, len(shown.rstrip("\n"))]
        self._links.append(
            TextProvenanceLink(
                -1,
                -1,
                "answer",
                0,
                len(text),
                is_certain=True,
                is_computed=True,
                via=via,
                place=place,
            )
        )

    def _link_answer_items(self, text: str, start: int, value: Any, flow: ValueOrigin) -> None:
        """Add the links that show where the answer's values came from.

        Items of a dict or list with known origins are linked separately.
        """
        entries = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        if not flow.items or not entries:
            return self._link_text((-1, -1, "answer"), text, start, flow)
        at = 0
        for key, item in entries:
            shown = msgspec.json.encode(item).decode()
            if isinstance(value, dict):
                at = max(at, text.find(f"{msgspec.json.encode(key).decode()}:", at))
            at = text.find(shown, at)
            if at < 0:
                return
            inner = shown[1:-1] if isinstance(item, str) else shown
            offset = at + (len(shown) - len(inner)) // 2
            part = flow.items.get(key, NOTHING)
            self._link_answer_items(inner, start + offset, item, _inherit_names(part, flow))
            at += len(shown)

    def _seen_before(self, text: str) -> None:
        """Link each answer value that has no link yet to the first output that shows it.

        Values that a call returned already have links.
        """
        taken = [(link.start, link.end) for link in self._links if link.part == "answer"]
        matches = [
            (at, at + len(leaf), leaf)
            for leaf in sorted(leaves(self._call.answer), key=len, reverse=True)
            if (at := text.find(leaf)) >= 0 and is_distinctive(leaf)
        ]
        matches += [(m.start(), m.end(), m[0]) for m in NUMBER.finditer(text)]
        for start, end, value in matches:
            if any(a < end and start < b for a, b in taken):
                continue
            for turn, cell, part, shown, from_context in self._shown:
                at = _position(shown, value)
                if at >= 0:
                    place = [turn, cell, part, at, at + len(value)]
                    is_certain = from_context and self._flow_is_from_context()
                    self._links.append(
                        TextProvenanceLink(
                            -1, -1, "answer", start, end, is_certain=is_certain, place=place
                        )
                    )
                    taken.append((start, end))
                    break

    def _flow_is_from_context(self) -> bool:
        return self._flow.final is not None and self._flow.final.from_context

    def _add_link(
        self,
        place: tuple[int, int, str],
        start: int,
        end: int,
        flow: ValueOrigin,
        *,
        names: frozenset[str] = frozenset(),
        computed: bool = False,
    ) -> None:
        sources = sorted(flow.calls or flow.guesses, key=_id_sort_key)
        if not sources:
            return
        known = self._source_variables(flow.names | names)
        self._links.append(
            TextProvenanceLink(
                *place,
                start,
                end,
                sources[:_MAX_SHOWN],
                bool(flow.calls),
                computed and place[2] != "code",
                known,
            )
        )

    def _source_variables(self, names: frozenset[str]) -> list[list[Any]]:
        """Return the variables among ``names`` whose values came from sub-calls or the context.

        Each comes with the turn, cell and line of its last assignment, most recent first.
        """
        known = [
            [name, *self._flow.defined[name]]
            for name in sorted(names)
            if name in self._flow.defined and self._flow.env.get(name)
        ]
        return sorted(known, key=lambda each: each[1:], reverse=True)


def _inherit_names(part: ValueOrigin, whole: ValueOrigin) -> ValueOrigin:
    return ValueOrigin(
        part.calls, part.guesses, part.from_context, part.names or whole.names, part.items
    )


def _id_sort_key(id: str) -> list[int]:
    return [int(part) if part.isdecimal() else 0 for part in re.split(r"[.:]", id)]


def _position(text: str, value: str) -> int:
    """Return the position of ``value`` in ``text`` as a whole word.

    Returns -1 if it does not occur.
    """
    match = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w])", text) if value else None
    return match.start() if match else -1


def _calls_by_place(
    run: WatchedRun, id: str
) -> dict[tuple[int, int], list[tuple[RunCallNode, str, Any]]]:
    """Return the sub-calls of the call ``id``, grouped by the turn and cell whose code made them.

    Each comes with its question and answer.
    """
    found: dict[tuple[int, int], list[tuple[RunCallNode, str, Any]]] = {}
    children = [node for node in run.tree.order if node.parent and node.parent.call == id]
    for node in children[:MAX_CALLS]:
        assert node.parent is not None
        try:
            question, answer = run.call_question_and_answer(node)
        except StoreError:  # damaged: the page already says so
            continue
        place = (node.parent.turn, node.parent.cell)
        found.setdefault(place, []).append((node, question, answer))
    return found


# --- a plain call, and a call's question


def _plain_links(call: Call) -> list[TextProvenanceLink]:
    """Link the answer of a plain call, or the numbers in it, to equal text in the prompt.

    A plain call is one without a session.
    """
    if not call.turns or call.answer is None:
        return []
    text, links = answer_text(call.answer), []
    prompt = call.turns[0].prompt[-1].content if call.turns[0].prompt else ""
    whole = text.strip()
    matches = [(m.start(), m.end(), m[0]) for m in NUMBER.finditer(text)]
    if is_distinctive(whole) and _position(prompt, whole) >= 0:
        matches = [(text.index(whole), text.index(whole) + len(whole), whole)]
    for start, end, value in matches:
        at = _position(prompt, value) if is_distinctive(value) else -1
        if at >= 0:
            place = [0, -1, "prompt", at, at + len(value)]
            links.append(TextProvenanceLink(-1, -1, "answer", start, end, place=place))
    return links


def _question_links(run: WatchedRun, node: RunCallNode, call: Call) -> list[TextProvenanceLink]:
    """Link values in a child call's question to the earlier sub-calls that returned them."""
    parent = run.tree.nodes.get(node.parent.call) if node.parent else None
    if parent is None or node.parent is None or parent.kind != "rlm":
        return []
    returned = ValueOriginIndex()
    flow = CellValueTracer(returned.guess_source_calls)
    place = (node.parent.turn, node.parent.cell)
    by_place = _calls_by_place(run, parent.id)
    prompt = NOTHING
    for index, turn in enumerate(run.call_detail(parent.id).call.turns[: place[0] + 1]):
        for number, cell in enumerate(turn.cells):
            if (index, number) > place:
                break
            made = by_place.get((index, number), [])
            ran = flow.trace_cell(
                index,
                number,
                cell.code,
                [CellSubcall(each.id, each.kind, asked) for each, asked, _ in made],
            )
            for each, _, answer in made:
                if each.index < node.index:
                    returned.add(each.id, answer)
            if (index, number) == place:
                prompt = ran.prompts.get(node.id, NOTHING)
    links = []
    for span in find_values(call.question, returned, prompt.calls | prompt.guesses):
        sources = sorted(span.calls & prompt.calls or span.calls, key=_id_sort_key)
        certain = bool(span.calls & prompt.calls)
        links.append(TextProvenanceLink(-1, -1, "question", span.start, span.end, sources, certain))
    return links
