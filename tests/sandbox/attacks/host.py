"""A host with busy sessions that will be killed: ``python -m attacks.host PLAN`` prints the
processes below it, and waits.

PLAN is that of ``runner.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings

import msgspec

from attacks import watch
from attacks.arena import SPEC, answer
from attacks.outer import impoverish
from attacks.runner import Plan
from ramify.errors import RamifyError
from ramify.sandbox.base import SharedContextValue, open_sandbox, provider_spec

CELLS = (
    "while True: pass",
    "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: "
    "time.sleep(60)",
    "import threading\nfor _ in range(3): threading.Thread(target=sum, args=(range(10 ** "
    "13),)).start()",
    "call_it = 1\nwhile True:\n    try:\n        while True: print('x' * 1000)\n    except "
    "BaseException: pass",
)


async def run(plan: Plan) -> None:
    sandbox = open_sandbox(provider_spec({"provider": plan.provider, **SPEC, **plan.spec}))
    context = SharedContextValue("a line\n" * 1_000_000)
    try:
        sessions = [
            await sandbox.open(context=context if number % 2 else None)
            for number in range(len(CELLS))
        ]
    except RamifyError as error:
        print(json.dumps({"refusal": str(error)}), flush=True)
        await sandbox.close()
        return
    if hasattr(sessions[0], "fork") and sandbox.caps.fork:
        sessions.append(await sessions[0].fork())
    running = [
        asyncio.ensure_future(session.run(CELLS[number % len(CELLS)], answer=answer, timeout_s=600))
        for number, session in enumerate(sessions)
    ]
    await asyncio.sleep(0.3)
    print(
        json.dumps({"sessions": len(sessions), "below": sorted(watch.descendants(os.getpid()))}),
        flush=True,
    )
    await asyncio.gather(*running)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    impoverish(plan.tier)
    asyncio.run(run(plan))
