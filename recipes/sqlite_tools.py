"""A task of several turns with a tool: answer questions about an SQLite database by calling
``sql(query)``.

    ramify train recipes/sqlite_tools.py policy.path=Qwen/Qwen3-1.7B --out runs/sql
    ramify eval recipes/sqlite_tools.py:shop --model openai:gpt-5-mini --items 20

The policy writes code in a session, sees what it printed, and continues; ``sql`` runs in the host,
is read-only, and bounds the time and the rows of a query. The prompt has the schema with example
rows, as ``ramify ask QUESTION shop.sqlite`` gives it. With your own database, change ``database``
and ``QUESTIONS``, or return a ``RolloutInitialState`` whose ``tools`` are any functions of yours.

    How many orders of tea from Oslo had at least 20 units?
    print(sql("SELECT COUNT(*) FROM orders JOIN customers … WHERE …"))     ──> [(11,)]
    FINAL(11)                                                              ──> reward 1
"""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import ramify
from ramify import Limits, tasks, train

CITIES = ("Oslo", "Lima", "Kyoto", "Perth")
PRODUCTS = ("tea", "rice", "soap", "ink", "salt")
QUESTIONS = (
    (
        "How many orders of {product} from {city} had at least {least} units?",
        "SELECT COUNT(*) FROM orders JOIN customers ON customers.id = customer "
        "WHERE product = :product AND city = :city AND units >= :least",
    ),
    (
        "How many units of {product} were sold in {city}, in orders of at least {least} units?",
        "SELECT COALESCE(SUM(units), 0) FROM orders JOIN customers ON customers.id = customer "
        "WHERE product = :product AND city = :city AND units >= :least",
    ),
    (
        "How many customers from {city} never ordered {least} or more units of {product} at once?",
        "SELECT COUNT(*) FROM customers WHERE city = :city AND id NOT IN "
        "(SELECT customer FROM orders WHERE product = :product AND units >= :least)",
    ),
)
"""Pairs of a question and the query whose result is the right answer."""


@functools.cache
def database() -> Path:
    """Write the shop's database, the same in each process, and return its file."""
    folder = tempfile.mkdtemp(prefix="ramify-shop-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, rng = Path(folder) / "shop.sqlite", random.Random(0)
    with closing(sqlite3.connect(path)) as shop, shop:
        shop.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, city TEXT)")
        shop.execute("CREATE TABLE orders (customer INTEGER, product TEXT, units INTEGER)")
        customers = [(number, rng.choice(CITIES)) for number in range(60)]
        shop.executemany("INSERT INTO customers VALUES (?, ?)", customers)
        shop.executemany(
            "INSERT INTO orders VALUES (?, ?, ?)",
            [
                (rng.randrange(60), rng.choice(PRODUCTS), rng.randint(1, 40))
                for number in range(400)
            ],
        )
    return path


def shop() -> tasks.Task:
    def item(rng: random.Random) -> tasks.Item:
        names = {
            "product": rng.choice(PRODUCTS),
            "city": rng.choice(CITIES),
            "least": rng.randint(1, 40),
        }
        text, query = rng.choice(QUESTIONS)
        with closing(sqlite3.connect(database())) as found:
            (gold,) = found.execute(query, names).fetchone()
        return tasks.Item(text.format(**names), gold=gold)

    async def begin(item: tasks.Item) -> tasks.RolloutInitialState:
        source = ramify.load(str(database()))
        return tasks.RolloutInitialState(
            context=source.context, tools=source.tools, about=source.manifest()
        )

    return tasks.DatasetTask("shop", tasks.generated("shop", item), tasks.numeric, begin=begin)


def run() -> train.Run:
    return train.Run(
        name="sqlite-tools",
        policy=train.PolicySpec(path="Qwen/Qwen3-1.7B"),
        task=train.TaskSpec(name=f"{__file__}:shop"),
        rl=train.RlSpec(
            steps=200,
            sample=train.RolloutBatchSpec(items=16, max_items=48),
            rollout=train.RolloutOptions(group=8, concurrency=128),
            optim=train.OptimizerSpec(lr=1e-6, warmup_steps=5, max_grad_norm=1.0),
        ),
        limits=Limits(
            max_turns=8,
            max_depth=0,
            max_reply_tokens=1024,
            max_seconds=86_400,
            max_concurrency=512,
        ),
        evaluate=train.EvaluateSpec(num=64),
    )
