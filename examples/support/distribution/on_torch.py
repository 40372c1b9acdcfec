"""Distributed training on torch: torchrun and `DistributedDataParallel`.

Each process has its own model, for its part of the batch. Gradients are
averaged in the backward pass and clipped afterwards; metrics are summed. States
stay local: they are not buffers, and DDP broadcasts parameters only once, at
the start. Processes have different seeds, so the noise depends on their number.
"""

import contextlib
import os

import keras
import numpy as np
import torch
from torch import distributed

from examples.support.cli import RunError
from examples.support.distribution.engine import Engine
from examples.support.distribution.engine import part_of
from examples.support.distribution.engine import seed_of
from examples.support.distribution.engine import spread_seeds


def start(arguments):
    if arguments.virtual_devices:
        raise RunError(
            "--virtual-devices is for JAX and TensorFlow. On torch: torchrun "
            f"--nproc-per-node {arguments.virtual_devices} ..."
        )
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise RunError(
            "--distribute data on torch needs torchrun, with a process for "
            "each device: torchrun --nproc-per-node 2 SCRIPT --distribute data"
        )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    return TorchProcesses()


class TorchProcesses(Engine):
    def __init__(self):
        self.rank = distributed.get_rank()
        self.processes = distributed.get_world_size()
        self.devices = self.models = self.processes
        self.is_chief = self.rank == 0

    def leave(self):
        distributed.destroy_process_group()

    def lost_others(self, error):
        return isinstance(error, distributed.DistError) or (
            isinstance(error, RuntimeError)
            and any(word in str(error) for word in ("gloo", "Connection"))
        )

    def data(self, dataset):
        return part_of(dataset, self.rank, self.models)

    def prepare(self, model):
        """Makes `fit` train it together with the other processes."""
        replica = torch.nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False
        )
        local_metrics = model.get_metrics_result

        def get_metrics_result():
            with _summed(model.metrics_variables):
                return local_metrics()

        def train_step(data):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            y_pred = replica(x, training=True)
            model.zero_grad()
            loss = model.compute_loss(x, y, y_pred, weight, training=True)
            loss.backward()
            variables = model.trainable_weights
            with torch.no_grad():
                gradients = [v.value.grad for v in variables]
                model.optimizer.apply(gradients, variables)
            tracker = next(x for x in model.metrics if x.name == "loss")
            tracker.update_state(loss.detach())
            return model.compute_metrics(x, y, y_pred, weight)

        model.get_metrics_result = get_metrics_result
        model.train_step = train_step
        # After DDP has broadcast those of the first process.
        spread_seeds(self, model)

    def agree(self, number):
        value = torch.tensor(number, dtype=torch.int64, device=_device())
        distributed.broadcast(value, src=0)
        return int(value)

    def wait(self):
        distributed.barrier()

    def gather(self, array):
        own = torch.from_numpy(array).to(_device())
        parts = [torch.empty_like(own) for _ in range(self.models)]
        distributed.all_gather(parts, own)
        return torch.cat(parts).cpu().numpy()

    def own_part(self, array):
        return np.split(array, self.models)[self.rank]

    def spread(self, variable, seed):
        variable.assign(seed_of(self.rank, seed))


def _device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def _summed(variables):
    """Metrics of all samples, while the context lasts: they are sums."""
    own = [v.value.detach().clone() for v in variables]
    total = torch.cat([value.reshape(-1) for value in own])
    distributed.all_reduce(total)
    parts = total.split([value.numel() for value in own])
    for variable, value in zip(variables, parts):
        variable.assign(value.reshape(tuple(variable.shape)))
    try:
        yield
    finally:
        for variable, value in zip(variables, own):
            variable.assign(value)
