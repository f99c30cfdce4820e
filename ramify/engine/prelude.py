"""The functions and variables available to the model in its session.

This source runs *inside* the session, never in the host.

Standard library only. Before this source is executed, the guest provides ``call_host``,
``SessionHostCallError``, ``namespace``, ``last_output`` and ``portable``. Afterwards it binds every name of
``__all__`` as a reserved name of the notebook.
"""

from __future__ import annotations

import builtins
import enum
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import dataclasses
    from collections.abc import Callable

    call_host: Callable[..., Any]
    namespace: dict[str, Any]
    last_output: Callable[[], str]
    portable: Callable[[Any], Any]
    notebook: Any

    class SessionHostCallError(Exception):
        kind: str
        data: dict[str, Any]


__all__ = [
    "FINAL",
    "FINAL_VAR",
    "SHOW_VARS",
    "SubcallError",
    "answer",
    "history",
    "llm_query",
    "llm_query_batched",
    "outputs",
    "rlm_query",
    "rlm_query_batched",
]

_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<no value>"})()


class SubcallError(RuntimeError):
    """Some sub-calls failed.

    ``results`` has every reply that did arrive, None where one failed; ``failures`` maps the index
    of each that failed to the reason, and ``kinds`` to its kind: length, content_filter, refusal,
    limit, unavailable or error (``kind`` is the first of them); ``partial`` maps the index of each
    that was cut at its limit to its text.
    """

    def __init__(
        self,
        message: str,
        results: list[Any] | None = None,
        failures: dict[int, str] | None = None,
        partial: dict[int, str] | None = None,
        kinds: dict[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.results: list[Any] = results or []
        self.failures: dict[int, str] = failures or {}
        self.partial: dict[int, str] = partial or {}
        self.kinds: dict[int, str] = kinds or {}
        self.kind: str = next(iter(self.kinds.values()), "error")


received: list[Any] = []
"""Replies to the calls of the current cell; None where a call failed."""


def _ask(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    replies = list(ask_host(name, *args, **kwargs))
    received.extend(replies)
    return replies


def ask_host(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a host function from session code, and return its answer.

    Raises SubcallError if sub-calls failed.
    """
    try:
        return call_host(name, *args, **kwargs)
    except SessionHostCallError as error:
        if error.kind != "SubcallError":
            kind = getattr(builtins, error.kind, None)
            raise (
                kind(str(error))
                if isinstance(kind, type) and issubclass(kind, Exception)
                else error
            ) from None
        names = ("results", "failures", "partial", "kinds")
        given = [error.data.get(name) for name in names]
        received.extend(given[0] or [None])
        raise SubcallError(str(error), *given) from None


def llm_query(prompt: str, model: str | None = None, schema: Any = None, images: Any = None) -> Any:
    """Ask a language model once; returns its text, or a value if ``schema`` (a JSON schema, a type
    such as ``list[int]`` or a dataclass) is given.

    It sees only ``prompt`` and ``images`` (a list of pictures). Raises SubcallError.
    """
    return llm_query_batched([prompt], model, schema, None if images is None else [images])[0]


def llm_query_batched(
    prompts: Sequence[str], model: str | None = None, schema: Any = None, images: Any = None
) -> list[Any]:
    """Ask for every prompt at once; replies in the order of the prompts.

    ``images`` has a list of pictures for each prompt. Raises SubcallError after all have ended.
    """
    if isinstance(prompts, str):
        raise TypeError("llm_query_batched takes a list of prompts; for a single one use llm_query")
    given = {} if images is None else {"images": [_pictures(each) for each in images]}
    return _ask(
        "llm_query_batched", _texts(prompts), model=model, schema=schema_of(schema), **given
    )


def _pictures(images: Any) -> list[Any]:
    """Return the pictures of one prompt as values that the host accepts.

    None means no pictures, and a single picture is treated as a list of one.
    """
    if images is None:
        return []
    single = isinstance(images, (Mapping, bytes, bytearray, memoryview)) or hasattr(images, "save")
    return [_picture(image) for image in ([images] if single else images)]


def _picture(image: Any) -> Any:
    """Return a picture as bytes if it is a buffer of bytes or a Pillow image, which is converted to
    PNG.

    Any other value is returned unchanged.
    """
    if isinstance(image, (bytearray, memoryview)):
        return bytes(image)
    if not isinstance(image, bytes) and callable(getattr(image, "save", None)):
        import io

        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()
    return image


def _texts(prompts: Any) -> list[str]:
    """Convert the prompts to text.

    None and bytes are rejected, because a model would otherwise be asked ``None`` or ``b'…'``.
    """
    if not hasattr(prompts, "__iter__"):
        raise TypeError(f"prompts must be a list of str, not {type(prompts).__name__}")
    texts: list[str] = []
    for prompt in prompts:
        if prompt is None or isinstance(prompt, (bytes, bytearray)):
            raise TypeError(f"prompt {len(texts)} must be a str, not {type(prompt).__name__}")
        texts.append(str(prompt))
    return texts


def rlm_query(prompt: str, context: Any = _MISSING, model: str | None = None) -> Any:
    """Start a child like you, with a session of its own; returns its final answer.

    Its ``context`` is the value given here, by default yours. Raises SubcallError.
    """
    contexts = None if context is _MISSING or context is None else [context]
    return rlm_query_batched([prompt], contexts, model)[0]


def rlm_query_batched(
    prompts: Sequence[str], contexts: Sequence[Any] | None = None, model: str | None = None
) -> list[Any]:
    """Start a child for every prompt at once, with the context of the same index; their answers in order."""
    if isinstance(prompts, str):
        raise TypeError("rlm_query_batched takes a list of prompts; for a single one use rlm_query")
    is_list = hasattr(contexts, "__len__") and not isinstance(contexts, (str, bytes, Mapping))
    if contexts is not None and not is_list:
        raise TypeError(
            "contexts must be a list with one context for each prompt, not "
            f"{type(contexts).__name__}"
        )
    prompts = _texts(prompts)
    if contexts is not None and len(contexts) != len(prompts):
        raise ValueError(
            f"{len(prompts)} prompts but {len(contexts)} contexts; give one context for each "
            "prompt, or None"
        )
    given = None if contexts is None else [_shared(value) for value in contexts]
    return _ask("rlm_query_batched", prompts, contexts=given, model=model)


def _shared(value: Any) -> Any:
    """Return a child's context to send to the host, or None if it is the session's own.

    None stands for the session's own context, which need not be sent.
    """
    return None if value is namespace.get("context", _MISSING) else value


class _Answer(dict[str, Any]):
    """``answer["content"]`` is the best answer so far; ``answer["ready"] = True`` makes it the final one."""


answer = _Answer(content="", ready=False)
_final: list[Any] = []


def FINAL(value: Any = _MISSING) -> None:
    """Give ``value`` as the final answer."""
    if value is _MISSING:
        raise TypeError("FINAL needs the answer: FINAL(value)")
    _final[:] = [_carried(value)]


def _carried(value: Any) -> Any:
    """Return ``value`` as the host receives it: dataclasses as dicts, unsupported values as text.

    Raises ValueError if it exceeds what the host accepts.
    """
    try:
        return portable(value)
    except TypeError:
        pass
    try:
        return portable(_as_data(value))
    except (TypeError, RecursionError):
        return str(value)


def _as_data(value: Any) -> Any:
    import dataclasses  # takes milliseconds, and few sessions need it

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _as_data(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {_as_data(key): _as_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_data(item) for item in value]
    if isinstance(value, enum.Enum):
        return _as_data(value.value)
    dump = getattr(value, "model_dump", None)
    return _as_data(dump()) if callable(dump) else value


def FINAL_VAR(name: Any) -> None:
    """Give the value of the variable called ``name`` as the final answer."""
    if not (isinstance(name, str) and name.isidentifier()):
        FINAL(name)
    elif globals().get("namespace_is_live", True):
        FINAL(_variable(name))
    else:
        _CONTROL["final_var"] = name


def _variable(name: str) -> Any:
    if name not in namespace:
        raise NameError(f"FINAL_VAR: there is no variable '{name}'; SHOW_VARS() lists them")
    return namespace[name]


def SHOW_VARS() -> dict[str, str]:
    """Your variables: name -> type and size."""
    hidden = {*__all__, "context", _CONTROL["replies"]}
    return {
        name: _kind(value)
        for name, value in namespace.items()
        if name not in hidden
        and value is not budget
        and not name.startswith("__")
        and name != "_"
        and not isinstance(value, types.ModuleType)
    }


def _kind(value: Any) -> str:
    kind = type(value).__name__
    try:
        return f"{kind}, {len(value):,} long"
    except Exception:  # noqa: BLE001 -- any class may have any __len__
        return kind


class _History(Sequence[Any]):
    """The conversation so far, oldest first, each ``{"role": …, "content": …}``; fetched when looked at."""

    def __init__(self) -> None:
        self._messages: list[dict[str, str]] = []

    def _fetch(self) -> list[dict[str, str]]:
        self._messages += call_host("history", len(self._messages))
        return self._messages

    def __len__(self) -> int:
        return len(self._fetch())

    def __getitem__(self, index: Any) -> Any:
        return self._fetch()[index]

    def __repr__(self) -> str:
        return f"<history of {len(self)} messages>"


history = _History()


def budget() -> dict[str, Any]:
    """What is left of your limits: turns, calls, tokens, dollars (if there is such a limit), seconds, and depth (levels
    of children)."""
    left: dict[str, Any] = call_host("budget")
    return left


if globals().get("namespace_is_live", True):
    # Not reserved: a variable of this name is common, and may replace it.
    globals().get("namespace", {}).setdefault("budget", budget)
else:
    __all__ += ["budget"]
outputs: dict[int, str] = {}
"""Cell number -> the whole output of a cell whose output was cut."""

_CONTROL: dict[str, Any] = {
    "cells": 0,
    "max_output_chars": 10_000,
    "final_var": None,
    "replies": "last_replies",
    "kept": None,
}


def after_cell() -> dict[str, Any]:
    """Return what the host needs to know after a cell has ended."""
    _CONTROL["cells"] += 1
    note: dict[str, Any] = {"cell": _CONTROL["cells"]}
    text = last_output()
    if len(text) > _CONTROL["max_output_chars"]:
        outputs[_CONTROL["cells"]] = text
    wanted, _CONTROL["final_var"] = _CONTROL["final_var"], None
    if wanted is not None:
        FINAL(_variable(wanted))
    if globals().get("namespace_is_live", True):
        _keep_replies(note)
        _keep_rebound(note)
    current = namespace.get("answer")
    if isinstance(current, Mapping) and current.get("content") not in ("", None):
        note["partial"] = _carried(current["content"])
        if current.get("ready"):
            _final[:] = [note["partial"]]
            current["ready"] = False  # type: ignore[index]
    if _final:
        note["final"] = _final.pop()
    return note


def _keep_replies(note: dict[str, Any]) -> None:
    """Store the replies that the cell received in a session variable, and tell the host its name.

    The name is one that the session's code does not use.
    """
    if not received:
        return
    name = _CONTROL["replies"]
    while name in namespace and namespace[name] is not _CONTROL["kept"]:
        name += "_"
    replies = _CONTROL["kept"] = namespace[name] = list(received)
    _CONTROL["replies"] = name
    received.clear()
    note["replies"] = {
        "name": name,
        "num": len(replies),
        "arrived": sum(reply is not None for reply in replies),
    }


def _keep_rebound(note: dict[str, Any]) -> None:
    """If the cell rebound reserved names, save the new values under other names, such as
    ``own_context``."""
    context = notebook.reserved.get("context", _MISSING)
    own = {name: globals()[name] for name in __all__} | {"context": context}
    for name, reserved in own.items():
        value = namespace.get(name, _MISSING)
        if value is reserved or value is _MISSING or value is None or reserved is _MISSING:
            continue
        if name == "answer" and isinstance(value, Mapping) and "content" in value:
            answer.update(content=value["content"], ready=value.get("ready", False))
            namespace["answer"] = answer
            continue
        namespace[f"own_{name}"] = value
        note.setdefault("kept", []).append(name)


# --- JSON schemas of Python types, so that llm_query(..., schema=list[int]) works -----------------

_SIMPLE = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def schema_of(kind: Any) -> Any:
    """Return the JSON schema of a type, or ``kind`` itself if it is a schema (a dict) or None."""
    if kind is None or isinstance(kind, dict):
        return kind
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    import dataclasses

    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (list, set, tuple, Sequence):
        return {"type": "array", "items": schema_of(args[0])} if args else {"type": "array"}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(arg) for arg in args]}
    if isinstance(kind, type) and hasattr(kind, "model_json_schema"):
        return kind.model_json_schema()
    if isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or hasattr(kind, "__annotations__")
    ):
        return _object_schema(kind)
    raise TypeError(
        f"no JSON schema for {kind!r}: give a dict, int, float, str, bool, list[…], dict[str, …] "
        "or a dataclass"
    )


def _object_schema(kind: type) -> dict[str, Any]:
    import dataclasses

    hints = typing.get_type_hints(
        kind, vars(sys.modules.get(kind.__module__, types.ModuleType("none"))) | namespace
    )
    fields = {name: schema_of(hint) for name, hint in hints.items()}
    optional = (
        {f.name for f in dataclasses.fields(kind) if not _required(f)}
        if dataclasses.is_dataclass(kind)
        else set()
    )
    required = [name for name in fields if name not in optional]
    return {
        "type": "object",
        "properties": fields,
        "required": required,
        "additionalProperties": False,
    }


def _required(field: dataclasses.Field[Any]) -> bool:
    import dataclasses

    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
