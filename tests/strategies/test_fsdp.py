"""Sharded training equals plain training: on any number of ranks, in any way to shard."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from sharded_training import Net, adamw, batches, loss_of, net, net_on_main_process, same, same_run, train
from torch.distributed.tensor import DTensor

from slipstream import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from slipstream.errors import ConfigError, StateError
from slipstream.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, GradScalerKwargs

Ranks = Any
Plugin = FullyShardedDataParallelPlugin
GRID = {"dp_replicate_size": 2, "dp_shard_size": 2}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_one_process(ranks: Ranks, world: int, steps: int) -> None:
    """Norms and weights after AdamW updates with clipping, with accumulation and a short last batch."""
    expected = ranks(1).run(train, steps)[0]
    for found in ranks(world).run(lambda: train(steps, fsdp_plugin=Plugin())):
        same_run(found, expected)


@pytest.mark.parametrize("steps", [1, 3])
def test_hybrid(ranks: Ranks, steps: int) -> None:
    """Two replicas of two shards each."""
    expected = ranks(1).run(train, steps)[0]
    for found in ranks(4).run(lambda: train(steps, fsdp_plugin=Plugin(), parallelism_config=ParallelismConfig(**GRID))):
        same_run(found, expected)


OPTIONS = {
    "checkpointing": {"activation_checkpointing": True},
    "kept": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
    "one": {"auto_wrap_policy": "no_wrap"},
    "size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100},
    "named": {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]},
    "ignored": {"ignored_modules": r"norm|blocks\.1"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_keep_results(ranks: Ranks, name: str) -> None:
    """How a model is sharded changes memory and time, and no result."""
    expected = ranks(1).run(train, 2)[0]
    for found in ranks(2).run(lambda: train(2, fsdp_plugin=Plugin(**OPTIONS[name]))):
        same_run(found, expected)


def test_reshard_to_fewer(ranks: Ranks) -> None:
    """Parameters are kept by pairs of ranks between forward and backward."""
    expected = ranks(1).run(train)[0]
    for found in ranks(4).run(lambda: train(fsdp_plugin=Plugin(reshard_after_forward=2))):
        same_run(found, expected)


def test_parts_and_methods(ranks: Ranks) -> None:
    """A model may be called through its methods and submodules, also before its first whole pass."""

    def by_methods(model: Any, words: torch.Tensor) -> torch.Tensor:
        return model.score(model.encode(words))

    def by_parts(model: Any, words: torch.Tensor) -> torch.Tensor:
        hidden = model.embed(words)
        for block in model.blocks:
            hidden = block(hidden)
        return model.head(model.norm(hidden)) / model.temperature

    expected = ranks(1).run(train, 2)[0]
    for call in (by_methods, by_parts):
        for found in ranks(2).run(lambda call=call: train(2, call=call, fsdp_plugin=Plugin())):
            same_run(found, expected)


def test_frozen(ranks: Ranks) -> None:
    """Frozen parameters are sharded, take no gradients and stay as they are."""

    def run(**options: Any) -> Any:
        model = net()
        model.blocks[0].requires_grad_(False)
        model.norm.bias.requires_grad_(False)
        before = model.blocks[0].wide.weight.detach().clone()
        result = train(2, model=model, **options)
        assert torch.equal(result[2]["blocks.0.wide.weight"].cpu(), before)
        return result

    expected = ranks(1).run(run)[0]
    for found in ranks(2).run(lambda: run(fsdp_plugin=Plugin())):
        same_run(found, expected)


def test_adapters(ranks: Ranks) -> None:
    """A frozen half-precision base with small trained adapters in float32."""

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(6, 6).to(torch.bfloat16).requires_grad_(False)
            self.down = torch.nn.Linear(6, 2, bias=False)
            self.up = torch.nn.Linear(2, 6, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x.to(torch.bfloat16)).float() + self.up(self.down(x))

    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Adapted(), Adapted())
        accelerator = Accelerator(**options)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
        for _ in range(3):
            accelerator.backward(model(torch.ones(2, 6, device=accelerator.device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.get_state_dict(model)

    expected = ranks(1).run(run)[0]
    for found in ranks(2).run(lambda: run(fsdp_plugin=Plugin())):
        same(found, expected)


# -- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["foreach", "fused", "after", "apart", "first"])
def test_optimizer_by_parameter(ranks: Ranks, kind: str) -> None:
    """An optimizer follows its parameters: made before or after, prepared in any order, in one call or several."""

    def run(shards: bool) -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin() if shards else None)
        model = net()
        optimizer = adamw(model, **{kind: True} if kind in ("foreach", "fused") else {})
        if kind == "after":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(adamw(model))
        elif kind == "apart":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        elif kind == "first":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        else:
            optimizer, model = accelerator.prepare(optimizer, model)
        for words, following in accelerator.prepare(batches(accelerator)):
            accelerator.backward(loss_of(model(words), following))
            optimizer.step()
            optimizer.zero_grad()
        assert [len(group["params"]) for group in optimizer.param_groups] == [7, 11]
        return accelerator.get_state_dict(model)

    expected = ranks(1).run(run, False)[0]
    for found in ranks(2).run(run, True):
        same(found, expected)


def test_two_optimizers(ranks: Ranks) -> None:
    """Two optimizers of one model, stepped in turn."""

    def run(shards: bool) -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin() if shards else None)
        model = net(tied=False)
        first, second = torch.optim.SGD(model.blocks.parameters(), lr=0.1), torch.optim.Adam(model.head.parameters(), lr=0.01)
        first, second, model = accelerator.prepare(first, second, model)
        for words, following in accelerator.prepare(batches(accelerator)):
            accelerator.backward(loss_of(model(words), following))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.get_state_dict(model)

    expected = ranks(1).run(run, False)[0]
    for found in ranks(2).run(run, True):
        same(found, expected)


@pytest.mark.parametrize("toggles", [False, True])
def test_two_models(ranks: Ranks, toggles: bool) -> None:
    """A generator and a judge without accumulate; the judge is frozen for the generator's turn, or its gradients are cleared."""

    def run(shards: bool) -> Any:
        torch.manual_seed(0)
        accelerator = Accelerator(fsdp_plugin=Plugin() if shards else None)
        generator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        judge = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        steps = torch.optim.Adam(generator.parameters(), lr=0.01), torch.optim.Adam(judge.parameters(), lr=0.01)
        draws = torch.randn(24, 7, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(draws, batch_size=12 // accelerator.num_processes)
        generator, judge, first, second, loader = accelerator.prepare(generator, judge, *steps, loader)
        score = torch.nn.functional.logsigmoid
        for rows in loader:
            if toggles:
                judge.requires_grad_(True)
            made = generator(rows[:, :4])
            accelerator.backward(-(score(judge(rows[:, 4:])) + score(-judge(made.detach()))).mean())
            second.step()
            second.zero_grad()
            if toggles:
                judge.requires_grad_(False)
            accelerator.backward(-score(judge(made)).mean())
            first.step()
            first.zero_grad()
            if not toggles:
                second.zero_grad()
        return accelerator.get_state_dict(generator), accelerator.get_state_dict(judge)

    expected = ranks(1).run(run, False)[0]
    for found in ranks(2).run(run, True):
        for one, other in zip(found, expected, strict=True):
            same(one, other)


# -- gradients --------------------------------------------------------------------------------------------------------


def test_clip_norms(ranks: Ranks) -> None:
    """The norm is the global one on every rank: of all parameters, of some, of the largest entry, and of parameters kept from before."""

    def run(shards: bool) -> list[float]:
        accelerator = Accelerator(fsdp_plugin=Plugin(ignored_modules="norm") if shards else None)
        model = net()
        kept = list(model.parameters())
        model, loader = accelerator.prepare(model, batches(accelerator, 12))
        scale = [model.blocks[0].scale]
        chosen = {"all": model.parameters, "block": model.blocks[1].parameters, "kept": lambda: kept, "scale": lambda: scale}
        norms = []
        for which in chosen:
            for kind in (2.0, 1.0, float("inf")):
                for words, following in loader:
                    accelerator.backward(loss_of(model(words), following))
                norms.append(float(accelerator.clip_grad_norm_(chosen[which](), 0.1, kind)))
                norms.append(float(accelerator.clip_grad_norm_(chosen[which](), 0.1, kind)))
                for parameter in model.parameters():
                    parameter.grad = None
        return norms

    expected = ranks(1).run(run, False)[0]
    for found in ranks(3).run(run, True):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-5), (found, expected)


def test_windows_without_communication(ranks: Ranks) -> None:
    """Gradients are scattered once per update; with sync_each_batch, after every batch."""

    def run(each: bool) -> int:
        accelerator = Accelerator(
            fsdp_plugin=Plugin(),
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_each_batch=each),
        )
        model = net()
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator, 36))
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as kind  # torch 2.9 and later

        counted = []
        before = kind.__call__
        kind.__call__ = lambda self, *args, **kwargs: (counted.append(1), before(self, *args, **kwargs))[1]
        try:
            for words, following in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model(words), following))
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            kind.__call__ = before
        return len(counted)

    assert ranks(2).run(run, False) == [4, 4]  # three blocks and the root
    assert ranks(2).run(run, True) == [12, 12]


def test_fp16_overflow(ranks: Ranks) -> None:
    """An overflow in one rank's rows skips the update on every rank."""

    def run() -> list[Any]:
        handlers = [GradScalerKwargs(init_scale=8.0)]
        accelerator = Accelerator(mixed_precision="fp16", fsdp_plugin=Plugin(), kwargs_handlers=handlers)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        skipped = []
        for factor in (1.0, 1e8):
            inputs = torch.ones(2, 4, device=accelerator.device)
            accelerator.backward(model(inputs).sum() * (factor if accelerator.is_main_process else 1.0))
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        return skipped

    assert ranks(2).run(run) == [[False, True], [False, True]]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(ranks: Ranks, precision: str) -> None:
    """Blocks compute in half precision on float32 weights, close to what replicas give."""
    handlers = [GradScalerKwargs(init_scale=64.0)] if precision == "fp16" else None
    expected = ranks(2).run(lambda: train(mixed_precision=precision, kwargs_handlers=handlers))[0]
    for found in ranks(2).run(lambda: train(mixed_precision=precision, fsdp_plugin=Plugin(), kwargs_handlers=handlers)):
        same_run(found, expected, atol=3e-2)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_rank_zero_counts(ranks: Ranks) -> None:
    """The weights and buffers of rank 0 are those of all ranks, whatever the others were given."""

    def run() -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin(ignored_modules="norm"))
        model = net(seed=accelerator.process_index)
        model.temperature.fill_(accelerator.process_index + 1.0)
        return accelerator.get_state_dict(accelerator.prepare(model))

    expected = net(seed=0)
    expected.temperature.fill_(1.0)
    for found in ranks(3).run(run):
        same(found, dict(expected.state_dict()))


def test_only_rank_zero_has_weights(ranks: Ranks) -> None:
    """The others hold a model on the meta device, and get their shards; the optimizer may be made before."""

    def run(shards: bool) -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin(cpu_ram_efficient_loading=True) if shards else None)
        model = net_on_main_process(accelerator)
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator))
        for words, following in loader:
            accelerator.backward(loss_of(model(words), following))
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.get_state_dict(model)

    expected = ranks(1).run(run, False)[0]
    for found in ranks(3).run(run, True):
        same(found, expected)


def test_no_rank_has_weights(ranks: Ranks) -> None:
    """`param_init_fn` gives values where no rank has any; without it, that is an error which says what to do."""

    def run() -> Any:
        from slipstream import init_empty_weights

        def fill(module: torch.nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                torch.nn.init.constant_(parameter, 0.5)

        with init_empty_weights():
            model = Net(tied=False)
        accelerator = Accelerator(fsdp_plugin=Plugin(param_init_fn=fill))
        filled = accelerator.get_state_dict(accelerator.prepare(model))
        assert all(bool((value == 0.5).all()) for name, value in filled.items() if name != "temperature")
        with init_empty_weights():
            model = Net()
        with pytest.raises(ConfigError, match="have no values on rank 0.*param_init_fn"):
            Accelerator(fsdp_plugin=Plugin()).prepare(model)

    ranks(2).run(run)


def test_model_stays_the_users(ranks: Ranks) -> None:
    """Class, names and attributes are the user's; a state dict of the whole loads into a plain model."""

    def run() -> None:
        accelerator = Accelerator(fsdp_plugin=Plugin())
        model = net()
        prepared = accelerator.prepare(model)
        assert isinstance(accelerator.unwrap_model(prepared), Net)
        assert accelerator.unwrap_model(prepared) is model
        assert [name for name, _ in prepared.named_parameters()] == [name for name, _ in net().named_parameters()]
        assert isinstance(prepared.embed.weight, DTensor)
        assert prepared.head.weight is prepared.embed.weight
        assert accelerator.distributed_type.value == "FSDP"
        assert accelerator.is_fsdp2
        assert accelerator.state.fsdp_plugin is not None
        assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_shard",)
        plain = Net()
        plain.load_state_dict(accelerator.get_state_dict(prepared))
        words = torch.arange(10).view(2, 5)
        with torch.no_grad():
            assert torch.allclose(prepared(words.to(accelerator.device)).cpu(), plain(words), atol=1e-6)
            assert isinstance(prepared.embed.weight, DTensor)  # freed again, though no backward follows
        assert accelerator.prepare(prepared) is prepared
        assert prepared.to(accelerator.device) is prepared

    ranks(2).run(run)


def test_memory_of_a_rank(ranks: Ranks) -> None:
    """On four ranks parameters, gradients and optimizer state take at most 0.27 of what one process holds."""

    def run(shards: bool) -> int:
        accelerator = Accelerator(fsdp_plugin=Plugin() if shards else None)
        model = net(width=32)
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator))
        for words, following in loader:
            accelerator.backward(loss_of(model(words), following))
            optimizer.step()
        held = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
        held += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes for tensor in held)

    whole = ranks(1).run(run, False)[0]
    assert max(ranks(4).run(run, True)) <= 0.27 * whole


def test_released_memory(ranks: Ranks) -> None:
    """After free_memory nothing of ours keeps a sharded model, its shards or the full parameters."""

    def run() -> None:
        accelerator = Accelerator(fsdp_plugin=Plugin())
        model = net()
        seen = [weakref.ref(model), weakref.ref(model.embed.weight)]
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator))
        gc.collect()
        assert seen[1]() is None  # the full parameters are gone as soon as the optimizer is mapped
        for words, following in loader:
            accelerator.backward(loss_of(model(words), following))
            optimizer.step()
            optimizer.zero_grad()
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        gc.collect()
        assert seen[0]() is None

    ranks(2).run(run)


def test_sharded_by_hand(ranks: Ranks) -> None:
    """A model on which the script called fully_shard itself is taken as it is."""

    def run() -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        accelerator = Accelerator(fsdp_plugin=Plugin())
        accelerator.wait_for_everyone()
        model = net()
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, ignored_params={block.scale})
        fully_shard(model, mesh=mesh, ignored_params={block.scale for block in model.blocks})
        return train(model=model, fsdp_plugin=Plugin())

    expected = ranks(1).run(train)[0]
    for found in ranks(2).run(run):
        same_run(found, expected)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_refused(ranks: Ranks) -> None:
    """Input that cannot work is an error on every rank before anything waits."""

    def run() -> None:
        with pytest.raises(ConfigError, match=r"2 processes|dp_shard"):
            Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
        named = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Blok"])
        with pytest.raises(ConfigError, match="Blok.*Block"):
            Accelerator(fsdp_plugin=named).prepare(net())
        accelerator = Accelerator(fsdp_plugin=Plugin())
        mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
        with pytest.raises(ConfigError, match="several dtypes .float32, float64."):
            accelerator.prepare(mixed)
        with pytest.raises(ConfigError, match="join_uneven_inputs"), accelerator.join_uneven_inputs([net()]):
            pass
        with pytest.raises(Exception, match="should be the same on all processes"):
            accelerator.prepare(net(width=7 + accelerator.process_index))
        with pytest.raises(ConfigError, match="DistributedDataParallelKwargs"):
            Accelerator(fsdp_plugin=Plugin(), kwargs_handlers=[DistributedDataParallelKwargs()])

    ranks(2).run(run)


def test_changed_model(ranks: Ranks) -> None:
    """Parameters may be unfrozen after prepare; new ones are refused before they diverge."""

    def run(shards: bool) -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin() if shards else None)
        model = net()
        if shards:
            model.blocks.requires_grad_(False)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(accelerator))
        model.blocks.requires_grad_(True)
        for words, following in loader:
            accelerator.backward(loss_of(model(words), following))
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        if shards:
            model.norm = torch.nn.LayerNorm(7, device=accelerator.device)
            accelerator.backward(loss_of(model(words), following))
            with pytest.raises(StateError, match="norm.weight, norm.bias of .*Net were put in after"):
                optimizer.step()
        return state

    expected = ranks(1).run(run, False)[0]
    for found in ranks(2).run(run, True):
        same(found, expected)


def test_released_group(ranks: Ranks) -> None:
    """A sharded model cannot run after its group was released, and says so."""

    def run() -> None:
        accelerator = Accelerator(fsdp_plugin=Plugin())
        model = accelerator.prepare(net())
        accelerator.state.destroy_process_group()
        with pytest.raises(StateError, match="released"):
            model(torch.zeros(1, 5, dtype=torch.long, device=accelerator.device))

    ranks(2).run(run)
