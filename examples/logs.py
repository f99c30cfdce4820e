"""Ask which host of a folder of logs failed first: 38 megabytes, without a key or a network.

The logs are generated: seven hosts write for ten days, and on one night the disk of a database
fills up. The model is a script behind a real HTTP server on this machine that speaks the OpenAI
API, and its tokens cost what those of gpt-5-mini cost. The script knows the form of a line, and
neither the host nor the time: its code finds them. As with a real model, the folder is read, the
code runs in the jail, sub-calls use HTTP, each request is reserved before it is sent, and the run
is recorded.

    python examples/logs.py
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import sys
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

from scripted import environment, ramify

from ramify import Message
from ramify.testing import ScriptedServer

QUESTION = "Which host failed first, and why?"
HOSTS = ("web-1", "web-2", "web-3", "web-4", "db-1", "db-2", "cache-1")
NIGHT = datetime(2026, 3, 7, 2, 13)
QUIET = (
    "GET /orders 200",
    "GET /stock 200",
    "POST /orders 201",
    "checkpoint complete",
    "GET / 304",
)

LOOK = """\
I look at the size and the form of the logs first.
```repl
print(len(context), "files,", f"{sum(map(len, context.values())):,} characters")
print(context[min(context)][:160])
```"""

FIND = """\
Code finds the errors. What a message means is work for a reader: one sub-call for each host.
```repl
errors = {}
for name in sorted(context):
    for line in context[name].splitlines():
        if " ERROR " in line:
            errors.setdefault(name.split("/")[0], []).append(line)
for lines in errors.values():
    lines.sort()
hosts = sorted(errors, key=lambda host: errors[host][0])
prompts = [f"Own fault or another host's?\\n{errors[host][0]}" for host in hosts]
about = llm_query_batched(prompts)
for host, said in zip(hosts, about):
    print(errors[host][0][:19], host, len(errors[host]), "errors:", said)
```"""

ANSWER = """\
```repl
first, line = hosts[0], errors[hosts[0]][0]
others = sum(said.startswith("another") for said in about)
FINAL(f"{first} failed first, on {line[:19]}: {line.partition(' ERROR ')[2]}. "
      f"The errors of {others} other hosts follow from it.")
```"""


def model(messages: tuple[Message, ...]) -> str:
    """Return the scripted reply for this point of the conversation."""
    if messages[0].role != "system":  # a sub-call: it reads one line
        line = messages[-1].content.splitlines()[-1]
        return "another host's" if "connect" in line else "its own"
    return {2: LOOK, 4: FIND}.get(len(messages), ANSWER)


def write_logs(folder: Path, seed: int = 0, num_lines: int = 10_000) -> str:
    """Write ``HOST/DAY.log`` for seven hosts and ten days. Return the host that failed first."""
    rng = random.Random(seed)
    failing = rng.choice(("db-1", "db-2"))
    for host in HOSTS:
        (folder / host).mkdir(parents=True)
        for day in range(1, 11):
            midnight = datetime(2026, 3, day)
            seconds = sorted(rng.randrange(86_400) for _ in range(num_lines))
            lines = [
                f"{(midnight + timedelta(seconds=second)).isoformat()} {host} INFO  "
                f"{rng.choice(QUIET)} {rng.randrange(1, 900)} ms"
                for second in seconds
            ]
            if day == NIGHT.day:
                lines = sorted([*lines, *_errors(rng, host, failing)])
            (folder / host / f"2026-03-{day:02}.log").write_text("\n".join(lines) + "\n")
    return failing


def _errors(rng: random.Random, host: str, failing: str) -> list[str]:
    """Return the errors of a host on the night on which the disk of ``failing`` filled up."""
    if host == "cache-1":
        return []
    if host == failing:
        start, text = NIGHT, "cannot write WAL segment: no space left on device"
    else:
        delay = timedelta(seconds=rng.randrange(20, 400))
        start, text = NIGHT + delay, f"cannot connect to {failing}:5432: connection refused"
    moments = sorted(start + timedelta(seconds=rng.randrange(0, 3_600)) for _ in range(200))
    return [f"{each.isoformat()} {host} ERROR {text}" for each in (start, *moments)]


async def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        failing = write_logs(Path(folder, "logs"))
        # Delay each reply as a real model would, so that there is something to watch.
        async with ScriptedServer(model, latency_s=0.3) as server:
            shell = functools.partial(
                ramify, folder=folder, environment=environment(folder, server.url)
            )
            status = await shell("ask", QUESTION, "logs/", "--model", "openai:gpt-5-mini")
            if status == 0:
                print(flush=True)
                status = await shell("show", "last")
    print(f"\nThe logs were generated; {failing} is the host whose disk was filled.")
    return status


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    sys.exit(asyncio.run(main()))
