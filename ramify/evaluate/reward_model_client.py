"""Get rewards from a reward model that is served over HTTP.

Requests are batched, concurrent and retried.

    RewardModel("http://gpu1:8000/classify", model="my-rm")        vLLM and SGLang: POST /classify
    RewardModel("http://gpu1:8000/pooling", model="my-rm")         vLLM: POST /pooling
    RewardModel("http://gpu1:8080/predict", label="good")          text-embeddings-inference

    answers of finished rollouts ── BatchedReward ── one request per batch ──> numbers

The last part of the URL decides the format of requests and replies; ``form`` sets it for other
paths. Transient failures (no connection, 429, 5xx, unusable replies) are retried with growing
delays. After five failures the rollouts of the batch have no reward, and the error names the
server. Judges that answer in words are in ``tasks/scoring/rubric.py``.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from ramify.clients.chat_json import error_from_status
from ramify.errors import (
    ConfigError,
    MalformedResponse,
    ModelError,
    RateLimited,
    ReplyLostError,
    did_you_mean,
)
from ramify.http_client.http_transport import (
    HttpConnectionPool,
    HttpRequestTarget,
    HttpResponse,
    route_to,
)
from ramify.secret_redaction import register_secret
from ramify.tasks.base import Item
from ramify.tasks.scoring.batched import BatchedReward

Form = Literal["classify", "pooling", "predict"]
_FORMS: tuple[Form, ...] = ("classify", "pooling", "predict")
_ATTEMPTS = 5
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


def join_question_and_answer(question: str, answer: str) -> str:
    """Join a question and its answer into one string, for a reward model without a chat
    template."""
    return f"{question}\n\n{answer}"


class RewardModel:
    """A reward function that asks a reward model over HTTP to score an answer to a question.

    Example:
        reward = evaluate.RewardModel("http://gpu1:8000/classify", model="my-rm", label="good")
        task = tasks.DatasetTask("helpful", splits, reward)
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        form: Form | None = None,
        label: str | int = 0,
        text: Callable[[str, str], str] = join_question_and_answer,
        key_variable: str = "",
        max_batch: int = 32,
        concurrency: int = 8,
        timeout_s: float = 60.0,
    ) -> None:
        """Create a reward function for the reward model at ``url``.

        ``label`` is the name or number of the class whose score is the reward. ``text`` builds the
        text to score from the question and the answer. ``key_variable`` names the environment
        variable with the server's key, if it needs one. Up to ``concurrency`` requests run at once.
        Each has at most ``max_batch`` answers and may take ``timeout_s`` seconds.

        Raises ConfigError for an unknown form, a URL that is not HTTP, and a missing key.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"reward model {url!r}: give a URL, such as http://host:8000/classify"
            )
        last = parts.path.rstrip("/").rpartition("/")[2]
        if form is None and last not in _FORMS:
            raise ConfigError(
                f"reward model {url}: its path is none of {', '.join(_FORMS)}: give the whole URL, "
                "or form="
            )
        if form is not None and form not in _FORMS:
            raise ConfigError(
                f"reward model {url}: unknown form '{form}': {did_you_mean(form, _FORMS)}"
            )
        if isinstance(label, str) and (form or last) != "predict":
            raise ConfigError(
                f"reward model {url}: /{form or last} returns unnamed scores: give label= as an "
                "index, 0 or more"
            )
        key = os.environ.get(key_variable, "") if key_variable else ""
        if key_variable and not key:
            raise ConfigError(
                f"reward model {url}: the environment variable {key_variable} is not set"
            )
        if key:
            register_secret(key_variable, key)
        self.url = url
        self._form = form or last
        self._model = model
        self._label = label
        self._text = text
        self._key = key
        self._key_variable = key_variable
        self._timeout_s = timeout_s
        self._route: HttpRequestTarget | None = None
        self._pool: tuple[asyncio.AbstractEventLoop, HttpConnectionPool] | None = None
        self._batched = BatchedReward(self._ask, max_batch=max_batch, concurrency=concurrency)

    def __call__(self, answer: Any, item: Item) -> float:
        """Return the reward of one answer, which is scored in a batch together with others.

        Raises RamifyError if the server returned no score.
        """
        return self._batched(answer, item)

    async def _ask(self, completions: Sequence[str], prompts: Sequence[str]) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        texts = [self._text(question, answer) for question, answer in pairs]
        wait_s = _FIRST_WAIT_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._asked_once(texts)
            except ModelError as error:
                if not error.transient or attempt == _ATTEMPTS:
                    raise
                asked_s = error.retry_after_s if isinstance(error, RateLimited) else None
                await asyncio.sleep(max(asked_s or 0.0, wait_s * random.uniform(0.5, 1.0)))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("unreachable")

    async def _asked_once(self, texts: Sequence[str]) -> list[float]:
        where = f"reward model {self.url}"
        if self._route is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._route = route_to(self.url, headers)
        body: dict[str, Any] = {"inputs" if self._form == "predict" else "input": list(texts)}
        if self._model:
            body["model"] = self._model
        try:
            async with asyncio.timeout(self._timeout_s):
                exchange = self._connections().prepare_exchange(
                    where, self._route, msgspec.json.encode(body)
                )
                async with exchange as response:
                    answer = await response.read()
        except TimeoutError:
            raise ReplyLostError(f"{where}: no reply within {self._timeout_s:g} s") from None
        if answer.status != 200:
            raise error_from_status(
                where,
                answer.status,
                answer.headers,
                answer.body,
                key_variable=self._key_variable,
                secrets=(self._key,) if self._key else (),
            )
        return self._parse_rewards(where, answer, len(texts))

    def _connections(self) -> HttpConnectionPool:
        """Return the connection pool of the running event loop.

        A pool cannot be shared between loops.
        """
        loop = asyncio.get_running_loop()
        if self._pool is None or self._pool[0] is not loop:
            self._pool = loop, HttpConnectionPool()
        return self._pool[1]

    def _parse_rewards(self, where: str, answer: HttpResponse, num: int) -> list[float]:
        try:
            reply = msgspec.json.decode(answer.body)
            rows = reply if self._form == "predict" else _in_order(reply)
            rewards = [self._parse_reward(row) for row in rows]
        except (LookupError, RecursionError, StopIteration, TypeError, ValueError) as error:
            raise MalformedResponse(
                f"{where}: its reply does not have the form of /{self._form} "
                f"({type(error).__name__}: {error!s:.100}): {answer.body[:80]!r}"
            ) from None
        if len(rewards) != num:
            raise MalformedResponse(f"{where}: {len(rewards)} scores for {num} texts")
        return rewards

    def _parse_reward(self, row: Any) -> float:
        """Parse the score of the chosen label from the reward server's result for one input."""
        if self._form == "predict":  # [{"label": "good", "score": 0.9}, …]
            if isinstance(self._label, int):
                return float(row[self._label]["score"])
            return float(next(each["score"] for each in row if each["label"] == self._label))
        name = next(name for name in ("probs", "embedding", "data") if name in row)
        number = row[name][self._label]
        return float(number[0] if isinstance(number, list) else number)


def _in_order(reply: Any) -> list[Any]:
    """Sort the entries of a reward server's reply by the order in which the inputs were sent.

    The replies of vLLM and SGLang are supported.
    """
    rows = reply["data"] if isinstance(reply, Mapping) and "data" in reply else reply
    rows = rows if isinstance(rows, list) else [rows]
    return sorted(rows, key=lambda row: row.get("index", 0))
