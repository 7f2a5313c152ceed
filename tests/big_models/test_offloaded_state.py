"""State dicts of models whose weights are elsewhere."""

import pytest
import torch
from models_to_dispatch import empty_model, run, small

from slipstream.big_models.dispatch import cpu_offload, dispatch_model
from slipstream.big_models.hooks.module_tensors import get_state_dict_from_offload, get_state_dict_offloaded_model
from slipstream.big_models.load import load_checkpoint_and_dispatch
from slipstream.checkpoint.model_io import save_model
from slipstream.errors import StateError


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, {"": "cpu", "layers.1": "disk", "head": "disk"}])
def test_complete_state_dict(device_map):
    """The whole state dict wherever the weights are."""
    model = dispatch_model(small(), device_map, offload_buffers=True)
    assert equal(get_state_dict_offloaded_model(model), small().state_dict())


def test_state_dict_of_cpu_offload():
    """That of a model in main memory."""
    assert equal(get_state_dict_offloaded_model(cpu_offload(small(), "cpu")), small().state_dict())


def test_dispatched_model_round_trip(tmp_path):
    """A dispatched model is saved and loaded again."""
    save_model(dispatch_model(small(), {"": "cpu", "layers": "disk"}), tmp_path)
    assert torch.equal(run(load_checkpoint_and_dispatch(empty_model(), tmp_path, {"": "disk"}, strict=True)), run(small()))


def test_state_dict_of_one_module():
    """One module fills the names that are asked for."""
    model = dispatch_model(small(), {"": "cpu", "layers": "disk"})
    asked = dict.fromkeys(["layers.1.up.weight", "layers.1.up.bias", "layers.2.up.weight"])
    found = get_state_dict_from_offload(model.layers[1].up, "layers.1.up.weight", asked, "cpu")
    assert found is asked
    assert torch.equal(found["layers.1.up.weight"], small().layers[1].up.weight)
    assert torch.equal(found["layers.1.up.bias"], small().layers[1].up.bias)
    assert found["layers.2.up.weight"] is None


def test_what_has_no_values_is_named():
    """What has no values is named."""
    with pytest.raises(StateError, match="scale, .*Load the weights first"):
        get_state_dict_offloaded_model(empty_model())
