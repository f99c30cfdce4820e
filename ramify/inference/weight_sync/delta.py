"""Weight sync that sends only what has changed since the engines' last update.

The unit is a tensor, single values of a tensor, or a low-rank adapter. Everything is sent if the
engines' weights are unknown.

    a tensor with the stamp of the last sync    not sent, not read
    equal to what the engines have              not sent
    changed in few positions                    positions and values    (if the engine takes them)
    small and changed                           together, as one tensor (``SmallTensorBundles``)
    any other                                   whole
    with a low-rank adapter                     the adapter: engines keep the base matrix, and add
                                                the adapter as the trainer does

The bytes are transported by another weight sync (``by``). The trainer keeps a copy of what the
engines have, in their precision. Each update names the one before it, from which it contains the
differences; an engine with other weights (it was restarted, or missed an update) reports that and
gets everything.

Many small tensors are compared, copied and described as one, since the overhead of each exceeds the
cost of its bytes:

    trainer   norm.1 norm.2 …  ── SmallTensorBundles ──▶ '::together-0' [N], table: names, shapes
    engine    '::together-0', table  ── apart ──▶ norm.1, norm.2, …

Values are compared bit by bit: two NaNs with the same bits are equal, and the two zeros differ.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.inference.weight_sync import WEIGHT_SYNCS
from ramify.inference.weight_sync.base import (
    Info,
    LazyExportWeight,
    LoraAdaptedMatrix,
    MissingDeltaBaseError,
    WeightChunk,
    WeightReceiver,
    WeightSync,
    WeightUpdateTensor,
    merge_adapter,
)

SAMPLE = 512
"""Number of values compared to estimate what share of a tensor has changed. Only larger tensors are
sampled."""
_RUNS = 32
"""Number of runs of neighbouring values that make up a sample. They are spread over the whole
tensor."""
_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_pattern(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a tensor's values as a flat tensor of integers."""
    return tensor.contiguous().view(-1).view(_KINDS[tensor.element_size()])


def differing_places(now_N: Tensor, had_N: Tensor) -> Tensor:
    """Return the positions at which the values of two flat tensors differ, in ascending order.

    On a CPU this uses numpy, which takes a third of PyTorch's time.
    """
    if now_N.is_cuda:
        return (now_N != had_N).nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(now_N.numpy() != had_N.numpy()))


def indices_of_changed_tensors(now_N: Tensor, had_N: Tensor, lengths: Sequence[int]) -> list[int]:
    """Return the indices of the concatenated tensors that differ between two versions.

    ``lengths`` holds the number of elements of each tensor, in order.
    """
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=now_N.device)
    differing: list[int] = (
        torch.searchsorted(differing_places(now_N, had_N), bounds).diff().nonzero()[:, 0].tolist()
    )
    return differing


def differing_share(now_N: Tensor, had_N: Tensor) -> float:
    """Estimate the fraction of values that differ between two tensors, from a sample of their
    values."""
    return int(torch.count_nonzero(_sample(now_N) != _sample(had_N))) / SAMPLE


def _sample(bits_N: Tensor) -> Tensor:
    """Sample a tensor's values in contiguous runs spread over the whole tensor.

    Neighbours are almost free, because loading a page of memory is the expensive part.
    """
    return bits_N[: len(bits_N) // _RUNS * _RUNS].view(_RUNS, -1)[:, : SAMPLE // _RUNS]


_PREFIX = "::together-"


class SmallTensorBundles:
    """Groups small weights of one precision into bundles, each sent as a single tensor.

    It remembers the values that the engines already have, so that only changed tensors are sent.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._had_N = torch.empty(0)
        """The values that the engines have, concatenated into one tensor in main memory."""

    def bundle_changed_tensors(
        self, sources: Sequence[LazyExportWeight], number: int
    ) -> tuple[LazyExportWeight, dict[str, Any]] | None:
        """Bundle the small weights that have changed since the engines last received them.

        Returns the bundle, and the table of names and shapes by which engines take it apart.
        Returns None if the engines have all current values.

        ``sources`` are then recorded as what the engines have, and all earlier tensors are
        forgotten.
        """
        names = [source.name for source in sources]
        lengths = [math.prod(source.shape) for source in sources]
        now_N = _flatten_tensors([source.full() for source in sources])
        which = self._changed_indices(names, lengths, now_N)
        self._names, self._lengths, self._had_N = names, lengths, now_N.cpu()
        if not which:
            return None
        if len(which) < len(sources):
            parts = now_N.split_with_sizes(lengths)
            now_N = torch.cat([parts[index] for index in which])
        table = {
            "names": [names[index] for index in which],
            "shapes": [sources[index].shape for index in which],
        }
        return LazyExportWeight(
            f"{_PREFIX}{number}", tuple(now_N.shape), now_N.dtype, None, lambda: now_N
        ), table

    def _changed_indices(
        self, names: list[str], lengths: list[int], now_N: Tensor
    ) -> Sequence[int]:
        if (names, lengths) == (self._names, self._lengths):
            return indices_of_changed_tensors(
                bit_pattern(now_N), bit_pattern(self._had_N.to(now_N.device)), lengths
            )
        had = dict(zip(self._names, self._had_N.split_with_sizes(self._lengths), strict=True))
        parts = zip(names, now_N.split_with_sizes(lengths), strict=True)
        return [
            index
            for index, (name, part) in enumerate(parts)
            if name not in had
            or not torch.equal(bit_pattern(part), bit_pattern(had[name].to(part.device)))
        ]


def split_bundle(values_N: Tensor, table: Mapping[str, Any]) -> Iterator[WeightUpdateTensor]:
    """Yield the individual weights in a bundle of small weights.

    ``table`` gives their names and shapes. Raises ValueError if the table does not fit the bundle.
    """
    try:
        names, shapes = table["names"], table["shapes"]
        parts = values_N.split_with_sizes([math.prod(shape) for shape in shapes])
        for name, shape, part in zip(names, shapes, parts, strict=True):
            yield WeightUpdateTensor(
                name, part if len(shape) == 1 else part.view(shape), holds=True
            )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the table of a tensor bundle does not match its contents: {error!r}"
        ) from None


def _flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])


_PLACES, _VALUES = "::places", "::values"
_BASE, _A, _B = "::base", "::a", "::b"
_FEW = 0.25
"""Maximum fraction of changed values for which only these (two or four bytes each) and their
positions (four bytes each) are sent, instead of the whole tensor."""
_MOST_PLACES = 2**31 - 1
_SMALL = SAMPLE
"""Maximum number of values in a tensor that is bundled with others."""
_MOST_TOGETHER = 1024
"""Maximum number of small tensors in one bundle."""


class DeltaWeightSync:
    """A weight sync that sends only the differences from the weights that the engines have."""

    def __init__(
        self,
        *,
        by: str = "shared",
        places: bool = True,
        adapters: bool = True,
        layers: bool = False,
        **options: Any,
    ) -> None:
        """Create the trainer's half of a weight sync that sends only differences.

        ``by`` names the weight sync that transports the bytes, and ``options`` are the options of
        that weight sync.

        With ``places``, single values within tensors are sent if that takes fewer bytes. With
        ``adapters``, low-rank adapters are sent as such, and engines keep the base matrices in main
        memory. With ``layers``, a change to one tensor sends the whole part of the layer, such as
        its attention, for engines that fuse several tensors into one.
        """
        # The files of a version are a whole checkpoint, and their chunk names no tensors.
        if by == "delta" or by == "file":
            raise ConfigError(
                f"the weight sync 'delta' cannot send by '{by}': use by=shared, gloo or nccl"
            )
        self._by: WeightSync = WEIGHT_SYNCS.resolve(by)(**options)
        self._places = places
        self._adapters = adapters
        self._layers = layers
        self._have: dict[str, Tensor] = {}
        """Tensor name -> the values that the engines have. Small tensors are not included."""
        self._stamps: dict[str, Hashable] = {}
        self._small: dict[tuple[torch.dtype, int], SmallTensorBundles] = {}
        """(dtype, index) -> a bundle of up to 1024 small tensors with that dtype."""
        self._later: list[tuple[Tensor, Tensor]] = []
        """Pairs of (old, new) tensors. Each new one is copied over the old one while the engines
        read the chunk, so that the copy takes no extra time."""
        self._tables: dict[str, dict[str, Any]] = {}
        """Name of each bundle in the current sync -> names and shapes of the tensors in the
        bundle."""
        self._bases: set[str] = set()
        """Names of matrices with low-rank adapters whose base matrix the engines already have."""
        self._sums: dict[str, tuple[float, str, str]] = {}
        """Name of the adapter's matrix b -> (scale, dtype in which the adapter is added to its
        base, dtype of the sum)."""
        self._last_sync = ""
        """Id of the last sync that the engines have received; empty if it is unknown which weights
        they have."""
        self.num_bytes = 0
        """Bytes sent by the last sync."""

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        return [{"weight_sync": "delta", "by": info} for info in self._by.open(num_engines)]

    def join(self) -> None:
        self._by.join()

    def chunks(
        self, sources: Iterable[LazyExportWeight], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        base = "" if whole else self._last_sync
        if not base:
            self._have, self._stamps, self._small, self._bases = {}, {}, {}, set()
        self._last_sync = ""  # until everything was sent, it is unknown what the engines have
        now, self.num_bytes, self._tables, self._later = secrets.token_hex(8), 0, {}, []
        about = {"base": base, "now": now}
        any_chunk = False
        for chunk in self._by.chunks(
            self._changed_weights(sources, bool(base)), version, whole=whole
        ):
            any_chunk = True
            names = chunk.info["names"]
            tables = {name: self._tables[name] for name in names if name in self._tables}
            sums = {name: self._sums[name] for name in names if name.endswith(_B)}
            yield WeightChunk(
                {**chunk.info, **about, "together": tables, "sums": sums}, chunk.is_last, chunk.send
            )
            self._commit_values()
        if not any_chunk:
            yield WeightChunk(
                {"names": [], "dtype_names": [], "shapes": [], "version": version, **about}, True
            )
        self._last_sync = now

    def close(self) -> None:
        self._by.close()
        self._have = {}
        self._stamps = {}
        self._small = {}
        self._bases = set()
        self._last_sync = ""
        self._later = []

    def _changed_weights(
        self, sources: Iterable[LazyExportWeight], has_base: bool
    ) -> Iterator[LazyExportWeight]:
        small: dict[torch.dtype, list[LazyExportWeight]] = {}
        stamps, self._stamps = self._stamps, {}
        is_known = partial(_is_known, stamps if has_base else {})
        if self._layers:
            yield from self._count_bytes(self._whole_layers(sources, is_known))
            return
        for source in sources:
            self._stamps[source.name] = source.stamp
            if is_known(source):
                continue
            if math.prod(source.shape) > _SMALL or (source.adapted is not None and self._adapters):
                yield from self._count_bytes(self._part(source))
            else:
                small.setdefault(source.dtype, []).append(source)
        for dtype, alike in small.items():
            for number, start in enumerate(range(0, len(alike), _MOST_TOGETHER)):
                yield from self._count_bytes(
                    self._join_small(alike[start : start + _MOST_TOGETHER], (dtype, number))
                )

    def _whole_layers(
        self, sources: Iterable[LazyExportWeight], is_known: Callable[[LazyExportWeight], bool]
    ) -> Iterator[LazyExportWeight]:
        for _, group in itertools.groupby(sources, _part_of_layer):
            together = list(group)
            self._stamps |= {source.name: source.stamp for source in together}
            if all(map(is_known, together)):
                continue
            parts = [[*self._part(source)] for source in together]
            if not any(parts):
                continue
            # All of the part: vLLM fills what is missing of a fused tensor with undefined values.
            for source, changed in zip(together, parts, strict=True):
                yield from changed or [source]

    def _part(self, source: LazyExportWeight) -> Iterable[LazyExportWeight]:
        """Return the tensors to send so that the engines get the current values of a weight.

        The list is empty if the engines have the current values.
        """
        if source.adapted is not None and self._adapters:
            return self._adapter(source, source.adapted)
        return self._difference(source)

    def _commit_values(self) -> None:
        for had, now in self._later:
            had.copy_(now)
        self._later.clear()

    def _count_bytes(self, parts: Iterable[LazyExportWeight]) -> Iterator[LazyExportWeight]:
        for part in parts:
            self.num_bytes += part.num_bytes
            yield part

    def _join_small(
        self, sources: list[LazyExportWeight], which: tuple[torch.dtype, int]
    ) -> list[LazyExportWeight]:
        """Return the small weights that have changed, bundled into a single tensor.

        Returns a list with that tensor, or an empty list if none has changed.
        """
        changed = self._small.setdefault(which, SmallTensorBundles()).bundle_changed_tensors(
            sources, len(self._tables)
        )
        if changed is None:
            return []
        bundle, self._tables[bundle.name] = changed
        return [bundle]

    def _difference(self, source: LazyExportWeight) -> list[LazyExportWeight]:
        now, had = source.full(), self._have.get(source.name)
        if had is None or had.shape != now.shape or had.dtype != now.dtype:
            self._have[source.name] = now.to("cpu", copy=True)
            return [source._replace(full=lambda: now)]
        if now.is_cuda:
            had = had.to(now.device)
        index = self._changed_places(bit_pattern(now), bit_pattern(had))
        if index is None:
            self._later.append((self._have[source.name], now))
            return [source._replace(full=lambda: now)]
        if not len(index):
            return []
        values = now.flatten()[index]
        self._have[source.name].view(-1).index_copy_(0, index.cpu(), values.cpu())
        return [
            _to_lazy_weight(source.name + _PLACES, index.to(torch.int32)),
            _to_lazy_weight(source.name + _VALUES, values),
        ]

    def _adapter(
        self, source: LazyExportWeight, adapted: LoraAdaptedMatrix
    ) -> Iterator[LazyExportWeight]:
        """Yield the two low-rank matrices of a weight that has a LoRA adapter.

        The base matrix is yielded first if the engines do not have it yet.
        """
        name = source.name
        # The engines will have the sum with the adapter, not the values of this copy.
        self._have.pop(name, None)
        if name not in self._bases:
            yield _to_lazy_weight(name + _BASE, _narrow_losslessly(adapted.base(), source.dtype))
            self._bases.add(name)
        a, b = adapted.pair()
        self._sums[name + _B] = (adapted.scale, _name(adapted.dtype), _name(source.dtype))
        yield _to_lazy_weight(name + _A, a)
        yield _to_lazy_weight(name + _B, b)

    def _changed_places(self, now_N: Tensor, had_N: Tensor) -> Tensor | None:
        """Return the positions of a weight's changed values, or None if it should be sent whole."""
        num = now_N.numel()
        # Twice the limit, so that sampling errors rarely send a tensor whole that changed little.
        if num > _SMALL and differing_share(now_N, had_N) > 2 * _FEW:  # a sample is enough
            return None
        if not self._places or num > _MOST_PLACES:
            return torch.empty(0) if torch.equal(now_N, had_N) else None
        places_P = differing_places(now_N, had_N)
        return places_P if len(places_P) <= _FEW * num else None

    @staticmethod
    def receiver(info: Info) -> DeltaWeightReceiver:
        return DeltaWeightReceiver(info)


class DeltaWeightReceiver:
    """The engine's half of the weight sync that sends only differences.

    Implements ``WeightReceiver``.
    """

    def __init__(self, info: Info) -> None:
        inner = info["by"]
        # A fixed list, so that a request cannot name a module for the engine to import.
        if not isinstance(inner, dict) or inner.get("weight_sync") not in {
            "shared",
            "gloo",
            "nccl",
            "cuda_ipc",
        }:
            raise ValueError(f"not a weight sync that can transport a delta: {str(inner)[:100]}")
        self._by: WeightReceiver = WEIGHT_SYNCS.resolve(inner["weight_sync"]).receiver(inner)
        self._has = ""
        self._taking = ""
        self._places: dict[str, Tensor] = {}
        self._bases: dict[str, Tensor] = {}
        """Base matrices of adapters, on the CPU."""
        self._a: dict[str, Tensor] = {}

    def unpack_chunk(self, info: Info) -> Iterator[WeightUpdateTensor]:
        base, now = str(info["base"]), str(info["now"])
        if self._taking != now and base and base != self._has:
            raise MissingDeltaBaseError(
                f"this delta builds on the weights '{base}', but this engine has "
                f"'{self._has or 'none of them'}'"
            )
        # Until the update is finished, these are neither the old weights nor the new ones.
        self._has, self._taking = "", now
        for piece in self._by.unpack_chunk(info) if info["names"] else ():
            if piece.name.endswith(_PLACES):
                self._places[piece.name.removesuffix(_PLACES)] = piece.tensor.long()
            elif piece.name.endswith(_VALUES):
                name = piece.name.removesuffix(_VALUES)
                yield WeightUpdateTensor(name, piece.tensor, self._places.pop(name))
            elif piece.name in info["together"]:
                yield from split_bundle(piece.tensor, info["together"][piece.name])
            elif piece.name.endswith(_BASE):
                self._bases[piece.name.removesuffix(_BASE)] = piece.tensor.to("cpu", copy=True)
            elif piece.name.endswith(_A):
                # A copy, because a tensor is valid only until the next one is requested.
                self._a[piece.name.removesuffix(_A)] = piece.tensor.clone()
            elif piece.name.endswith(_B):
                yield self._add_adapter(piece.name.removesuffix(_B), piece.tensor, info)
            else:
                yield piece

    def _add_adapter(self, name: str, b: Tensor, info: Info) -> WeightUpdateTensor:
        scale, kind, dtype = info["sums"][name + _B]
        base = self._bases[name].to(b.device, getattr(torch, kind))
        return WeightUpdateTensor(
            name, merge_adapter(base, self._a.pop(name), b, float(scale)).to(getattr(torch, dtype))
        )

    def finished(self, version: str) -> None:
        self._has, self._taking = self._taking, ""
        self._by.finished(version)

    def close(self) -> None:
        self._by.close()


def _is_known(stamps: Mapping[str, Hashable], source: LazyExportWeight) -> bool:
    """Return True if the engines already have the current value of a weight.

    The check compares its change marker, called ``stamp``.
    """
    return source.stamp is not None and source.stamp == stamps.get(source.name)


def _part_of_layer(source: LazyExportWeight) -> str:
    """Return the part of a layer to which a weight belongs, such as ``model.layers.3.self_attn``.

    A tensor outside the layers is its own part.
    """
    parts = source.name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 2])


def _to_lazy_weight(name: str, tensor: Tensor) -> LazyExportWeight:
    return LazyExportWeight(name, tuple(tensor.shape), tensor.dtype, None, lambda: tensor)


def _narrow_losslessly(base: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a matrix to the engine's dtype if that loses no precision.

    It is lossless if, for example, the checkpoint was stored in that dtype. Otherwise return the
    matrix unchanged.
    """
    short = base.to(dtype)
    return short if torch.equal(short.to(base.dtype), base) else base


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
