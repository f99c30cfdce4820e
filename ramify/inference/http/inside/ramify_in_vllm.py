"""The vLLM plugin for weight transfer, and the only module of Ramify that vLLM itself loads.

It adds a weight transfer engine named ``ramify``, through which vLLM receives new weights from a
Ramify trainer.

    PYTHONPATH=…/inference/http/inside vllm serve MODEL \\
        --worker-extension-cls ramify_in_vllm.RamifyWorkerExtension \\
        --weight-transfer-config '{"backend": "ramify"}'

The module's folder holds nothing else, so that no other module of Ramify shadows vLLM's own
packages; the package that contains the folder is found by path. Tensors arrive under a checkpoint's
names and are loaded layer by layer like a checkpoint, so that vLLM repeats the changes that it made
to the weights when it started (fused, packed, tied). Written for vLLM 0.32.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

PACKAGE = Path(__file__).resolve().parents[3]


def _find_ramify() -> None:
    """Make Ramify's package importable in a vLLM process that does not have it installed.

    Other packages in the same folder do not become importable.
    """
    if "ramify" in sys.modules or importlib.util.find_spec("ramify") is not None:
        return
    spec = importlib.util.spec_from_file_location(
        "ramify", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["ramify"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


@dataclasses.dataclass
class RamifyWeightTransferInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The message that prepares vLLM for weight updates.

    It describes how the weights will be sent.
    """

    info: dict[str, Any]


@dataclasses.dataclass
class RamifyWeightTransferUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The message to vLLM that announces one chunk of new weights.

    It describes the tensors and how to get their bytes.
    """

    info: dict[str, Any]


class RamifyWeightTransferEngine(
    WeightTransferEngine[RamifyWeightTransferInit, RamifyWeightTransferUpdate]  # type: ignore[misc]
):
    """The receiver of weight updates inside a vLLM worker.

    vLLM's worker calls its methods.
    """

    init_info_cls = RamifyWeightTransferInit
    update_info_cls = RamifyWeightTransferUpdate
    supports_draft_weight_update = False

    def parse_init_info(self, init_dict: dict[str, Any]) -> RamifyWeightTransferInit:
        return RamifyWeightTransferInit(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> RamifyWeightTransferUpdate:
        return RamifyWeightTransferUpdate(update_dict)

    def init_transfer_engine(self, init_info: RamifyWeightTransferInit) -> None:
        _find_ramify()
        from ramify.inference.weight_sync import WEIGHT_SYNCS

        self.shutdown()
        self._receiver = WEIGHT_SYNCS.resolve(str(init_info.info["weight_sync"])).receiver(
            init_info.info
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: RamifyWeightTransferUpdate) -> None:
        def whole() -> Any:
            for name, tensor, places, *_ in self._receiver.unpack_chunk(update_info.info):
                if places is not None:
                    raise ValueError("vLLM takes whole tensors: remove weight_sync_options.places")
                # A layer is loaded once all of it has arrived. The weight sync may have reused the
                # memory of its first tensors by then.
                yield name, tensor.to(self.device, copy=True)

        self.model.load_weights(whole())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_again(self.model)
        self._receiver.finished("")

    def shutdown(self) -> None:
        receiver, self._receiver = getattr(self, "_receiver", None), None
        if receiver is not None:
            receiver.close()


def _pack_again(model: torch.nn.Module) -> None:
    """Repack the output matrices that share the embedding's weights, after a weight update.

    On a CPU, vLLM computes with a packed copy, which it does not renew when weights are reloaded.
    Without this, it would keep answering with old weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class RamifyWorkerExtension:
    """An empty mixin for vLLM's worker class.

    Its only purpose is that vLLM's processes import this module.
    """


WeightTransferEngineFactory.register_engine("ramify", RamifyWeightTransferEngine)
