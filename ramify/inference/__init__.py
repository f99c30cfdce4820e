"""Model clients, and inference engines whose weights are updated while a policy is trained.

    >>> from ramify import inference
    >>> policy = inference.load_policy("Qwen/Qwen3-0.6B")
    >>> client = inference.LocalClient(policy, name="local:qwen")

    your own client     Client Request Reply Message Sampling Tool ToolCall Usage Price
    its errors          RateLimited Unreachable ReplyLostError ServerStatusError MalformedResponse
                        RequestRefusedError …
    a policy            load_policy save_policy from_config Policy SamplingDefaults
    an engine           LocalClient connect
    engines             UpdatableInferenceClient InferenceSpec EngineLost CachePressure
    weight sync         WeightSync WeightReceiver LazyExportWeight WeightChunk WeightUpdateTensor

These are all the public names (``__all__``); modules below this package are private.
"""

from ramify import lazy_namespace

__getattr__, __dir__, __all__ = lazy_namespace(__name__, __path__[0])
