"""Dense decoder models of the Llama, Mistral, Qwen2 and Qwen3 families.

They compute over a single flat axis of tokens.

The model computes everything between token ids and logits except attention, which the caller passes
in: attention in the engine reads and writes a KV cache, and attention in the trainer runs over a
forest of segments. Outside attention, a token's result depends only on its id and position.

    ids_T, positions_T ── embed ──┐
        per layer:  norm ─ q k v ─ (q, k norm) ─ rotate ─ attend(layer, q, k, v, scale)
                    ─ o_proj ─ + ─ norm ─ mlp ─ +
    norm ── h_TD ── logits ── [N, V]

Parameters have the same names as in Hugging Face's modules
(``model.layers.0.self_attn.q_proj.weight``), so that state dicts are interchangeable. Not
supported: dropout, sliding windows (``DenseModelConfig.window`` stays inside them, where they
change nothing), mixtures of experts, and rotary scalings other than Llama 3's;
``DenseModelConfig.from_config`` rejects these by name.

The norm has a custom backward pass on a CPU:

    y = x r weight,  r = 1 / sqrt(mean(x²) + eps)          g = dy weight
    dweight = sum over rows of dy x r                      dx = r (g - x r mean(g x r))

PyTorch has a kernel for its forward pass, which is used here, but splits its backward pass into a
dozen operations; on 2,000 rows of 128 this one takes a third of the time. On other devices PyTorch
has a kernel for both.

Legend: T tokens, N rows of them, D width, H query heads, K key-value heads, d head size, V
vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ramify.errors import ConfigError
from ramify.models.onednn_products import linear

_HAS_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm")


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension of a tensor by its root mean square, and scale it.

    The scale is a weight vector of the same precision.
    """
    if (
        _HAS_KERNEL
        and x.device.type == "cpu"
        and torch.is_grad_enabled()
        and x.dtype == torch.float32
    ):
        return cast(Tensor, _RmsNorm.apply(x, weight_D, eps))  # type: ignore[no-untyped-call]
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y, r = torch.ops.aten._fused_rms_norm(x, weight_D.shape, weight_D, eps)
        ctx.save_for_backward(x, r, weight_D)
        return cast(Tensor, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy,) = grads
        x, r, weight_D = ctx.saved_tensors
        share_ND = (dy * x).mul_(r).flatten(0, -2)
        # Sums as products with a vector: on a CPU this is faster, over rows and over the last
        # dimension.
        dweight_D = share_ND.t().mv(torch.ones(len(share_ND)))
        mean = share_ND.mv(weight_D).mul_(-1 / x.shape[-1]).view(r.shape)
        dx = (dy * weight_D).addcmul_(x, mean.mul_(r)).mul_(r)
        return dx, dweight_D, None


ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` that ``DenseModel`` supports."""


class CausalAttentionKernel(Protocol):
    """A function that computes causal attention for the tokens of a batch.

    Each token attends to itself and to the tokens before it in its own sequence.
    """

    def __call__(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> Tensor:
        """Return the attention output [tokens, query heads, head size].

        Consecutive query heads share a key-value head: query head h reads key-value head ``h // (H
        / K)``, with H query heads and K key-value heads.
        """
        ...


class Llama3Scaling(msgspec.Struct, frozen=True):
    """Parameters of Llama 3.1's RoPE scaling (``rope_type: llama3``) for longer contexts."""

    factor: float
    """Factor by which the lowest rotary frequencies are divided."""
    low_freq_factor: float
    high_freq_factor: float
    original_window: int
    """Context window of the original training, in tokens."""


class DenseModelConfig(msgspec.Struct, frozen=True):
    """The sizes and settings in a model's configuration that determine its computation."""

    architecture: str
    """``llama``, ``mistral``, ``qwen2`` or ``qwen3``."""
    vocab_size: int
    width: int
    """Size of the hidden states, D."""
    num_layers: int
    num_heads: int
    """Number of query heads, H."""
    num_kv_heads: int
    """Number of key-value heads, K."""
    head_size: int
    """Size of a head, d. Must be even."""
    mlp_width: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    window: int
    """Number of positions for which the result equals the original model's. It is the context
    window, or the sliding window if that is smaller."""
    tied: bool
    """True if the embedding is also the output matrix."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """True if each query and key head is normalized before it is rotated."""

    @classmethod
    def from_config(cls, config: Any) -> DenseModelConfig:
        """Read a model's sizes and settings from a Hugging Face ``PretrainedConfig``.

        Raises ConfigError with the first feature that ``DenseModel`` does not support.
        """
        kind = config.model_type
        if reason := unsupported_reason(config):
            raise ConfigError(
                f"{kind}: {reason}: load it as a Hugging Face module instead of DenseModel"
            )
        bias = bool(getattr(config, "attention_bias", False))
        window, sliding = int(config.max_position_embeddings), _sliding_window(config)
        return cls(
            architecture=kind,
            vocab_size=config.vocab_size,
            width=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            mlp_width=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            rope_theta=float(_rope(config)["rope_theta"]),
            rope_scaling=_scaling(_rope(config), window),
            window=min(window, sliding) if sliding else window,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias and kind != "qwen2",
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
        )


def unsupported_reason(config: Any) -> str | None:
    """Return the reason why ``DenseModel`` cannot run a model with this configuration, or None if
    it can."""
    if config.model_type not in ARCHITECTURES:
        return f"the architecture '{config.model_type}' is not one of {', '.join(ARCHITECTURES)}"
    if config.hidden_act != "silu":
        return f"hidden_act '{config.hidden_act}' is not silu"
    kind = _rope(config).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        return f"rope_type '{kind}' is neither default nor llama3"
    if _rope(config).get("partial_rotary_factor", 1.0) != 1.0:
        return "partial_rotary_factor is not 1"
    return None


class DenseModel(nn.Module):
    """The decoder model of Llama, Mistral, Qwen2 and Qwen3.

    Its weights are fp32 and uninitialized until ``models.load`` fills them in.
    """

    def __init__(self, config: Any) -> None:
        """Create the model that a Hugging Face configuration describes.

        Raises ConfigError if this class does not support it.
        """
        super().__init__()
        self.shape = shape = DenseModelConfig.from_config(config)
        self.model = _Trunk(shape)
        self.lm_head = _Linear(shape.width, shape.vocab_size, bias=False)
        self._frequencies = rotary_frequencies(shape)
        """[d / 2] frequencies in radians per position, always in fp32."""
        self._tie()

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: CausalAttentionKernel,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states after the final norm, one row per token.

        The token ids and positions are integer vectors.

        If ``rows_N`` is given, it selects tokens by N distinct indices, and the result has only
        their rows. For all other tokens, the last layer computes only keys and values.
        """
        h_TD = self.model.embed_tokens(ids_T)
        cos_T1d, sin_T1d = self._rotations(positions_T, h_TD.dtype)
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            h_TD = layer(h_TD, cos_T1d, sin_T1d, index, attend, rows_N if index == last else None)
        return cast(Tensor, self.model.norm(h_TD))

    def logits(self, h_ND: Tensor) -> Tensor:
        """Return fp32 logits, one row per hidden state."""
        return cast(Tensor, self.lm_head(h_ND)).float()

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the model's parameters from a state dict, as any PyTorch module does.

        The output matrix may be missing if it shares the weights of the embedding, as in Hugging
        Face's files.
        """
        if self.shape.tied:
            state_dict = {**state_dict, "lm_head.weight": state_dict["model.embed_tokens.weight"]}
        outcome = super().load_state_dict(state_dict, strict, assign)
        self._tie()
        return outcome

    def _rotations(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the rotary embedding for each position.

        The first half of the sines is negated, as ``_rotate`` expects.
        """
        if self._frequencies.device != positions_T.device:
            self._frequencies = self._frequencies.to(positions_T.device)
        angles = positions_T[:, None, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)

    def _tie(self) -> None:
        if self.shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight


class _Trunk(nn.Module):
    def __init__(self, shape: DenseModelConfig) -> None:
        super().__init__()
        self.embed_tokens = _Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _Norm(shape.width, shape.norm_eps)


class _Layer(nn.Module):
    # The parts of a layer are called by ``forward``: on small models a module's ``__call__`` costs
    # as much as its product (28 % of a step of 48 rows, 3 layers of width 128). Register hooks on
    # whole layers.
    def __init__(self, shape: DenseModelConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = _Norm(shape.width, shape.norm_eps)
        self.post_attention_layernorm = _Norm(shape.width, shape.norm_eps)
        self.compiler: str | None = None
        """Backend of ``torch.compile`` for the layer's two parts before and after attention, or
        None if they are not compiled. It is only used in training, and is set by
        ``compile_layers``."""

    def forward(
        self,
        h_TD: Tensor,
        cos_T1d: Tensor,
        sin_T1d: Tensor,
        index: int,
        attend: CausalAttentionKernel,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        before, after = _Layer.before_attention, _Layer.after_attention
        if self.compiler is not None and not torch.is_inference_mode_enabled():
            before, after = _compiled_parts(self.compiler)
        q_THd, k_TKd, v_TKd = before(self, h_TD, cos_T1d, sin_T1d)
        o_THd = attend(index, q_THd, k_TKd, v_TKd, self.self_attn.shape.head_size**-0.5)
        if rows_N is not None:
            h_TD, o_THd = h_TD.index_select(0, rows_N), o_THd.index_select(0, rows_N)
        return after(self, h_TD, o_THd)

    def before_attention(
        self, h_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's queries, keys and values, each [tokens, heads, head size].

        Queries and keys are rotated by the rotary embedding.
        """
        return self.self_attn.forward(self.input_layernorm.forward(h_TD), cos_T1d, sin_T1d)

    def after_attention(self, h_ND: Tensor, o_NHd: Tensor) -> Tensor:
        """Complete a layer's forward pass after its attention has been computed.

        The output projection and the MLP are added to the residual stream. Returns the hidden
        states of the tokens that the next layer needs.
        """
        h_ND = h_ND + self.self_attn.o_proj.forward(o_NHd.flatten(-2))
        return h_ND + self.mlp.forward(self.post_attention_layernorm.forward(h_ND))


class _Attention(nn.Module):
    # Queries, keys and values are three products, as are gate and up: one fused product of each was
    # no faster (0.9-1.1x from 1 to 128 rows on a CPU), and its parameter would not have Hugging
    # Face's name.
    def __init__(self, shape: DenseModelConfig) -> None:
        super().__init__()
        q_width, kv_width = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = _Linear(shape.width, q_width, bias=shape.qkv_bias)
        self.k_proj = _Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.v_proj = _Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.o_proj = _Linear(q_width, shape.width, bias=shape.o_bias)
        if shape.qk_norm:
            self.q_norm = _Norm(shape.head_size, shape.norm_eps)
            self.k_norm = _Norm(shape.head_size, shape.norm_eps)
        self.shape = shape

    def forward(
        self, h_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        q_THd = self.q_proj.forward(h_TD).view(-1, shape.num_heads, shape.head_size)
        k_TKd = self.k_proj.forward(h_TD).view(-1, shape.num_kv_heads, shape.head_size)
        v_TKd = self.v_proj.forward(h_TD).view(-1, shape.num_kv_heads, shape.head_size)
        if shape.qk_norm:
            q_THd, k_TKd = self.q_norm.forward(q_THd), self.k_norm.forward(k_TKd)
        return _rotate(q_THd, cos_T1d, sin_T1d), _rotate(k_TKd, cos_T1d, sin_T1d), v_TKd


class _Mlp(nn.Module):
    def __init__(self, shape: DenseModelConfig) -> None:
        super().__init__()
        self.gate_proj = _Linear(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.up_proj = _Linear(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.down_proj = _Linear(shape.mlp_width, shape.width, bias=shape.mlp_bias)

    def forward(self, h_TD: Tensor) -> Tensor:
        return self.down_proj.forward(
            F.silu(self.gate_proj.forward(h_TD)) * self.up_proj.forward(h_TD)
        )


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Skip PyTorch's initialization, because every caller fills in the weights.

        On the meta device, the initialization would import torch's compiler, which takes 1.5 s.
        """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Skip PyTorch's initialization, because every caller fills in the weights."""


class _Norm(nn.Module):
    """A layer that applies RMS normalization: x / sqrt(mean(x²) + eps) · weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)  # under autocast x has another type


def compile_layers(model: DenseModel, compiler: str | None) -> None:
    """Compile the parts of each layer before and after attention.

    Norms, rotations, activations and casts then become a few kernels that all layers share.
    ``compiler`` is a backend of ``torch.compile``, such as ``inductor``, or None to turn
    compilation off.

    Compilation takes place in the first batch and takes most of a minute. An engine that samples
    from the same model in inference mode is not affected. Attention is never compiled, since each
    batch has a different forest.
    """
    for layer in model.model.layers:
        assert isinstance(layer, _Layer)
        layer.compiler = compiler


@functools.cache
def _compiled_parts(compiler: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile the two parts of a layer, before and after attention, for any number of tokens."""
    parts = (_Layer.before_attention, _Layer.after_attention)
    before, after = (torch.compile(each, dynamic=True, backend=compiler) for each in parts)
    return before, after


def rotary_frequencies(shape: DenseModelConfig) -> Tensor:
    """Return the frequencies of the rotary embedding, in radians per position, one for each pair of
    a head's dimensions.

    Pair i has the frequency theta^(-2i/d), where d is the head size. Frequencies are scaled as in
    Llama 3.1 if the model requires it.

    The scaling of a frequency f depends on its wavelength w = 2π/f, the original window c and the
    factor s. If w < c / high, f is unchanged; if w > c / low, it becomes f / s. In between, it
    becomes (1 - m) f / s + m f, with m = (c / w - low) / (high - low).
    """
    powers = torch.arange(0, shape.head_size, 2, dtype=torch.float, device="cpu") / shape.head_size
    f = 1.0 / (shape.rope_theta**powers)
    if shape.rope_scaling is None:
        return f
    scaling = shape.rope_scaling
    turns = scaling.original_window / (2 * math.pi / f)
    mixed = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    m = mixed.clamp(0, 1)
    return (1 - m) * f / scaling.factor + m * f


def _rotate(x_Thd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Apply the rotary embedding to the queries or keys of each head.

    Each pair of dimensions (i, i + d/2) is rotated by an angle that depends on the token's
    position. The sines already contain the signs. Under autocast, the sines and cosines have a
    higher precision than the input and the result.
    """
    rotated = torch.addcmul(x_Thd * cos_T1d, x_Thd.roll(x_Thd.shape[-1] // 2, -1), sin_T1d)
    return rotated.to(x_Thd.dtype)


def _rope(config: Any) -> dict[str, Any]:
    """Return the parameters of a model's rotary embedding, named as in transformers 5.

    This also works for older configurations.
    """
    parameters = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0
    return {
        **parameters,
        "rope_theta": theta,
        "rope_type": parameters.get("rope_type") or parameters.get("type") or "default",
    }


def _scaling(rope: dict[str, Any], window: int) -> Llama3Scaling | None:
    if rope["rope_type"] == "default":
        return None
    original = rope.get("original_max_position_embeddings") or window
    return Llama3Scaling(
        rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original
    )


def _sliding_window(config: Any) -> int | None:
    """Return how many tokens a sliding-window layer attends to, or None if no layer has a sliding
    window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)
