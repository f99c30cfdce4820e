"""TRL's ``GRPOTrainer`` as a side of ``training.py``, in a separate environment
(``requirements-trl.txt``).

    side_trl.py MODEL once FILE SIBLINGS REPLY    generate SIBLINGS replies of REPLY tokens to each
                                                  prompt (one JSON line each), and learn from them
    side_trl.py MODEL rows FILE SIBLINGS          learn from given rows, one JSON line each:
                                                  {"prompt": [ids], "reply": [ids],
                                                  "logprobs": [numbers]}

Makes one optimizer step for each line of standard input and prints its CPU seconds; prints "ready"
before the first. It uses fp32, no KL, no gradient checkpointing, and batches of 32 replies or of 8
rows, as many as fill the step.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ |= {
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

STEPS = 1000


class OnDemand(TrainerCallback):
    """Waits for a line before each step and reports the time of the step."""

    def __init__(self, out: Any) -> None:
        self.out, self.started = out, 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        print("ready", file=self.out, flush=True)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not sys.stdin.readline():
            sys.stdout.flush()
            os._exit(0)  # otherwise the trainer would run to its end
        self.started = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        print(json.dumps(time.process_time() - self.started), file=self.out, flush=True)


def options(rows: int, batch: int, siblings: int, **more: Any) -> GRPOConfig:
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=rows // batch,
        num_generations=siblings,
        max_steps=STEPS,
        learning_rate=1e-3,
        beta=0.0,
        bf16=False,
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch_fused",
        **more,
    )


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to stderr
    torch.set_num_threads(1)
    folder, kind, file, *rest = sys.argv[1:]
    siblings, given = (
        int(rest[0]),
        [json.loads(line) for line in Path(file).read_text().splitlines()],
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    pick = random.Random(0)
    extra: dict[str, Any] = {}
    if kind == "once":
        texts, reply = given, int(rest[1])
        fixed = {"min_new_tokens": reply}
        args = options(
            len(given) * siblings,
            32,
            siblings,
            max_completion_length=reply,
            generation_kwargs=fixed,
            temperature=1.0,
        )
    else:
        texts = ["a"] * (len(given) // siblings)
        args = options(len(given), 8, siblings)

        def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            names = {"prompt_ids": "prompt", "completion_ids": "reply", "logprobs": "logprobs"}
            return {name: [row[field] for row in given] for name, field in names.items()}

        extra = {"rollout_func": rollout}
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        reward_funcs=lambda completions, **kwargs: [pick.random() for _ in completions],
        **extra,
    )
    trainer.add_callback(OnDemand(out))
    trainer.train()


if __name__ == "__main__":
    main()
