"""Programs written for Slipstream run with `accelerate` in their imports. All examples run in `make test-ecosystem`, three of them here."""

from __future__ import annotations

import importlib

import pytest
from examples_with_accelerate import DIFFERENT, EXAMPLES, write_example


@pytest.mark.parametrize("name", ["slipstream", "slipstream.utils", "slipstream.logging", "slipstream.hooks", "slipstream.tracking"])
def test_every_public_name_of_slipstream(name):
    """What Slipstream exports can be imported under the name of the drop-in too."""
    theirs = importlib.import_module(name.replace("slipstream", "accelerate"))
    assert not [exported for exported in importlib.import_module(name).__all__ if not hasattr(theirs, exported)]


def test_unknown_names():
    """A name that neither has is an AttributeError, as in any module."""
    import accelerate

    with pytest.raises(AttributeError, match="module 'accelerate' has no attribute 'no_such_name'"):
        _ = accelerate.no_such_name


@pytest.mark.parametrize("name", ["average_gradients", "evaluate", "template"])
def test_example_on_two_processes(launch, tmp_path, name):
    """The example does with the drop-in what it does with Slipstream."""
    assert launch(write_example(name, tmp_path), 2)


def test_exceptions_are_examples():
    """The list of examples that are left out names existing ones."""
    assert set(DIFFERENT) <= {path.stem for path in EXAMPLES.glob("*.py")}


def test_bar_on_the_main_process_alone(launch):
    """A shuffled loader inside a bar that only the main process shows: the processes agree on the order all the same."""
    shown = launch(
        """
        import torch, tqdm
        from accelerate import Accelerator
        accelerator = Accelerator()
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(16), batch_size=2, shuffle=True))
        found = [accelerator.gather(batch) for batch in tqdm.tqdm(loader, disable=not accelerator.is_main_process)]
        accelerator.print("sum", int(torch.cat(found).sum()))
        """,
        2,
    )
    assert "sum 120" in shown
