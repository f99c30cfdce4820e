"""Plans are fixed programs that answer a question about a text with many small model calls of
limited size.

The number of calls and the cost are known before anything is spent.

    >>> from ramify import plans
    >>> plan = plans.aggregate(["error", "warning", "fine"])
    >>> print(plan)                                            # its steps and their types
    >>> plan.cost(text, "openai:gpt-5-mini").dollars           # at most; nothing has been sent
    >>> rlm.completion(text, "How many errors?", strategy=plans.PlanStrategy(plan))

    combinators   split peek map filter ask reduce concat cross best field both
    symbolic      count spread total top distinct combine join periods
    predicates    Pattern (regular expression) Relevance (BM25) Comparison (fields), or a Leaf
    ready         search classify aggregate pairwise summarise multi_hop; ready_plan plan_for
                  strategy_for
    values        Plan Leaf PlanStrategy PlanCostBound CallBound SplitText ContextPart
    measured      PartSizeCalibration PartSizeAccuracy calibration_of

These are all the public names (``__all__``); modules below this package are private.
"""

from ramify import lazy_namespace

__getattr__, __dir__, __all__ = lazy_namespace(__name__, __path__[0])
