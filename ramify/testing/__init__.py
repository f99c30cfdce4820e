"""Test doubles to pass in instead of patching, and conformance checks for plug-ins.

    >>> import ramify
    >>> from ramify import testing
    >>> with ramify.RLM(testing.ScriptedClient(["42"])) as rlm:
    ...     rlm.completion("What is six times seven?").answer
    '42'

    a model       ScriptedClient, in this process; ScriptedServer, OpenAI's API over real HTTP
    a reader      OfflineModel, which answers suites with a stated accuracy (SimulatedAccuracyCurve,
                  ModelLatency), and what it knows of one (OfflineModelSuiteStrategy)
    batches       FakeBatchApiServer, the batch APIs of OpenAI and Anthropic over real HTTP
    a script      a list, ScriptRule, a function of the messages, or a file (Script)
    failures      rate_limited server_error refused unreachable dropped cut stalled malformed …
    a hub         FakeHubServer, the Hugging Face hub's HTTP interface
    a disk        ForgetfulDisk, which loses what was not synced
    a sandbox     check_sandbox check_one CHECKS ConformanceCheck ConformanceResult SandboxUnderTest

These are all the public names (``__all__``); modules below this package are private.
"""

from ramify import lazy_namespace

__getattr__, __dir__, __all__ = lazy_namespace(__name__, __path__[0])
