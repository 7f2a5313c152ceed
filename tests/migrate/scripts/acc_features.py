"""Many features by their imports: local SGD, automatic batch size, profiles, hooks of DDP, timeouts, big models."""

from datetime import timedelta

from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, init_empty_weights
from accelerate import load_checkpoint_and_dispatch, notebook_launcher
from accelerate.big_modeling import dispatch_model
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.hooks import add_hook_to_module, ModelHook
from accelerate.local_sgd import LocalSGD
from accelerate.memory_utils import find_executable_batch_size
from accelerate.utils import InitProcessGroupKwargs, ProfileKwargs, release_memory
from accelerate.utils.operations import send_to_device


def training_function(model, loader, optimizer):
    handlers = [
        InitProcessGroupKwargs(timeout=timedelta(hours=1)),
        DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16),
    ]
    fsdp_plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=2000)
    accelerator = Accelerator(fsdp_plugin=fsdp_plugin, kwargs_handlers=handlers)

    @find_executable_batch_size(starting_batch_size=128)
    def inner_training_loop(batch_size):
        nonlocal accelerator
        accelerator.free_memory()
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True) as local_sgd:
            with accelerator.profile(ProfileKwargs(activities=["cpu"])) as prof:
                for batch in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(batch).mean())
                        optimizer.step()
                        local_sgd.step()
        return prof

    inner_training_loop()
    release_memory(model)
    return skip_first_batches, prepare_data_loader, dispatch_model, add_hook_to_module, ModelHook, send_to_device, init_empty_weights


if __name__ == "__main__":
    notebook_launcher(training_function, ())
    load_checkpoint_and_dispatch(None, "weights", device_map="auto")
