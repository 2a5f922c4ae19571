"""Sharded training (FSDP) that computes and saves what training without sharding does.

Lightning's strategy, with these differences. Nothing is cast that would not be cast on one device: parameters,
gradients and batches keep their types, and autocast works as ever; bfloat16 parameters would cost the structured layers
their digits. Checkpoints are those of any other run, whole, verified when they are read, and their optimiser states are
in the optimiser's own order, so that a run can go on with another strategy. Hooks that use the model outside of a step
see whole parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.plugins.precision import FSDPPrecision
from pytorch_lightning.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateKeyType,
    StateDictType,
)
from torch.optim import Optimizer

from matbackprop.errors import ConfigurationError
from matbackprop.training.checkpoint import load_checkpoint

__all__ = ["ShardedPrecision", "ShardedStrategy"]

_HOOKS = ("on_fit_start", "on_validation_epoch_end")
"""Hooks of a module that may use its network although they are no step."""


class ShardedPrecision(FSDPPrecision):
    """Precision as without sharding: autocast where it is mixed, and nothing else.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        device: type of the device.
    """

    def __init__(self, precision: Any, device: str) -> None:
        super().__init__(precision)
        self.device = device

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        return MixedPrecision()

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data

    def convert_output(self, data: Any) -> Any:
        return data

    def forward_context(self) -> AbstractContextManager[Any]:
        if "mixed" not in self.precision:
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        return torch.autocast(self.device, dtype=dtype, cache_enabled=False)


class ShardedStrategy(FSDPStrategy):
    """Fully sharded data parallel training: gradients, optimiser states and, between steps, parameters are in parts.

    The network is one unit, which is gathered for each step. Units within it could not be used by the hooks.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        device: type of the device.
    """

    def __init__(self, precision: str, device: str) -> None:
        super().__init__(precision_plugin=ShardedPrecision(precision, device))
        self._restore_hooks: list[Callable[[], None]] = []

    def _setup_model(self, model: nn.Module) -> FullyShardedDataParallel:
        single = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
        if single:
            raise ConfigurationError(
                f"fsdp cannot shard a parameter that is a single number: {', '.join(single)}. Do not let it learn, or "
                "use --strategy ddp."
            )
        for parameter in model.parameters():
            # One process alone (NO_SHARD) would train wrongly in another layout, such as channels_last.
            parameter.data = parameter.data.contiguous()
        return FullyShardedDataParallel(
            model,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        )

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        for name in _HOOKS:
            if getattr(type(module), name) is not getattr(pl.LightningModule, name):
                setattr(module, name, self._on_whole_parameters(getattr(module, name)))
                self._restore_hooks.append(functools.partial(delattr, module, name))

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with self._whole():  # groups may be made by the parameters' shapes
            super().setup_optimizers(trainer)

    def teardown(self) -> None:
        for restore in self._restore_hooks:
            restore()
        self._restore_hooks = []
        super().teardown()

    def _whole(self) -> AbstractContextManager[Any]:
        assert self.model is not None
        return FullyShardedDataParallel.summon_full_params(self.model)

    def _on_whole_parameters(self, hook: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(hook)
        def call() -> Any:
            with self._whole():
                return hook()

        return call

    # ------------------------------------------------------------------------------------------------- checkpoints

    @contextmanager
    def _full_states(self, first_only: bool) -> Iterator[FullyShardedDataParallel]:
        assert isinstance(self.model, FullyShardedDataParallel)
        # On the CPU there is nothing to copy them from, and what is not copied is freed.
        options = {"offload_to_cpu": self.root_device.type != "cpu", "rank0_only": first_only}
        with FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(**options),
            FullOptimStateDictConfig(**options),
        ):
            yield self.model

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return all parameters and buffers on the first process."""
        with self._full_states(first_only=True) as model:
            return model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state on the first process, keyed by the optimiser's own order."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        with self._full_states(first_only=True) as model:
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            if self.global_rank:
                return {}
            return FullyShardedDataParallel.rekey_optim_state_dict(
                state, OptimStateKeyType.PARAM_ID, model, optim=optimizer
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a whole checkpoint, of any strategy, and keep this process's part of it."""
        checkpoint = load_checkpoint(self.broadcast(checkpoint_path))
        assert self.lightning_module is not None
        with self._full_states(first_only=False) as model:
            model.load_state_dict(checkpoint.pop("state_dict"), strict=self.lightning_module.strict_loading)
            for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", []), strict=True):
                if state["state"]:
                    state = FullyShardedDataParallel.rekey_optim_state_dict(
                        state, OptimStateKeyType.PARAM_NAME, model, optim=optimizer
                    )
                    state = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
                optimizer.load_state_dict(state)
        return checkpoint
