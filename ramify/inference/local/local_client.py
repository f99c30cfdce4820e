"""A client of the inference engine in this process.

It takes messages, and returns replies with exact token ids and log-probabilities.

    client = LocalClient(load_policy("folder"))
    sampling = Sampling(max_tokens=64, temperature=1.0, seed=7)
    reply = await client.complete(Request(messages, sampling))
    await client.update(policy, version)      # the trainer's weights, shared or copied

Token ids are extended and never computed twice from messages: if a request contains the ids of its
beginning (``known``), only the messages after them are converted. The same request with the same
seed gives the same reply, whatever else is in the batch. The seed is combined with the call's id
and the prompt's length, so that the turns and calls of one run draw different numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from ramify.clients.base import Price, Request, Sampling
from ramify.errors import ConfigError, RequestRefusedError, ServerStatusError
from ramify.inference.base import TAGS, CachePressure, prompt_too_long_error
from ramify.inference.local.engine import EngineThread, InferenceEngineLimits, LocalEngine
from ramify.inference.local.generation_request import GenerationState, SamplingSettings, log_softmax
from ramify.inference.local.model_runner import create_runner
from ramify.inference.local.offloaded_weights import OffloadedWeights
from ramify.inference.weight_sync.base import MissingDeltaBaseError, WeightUpdateTensor
from ramify.models.chat_renderer import make_prompt_renderer, parse_reply, prompt_ids
from ramify.models.chat_template import streamable_reply
from ramify.models.load import Policy
from ramify.models.moe_routing import MoeRouters, moe_layout
from ramify.models.moe_shape import MoeLayout
from ramify.models.weights import fingerprint, load_weights
from ramify.step_time_accounting import WallAndCpuTimer
from ramify.types.message import Finish, Message, Reply, Usage

Result = TypeVar("Result")
_FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length"}
_STREAM_EVERY_S = 0.05
_CPU_CACHE_BYTES = 2 << 30


class LocalClient:
    """A model client that runs a policy in this process.

    One client serves any number of runs and event loops.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        name: str = "",
        slots: int | None = None,
        prefill_tokens: int | None = None,
        cache_bytes: int | None = None,
        reuse: bool = True,
        fixed_shapes: torch.dtype | None = None,
    ) -> None:
        """Create a client that runs the given policy in this process.

        Its engine starts with the first request.

        ``slots``: concurrent replies (128 on a CPU, otherwise 256). ``prefill_tokens``: prompt
        tokens per step (1024 on a CPU, otherwise 8192). ``cache_bytes``: memory of the KV cache (2
        GiB on a CPU, otherwise a third of the GPU's memory). Without ``reuse``, the cached prefix
        of one request is not used for another. ``fixed_shapes``: if not None, matrix products are
        computed in fixed shapes and in this precision, so that replies have the same bits in any
        batch (``models/batch_invariant_forward.py``).
        """
        self.policy = policy
        self._weights: dict[str, Tensor] = {}
        """Name -> weight, filled by the first weight sync. A sync may move a tensor to other
        memory, but does not replace the tensor object."""
        self._lent: set[str] = set()
        """Names of weights whose memory is shared with other engines."""
        self.name = name or f"local:{policy.name}"
        self.window = policy.window
        self.price: Price | None = Price(0.0, 0.0)
        self.rendering = make_prompt_renderer(policy.renderer, policy.tokenizer)
        self.card = policy.card
        """Scaffold and limits with which this policy was trained."""
        is_cpu = policy.device.type == "cpu"
        room = InferenceEngineLimits(
            slots=slots or (128 if is_cpu else 256),
            prefill_tokens=prefill_tokens or (1024 if is_cpu else 8192),
            cache_bytes=cache_bytes
            or (_CPU_CACHE_BYTES if is_cpu else _gpu_bytes(policy.device) // 3),
            window=self.window,
            reuse=reuse,
        )
        self.engine = LocalEngine(create_runner(policy.model, fixed_shapes), room, policy.version)
        self._thread = EngineThread(self.engine)
        self._sleeping_weights = OffloadedWeights(policy.model)
        self.experts: MoeLayout | None = None
        """Description of the model's experts if replies report them, otherwise None."""

    @property
    def version(self) -> int:
        return self.engine.version

    def report_routes(self) -> None:
        """Make the engine report the mixture-of-experts routing of each token in future replies.

        The routing is the experts that the model uses for the token. Raises ConfigError if the
        model has no experts.
        """
        routers = MoeRouters.of_model(self.policy.model)
        if routers is None:
            raise ConfigError(
                f"{self.name} is not a mixture-of-experts model, so it has no experts to report"
            )
        routers.start_recording()
        self.engine.runner.routers = routers
        self.experts = moe_layout(self.policy.model)

    async def pressure(self) -> CachePressure:
        """Return the load on the engine's KV cache."""
        return self.engine.pressure

    async def complete(self, request: Request) -> Reply:
        """Return one reply to a request, sampled by this client's engine.

        Raises RequestRefusedError if the prompt does not fit in the context window. If the task is
        cancelled, the engine drops the sequence before its next step.
        """
        started = time.perf_counter()
        with WallAndCpuTimer("rendering"):
            generation = self._generation(request)
        await self._await_generation(generation)
        with WallAndCpuTimer("rendering"):
            return self._reply(generation, request, time.perf_counter() - started)

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, affinity: str = ""
    ) -> GenerationState:
        """Sample a continuation of the given token ids.

        It is returned once it has ended. Its ``end`` is ``abort`` if ``pause`` interrupted it.
        Raises RequestRefusedError if the ids fill the context window.
        """
        if len(ids) >= self.window:
            raise prompt_too_long_error(self.name, self.window, None, len(ids))
        generation = self._generation_of(ids, sampling, affinity)
        await self._await_generation(generation)
        return generation

    async def stream(self, request: Request) -> AsyncGenerator[Message | Reply, None]:
        """Yield the reply as it grows, about 20 times a second, and finally the complete reply.

        Incomplete characters are held back, and so is text at the end that may be the beginning of
        a stop sequence.
        """
        started = time.perf_counter()
        generation = self._generation(request)
        finished = asyncio.ensure_future(self._await_generation(generation))
        try:
            while not finished.done():
                await asyncio.wait([finished], timeout=_STREAM_EVERY_S)
                if not finished.done() and generation.logprobs:
                    yield streamable_reply(
                        self._message(generation, request),
                        request.sampling.stop,
                        tool_calls=bool(request.tools) and self.policy.renderer.takes_tools,
                    )
            await finished
            yield self._reply(generation, request, time.perf_counter() - started)
        finally:
            finished.cancel()

    async def update(self, weights: object, version: int) -> None:
        """Replace the policy's weights with those of a ``Policy``, a module or a state dict.

        Nothing is copied if the client already uses the same module.

        All caches are cleared; a reply in progress is recomputed under the new weights and
        continues. Raises ConfigError, which names the first difference, if the weights do not fit.
        """
        await self.run(partial(self._load_weights, weights, version))

    async def fingerprint(self) -> str:
        return await self.run(partial(fingerprint, self.policy.model))

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token except the first, at temperature 1.

        It is conditional on the tokens before it.
        """
        return await self.run(partial(self._logprobs, tuple(ids)))

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run a function in the engine's thread between two engine steps, and return its result.

        Code that changes weights in place must run there.
        """
        return await asyncio.wrap_future(cast("Future[Result]", self._thread.call(function)))

    def pause(self, *, abort: bool = False) -> None:
        """Pause the engine's sampling until ``resume`` is called.

        With ``abort``, replies in progress end at once.
        """
        self._thread.pause(abort=abort)

    def resume(self) -> None:
        self._thread.resume()

    async def sleep(self, tags: Collection[str] = ("kv_cache",), *, keep: bool = True) -> None:
        """Release the engine's memory until ``wake`` is called.

        ``tags`` selects ``kv_cache``, ``weights`` or both. With ``keep``, weights move to main
        memory instead of being dropped. Pause the engine first.
        """
        await self.run(partial(self._sleep, tags, keep))

    async def wake(self, tags: Collection[str] = TAGS) -> None:
        """Allocate the engine's memory again after ``sleep`` released it.

        Dropped weights are listed in ``missing`` until ``receive_weights`` has received all of
        them.
        """
        await self.run(partial(self._wake, tags))

    @property
    def missing(self) -> list[str]:
        """The names of weights that were dropped for sleep and must be received again."""
        return self._sleeping_weights.missing_names

    def device_memory_usage(self) -> dict[str, int]:
        """Return the bytes that ``weights`` and ``kv_cache`` use on the compute device."""
        return {
            "weights": self._sleeping_weights.num_bytes,
            "kv_cache": self.engine.runner.cache_bytes,
        }

    async def receive_weights(
        self, pieces: Callable[[], Iterator[WeightUpdateTensor]], version: int | None = None
    ) -> None:
        """Copy weights sent by a trainer into the model, between two engine steps.

        After all weights have arrived, caches must be cleared with ``forget``. If ``version`` is
        given, this happens at once unless weights are still ``missing``. Raises ValueError, which
        names the first tensor that is not this model's, or MissingDeltaBaseError for a part of a
        tensor that is ``missing``.
        """
        await self.run(partial(self._take_pieces, pieces, version))

    async def forget(self, version: int) -> None:
        """Clear all caches, because the weights have changed to version ``version``."""
        await self.run(partial(self.engine.mark_weights_changed, version))

    async def close(self) -> None:
        """End the background thread in which the engine runs.

        The policy can still be used.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._thread.close)

    def _generation(self, request: Request) -> GenerationState:
        sampling = request.sampling
        if sampling.extra:
            raise ConfigError(
                f"{self.name} does not support {', '.join(sorted(sampling.extra))}: remove "
                "sampling.extra"
            )
        ids = prompt_ids(self.policy.renderer, request)
        if len(ids) >= self.window:
            raise prompt_too_long_error(self.name, self.window, request, len(ids))
        return self._generation_of(ids, sampling, request.affinity, tool_calls=bool(request.tools))

    def _generation_of(
        self, ids: Sequence[int], sampling: Sampling, affinity: str, *, tool_calls: bool = False
    ) -> GenerationState:
        seed = (
            os.urandom(16).hex()
            if sampling.seed is None
            else f"{sampling.seed}|{affinity}|{len(ids)}"
        )
        return GenerationState(
            ids,
            max_tokens=min(sampling.max_tokens, self.window - len(ids)),
            draw=self._sampling_settings(sampling),
            stop_ids=self.policy.renderer.stop_ids,
            stop=sampling.stop,
            seed=seed,
            affinity=affinity,
            decode=lambda ids: self.policy.renderer.parse(ids, tool_calls=tool_calls).content,
        )

    def _sampling_settings(self, sampling: Sampling) -> SamplingSettings:
        default = self.policy.defaults
        if sampling.temperature is None:
            return SamplingSettings(
                default.temperature, default.top_p, default.top_k, sampling.top_logprobs
            )
        draw = SamplingSettings(
            sampling.temperature,
            1.0 if sampling.top_p is None else sampling.top_p,
            sampling.top_k or 0,
            sampling.top_logprobs,
        )
        if not (0 <= draw.temperature < math.inf and 0 < draw.top_p <= 1 and draw.top_k >= 0):
            raise ConfigError(
                f"{self.name}: temperature={draw.temperature} must be at least 0, "
                f"top_p={draw.top_p} above 0 and at most 1, "
                f"top_k={draw.top_k} not negative"
            )
        return draw

    async def _await_generation(self, generation: GenerationState) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def done(_: GenerationState, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nothing waits
                loop.call_soon_threadsafe(_settle, ended, error)

        self._thread.add(generation, done)
        try:
            await ended
        except asyncio.CancelledError:
            self._thread.cancel(generation)
            raise
        except (RequestRefusedError, ConfigError):
            raise
        except Exception as error:
            raise ServerStatusError(
                f"{self.name}: the engine failed: {type(error).__name__}: {error}"
            ) from error

    def _reply(self, generation: GenerationState, request: Request, seconds: float) -> Reply:
        message = self._message(generation, request)
        return Reply(
            message=message,
            usage=Usage(
                generation.num_prompt,
                len(generation.logprobs),
                cached_tokens=generation.num_reused,
                calls=1,
            ),
            finish="tool_calls" if message.tool_calls else _FINISHES.get(generation.end, "other"),
            model=self.policy.name,
            seconds=seconds,
            prompt_ids=tuple(generation.ids[: generation.num_prompt]),
            token_ids=tuple(generation.sampled_ids),
            logprobs=tuple(generation.logprobs),
            versions=generation.version_spans,
            kept=generation.candidate_ids_by_token,
            routes=tuple(generation.routes) or None,
            top_logprobs=tuple(generation.top) or None,
        )

    def _message(self, generation: GenerationState, request: Request) -> Message:
        return parse_reply(
            self.policy.renderer,
            generation.sampled_ids,
            [generation.stopped_at] if generation.stopped_at else (),
            tool_calls=bool(request.tools),
        )

    def _load_weights(self, weights: object, version: int) -> None:
        source = weights.model if isinstance(weights, Policy) else weights
        if source is not self.policy.model:
            state = source.state_dict() if isinstance(source, nn.Module) else source
            if not isinstance(state, Mapping):
                raise ConfigError(
                    f"weights are a {type(weights).__name__}: give a policy, a module or a state "
                    "dict"
                )
            load_weights(self.policy.model, cast("Mapping[str, Tensor]", state), "the update")
        self.engine.mark_weights_changed(version)

    def _take_pieces(
        self, pieces: Callable[[], Iterator[WeightUpdateTensor]], version: int | None
    ) -> None:
        if self._sleeping_weights.is_released:
            raise RuntimeError(
                "the memory of the weights was released: wake it first (POST /wake_up?tags=weights)"
            )
        self._weights = self._weights or self.policy.model.state_dict(keep_vars=True)
        targets: list[Tensor] = []
        tensors: list[Tensor] = []
        for name, tensor, places, stays, holds in pieces():
            weight = self._matching_weight(name, tensor, places is None)
            if stays and tensor.device == weight.device:
                weight.data = tensor
                self._lent.add(name)
                self._sleeping_weights.mark_received(weight)
                continue
            if name in self._lent:  # other engines also compute with it
                self._lent.remove(name)
                weight.data = weight.data.clone()
            if places is None:
                self._sleeping_weights.mark_received(weight)
                if holds:
                    targets.append(weight.data)
                    tensors.append(tensor)
                else:
                    weight.data.copy_(tensor)
            elif self._sleeping_weights.lacks(weight):
                raise MissingDeltaBaseError(
                    f"tensor '{name}' was dropped while this engine slept, and only a part of it "
                    "was sent: send all of it"
                )
            else:
                weight.data.view(-1).index_copy_(
                    0, places.to(weight.device), tensor.to(weight.device)
                )
        if targets:
            torch._foreach_copy_(targets, tensors)
        if version is not None and not self._sleeping_weights.missing_names:
            self.engine.mark_weights_changed(version)

    def _matching_weight(self, name: str, tensor: Tensor, whole: bool) -> Tensor:
        """Return the model's own weight that a received tensor will replace, fully or in part.

        Raises ValueError if there is none, or if it differs from ``tensor`` in its type or, with
        ``whole``, in its shape.
        """
        weight = self._weights.get(name)
        if weight is None:
            raise ValueError(
                f"this model has no tensor '{name}': the trainer's policy is a different model"
            )
        if tensor.dtype != weight.dtype or (whole and tensor.shape != weight.shape):
            received, expected = (f"{tuple(x.shape)} of {x.dtype}" for x in (tensor, weight))
            raise ValueError(
                f"tensor '{name}' is {received} at the trainer and {expected} here: serve the "
                "model in the trainer's precision and shape"
            )
        return weight

    def _sleep(self, tags: Collection[str], keep: bool) -> None:
        if "kv_cache" in tags:
            self.engine.release_cache()
        if "weights" in tags:
            self._sleeping_weights.release_memory(keep=keep)
            if self._sleeping_weights.is_released:
                self._lent.clear()
        if self.policy.device.type == "cuda":  # otherwise PyTorch keeps the freed memory
            torch.cuda.empty_cache()

    def _wake(self, tags: Collection[str]) -> None:
        if "weights" in tags:
            self._sleeping_weights.wake()
        if "kv_cache" in tags:
            self.engine.allocate_cache()

    def _logprobs(self, ids: Sequence[int]) -> list[float]:
        logits_TV = self.engine.runner.all_logits(ids)
        logprobs_TV = log_softmax(logits_TV[:-1], fixed=self.engine.runner.is_fixed)
        return [
            float(each)
            for each in logprobs_TV.gather(
                1, torch.tensor(ids[1:], device=logits_TV.device)[:, None]
            )
        ]


def _gpu_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def _settle(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
