"""llama.cpp's side of the sampling benchmark, through the wheel ``xllamacpp``.

    python side_llama.py FOLDER    FOLDER has weights in Hugging Face's layout, and work.json

It converts the weights to GGUF in fp32 and serves them in this process, with one thread and all
replies at once. The last line of its output has the CPU seconds of each repeat, and the greedy
continuation of the first prompt, which shows that it runs the same model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def safetensors(path: Path) -> dict[str, Any]:
    """Read fp32 weights without a further library."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    weights = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "F32", f"{name} is {entry['dtype']}"
        begin, end = entry["data_offsets"]
        weights[name] = np.frombuffer(data[start + begin : start + end], np.float32).reshape(
            entry["shape"]
        )
    return weights


def convert(folder: Path) -> Path:
    """Write the Qwen3 model of a folder as GGUF."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    # Prompts are ids, so the texts of tokens do not matter.
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["t 0"])
    for name, weight in safetensors(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{NAMES[stem]}.weight", weight)
        else:
            writer.add_tensor(f"{NAMES[stem]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def server(path: Path, num: int, length: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = num
    params.n_ctx = num * length
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_batch = params.n_ubatch = 1024
    params.warmup, params.port, params.verbosity = False, 0, 0
    params.cache_prompt = False
    return xllamacpp.Server(params)


def main() -> None:
    folder = Path(sys.argv[1])
    work = json.loads((folder / "work.json").read_text())
    num, length, new = len(work["prompts"][0]), len(work["prompts"][0][0]), work["new"]
    llama = server(convert(folder), num, 2 * max(length + new, 128))

    def complete(ids: list[int], **more: Any) -> dict[str, Any]:
        given = {
            "prompt": ids,
            "n_predict": new,
            "temperature": 1.0,
            "samplers": ["temperature"],
            "ignore_eos": True,  # GGUF without a last token takes some id for it
            "cache_prompt": False,
            **more,
        }
        done = llama.handle_completions(given)
        return json.loads(done) if isinstance(done, str | bytes) else done

    greedy = complete(work["prompts"][0][0], temperature=0.0)["choices"][0]["text"]
    seconds: dict[str, list[float]] = {"plain": [], "logprobs": []}
    with ThreadPoolExecutor(num) as threads:
        for prompts in work["prompts"]:
            for kind, more in (("plain", {}), ("logprobs", {"n_probs": 1})):
                started = time.process_time()
                replies = list(threads.map(partial(complete, **more), prompts))
                seconds[kind].append(time.process_time() - started)
                made = sum(reply["usage"]["completion_tokens"] for reply in replies)
                assert made == num * new, f"{made} tokens instead of {num * new}"
    print(json.dumps({**seconds, "greedy": [int(each) for each in greedy.split("t")[1:]]}))
    sys.stdout.flush()
    os._exit(0)  # its threads would wait for further requests


if __name__ == "__main__":
    main()
