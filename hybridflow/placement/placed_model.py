"""A role's model on one mesh, and columns computed with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybridflow.algorithms.losses import Totals
from hybridflow.config.roles import OptimizerConfig
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.adapters import base_spec, factor_spec, is_factor
from hybridflow.models.distillation import top_log_probs, vocab_parallel_reverse_kl
from hybridflow.models.gpt import Transformer, build_transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import MicroBatch, first_of_prompt, pack, split_by_tokens
from hybridflow.models.specs import logical_tensors
from hybridflow.models.training import Trainable, forward_only, sum_over
from hybridflow.models.user_model import Uncut
from hybridflow.models.weights import describe_model, initialize, local_shards
from hybridflow.parallel.megatron import collection
from hybridflow.placement.job import Job
from hybridflow.placement.loss_mask import without_dropped
from hybridflow.placement.pretrained import load_pretrained
from hybridflow.placement.user_objects import has_weights, role_of, user_class_of, weights_of
from hybridflow.reshard.memory import HostOffload
from hybridflow.reshard.spec import ModelSpec


def role_spec(job: Job, role: str = "actor", *, has_value_head: bool = False) -> ModelSpec:
    """How the tensors of a role's model are cut, its adapters too; the same on every rank, in its meshes or not."""
    own = user_class_of(job, role)
    if own is not None:
        return Uncut(own).describe()
    model = job.model_of(role)
    assert model.vocab_size is not None, "a job's models have a vocabulary"
    lora = job.recipe.actor.lora if role == "actor" else None
    return describe_model(job.world, model, vocab_size=model.vocab_size, has_value_head=has_value_head, lora=lora)


class PlacedModel:
    """This rank's part of a role's model in one mesh.

    Its weights are initialised from (seed, tensor name), unless they are to come from elsewhere: ``is_filled_later``,
    ``Job.is_resumed``, or a model that was given or a directory that the recipe names, for ``load``.

    Attributes:
        mesh: Where the model is.
        spec: How its tensors are cut.
        groups: This rank's process groups there.
        transformer: This rank's stage and shard.
    """

    def __init__(
        self,
        job: Job,
        mesh: DeviceMesh,
        spec: ModelSpec,
        *,
        has_value_head: bool = False,
        is_filled_later: bool = False,
    ) -> None:
        recipe = job.recipe
        self.mesh = mesh
        self.spec = spec
        self.groups = collection(job.world, mesh)
        self._job = job
        self._role = role_of(mesh.name)
        self._model = job.model_of(self._role)
        self._seed = recipe.seed
        self._rank = job.world.rank
        self._device = job.world.device
        self._budget_tokens = recipe.trainer.micro_batch_tokens
        self._vocab_size = job.vocab_size
        self._temperature = recipe.rollout.temperature
        self._norm_tokens = recipe.loss.norm_tokens or recipe.rollout.max_new_tokens
        self._offload: HostOffload | None = None
        self.transformer = self._build(has_value_head=has_value_head)
        if not (is_filled_later or job.is_resumed):
            self._initialize()

    def _build(self, *, has_value_head: bool) -> Transformer | Uncut:
        assert self._model.vocab_size is not None, "a job's models have a vocabulary"
        return build_transformer(
            self._model,
            self.mesh.layout,
            self.groups,
            self._device,
            vocab_size=self._model.vocab_size,
            has_value_head=has_value_head,
            lora=self._job.recipe.actor.lora if self._role == "actor" else None,
            seed=self._seed,
        )

    def _initialize(self) -> None:
        # What is given or in a directory is read by load(); a value head or adapters may be what it lacks.
        factors = {tensor.name for tensor in self.spec.tensors if is_factor(tensor.name)}
        names = {"value_head.weight", *factors} if has_weights(self._job, self._role) else None
        initialize(
            self.transformer,
            self.spec,
            self.mesh,
            self._rank,
            seed=self._seed,
            std=self._model.init_std,
            names=names,
        )

    def make_trainable(self, settings: OptimizerConfig) -> Trainable:
        """Gradients and an optimizer for it."""
        return Trainable(self.transformer, self.groups, settings)

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank has the model's outputs: the last pipeline stage."""
        return self.transformer.post_process

    def load(self) -> None:
        """Take the weights of the model that was given, or of the directory that the recipe names; else none.

        Collective: of a ``GPTModel`` that is cut, the ranks that hold it.

        Raises:
            CheckpointError: The directory is damaged, or holds another model.
            ConfigError: What was given is not what the recipe asks for.
        """
        source = weights_of(self._job, self._role)
        if source is not None:
            load_pretrained(
                source,
                self.transformer,
                base_spec(self.spec),
                self.mesh,
                self._rank,
                seed=self._seed,
                std=self._model.init_std,
            )

    def keep_in_host_memory(self) -> None:
        """Move the weights away: from now on they are on the device within ``at_hand`` alone.

        Raises:
            ReshardError: The host has no room.
        """
        owner = f"rank {self._rank}: weights of {self.mesh.name}"
        self._offload = HostOffload(self.transformer.parameters(), owner=owner)
        self._offload.offload()

    @contextlib.contextmanager
    def at_hand(self, *, is_written: bool = False) -> Iterator[None]:
        """The weights where they are used, also of a model that is kept in host memory.

        Args:
            is_written: They are changed within.

        Raises:
            ReshardError: The device has no room.
        """
        is_away = self._offload is not None and self._offload.is_away
        if self._offload is not None:
            self._offload.restore()
        try:
            yield
        finally:
            if self._offload is not None and is_away:
                self._offload.offload(is_unchanged=not is_written)

    def forward(self, parts: list[MicroBatch], compute: Callable[..., Any]) -> list[Any]:
        """Forward passes without gradients: what ``compute(output, micro-batch)`` gave each, on the last stage.

        Collective: tp, pp.
        """
        with self.at_hand():
            return forward_only(self.transformer, self.groups, parts, compute)

    def begin_adapters(self, variant: int) -> None:
        """Give the adapters initial values: another number, others."""
        spec, std = factor_spec(self.spec), self._model.init_std
        initialize(self.transformer, spec, self.mesh, self._rank, seed=self._seed, std=std, variant=variant)

    def tensors(self) -> dict[str, Tensor]:
        """Live weights by logical name, as this rank holds them."""
        return {
            name: tensor
            for name, (tensor, _) in local_shards(self.transformer, self.spec, self.mesh, self._rank).items()
        }

    def share_storage(self, other: PlacedModel, names: Collection[str]) -> None:
        """Take another model's storage for some tensors, which are cut alike in both."""
        mine, theirs = logical_tensors(self.transformer), logical_tensors(other.transformer)
        for name in names:
            mine[name].data = theirs[name].data

    def micro_batches(self, batch: Batch, group_size: int = 1) -> list[MicroBatch]:
        """The batch cut by the recipe's token budget, ``group_size`` samples in a row staying together."""
        return self.pack(column_rows(batch, "tokens"), batch.columns["prompt_lengths"].tolist(), group_size)

    def pack(self, sequences: list[Tensor], prompt_lengths: list[int], group_size: int = 1) -> list[MicroBatch]:
        """Sequences, each ``[tokens]`` of prompt and response, cut as in ``micro_batches``."""
        prompts = first_of_prompt(sequences, prompt_lengths)
        lengths = [len(sequence) for sequence in sequences]
        chosen = split_by_tokens(lengths, self._budget_tokens, prompts=prompts, group_size=group_size)
        return [pack(samples, sequences, prompt_lengths, self._device) for samples in chosen]

    def log_probs(self, output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token at the rollout's temperature, ``[responses]`` each."""
        return vocab_parallel_log_probs(
            output,
            micro_batch.targets,
            group=self.groups.tp,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
        )

    def totals(self, part: Batch, mask: str = "response_mask") -> Totals | None:
        """Counts of a mini-batch over all data-parallel ranks, from a mask's column. Collective: dp.

        Returns:
            None where no token counts: such a mini-batch has no loss, and is left out, on all ranks.
        """
        rows = column_rows(part, mask)
        counts = torch.tensor([sum(float(row.sum()) for row in rows), sum(bool(row.any()) for row in rows)])
        num_tokens, num_sequences = sum_over(self.groups.dp)(counts.double()).tolist()
        if num_tokens == 0:
            return None
        return Totals(
            num_tokens=int(num_tokens), num_sequences=int(num_sequences), max_response_tokens=self._norm_tokens
        )

    def add_up(self, shares: list[Tensor], width: int) -> list[float]:
        """Sums of ``[width]`` shares over micro-batches and data-parallel ranks. Collective: dp, on holders."""
        none = torch.zeros(width, dtype=torch.float64, device=self._device)
        return sum_over(self.groups.dp)(torch.stack([none, *(share.double() for share in shares)]).sum(0)).tolist()

    def top_log_probs(self, output: Tensor, top_k: int) -> tuple[Tensor, ...]:
        """What students of this model compare themselves with, at the rollout's temperature; in host memory.

        Returns:
            As ``models.distillation.top_log_probs``: log-probabilities, and ids unless ``top_k`` is 0.
        """
        return top_log_probs(
            output, top_k, group=self.groups.tp, vocab_size=self._vocab_size, temperature=self._temperature
        )

    def reverse_kl(self, output: Tensor, teacher: Tensor, ids: Tensor | None) -> Tensor:
        """KL to a teacher at each response token, ``[responses]``, at the rollout's temperature; differentiable."""
        return vocab_parallel_reverse_kl(
            output, teacher, ids, group=self.groups.tp, vocab_size=self._vocab_size, temperature=self._temperature
        )

    def per_token(self, batch: Batch, compute: Callable[[Tensor, MicroBatch], Tensor]) -> Ragged | None:
        """One number for each response token, without gradients.

        Collective: tp, pp.

        Args:
            batch: With ``tokens`` and ``prompt_lengths``.
            compute: ``(output, micro-batch) -> [responses]``.

        Returns:
            The column, ``[samples, response]`` ragged; None but on holders.
        """
        found = self.rows_per_token(batch, lambda output, part: (compute(output, part).float(),))
        return None if found is None else Ragged.from_list([row for (row,) in found], torch.float32)

    def rows_per_token(
        self, batch: Batch, compute: Callable[[Tensor, MicroBatch], tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, ...]] | None:
        """Several things of each response token, without gradients.

        Collective: tp, pp.

        Args:
            batch: With ``tokens`` and ``prompt_lengths``.
            compute: ``(output, micro-batch) -> [responses, ...]`` each.

        Returns:
            Of each sample ``[response, ...]`` each, in host memory; None but on holders.
        """

        def rows(output: Tensor, micro_batch: MicroBatch) -> list[tuple[int, tuple[Tensor, ...]]]:
            split = [values.cpu().split(micro_batch.response_lengths) for values in compute(output, micro_batch)]
            return list(zip(micro_batch.samples, zip(*split, strict=True), strict=True))

        parts = self.forward(self.micro_batches(batch), rows)
        if not self.is_output_rank:
            return None
        by_sample: Mapping[int, tuple[Tensor, ...]] = dict(pair for part in parts for pair in part)
        return [by_sample[index] for index in range(len(batch))]


def column_rows(batch: Batch, name: str) -> list[Tensor]:
    """The rows of a ragged column."""
    column = batch.columns[name]
    assert isinstance(column, Ragged), f"column {name} is dense"
    return column.to_list()


def mismatched(batch: Batch) -> Batch:
    """The samples with ``mismatched_tokens``, each prompt with another's completion, where others have ``tokens``."""
    columns = {"tokens": batch.columns["mismatched_tokens"], "prompt_lengths": batch.columns["prompt_lengths"]}
    return Batch(batch.ids, columns)


def padded(batch: Batch, name: str, samples: list[int] | None = None, device: torch.device | None = None) -> Tensor:
    """Rows of a ragged column side by side, ``[samples, tokens]``, zeros behind the shorter ones."""
    rows = column_rows(batch, name)
    chosen = rows if samples is None else [rows[index] for index in samples]
    return pad_rows(chosen).to(device) if device is not None else pad_rows(chosen)


def mini_batch_size(job: Job) -> int:
    """Samples of one optimizer step."""
    trainer = job.recipe.trainer
    return trainer.global_batch_size if trainer.mini_batch_size is None else trainer.mini_batch_size


def length_metrics(batch: Batch, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """How long the samples of the global batch are, from this replica's. Collective: dp."""
    mask, tokens = batch.columns["response_mask"], batch.columns["tokens"]
    assert isinstance(mask, Ragged) and isinstance(tokens, Ragged), "both are ragged"
    shares = [float(mask.values.double().sum()), len(batch), int(tokens.lengths.sum())]
    counts = torch.tensor(shares, dtype=torch.float64)
    num_response_tokens, num_samples, num_tokens = sum_over_ranks(counts).tolist()
    return {"response/length_mean": num_response_tokens / num_samples, "batch/num_tokens": num_tokens}


def length_stats(job: Job, batch: Batch) -> dict[str, list[float]]:
    """Response tokens of each sample of this rank's replica, on one of its ranks."""
    mesh = job.meshes["actor.update"]
    place = mesh.coordinate(job.world.rank)
    if place.tp or place.pp:
        return {}
    return {"length": [float(row.sum()) for row in column_rows(batch, "response_mask")]}


def pad_rows(rows: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """``[samples, tokens]`` from rows of unequal length; differentiable."""
    return pad_sequence(list(rows), batch_first=True) if rows else torch.zeros(0, 0)


def mini_batch(job: Job, batch: Batch, index: int) -> Batch:
    """This rank's samples of a mini-batch: places ``[index * size, (index + 1) * size)`` of the global batch.

    Of one that is left out of learning no token counts.
    """
    size, order = mini_batch_size(job), batch.columns["order"]
    assert isinstance(order, Tensor), "order is a dense column"
    return without_dropped(batch.select((order // size == index).nonzero()[:, 0]))
