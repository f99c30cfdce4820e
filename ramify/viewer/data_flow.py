"""Trace the values of a session's variables back to model calls.

The analysis uses only the session's code, which is parsed but never run.

    sums = rlm_query_batched([…], sheets)      sums  ← 0.0 … 0.11
    total = sum(sums)                          total ← sums ← 0.0 … 0.11
    print(total)                               what is printed ← 0.0 … 0.11

Model calls that the code makes are called sub-calls. The result is an upper bound: a value may come
from fewer sub-calls than its ``ValueOrigin`` names, but not from others. The exception is code that
this module does not follow, such as ``exec`` or attributes of classes that the code defines.
Conditions count too: a counter that grows under ``if "yes" in reply`` comes from that reply.
provenance.py finds where the values appear in texts.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ramify.viewer.returned_value_index import QUERIES, CellSubcall, match_subcalls_to_expressions

_MUTATORS = {"append", "extend", "add", "update", "insert", "setdefault", "appendleft"}
_SAME_ITEMS = {"list", "tuple"}
_MAX_ITEMS = 1000


class ValueOrigin(msgspec.Struct, frozen=True):
    """The origin of a value in a session: the sub-calls, the context and the variables that it was
    made from.

    A sub-call is a model call that the session's code made.
    """

    calls: frozenset[str] = frozenset()
    """Sub-calls from whose results the value was made."""
    guesses: frozenset[str] = frozenset()
    """Sub-calls that returned the same text as a literal in the code, which the model has probably
    copied."""
    from_context: bool = False
    """True if the value was made from ``context``."""
    names: frozenset[str] = frozenset()
    """Variables from which the value was made."""
    items: dict[Any, ValueOrigin] | None = None
    """Origin of each item of a list, tuple or dict, if known."""

    def __bool__(self) -> bool:
        return bool(self.calls or self.guesses or self.from_context)

    def without_items(self) -> ValueOrigin:
        """Return the origin of a list or dict as a whole, without the origins of its items."""
        return ValueOrigin(self.calls, self.guesses, self.from_context, self.names)


NOTHING = ValueOrigin()


def union(flows: Iterable[ValueOrigin]) -> ValueOrigin:
    """Merge several origins into one that includes all of them."""
    several = [flow for flow in flows if flow or flow.names]
    if len(several) == 1:
        return several[0].without_items()
    return ValueOrigin(
        frozenset().union(*(flow.calls for flow in several)),
        frozenset().union(*(flow.guesses for flow in several)),
        any(flow.from_context for flow in several),
        frozenset().union(*(flow.names for flow in several)),
    )


class TracedExpression(msgspec.Struct, frozen=True):
    """An expression in a cell's code whose value came from sub-calls.

    It is a variable, or a call such as ``llm_query``.
    """

    line: int
    """Line number in the cell, from 1."""
    column: int
    """Position in the line, from 0."""
    text: str
    flow: ValueOrigin


class CellValueOrigins(msgspec.Struct):
    """The origins of the values in one code cell: of its prints, last expression, prompts and
    variables."""

    is_parsed: bool = True
    prints: list[ValueOrigin] = []
    is_straight: bool = True
    """True if each print certainly ran once, in the order of ``prints``."""
    echo: ValueOrigin = NOTHING
    """Origin of the last expression's value."""
    uses: list[TracedExpression] = []
    prompts: dict[str, ValueOrigin] = {}
    """For each sub-call, the origin of its prompt and context."""


class CellValueTracer:
    """Traces the values in the code cells of one session back to their origins.

    The cells must be given in order.
    """

    def __init__(self, guess: Callable[[Any], frozenset[str]] = lambda _: frozenset()) -> None:
        """Create a tracer for one session.

        ``guess`` takes a literal in the code and returns the earlier sub-calls that returned the
        same value. The model may have copied the literal from them.
        """
        self.env: dict[str, ValueOrigin] = {"context": ValueOrigin(from_context=True)}
        self.defined: dict[str, tuple[int, int, int]] = {}
        """Place (turn, cell, line) of each variable's last assignment."""
        self.final: ValueOrigin | None = None
        """Origin of the value that was last passed to ``FINAL``."""
        self._guess = guess
        self._place = (0, 0)
        self._control: list[ValueOrigin] = []
        self._loops = 0
        self._cell = CellValueOrigins()
        self._sites: dict[ast.AST, list[str]] = {}

    def trace_cell(
        self, turn: int, cell: int, code: str, made: Sequence[CellSubcall]
    ) -> CellValueOrigins:
        """Trace the values in one code cell and return their origins.

        ``made`` lists the sub-calls that the code made.
        """
        self._cell = CellValueOrigins(prints=[], uses=[], prompts={})
        self._place = (turn, cell)
        try:
            tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError):
            self._cell.is_parsed = False
            return self._cell
        self._sites = match_subcalls_to_expressions(tree, made)
        try:
            for statement in tree.body:
                self._trace_statement(statement)
            if tree.body and isinstance(last := tree.body[-1], ast.Expr):
                self._cell.echo = self._trace_quietly(last.value)
        except RecursionError:
            self._cell.is_parsed = False
        return self._cell

    def _trace_quietly(self, node: ast.expr) -> ValueOrigin:
        """Return the origin of an already traced expression without recording it again.

        Its prints and uses were already recorded.
        """
        prints, uses = len(self._cell.prints), len(self._cell.uses)
        flow = self._trace_expression(node)
        del self._cell.prints[prints:], self._cell.uses[uses:]
        return flow

    # --- statements -------------------------------------------------------------------------------

    def _trace_statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign():
                flow = self._trace_expression(node.value)
                for target in node.targets:
                    self._assign(target, flow)
            case ast.AnnAssign(value=value) if value is not None:
                self._assign(node.target, self._trace_expression(value))
            case ast.AugAssign():
                flow = self._trace_expression(node.value)
                self._assign(node.target, flow, adds=True)
            case ast.For() | ast.AsyncFor():
                self._trace_loop(node)
            case ast.While():
                self._trace_under_condition(
                    self._trace_expression(node.test), [*node.body, *node.orelse], loops=True
                )
            case ast.If():
                before = len(self._cell.prints)
                self._trace_under_condition(
                    self._trace_expression(node.test), [*node.body, *node.orelse]
                )
                self._cell.is_straight &= before == len(self._cell.prints)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    flow = self._trace_expression(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, flow)
                self._trace_block(node.body)
            case ast.Try():
                self._trace_block(node.body)
                for handler in node.handlers:
                    if handler.name:  # an error of a sub-call holds its siblings' results
                        failed = frozenset().union(*(map(frozenset, self._sites.values())))
                        self.env[handler.name] = ValueOrigin(failed)
                    before = len(self._cell.prints)
                    self._keep_and_block(handler.body)
                    self._cell.is_straight &= before == len(self._cell.prints)
                self._trace_block([*node.orelse, *node.finalbody])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._trace_function(node)
            case ast.ClassDef():
                self._trace_block(node.body)
            case ast.Expr():
                self._trace_expression(node.value)
            case ast.Return(value=value) if value is not None:
                self._trace_expression(value)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._trace_expression(child)

    def _trace_block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._trace_statement(statement)

    def _keep_and_block(self, body: Sequence[ast.stmt]) -> None:
        """Trace a block of code that may or may not have run.

        A variable that the block assigns may still have its earlier value, so both origins are
        merged.
        """
        before = dict(self.env)
        self._trace_block(body)
        for name, flow in before.items():
            if self.env.get(name) is not flow:
                self.env[name] = union([flow, self.env.get(name, NOTHING)])

    def _trace_under_condition(
        self, test: ValueOrigin, body: Sequence[ast.stmt], *, loops: bool = False
    ) -> None:
        self._control.append(test.without_items())
        self._loops += loops
        for _ in range(2 if loops else 1):  # twice, for what is carried from one round to the next
            prints, uses = len(self._cell.prints), len(self._cell.uses)
            self._keep_and_block(body)
            if loops and _ == 0:
                del self._cell.prints[prints:], self._cell.uses[uses:]
        self._loops -= loops
        self._control.pop()

    def _trace_loop(self, node: ast.For | ast.AsyncFor) -> None:
        self._assign(node.target, self._element_origin(self._trace_expression(node.iter)))
        before = len(self._cell.prints)
        self._trace_under_condition(NOTHING, [*node.body, *node.orelse], loops=True)
        self._cell.is_straight &= before == len(self._cell.prints)

    def _trace_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Trace the definition of a function.

        The function's origin includes all variables and calls in its body. If its body prints, the
        cell's prints have no certain order.
        """
        before = dict(self.env)
        prints = len(self._cell.prints)
        self._trace_block(node.body)
        inner = [
            self._trace_quietly(child)
            for child in ast.walk(node)
            if isinstance(child, ast.Name | ast.Call)
        ]
        parameters = {arg.arg for arg in ast.walk(node) if isinstance(arg, ast.arg)}
        self.env = {**before, node.name: _without_names(union(inner), parameters)}
        self._cell.is_straight &= prints == len(self._cell.prints)

    def _assign(self, target: ast.expr, flow: ValueOrigin, *, adds: bool = False) -> None:
        match target:
            case ast.Name(id=name):
                control = union(self._control)
                if control:
                    whole = union([flow, control])
                    flow = _with_items(whole, flow.items)
                if adds:
                    flow = union([self.env.get(name, NOTHING), flow])
                self.env[name] = flow
                self.defined[name] = (*self._place, target.lineno)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for index, each in enumerate(targets):
                    inner = each.value if isinstance(each, ast.Starred) else each
                    known = flow.items.get(index) if flow.items else None
                    part = known if known is not None and inner is each else flow.without_items()
                    self._assign(inner, part, adds=adds)
            case ast.Subscript():
                self._assign_item(target, flow)
            case ast.Attribute(value=value):
                self._add_to(value, flow)
            case _:
                pass

    def _assign_item(self, target: ast.Subscript, flow: ValueOrigin) -> None:
        """Record an assignment to an item of a container, such as ``answer["content"] = …``.

        If the key is a constant, the item gets a separate origin.
        """
        key = target.slice.value if isinstance(target.slice, ast.Constant) else None
        if not isinstance(target.value, ast.Name):
            return self._add_to(target.value, flow)
        name = target.value.id
        old = self.env.get(name, NOTHING)
        # Items keep separate origins only while all of them have constant keys.
        is_known = key is not None and (old.items is not None or not old)
        items = {**(old.items or {}), key: flow} if is_known else None
        whole = union([old, flow, self._trace_expression(target.slice), *self._control])
        self.env[name] = _with_items(whole, items)
        self.defined[name] = (*self._place, target.lineno)
        if name == "answer" and key == "content":
            self.final = flow

    def _add_to(self, node: ast.expr, flow: ValueOrigin) -> None:
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            node = node.func if isinstance(node, ast.Call) else node.value
        if isinstance(node, ast.Name):
            whole = union([self.env.get(node.id, NOTHING), flow, *self._control])
            self.env[node.id] = whole
            self.defined[node.id] = (*self._place, node.lineno)

    # --- expressions ------------------------------------------------------------------------------

    def _trace_expression(self, node: ast.expr) -> ValueOrigin:
        match node:
            case ast.Name(id=name):
                return self._trace_name(node, name)
            case ast.Constant(value=value):
                calls = self._guess(value)
                return ValueOrigin(guesses=calls) if calls else NOTHING
            case ast.Call():
                return self._trace_call(node)
            case ast.Subscript():
                base, index = self._trace_expression(node.value), self._trace_expression(node.slice)
                key = _constant(node.slice)
                if base.items is not None and key is not None:
                    if isinstance(key, int) and key < 0:
                        key += len(base.items)
                    if key in base.items:
                        return _with_names(base.items[key], base.names)
                return union([base, index])
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                flows = [self._trace_expression(part) for part in parts]
                has_star = any(isinstance(part, ast.Starred) for part in parts)
                items = None if has_star else dict(enumerate(flows))
                return _with_items(union(flows), items)
            case ast.Dict(keys=keys, values=values):
                flows = [self._trace_expression(value) for value in values]
                names = [_constant(key) if key else None for key in keys]
                extra = [self._trace_expression(key) for key in keys if key is not None]
                is_known = None not in names
                whole = union([*flows, *extra])
                by_key: dict[Any, ValueOrigin] = dict(zip(names, flows, strict=True))
                return _with_items(whole, by_key if is_known else None)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._trace_comprehension(node, [node.elt])
            case ast.DictComp():
                return self._trace_comprehension(node, [node.key, node.value])
            case ast.NamedExpr(target=target, value=value):
                flow = self._trace_expression(value)
                self._assign(target, flow)
                return flow
            case ast.Starred(value=value):
                return self._trace_expression(value)
            case ast.Lambda(body=body):
                return self._trace_expression(body)
            case _:
                return union(
                    self._trace_expression(child)
                    for child in ast.iter_child_nodes(node)
                    if isinstance(child, ast.expr)
                )

    def _trace_name(self, node: ast.Name, name: str) -> ValueOrigin:
        if node in self._sites:  # ``pool.map(llm_query, prompts)``
            return ValueOrigin(frozenset(self._sites[node]))
        flow = self.env.get(name)
        if not flow:
            return NOTHING
        if name != "context" and (flow.calls or flow.guesses):
            self._cell.uses.append(
                TracedExpression(node.lineno, node.col_offset, name, flow.without_items())
            )
        return _with_names(flow, frozenset([name]))

    def _trace_call(self, node: ast.Call) -> ValueOrigin:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        flows = [self._trace_expression(argument) for argument in arguments]
        if name in QUERIES and node in self._sites:
            return self._trace_query(node, name, flows)
        is_map = name == "map" or (
            isinstance(node.func, ast.Attribute) and node.func.attr in ("map", "imap")
        )
        if is_map and node.args and node.args[0] in self._sites and not self._loops:
            calls = self._sites[node.args[0]]
            items = {index: ValueOrigin(frozenset([call])) for index, call in enumerate(calls)}
            return ValueOrigin(frozenset(calls), items=items)
        if name == "print":
            self._cell.prints.append(union(flows))
            self._cell.is_straight &= not self._loops
            return NOTHING
        if name in ("FINAL", "FINAL_VAR"):
            self._trace_final_call(name, node, flows)
            return NOTHING
        if name in _SAME_ITEMS and len(flows) == 1:
            return flows[0]
        whole = union(flows)
        if isinstance(node.func, ast.Attribute):
            base = self._trace_expression(node.func.value)
            if node.func.attr in _MUTATORS:
                self._add_to(node.func.value, whole)
            if node.func.attr in ("format", "join") or base:
                return union([base, whole])
            return whole
        return union([whole, self._trace_expression(node.func)]) if name not in QUERIES else whole

    def _trace_query(self, node: ast.Call, name: str, flows: Sequence[ValueOrigin]) -> ValueOrigin:
        calls = self._sites[node]
        made_from = union([*flows, *self._control])
        for index, call in enumerate(calls):
            known = flows[0].items if flows and flows[0].items else None
            part = known.get(index) if known is not None and len(known) == len(calls) else None
            self._cell.prompts[call] = union([part, *flows[1:]]) if part is not None else made_from
        flow = ValueOrigin(frozenset(calls))
        self._cell.uses.append(TracedExpression(node.func.lineno, node.func.col_offset, name, flow))
        if not name.endswith("_batched") or len(calls) > _MAX_ITEMS:
            return flow
        items = {index: ValueOrigin(frozenset([call])) for index, call in enumerate(calls)}
        return ValueOrigin(frozenset(calls), items=None if self._loops else items)

    def _trace_final_call(self, name: str, node: ast.Call, flows: Sequence[ValueOrigin]) -> None:
        argument = _constant(node.args[0]) if node.args else None
        if name == "FINAL_VAR" and isinstance(argument, str):
            flow = _with_names(self.env.get(argument, NOTHING), frozenset([argument]))
        else:
            flow = flows[0] if len(flows) == 1 else union(flows)
        control = union(self._control)
        self.final = _with_items(union([flow, control]), flow.items) if control else flow

    def _trace_comprehension(self, node: Any, parts: Sequence[ast.expr]) -> ValueOrigin:
        before, tests, items = dict(self.env), [], None
        for number, generator in enumerate(node.generators):
            source = self._trace_expression(generator.iter)
            if number == 0 and len(node.generators) == 1 and not generator.ifs:
                items = source.items
            self._assign(generator.target, self._element_origin(source))
            tests += [self._trace_expression(test) for test in generator.ifs]
        self._loops += 1
        whole = union([*(self._trace_expression(part) for part in parts), *tests])
        single = self._one_by_one(node, parts, items, whole)
        self._loops -= 1
        self.env = before
        return _with_items(whole, single)

    def _one_by_one(
        self,
        node: Any,
        parts: Sequence[ast.expr],
        items: dict[Any, ValueOrigin] | None,
        whole: ValueOrigin,
    ) -> dict[Any, ValueOrigin] | None:
        """Return the origin of each item of a comprehension such as ``[f(x) for x in xs]``.

        Returns None unless the items of ``xs`` or the calls made by ``f`` are known.
        """
        if len(parts) != 1 or isinstance(node, ast.SetComp):
            return None
        made = [site for site in ast.walk(parts[0]) if site in self._sites]
        if len(made) == 1 and len(node.generators) == 1 and made[0] is parts[0]:
            calls = self._sites[made[0]]
            return {index: ValueOrigin(frozenset([call])) for index, call in enumerate(calls)}
        if items is None or made or len(items) > _MAX_ITEMS:
            return None
        found = {}
        for key, flow in items.items():
            self._assign(node.generators[0].target, flow)
            found[key] = self._trace_quietly(parts[0])
        return found

    def _element_origin(self, flow: ValueOrigin) -> ValueOrigin:
        """Return the origin of one element of an iterable, given the origin of the iterable."""
        parts = list(flow.items.values()) if flow.items else []
        inner = [part.items for part in parts]
        if parts and all(inner):
            keys = inner[0].keys() if inner[0] else ()
            items = {key: union(each.get(key, NOTHING) for each in inner if each) for key in keys}
            return _with_items(flow, items)
        return flow.without_items()


def _with_items(flow: ValueOrigin, items: dict[Any, ValueOrigin] | None) -> ValueOrigin:
    return ValueOrigin(flow.calls, flow.guesses, flow.from_context, flow.names, items)


def _without_names(flow: ValueOrigin, names: set[str]) -> ValueOrigin:
    return ValueOrigin(flow.calls, flow.guesses, flow.from_context, flow.names - names)


def _with_names(flow: ValueOrigin, names: frozenset[str]) -> ValueOrigin:
    return ValueOrigin(flow.calls, flow.guesses, flow.from_context, flow.names | names, flow.items)


def _constant(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, str | int) else None
