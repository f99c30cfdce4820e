"""Tensors of a checkpoint are read in parts, in the form that the model has in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ramify.errors import StoreError
from ramify.models.stored_weights import (
    can_read_separately,
    lazy_disk_tensors,
    stored_tensors,
    to_checkpoint_tensors,
)
from ramify.train.backends.meta_model import build_meta_model
from tests.train.backends.small import CONFIG
from tests.train.backends.test_meshes import MIXTRAL, MOE


@pytest.mark.parametrize("config", [CONFIG, MOE, MIXTRAL], ids=["dense", "moe", "renamed"])
def test_parts_of_stored_tensors_match_the_model(config, tmp_path: Path):
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    module.save_pretrained(tmp_path)
    model = build_meta_model(config)
    assert can_read_separately(model)
    raw, stored = lazy_disk_tensors(tmp_path), stored_tensors(tmp_path, model)
    written = set()
    for name, tensor in module.named_parameters():
        assert stored[name].shape == tuple(tensor.shape)
        assert torch.equal(stored[name][...], tensor)
        assert torch.equal(stored[name][1:3], tensor[1:3])
        if tensor.dim() == 3:  # experts: across the border between gate and up
            assert torch.equal(stored[name][1:3, 5:20, :7], tensor[1:3, 5:20, :7])
            assert stored[name][2:2].shape == (0, *tensor.shape[1:])
        for own, part in to_checkpoint_tensors(model, name, tensor.detach()):
            written.add(own)
            assert torch.equal(raw[own][...], part)
    assert written == set(raw)


def test_unreadable_file_is_named(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(StoreError, match=r"model.safetensors cannot be read as safetensors"):
        lazy_disk_tensors(tmp_path)
