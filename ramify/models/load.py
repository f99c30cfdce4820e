"""Loads, creates and saves policies.

A policy is a language model together with its tokenizer and its renderer, which converts messages
to token ids.

    policy = load("path/or/hub-name")               a folder, or a model in the Hugging Face cache
    policy = from_config(config, tokenizer, seed)   random weights
    save(policy, "folder")                          transformers loads it and computes the same

Dense Llama, Mistral, Qwen2 and Qwen3 models run as ``DenseModel``; every other causal language
model runs as transformers' own module. Nothing is downloaded, and no code from a checkpoint is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ramify.errors import ConfigError, StoreError
from ramify.models.chat_renderer import SCRATCH, ChatRenderer, renderer_of
from ramify.models.chat_template import set_thinking_default
from ramify.models.dense import DenseModel, DenseModelConfig, unsupported_reason
from ramify.models.folder_file_checksums import check_model, drop
from ramify.models.model_config_files import WINDOWS, check_tokenizer_file, local_model_folder
from ramify.models.weights import (
    check_weights,
    config_difference,
    load_weights,
    read_weights,
    write_weights,
)
from ramify.progress import track_progress
from ramify.trained_policy_settings import (
    PolicyRolloutSettings,
    read_policy_settings,
    write_policy_settings,
)

_GENERATION = "generation_config.json"
_OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""Matrices that write into the residual stream. Their initial values have half the usual scale, so
that activations do not grow with depth."""
_EMBEDDING_STD = 0.02


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Default sampling options for requests that set none, as stored in
    ``generation_config.json``."""

    temperature: float = 1.0
    """Sampling temperature. 0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from. 0 keeps all tokens."""


@dataclasses.dataclass
class Policy:
    """A language model together with its tokenizer, renderer and configuration."""

    model: nn.Module
    """A ``DenseModel``, or a transformers module whose ``forward`` returns ``logits``."""
    tokenizer: PreTrainedTokenizerFast
    renderer: ChatRenderer
    config: Any
    """The model's Hugging Face configuration."""
    version: int
    """Version of the weights, which increases with every published change."""
    name: str
    """Path or name from which the policy was loaded, for display."""
    defaults: SamplingDefaults = dataclasses.field(default_factory=SamplingDefaults)
    card: PolicyRolloutSettings = dataclasses.field(default_factory=PolicyRolloutSettings)
    """Scaffold and limits with which the policy was trained."""

    @property
    def window(self) -> int:
        """Return the context window in tokens: the maximum length of a prompt and its reply
        together."""
        return (
            DenseModelConfig.from_config(self.config).window
            if isinstance(self.model, DenseModel)
            else context_window_from_config(self.config)
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the model.

        A matrix that is used twice is counted once.
        """
        return sum(parameter.numel() for parameter in self.model.parameters())


def load_policy(
    path_or_name: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    thinking: bool | None = None,
) -> Policy:
    """Load a policy from a folder or from a Hugging Face model that is already on disk.

    By default, the precision is fp32 on a CPU and that of the stored weights otherwise, and the
    device is a GPU if there is one. The device ``meta`` loads no weights, for callers that only
    need token ids. ``thinking`` turns the thinking of a hybrid model on or off if its template
    supports that; the choice is saved with the policy. Raises ConfigError if the folder is missing,
    the weights do not match the configuration, or the tokenizer does not match its template.

    Example:
        policy = inference.load_policy("Qwen/Qwen3-0.6B", torch.bfloat16)
        policy.num_parameters
    """
    folder = local_model_folder(path_or_name)
    check_model(folder)
    config = _config(folder)
    tokenizer = load_tokenizer(folder)
    if thinking is not None:
        set_thinking_default(tokenizer, thinking)
    device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or default_dtype(config, device.type)
    generation = _read_generation_config(folder)
    if len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens but the model has "
            f"{config.vocab_size}: they do not belong together"
        )
    return Policy(
        model=_model(folder, config, dtype, device),
        tokenizer=tokenizer,
        renderer=renderer_of(
            tokenizer, stop_ids=_stop_ids(generation, config, tokenizer), thinking=thinking
        ),
        config=config,
        version=0,
        name=str(path_or_name),
        defaults=_defaults(generation),
        card=read_policy_settings(folder),
    )


def from_config(
    config: Any,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    *,
    device: torch.device | str = "cpu",
) -> Policy:
    """Create a policy with random weights from a Hugging Face configuration.

    The same seed gives the same weights on every device.

    Matrices are drawn from a normal distribution with standard deviation 1 / sqrt(inputs), or half
    of that if they write into the residual stream. For embeddings and an untied output matrix the
    standard deviation is 0.02. Biases start at 0, and norm weights at 1.

    Example:
        policy = inference.from_config(config, tokenizer, seed=0)
    """
    if len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens but the configuration has "
            f"{config.vocab_size}: use the same size for both"
        )
    if unsupported_reason(config) is None:
        model: nn.Module = DenseModel(config)
        for name, parameter in model.named_parameters():
            _initialize_parameter(name, parameter, seed)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    renderer = renderer_of(tokenizer, stop_ids=_stop_ids({}, config, tokenizer))
    return Policy(
        model.to(device).eval(),
        tokenizer,
        renderer,
        config,
        0,
        f"{config.model_type} from seed {seed}",
        card=PolicyRolloutSettings(is_from_scratch=renderer.name == SCRATCH),
    )


def save_policy(
    policy: Policy,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    write: Callable[[Path], None] | None = None,
) -> None:
    """Save a policy in Hugging Face's file layout.

    Weights are cast to ``dtype`` if it is given. The folder may already exist.

    The files are config.json, generation_config.json, model.safetensors, the tokenizer with its
    chat template, and policy.json if the policy has training settings to record. ``write`` is
    called to write the configuration and weights if they are not in this process.

    Example:
        inference.save_policy(policy, "runs/mine/policy", torch.bfloat16)
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drop(folder)  # these are the checksums of the previous files
    if write is not None:
        write(folder)
    elif isinstance(policy.model, DenseModel):
        config = policy.config.__class__.from_dict(policy.config.to_dict())
        config.architectures = [_architecture(policy)]
        config.dtype = dtype or policy.dtype
        config.save_pretrained(folder)
        write_weights(policy.model, folder, dtype)
    else:
        _save_module(policy.model, folder, dtype)
    policy.tokenizer.save_pretrained(folder)
    (folder / _GENERATION).write_text(json.dumps(_generation_config(policy), indent=2) + "\n")
    write_policy_settings(folder, policy.card)


def load_into(policy: Policy, folder: str | Path) -> None:
    """Replace a policy's weights, in place, with those of a checkpoint.

    Raises ConfigError, which names the first difference, if the checkpoint was made with another
    configuration.
    """
    folder = Path(folder)
    if difference := config_difference(policy.config, _config(folder)):
        raise ConfigError(f"{folder} was saved with a different configuration: {difference}")
    if isinstance(policy.model, DenseModel):
        load_weights(policy.model, read_weights(folder), str(folder))
    else:
        policy.model.load_state_dict(_load_transformers_module(folder, policy.dtype).state_dict())


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer from its tokenizer.json alone, regardless of the model family.

    ``AutoTokenizer`` would choose a class by model family, which may split text differently. Raises
    ConfigError if the file is missing or invalid.
    """
    check_tokenizer_file(folder)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 (the tokenizers library raises this class itself)
        raise ConfigError(
            f"{folder}: the tokenizer cannot be loaded: {str(error).splitlines()[0]}"
        ) from None
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def read_config(path_or_name: str | Path) -> Any:
    """Read a model's configuration without loading the model.

    The model is a folder, or a Hugging Face name whose files are on disk. Raises ConfigError if it
    cannot be found or read.
    """
    return _config(local_model_folder(path_or_name))


def _config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder}/config.json cannot be read: {str(error).splitlines()[0]}"
        ) from None


def _device(name: torch.device | str) -> torch.device:
    """Return the torch device with the given name.

    Raises ConfigError if this machine does not have it.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"this machine has no device '{name}': {str(error).splitlines()[0]}"
        ) from None
    return device


def _model(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    if device.type == "meta":
        with device:
            dense = unsupported_reason(config) is None
            bare = DenseModel(config) if dense else AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        return cast(nn.Module, bare.to(dtype).eval())
    if unsupported_reason(config) is not None:
        with track_progress("loading", note=str(folder)):
            return _load_transformers_module(folder, dtype).to(device).eval()
    with torch.device("meta"):
        model = DenseModel(config)
    weights = read_weights(folder)
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    check_weights(model, weights, str(folder))
    moved = {}
    with track_progress(
        "loading", sum(tensor.nbytes for tensor in weights.values()), "bytes", str(folder)
    ) as work:
        for name, tensor in weights.items():
            moved[name] = tensor.to(device, dtype)
            work.advance(tensor.nbytes)
    model.load_state_dict(moved, assign=True)
    return model.eval()


def _load_transformers_module(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Load a model as a transformers module.

    This is for architectures that ``DenseModel`` does not support.
    """
    try:
        with _without_progress_bars():
            module: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    return module


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Context manager that turns off the progress bars of transformers.

    They would mix with a run's log lines.
    """
    from transformers.utils import logging

    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shows_progress:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _save_module(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    state = module.state_dict()
    cast = {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    with _without_progress_bars():
        module.save_pretrained(folder, state_dict=cast)


def _initialize_parameter(name: str, parameter: nn.Parameter, seed: int) -> None:
    """Initialize one parameter of a new model.

    Norms and biases get constants, and matrices get random values. The random numbers depend only
    on the seed and the parameter's name, and not on the model's other parameters.
    """
    with torch.no_grad():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        std = float(parameter.shape[1]) ** -0.5 * (0.5 if name.endswith(_OUTPUTS) else 1.0)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            std = _EMBEDDING_STD
        # Hash seed and name together: a CPU generator uses only 32 bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / _GENERATION
    try:
        return dict(json.loads(path.read_bytes())) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def _defaults(generation: dict[str, Any]) -> SamplingDefaults:
    if generation.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    values = {
        name: generation[name]
        for name in ("temperature", "top_p", "top_k")
        if generation.get(name) is not None
    }
    return msgspec.convert(values, SamplingDefaults, strict=False)


def _generation_config(policy: Policy) -> dict[str, Any]:
    drawn = (
        {"do_sample": False}
        if policy.defaults.temperature == 0
        else {"do_sample": True, **msgspec.to_builtins(policy.defaults)}
    )
    return {
        **drawn,
        "eos_token_id": list(policy.renderer.stop_ids),
        "pad_token_id": policy.tokenizer.pad_token_id,
    }


def _stop_ids(
    generation: dict[str, Any], config: Any, tokenizer: PreTrainedTokenizerFast
) -> list[int]:
    ids: list[int] = []
    for candidate in (
        generation.get("eos_token_id"),
        getattr(config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        ids += (
            candidate if isinstance(candidate, list) else [] if candidate is None else [candidate]
        )
    return list(dict.fromkeys(ids))


def _architecture(policy: Policy) -> str:
    """Return the name of the transformers class that implements the policy's model.

    The class itself is not imported, because that takes seconds.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[policy.config.model_type])


def default_dtype(config: Any, device: str) -> torch.dtype:
    """Return the default precision for loading a checkpoint's weights.

    It is fp32 on a CPU, and the stored precision on other devices.
    """
    if device == "cpu":
        return torch.float32
    stored = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, stored) if isinstance(stored, str) else stored


def context_window_from_config(config: Any) -> int:
    """Return the context window in tokens from a model's configuration.

    It is the maximum length of a prompt and its reply together. Raises ConfigError if the
    configuration does not say.
    """
    inner = config.get_text_config()
    for name in WINDOWS:
        if (window := getattr(inner, name, None)) is not None:
            return int(window)
    raise ConfigError(
        f"the configuration of {config.model_type} has no context window: set "
        "max_position_embeddings in its config.json"
    )
