"""A role's model on one mesh, and columns computed with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.algorithms.losses import Totals
from hybridflow.config.roles import ActorConfig, CriticConfig, OptimizerConfig
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.families.family import VALUE_HEAD
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.adapters import base_spec, is_factor, whole_spec
from hybridflow.models.gpt import Transformer
from hybridflow.models.layers import Chunks, chunks_of, recompute_activations
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import MicroBatch, first_of_prompt, pack, split_by_tokens
from hybridflow.models.training import Trainable, forward_only, sum_over
from hybridflow.models.user_model import Uncut
from hybridflow.placement.images import image_reader
from hybridflow.placement.job import Job
from hybridflow.placement.model_on_mesh import ModelOnMesh
from hybridflow.placement.routing import ROUTER_CHOICES, attach_choices, set_dispatcher
from hybridflow.placement.user_objects import has_weights, user_class_of, weights_of
from hybridflow.reshard.optimizer import bucket_elements
from hybridflow.reshard.spec import ModelSpec


def role_spec(job: Job, role: str = "actor", *, has_value_head: bool = False) -> ModelSpec:
    """Return how the tensors of a role's model are cut, adapters included; the same on every rank of the job."""
    own = user_class_of(job, role)
    if own is not None:
        return Uncut(own).describe()
    model = job.model_of(role)
    lora = job.recipe.actor.lora if role == "actor" else None
    return whole_spec(model, has_value_head=has_value_head, lora=lora)


def part_of(job: Job, mesh: str, spec: ModelSpec, model: PlacedModel | None) -> ModelOnMesh:
    """Return this rank's part of a role's model; where it has none, outside the mesh, one without weights."""
    return ModelOnMesh(job.world, job.meshes[mesh], job.model_of(mesh), spec) if model is None else model


class PlacedModel(ModelOnMesh):
    """This rank's part of a role's model in one mesh.

    Its weights are initialized from (seed, tensor name), unless they are to come from elsewhere: ``is_filled_later``,
    ``Job.is_resumed``, or a model that was given or a directory that the recipe names, for ``load_given``.

    Attributes:
        temperature: The rollout's, by which logits are divided.
        images: What the model knows of images; None: prompts are text.
    """

    groups: ProcessGroupCollection
    transformer: Transformer | Chunks | Uncut

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
        self._job = job
        self._role = mesh.role
        super().__init__(job.world, mesh, job.model_of(self._role), spec, seed=recipe.seed)
        self.vocab_size = job.vocab_size
        self.temperature = recipe.rollout.temperature
        self._norm_tokens = recipe.loss.norm_tokens or recipe.rollout.max_new_tokens
        self._is_in_host_memory = mesh.layout.fsdp > 1 and getattr(recipe, self._role).offload == "always"
        if mesh.name == "actor.update":
            self._fp8 = recipe.actor.fp8
        self.build(has_value_head=has_value_head, lora=recipe.actor.lora if self._role == "actor" else None)
        section = getattr(recipe, self._role)
        if mesh.name != "actor.rollout" and isinstance(section, ActorConfig | CriticConfig):
            owner = f"{self._role}.recompute"
            recompute_activations(self.transformer, owner, section.recompute, section.recompute_layers)
        self.images = image_reader(job, self._role)
        if self.images is not None:
            self.read_images(self.images)
        if self._role == "actor" and not isinstance(self.transformer, Uncut):
            set_dispatcher(self.transformer, recipe.actor.moe.dispatcher)
        if not (is_filled_later or job.is_resumed):
            self._initialize()

    def _initialize(self) -> None:
        # What is given or in a directory is read by load_given(); a value head or adapters may be what it lacks.
        factors = {tensor.name for tensor in self.spec.tensors if is_factor(tensor.name)}
        self.initialize({VALUE_HEAD, *factors} if has_weights(self._job, self._role) else None)

    def make_trainable(self, settings: OptimizerConfig) -> Trainable:
        """Make gradients and an optimizer for the model. On a GPU its collectives overlap with computation."""
        bucket_size = bucket_elements(self.mesh.layout) if self._world.device.type == "cuda" else None
        self._trainable = Trainable(self.megatron_model, self.groups, settings, bucket_size=bucket_size)
        return self._trainable

    @property
    def is_output_rank(self) -> bool:
        """Return whether this rank has the model's outputs: the last pipeline stage."""
        return bool(chunks_of(self.megatron_model)[-1].post_process)

    def load_given(self) -> None:
        """Take the weights of the model that was given, or of the directory that the recipe names; else none.

        Collective: of a ``GPTModel`` that is cut, the ranks that hold it.

        Raises:
            CheckpointError: The directory is damaged, or holds another model.
            ConfigError: What was given is not what the recipe asks for.
        """
        source = weights_of(self._job, self._role)
        if source is not None:
            self.load(source, base_spec(self.spec))

    def forward(self, parts: list[MicroBatch], compute: Callable[..., Any]) -> list[Any]:
        """Run forward passes without gradients; return each ``compute(output, micro-batch)``, on the last stage.

        Collective: tp, pp.
        """
        with self.at_hand():
            return forward_only(self.megatron_model, self.groups, parts, compute)

    def micro_batches(self, batch: Batch, group_size: int = 1) -> list[MicroBatch]:
        """Split the batch by the recipe's token budget; ``group_size`` consecutive samples stay together."""
        parts = self.pack(batch.ragged("tokens").to_list(), batch.dense("prompt_lengths").tolist(), group_size)
        if ROUTER_CHOICES in batch.columns:
            is_replayed = self._job.recipe.actor.moe.router_replay == "replay"
            attach_choices(parts, batch, self.groups, self.megatron_model, is_replayed=is_replayed)
        return parts

    def pack(self, sequences: list[Tensor], prompt_lengths: list[int], group_size: int = 1) -> list[MicroBatch]:
        """Split sequences, each ``[tokens]`` of prompt and response, as ``micro_batches`` does."""
        prompts = first_of_prompt(sequences, prompt_lengths)
        lengths = [len(sequence) for sequence in sequences]
        budget = self._job.recipe.trainer.micro_batch_tokens
        chosen = split_by_tokens(lengths, budget, prompts=prompts, group_size=group_size)
        device, context = self._world.device, self.groups.cp
        return [pack(samples, sequences, prompt_lengths, device, context, self.images) for samples in chosen]

    def log_probs(
        self, output: Tensor, micro_batch: MicroBatch, *, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probability and entropy per response token, ``[responses]`` each.

        Collective: tp, cp.

        Args:
            output: Logits of the micro-batch.
            micro_batch: The micro-batch.
            temperature: By which logits are divided; None: the rollout's.
        """
        local = vocab_parallel_log_probs(
            output,
            micro_batch.targets,
            group=self.groups.tp,
            vocab_size=self.vocab_size,
            temperature=self.temperature if temperature is None else temperature,
        )
        log_probs, entropy = micro_batch.gathered(torch.stack(local, dim=1)).unbind(1)
        return log_probs, entropy

    def values(self, output: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return a value head's number of each row, ``[rows]`` fp32. Collective: cp."""
        return micro_batch.gathered(output[:, 0].float())

    def totals(self, part: Batch, mask: str = "response_mask") -> Totals | None:
        """Count a mini-batch over all data-parallel ranks, from a mask's column. Collective: dp.

        Returns:
            None where no token counts: such a mini-batch has no loss, and is left out, on all ranks.
        """
        rows = part.ragged(mask).to_list()
        counts = torch.tensor([sum(float(row.sum()) for row in rows), sum(bool(row.any()) for row in rows)])
        num_tokens, num_sequences = sum_over(self.groups.dp)(counts.double()).tolist()
        if num_tokens == 0:
            return None
        return Totals(
            num_tokens=int(num_tokens), num_sequences=int(num_sequences), max_response_tokens=self._norm_tokens
        )

    def add_up(self, shares: list[Tensor], width: int) -> list[float]:
        """Sum ``[width]`` shares over micro-batches and data-parallel ranks. Collective: dp, on holders."""
        none = torch.zeros(width, dtype=torch.float64, device=self._world.device)
        return sum_over(self.groups.dp)(torch.stack([none, *(share.double() for share in shares)]).sum(0)).tolist()

    def per_token(self, batch: Batch, compute: Callable[[Tensor, MicroBatch], Tensor]) -> Ragged | None:
        """Compute one number for each response token, without gradients.

        Collective: tp, pp.

        Args:
            batch: With ``tokens`` and ``prompt_lengths``.
            compute: ``(output, micro-batch) -> [responses]``.

        Returns:
            The column, ``[samples, response]`` ragged; None but on holders.
        """
        found = self.forward(self.micro_batches(batch), lambda output, part: (part, compute(output, part).float()))
        if not self.is_output_rank:
            return None
        # One copy behind all passes. A copy behind each would keep the host from starting the next one.
        values = torch.cat([torch.empty(0, device=self._world.device), *(each for _, each in found)]).cpu()
        rows = values.split([length for part, _ in found for length in part.response_lengths])
        by_sample = dict(zip([index for part, _ in found for index in part.samples], rows, strict=True))
        return Ragged.from_list([by_sample[index] for index in range(len(batch))], torch.float32)

    def rows_per_token(
        self, batch: Batch, compute: Callable[[Tensor, MicroBatch], tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, ...]] | None:
        """Compute several values for each response token, without gradients.

        Collective: tp, pp.

        Args:
            batch: With ``tokens`` and ``prompt_lengths``.
            compute: ``(output, micro-batch) -> [responses, ...]`` each.

        Returns:
            Of each sample ``[response, ...]`` each, in host memory; None but on holders.
        """

        def rows(output: Tensor, micro_batch: MicroBatch) -> list[tuple[int, tuple[Tensor, ...]]]:
            split = [micro_batch.by_response(values.cpu()) for values in compute(output, micro_batch)]
            return list(zip(micro_batch.samples, zip(*split, strict=True), strict=True))

        parts = self.forward(self.micro_batches(batch), rows)
        if not self.is_output_rank:
            return None
        by_sample: Mapping[int, tuple[Tensor, ...]] = dict(pair for part in parts for pair in part)
        return [by_sample[index] for index in range(len(batch))]
