"""Continuous batching on the training model's own weights, under tensor, pipeline and data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.errors import DataError
from hybridflow.models.gpt import Transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.rollout.blocks import BLOCK_TOKENS, BlockPool
from hybridflow.rollout.cpu_transformer import CpuTransformer, runs_on_cpu
from hybridflow.rollout.paged import PagedAttention, PagedCache
from hybridflow.rollout.request import Progress, Request, Response, RolloutStopped
from hybridflow.rollout.sampling import Sampled, Sampler, sequence_key
from hybridflow.rollout.scheduler import Job, Scheduler, Step

STEP_TOKENS = 2048
"""Tokens that go through the model at one time."""

LOOK_STEPS = 16
"""Every so many steps generating looks up: what is finished is handed over, and it may be told to stop."""
