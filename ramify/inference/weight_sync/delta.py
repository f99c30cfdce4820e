"""Only what changed since the engines' last weights: tensors, values within them, or their
adapters; all of it where that is not known.

    a tensor whose stamp is the last sync's     left out, unread
    one that is equal to what engines have      left out
    one that changed in few places              places and values        (where the engine can take them)
    small ones that changed                     together, as one         (``tensor_bundles.py``)
    any other                                   whole
    one with a low-rank adapter                 the adapter: engines keep what it is added to, and add it up as the trainer does

Carried by another carrier (``by``). The trainer keeps a copy of what the engines have, in their
precision. Each sync says which one it builds on; an engine that has another (it was started anew,
or lost a sync) answers so, and gets everything.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.inference.weight_sync import bits
from ramify.inference.weight_sync.base import (
    AdaptedMatrix,
    Info,
    StaleWeights,
    WeightChunk,
    WeightPiece,
    WeightReceiver,
    WeightSource,
    WeightSync,
    added,
    weight_sync_class,
)
from ramify.inference.weight_sync.tensor_bundles import TensorBundles, apart

_PLACES, _VALUES = "::places", "::values"
_BASE, _A, _B = "::base", "::a", "::b"
_FEW = 0.25
"""Share of changed values up to which places and values are sent: a place takes four bytes, a value
two or four."""
_MOST_PLACES = 2**31 - 1
_SMALL = bits.SAMPLE
"""Values up to which a tensor is sent whole, together with others."""
_MOST_TOGETHER = 1024
"""Small tensors."""


class DeltaSync:
    """Implements ``WeightSync``."""

    def __init__(
        self,
        *,
        by: str = "shared",
        places: bool = True,
        adapters: bool = True,
        layers: bool = False,
        **options: Any,
    ) -> None:
        """``by`` carries the bytes, with ``options``; ``places``: send values within tensors, where
        that is less; ``adapters``: send those of low-rank adapters, for which an engine keeps the
        matrices that they are added to in main memory; ``layers``: where one tensor of a layer's
        part (its attention) changed, send all of that, as engines need it that have fused several
        into one."""
        if by == "delta" or by == "file":
            raise ConfigError(
                f"the carrier 'delta' cannot be carried by '{by}': give shared, gloo or nccl"
            )
        self._by: WeightSync = weight_sync_class(by)(**options)
        self._places, self._adapters, self._layers = places, adapters, layers
        self._have: dict[str, Tensor] = {}
        """What the engines have, but for small ones."""
        self._stamps: dict[str, Hashable] = {}
        self._small: dict[tuple[torch.dtype, int], TensorBundles] = {}
        """Those of one precision, a thousand at a time."""
        self._later: list[tuple[Tensor, Tensor]] = []
        """What engines had and have, to be copied while they read the chunk: it is not on anybody's
        way then."""
        self._tables: dict[str, dict[str, Any]] = {}
        """Of what was joined in the sync that is under way."""
        self._bases: set[str] = set()
        """Names of matrices of which engines have what adapters are added to."""
        self._sums: dict[str, tuple[float, str, str]] = {}
        """Name of a b -> (scale, the precision of the sum, and of the matrix)."""
        self._told = ""
        """Names the sync that the engines took last."""
        self.num_bytes = 0
        """Carried by the last sync."""

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        return [{"weight_sync": "delta", "by": info} for info in self._by.open(num_engines)]

    def join(self) -> None:
        self._by.join()

    def chunks(
        self, sources: Iterable[WeightSource], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        base = "" if whole else self._told
        if not base:
            self._have, self._stamps, self._small, self._bases = {}, {}, {}, set()
        self._told = ""  # until all of it was carried, nobody knows what the engines have
        now, self.num_bytes, self._tables, self._later = secrets.token_hex(8), 0, {}, []
        about = {"base": base, "now": now}
        any_chunk = False
        for chunk in self._by.chunks(self._changed(sources, bool(base)), version, whole=whole):
            any_chunk = True
            names = chunk.info["names"]
            tables = {name: self._tables[name] for name in names if name in self._tables}
            sums = {name: self._sums[name] for name in names if name.endswith(_B)}
            yield WeightChunk(
                {**chunk.info, **about, "together": tables, "sums": sums}, chunk.is_last, chunk.send
            )
            self._keep()
        if not any_chunk:
            yield WeightChunk(
                {"names": [], "dtype_names": [], "shapes": [], "version": version, **about}, True
            )
        self._told = now

    def close(self) -> None:
        self._by.close()
        self._have, self._stamps, self._small, self._bases, self._told, self._later = (
            {},
            {},
            {},
            set(),
            "",
            [],
        )

    def _changed(self, sources: Iterable[WeightSource], has_base: bool) -> Iterator[WeightSource]:
        small: dict[torch.dtype, list[WeightSource]] = {}
        stamps, self._stamps = self._stamps, {}
        is_known = partial(_is_known, stamps if has_base else {})
        if self._layers:
            yield from self._counted(self._whole_layers(sources, is_known))
            return
        for source in sources:
            self._stamps[source.name] = source.stamp
            if is_known(source):
                continue
            if math.prod(source.shape) > _SMALL or (source.adapted is not None and self._adapters):
                yield from self._counted(self._part(source))
            else:
                small.setdefault(source.dtype, []).append(source)
        for dtype, alike in small.items():
            for number, start in enumerate(range(0, len(alike), _MOST_TOGETHER)):
                yield from self._counted(
                    self._joined(alike[start : start + _MOST_TOGETHER], (dtype, number))
                )

    def _whole_layers(
        self, sources: Iterable[WeightSource], is_known: Callable[[WeightSource], bool]
    ) -> Iterator[WeightSource]:
        for _, group in itertools.groupby(sources, _part_of_layer):
            together = list(group)
            self._stamps |= {source.name: source.stamp for source in together}
            if all(map(is_known, together)):
                continue
            parts = [[*self._part(source)] for source in together]
            if not any(parts):
                continue
            for source, found in zip(together, parts, strict=True):
                yield from found or [source]

    def _part(self, source: WeightSource) -> Iterable[WeightSource]:
        """What engines do not have of it; nothing where they have it."""
        if source.adapted is not None and self._adapters:
            return self._adapter(source, source.adapted)
        return self._difference(source)

    def _keep(self) -> None:
        for had, now in self._later:
            had.copy_(now)
        self._later.clear()

    def _counted(self, parts: Iterable[WeightSource]) -> Iterator[WeightSource]:
        for part in parts:
            self.num_bytes += part.num_bytes
            yield part

    def _joined(
        self, sources: list[WeightSource], which: tuple[torch.dtype, int]
    ) -> list[WeightSource]:
        """Those of small ones that changed, as one."""
        found = self._small.setdefault(which, TensorBundles()).changed(sources, len(self._tables))
        if found is None:
            return []
        made, self._tables[made.name] = found
        return [made]

    def _difference(self, source: WeightSource) -> list[WeightSource]:
        now, had = source.full(), self._have.get(source.name)
        if had is None or had.shape != now.shape or had.dtype != now.dtype:
            self._have[source.name] = now.to("cpu", copy=True)
            return [source._replace(full=lambda: now)]
        if now.is_cuda:
            had = had.to(now.device)
        index = self._changed_places(bits.bits(now), bits.bits(had))
        if index is None:
            self._later.append((self._have[source.name], now))
            return [source._replace(full=lambda: now)]
        if not len(index):
            return []
        values = now.flatten()[index]
        self._have[source.name].view(-1).index_copy_(0, index.cpu(), values.cpu())
        return [
            _source(source.name + _PLACES, index.to(torch.int32)),
            _source(source.name + _VALUES, values),
        ]

    def _adapter(self, source: WeightSource, adapted: AdaptedMatrix) -> Iterator[WeightSource]:
        """a and b, and before them what they are added to where engines do not have it."""
        name = source.name
        self._have.pop(name, None)
        if name not in self._bases:
            yield _source(name + _BASE, _shortest(adapted.base, source.dtype))
            self._bases.add(name)
        a, b = adapted.pair()
        self._sums[name + _B] = (adapted.scale, _name(adapted.base.dtype), _name(source.dtype))
        yield _source(name + _A, a)
        yield _source(name + _B, b)

    def _changed_places(self, now_N: Tensor, had_N: Tensor) -> Tensor | None:
        """Where they differ; None where the tensor is to be sent whole."""
        num = now_N.numel()
        if num > _SMALL and bits.share(now_N, had_N) > 2 * _FEW:  # no need to look at the rest
            return None
        if not self._places or num > _MOST_PLACES:
            return torch.empty(0) if torch.equal(now_N, had_N) else None
        places_P = bits.places(now_N, had_N)
        return places_P if len(places_P) <= _FEW * num else None

    @staticmethod
    def receiver(info: Info) -> DeltaReceiver:
        return DeltaReceiver(info)


class DeltaReceiver:
    """Implements ``WeightReceiver``."""

    def __init__(self, info: Info) -> None:
        inner = info["by"]
        if not isinstance(inner, dict) or inner.get("weight_sync") not in {
            "shared",
            "gloo",
            "nccl",
            "cuda_ipc",
        }:
            raise ValueError(f"no carrier that could bring a delta: {str(inner)[:100]}")
        self._by: WeightReceiver = weight_sync_class(inner["weight_sync"]).receiver(inner)
        self._has = ""
        self._taking = ""
        self._places: dict[str, Tensor] = {}
        self._bases: dict[str, Tensor] = {}
        """What adapters are added to, on the CPU."""
        self._a: dict[str, Tensor] = {}

    def take(self, info: Info) -> Iterator[WeightPiece]:
        base, now = str(info["base"]), str(info["now"])
        if self._taking != now and base and base != self._has:
            raise StaleWeights(
                f"this delta builds on the weights '{base}', and this engine has "
                f"'{self._has or 'none of them'}'"
            )
        self._has, self._taking = "", now
        for piece in self._by.take(info) if info["names"] else ():
            if piece.name.endswith(_PLACES):
                self._places[piece.name.removesuffix(_PLACES)] = piece.tensor.long()
            elif piece.name.endswith(_VALUES):
                name = piece.name.removesuffix(_VALUES)
                yield WeightPiece(name, piece.tensor, self._places.pop(name))
            elif piece.name in info["together"]:
                yield from apart(piece.tensor, info["together"][piece.name])
            elif piece.name.endswith(_BASE):
                self._bases[piece.name.removesuffix(_BASE)] = piece.tensor.to("cpu", copy=True)
            elif piece.name.endswith(_A):
                self._a[piece.name.removesuffix(_A)] = piece.tensor.clone()
            elif piece.name.endswith(_B):
                yield self._added(piece.name.removesuffix(_B), piece.tensor, info)
            else:
                yield piece

    def _added(self, name: str, b: Tensor, info: Info) -> WeightPiece:
        scale, kind, dtype = info["sums"][name + _B]
        base = self._bases[name].to(b.device, getattr(torch, kind))
        return WeightPiece(
            name, added(base, self._a.pop(name), b, float(scale)).to(getattr(torch, dtype))
        )

    def finished(self, version: str) -> None:
        self._has, self._taking = self._taking, ""
        self._by.finished(version)

    def close(self) -> None:
        self._by.close()


def _is_known(stamps: Mapping[str, Hashable], source: WeightSource) -> bool:
    """Whether it is what it was when it had one of ``stamps``."""
    return source.stamp is not None and source.stamp == stamps.get(source.name)


def _part_of_layer(source: WeightSource) -> str:
    """``model.layers.3.self_attn`` of all that is in there; of what is in no layer its own name."""
    parts = source.name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 2])


def _source(name: str, tensor: Tensor) -> WeightSource:
    return WeightSource(name, tuple(tensor.shape), tensor.dtype, None, lambda: tensor)


def _shortest(base: Tensor, dtype: torch.dtype) -> Tensor:
    """In the engine's precision where that loses nothing, as with a checkpoint that was in it."""
    short = base.to(dtype)
    return short if torch.equal(short.to(base.dtype), base) else base


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
