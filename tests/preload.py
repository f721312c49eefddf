"""What processes of tests have imported when they begin: they are forked from a server that has done so once."""

import multiprocessing

# A module that is not installed is passed over. The server does not know the folder of the tests.
MODULES = [
    "cce_dist.tools.cli",
    "cce_dist.tools.verify",
    "cce_dist.tools.pretrain.launch",
    "cce_dist.tools.pretrain.torchrun",
    "cce_dist.tools.pretrain.engine",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "deepspeed.pipe",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
]


def preload() -> None:
    """Name the modules to the server, which begins with the first process."""
    multiprocessing.set_forkserver_preload(MODULES)
