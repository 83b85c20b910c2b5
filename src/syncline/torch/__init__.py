"""Syncline for PyTorch: a DataLoader that splits, an optimizer whose rule runs on the servers, schedules."""

# Layout, in reading order.
#
# optimizer                                 DistributedOptimizer: `step()` pushes gradients and receives parameters
# parameters, rules                         names and flat memory of a model; torch optimizers as rules
# gradients                                 gradients of a segment on their way into the arena
# carriers, channel_carrier, comparing      what copies them: CPU or GPU; what was edited since it was copied
# peer_channel                              gradients that servers of other processes read on their GPU
# receiver                                  new parameters on their way into the model, on a CPU
# streams, device_receiver, device_target   the same on a GPU
# guard                                     on a GPU: a layer waits for its own parameters
# local_steps                               `--sync-every`
# buffers, state, remembered                buffers of the model; optimizer state; what is saved of an optimizer
# pipelining/                               Pipeline: a model in stages, one per process
# schedules, schedulers                     learning rates by progress; the schedulers that a script made
# data, batches, batch_sizes, naming        DataLoader; leased batches; warnings and errors about samples
# validation, weights, notices              validations; weights of a checkpoint; notices to the user

from syncline.errors import ConfigError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ConfigError(f"syncline.torch needs torch: pip install 'syncline[torch]' ({error})") from error

from syncline.torch.data import DataLoader
from syncline.torch.optimizer import DistributedOptimizer
from syncline.torch.pipelining.deferred import deferred_init
from syncline.torch.pipelining.pipeline import Pipeline
from syncline.torch.schedules import Schedule, schedule

__all__ = ["DataLoader", "DistributedOptimizer", "Pipeline", "Schedule", "deferred_init", "schedule"]
