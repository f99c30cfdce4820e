"""The reference library of recursive language models, ``rlms``: agent.py ITEM_FILE."""

import json
import os
import sys

from rlm import RLM

with open(sys.argv[1]) as file:
    question = json.load(file)["question"]
rlm = RLM(
    backend="openai",
    backend_kwargs={
        "model_name": "policy",
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
    },
    max_iterations=3,
)
boxes = "The red box holds copper. The blue box holds gold. The green box holds silver."
print(rlm.completion(boxes, root_prompt=question).response)
