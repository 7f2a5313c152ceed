"""Single rules on small scripts: where the Accelerator is made, what is changed with care, and what is left with a note."""

# ruff: noqa: E501  a script in a text is easier to read if its statements are not broken

from __future__ import annotations

import pytest

from slipstream.migrate.migration import migrate_text

HEAD = "import torch\nimport torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n"
NEW_HEAD = "import torch\nfrom slipstream import Accelerator\n\n"

CASES = {
    "global": (  # a function that is passed around cannot get an argument
        "def train(model):\n    model(1).mean().backward()\n\n"
        "def main():\n    dist.init_process_group('gloo')\n    model = DDP(torch.nn.Linear(1, 1))\n    run(train, model)\n\nmain()\n",
        "def train(model):\n    accelerator.backward(model(1).mean())\n\n"
        "def main():\n    model = accelerator.prepare(torch.nn.Linear(1, 1))\n    run(train, model)\n\naccelerator = Accelerator()\nmain()\n",
    ),
    "tabs": (
        "def main():\n\tdist.init_process_group('gloo')\n\tmodel = DDP(torch.nn.Linear(1, 1))\n\tif True:\n\t\tdist.barrier()\n",
        "def main():\n\taccelerator = Accelerator()\n\tmodel = accelerator.prepare(torch.nn.Linear(1, 1))\n\tif True:\n"
        "\t\taccelerator.wait_for_everyone()\n",
    ),
    "text over several lines": (  # is not moved with the block around it
        'if dist.is_initialized():\n    model = DDP(torch.nn.Linear(1, """\n    kept\n"""))\n',
        'accelerator = Accelerator()\nmodel = accelerator.prepare(torch.nn.Linear(1, """\n    kept\n"""))\n',
    ),
    "texts with expressions": (
        "dist.init_process_group('gloo')\nmodel = DDP(torch.nn.Linear(1, 1))\nprint(f\"{dist.get_rank()} of {dist.get_world_size():>3}\")\n",
        "accelerator = Accelerator()\nmodel = accelerator.prepare(torch.nn.Linear(1, 1))\n"
        'print(f"{accelerator.process_index} of {accelerator.num_processes:>3}")\n',
    ),
    "a name that is taken": (
        "accelerator = 'gpu'\ndist.init_process_group('gloo')\nmodel = DDP(torch.nn.Linear(1, 1))\n",
        "accelerator = 'gpu'\nslipstream_accelerator = Accelerator()\nmodel = slipstream_accelerator.prepare(torch.nn.Linear(1, 1))\n",
    ),
    "one line": (
        "rank = dist.get_rank()\nif rank == 0: dist.barrier()\nx = 1; dist.init_process_group('gloo'); y = 2\nmodel = DDP(torch.nn.Linear(1, 1))\n",
        "accelerator = Accelerator()\nrank = accelerator.process_index\nif rank == 0: accelerator.wait_for_everyone()\nx = 1; pass; y = 2\n"
        "model = accelerator.prepare(torch.nn.Linear(1, 1))\n",
    ),
    "in place": (  # what another function holds is changed in place, what is ours gets a new value
        "model = DDP(torch.nn.Linear(1, 1))\ndef mean(t):\n    dist.all_reduce(t, op=dist.ReduceOp.AVG)\ntotal = torch.ones(1)\ndist.all_reduce(total)\n",
        "accelerator = Accelerator()\nmodel = accelerator.prepare(torch.nn.Linear(1, 1))\ndef mean(t):\n"
        '    t.copy_(accelerator.reduce(t, "mean"))\ntotal = torch.ones(1)\ntotal = accelerator.reduce(total, "sum")\n',
    ),
    "losses": (
        "dist.init_process_group('gloo')\nmodel = DDP(torch.nn.Linear(1, 1))\nlosses['a'].backward(retain_graph=True)\n(a + b).backward()\nself.loss.backward()\n",
        "accelerator = Accelerator()\nmodel = accelerator.prepare(torch.nn.Linear(1, 1))\naccelerator.backward(losses['a'], retain_graph=True)\n"
        "accelerator.backward(a + b)\naccelerator.backward(self.loss)\n",
    ),
    "devices": (
        "rank = dist.get_rank()\ndevice = torch.device(f'cuda:{rank}' if torch.cuda.is_available() else 'cpu')\n"
        "model = DDP(torch.nn.Linear(1, 1).to(rank))\nname = 'cuda:%d' % rank\nx = torch.load('x', map_location=lambda s, l: s.cuda(rank))\n",
        "accelerator = Accelerator()\nrank = accelerator.process_index\ndevice = accelerator.device\n"
        "model = accelerator.prepare(torch.nn.Linear(1, 1).to(accelerator.device))\nname = str(accelerator.device)\n"
        "x = torch.load('x', map_location=accelerator.device)\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rules(name: str) -> None:
    """A small script becomes the expected one, and stays so."""
    before, after = CASES[name]
    new = migrate_text(HEAD + before).new
    assert new == NEW_HEAD + after
    assert migrate_text(new).new == new


def test_class_makes_its_own() -> None:
    """A class that nobody in the script makes has its own Accelerator, with the options of the wrapper."""
    text = "class Trainer(Base):\n    def __init__(self, net):\n        super().__init__()\n        self.net = DDP(net, static_graph=True)\n"
    text += "\n    def fit(self, loss):\n        loss.backward()\n        return self.net.module\n"
    new = migrate_text(HEAD + text).new
    handler = "kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)]"
    assert f"        super().__init__()\n        self.accelerator = Accelerator({handler})\n        self.net = self.accelerator.prepare(net)\n" in new
    assert "        self.accelerator.backward(loss)\n        return self.accelerator.unwrap_model(self.net)\n" in new


def test_helpers_of_other_files() -> None:
    """A file without a wrapper gets no Accelerator: its questions go to PartialState, and its loop is noted."""
    text = "import torch.distributed as dist\n\ndef setup():\n    dist.init_process_group('nccl')\n\ndef step(loss):\n    loss.backward()\n"
    migration = migrate_text(f"{text}    return dist.get_rank() == 0\n")
    assert "    PartialState()\n" in migration.new
    assert "    return PartialState().is_main_process\n" in migration.new
    assert "    loss.backward()\n" in migration.new
    assert [(note.line, "give this function the Accelerator" in note.text) for note in migration.notes] == [(7, True)]


def test_dotted_import() -> None:
    """`import torch.distributed` alone also stands for `import torch`, if that is used."""
    text = "import torch.distributed\n\ntorch.distributed.barrier()\nx = torch.ones(1)\n"
    assert migrate_text(text).new == "import torch\nfrom slipstream import PartialState\n\nPartialState().wait_for_everyone()\nx = torch.ones(1)\n"
    text = text.replace("x = torch.ones(1)\n", "")
    assert migrate_text(text).new == "from slipstream import PartialState\n\nPartialState().wait_for_everyone()\n"


def test_definition_time() -> None:
    """Decorators and defaults are evaluated before there is an Accelerator."""
    text = "@skip(dist.get_world_size() < 2)\ndef main(rank=dist.get_rank()):\n    model = DDP(net)\n    return dist.get_rank()\n"
    new = migrate_text(HEAD + text).new
    assert "@skip(PartialState().num_processes < 2)\ndef main(rank=PartialState().process_index):\n" in new
    assert new.endswith("    accelerator = Accelerator()\n    model = accelerator.prepare(net)\n    return accelerator.process_index\n")


def test_options_of_several_models() -> None:
    """Options of the wrapper are one handler; a second value is noted, and so is one that is not known at the Accelerator."""
    text = "def main():\n    dist.init_process_group('gloo', timeout=limit)\n    a = DDP(x, bucket_cap_mb=5)\n    b = DDP(y, bucket_cap_mb=9, static_graph=True)\n"
    migration = migrate_text(HEAD + text)
    assert "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=5, static_graph=True)])" in migration.new
    assert ["bucket_cap_mb=9 was not kept" in note.text or "timeout" in note.text for note in migration.notes] == [True, True]


def test_both_packages() -> None:
    """A script of Accelerate that also calls torch.distributed keeps the import that was renamed."""
    text = "import accelerate\nimport torch.distributed as dist\n\naccelerate.utils.set_seed(0)\ndist.barrier()\n"
    new = "import slipstream\nfrom slipstream import PartialState\n\nslipstream.utils.set_seed(0)\nPartialState().wait_for_everyone()\n"
    assert migrate_text(text).new == new


def test_batch_sampler() -> None:
    """A batch sampler around a DistributedSampler becomes options of the loader; its length is that of one process."""
    text = "from torch.utils.data import BatchSampler, DataLoader, DistributedSampler\nsampler = DistributedSampler(data, shuffle=False)\n"
    text += "batches = BatchSampler(sampler, 4, drop_last=True)\nloader = DataLoader(data, batch_sampler=batches)\nn = len(sampler)\n"
    expected = "from torch.utils.data import DataLoader\nfrom slipstream import Accelerator\naccelerator = Accelerator()\n"
    expected += "loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=False, drop_last=True))\n"
    assert migrate_text(text).new == f"{expected}n = -(-len(loader.dataset) // accelerator.num_processes)\n"


def test_precision_from_an_option() -> None:
    """The switch of autocast becomes the precision of the Accelerator, if it is known where that is made."""
    text = "def main():\n    args = parse()\n    model = DDP(torch.nn.Linear(1, 1))\n    scaler = torch.cuda.amp.GradScaler(enabled=args.amp)\n"
    text += "    with torch.cuda.amp.autocast(enabled=args.amp):\n        loss = model(x)\n    scaler.scale(loss).backward()\n    scaler.step(opt)\n"
    new = migrate_text(f"{HEAD}{text}    scaler.update()\n").new
    assert 'accelerator = Accelerator(mixed_precision="fp16" if args.amp else "no")' in new
    assert new.endswith("    with accelerator.autocast():\n        loss = model(x)\n    accelerator.backward(loss)\n    opt.step()\n")


def test_precision_that_is_computed() -> None:
    """Autocast and a scaler that depend on more than an option stay, with a note; the loss still goes through the Accelerator."""
    text = "model = DDP(net)\nscaler = torch.amp.GradScaler('cuda') if big else None\nwith torch.autocast('cuda', dtype=kind):\n    loss = model(x)\n"
    migration = migrate_text(f"{HEAD}{text}scaler.scale(loss).backward()\n")
    assert "with torch.autocast('cuda', dtype=kind):\n" in migration.new
    assert "accelerator.backward(scaler.scale(loss))\n" in migration.new
    assert any("autocast and GradScaler stay" in note.text for note in migration.notes)


NOTED = {
    "group = dist.new_group([0, 1])\n": "new_group stays",
    "dist.all_reduce(x, group=group)\n": "all_reduce stays",
    "work = dist.all_reduce(x, async_op=True)\n": "all_reduce stays",
    "dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)\n": "all_reduce stays",
    "dist.send(x, 1)\n": "send stays",
    "model = torch.nn.DataParallel(net)\n": "DataParallel stays",
    "model = DDP(net, bucket_cap_mb=size)\n": "bucket_cap_mb=size",
    "y = dist.get_rank(group)\n": "a group of its own",
    "from torch.distributed.fsdp import FullyShardedDataParallel\nmodel = FullyShardedDataParallel(net)\n": "FullyShardedDataParallelPlugin",
    "import torch.multiprocessing as mp\nmp.Process(target=run).start()\n": "slipstream launch starts them",
    "import torch.multiprocessing as mp\nmp.spawn(Trainer().run, nprocs=2)\n": "call the function of torch.multiprocessing.spawn directly",
    "model = DDP(net)\nloss.backward(gradient)\n": "are not averaged",
}


@pytest.mark.parametrize("text", NOTED)
def test_notes(text: str) -> None:
    """What cannot be changed safely stays, and is noted with its line."""
    migration = migrate_text(HEAD + text)
    line = HEAD.count("\n") + text.count("\n")
    assert [note.line for note in migration.notes if NOTED[text] in note.text] == [line]
