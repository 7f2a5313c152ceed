"""State dicts of models whose weights are elsewhere."""

import pytest
import torch
from spread_models import run, skeleton, small

from slipstream.big_models.dispatch import cpu_offload, dispatch_model
from slipstream.big_models.hooks.module_tensors import get_state_dict_from_offload, get_state_dict_offloaded_model
from slipstream.big_models.load import load_checkpoint_and_dispatch
from slipstream.checkpoint.model_io import save_model
from slipstream.errors import StateError


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, {"": "cpu", "layers.1": "disk", "head": "disk"}])
def test_the_whole_state_dict_wherever_the_weights_are(device_map):
    model = dispatch_model(small(), device_map, offload_buffers=True)
    assert equal(get_state_dict_offloaded_model(model), small().state_dict())


def test_that_of_a_model_in_main_memory():
    assert equal(get_state_dict_offloaded_model(cpu_offload(small(), "cpu")), small().state_dict())


def test_a_spread_model_is_saved_and_loaded_again(tmp_path):
    save_model(dispatch_model(small(), {"": "cpu", "layers": "disk"}), tmp_path)
    assert torch.equal(run(load_checkpoint_and_dispatch(skeleton(), tmp_path, {"": "disk"}, strict=True)), run(small()))


def test_one_module_fills_the_names_that_are_asked_for():
    model = dispatch_model(small(), {"": "cpu", "layers": "disk"})
    asked = dict.fromkeys(["layers.1.up.weight", "layers.1.up.bias", "layers.2.up.weight"])
    found = get_state_dict_from_offload(model.layers[1].up, "layers.1.up.weight", asked, "cpu")
    assert found is asked
    assert torch.equal(found["layers.1.up.weight"], small().layers[1].up.weight)
    assert torch.equal(found["layers.1.up.bias"], small().layers[1].up.bias)
    assert found["layers.2.up.weight"] is None


def test_what_has_no_values_is_named():
    with pytest.raises(StateError, match="scale, .*Load the weights first"):
        get_state_dict_offloaded_model(skeleton())
