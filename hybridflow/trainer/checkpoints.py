"""What a checkpoint of a training job holds, and going on from it: in the same layout bit for bit, or in another."""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.checkpoint.model_dir import ModelDir
from hybridflow.checkpoint.saver import RolePart, Saver, Step
from hybridflow.checkpoint.store import (
    BASE,
    Checkpoint,
    clear_leftovers,
    load_latest,
    naming_others,
    open_role,
    reading_state,
)
from hybridflow.checkpoint.training_state import Shares, load_model, load_training
from hybridflow.data.tokenizer import JSON, PIECES, Tokenizer, open_tokenizer
from hybridflow.errors import CheckpointError
from hybridflow.families.assets import ADAPTER_CONFIG, TOKENIZERS
from hybridflow.families.assets import FOLDER as ASSETS
from hybridflow.families.family import VALUE_HEAD
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.adapters import base_spec, factor_spec
from hybridflow.models.training import Trainable
from hybridflow.observe.rank_log import say
from hybridflow.placement.job import Job
from hybridflow.placement.peft import adapter_config
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.placement.pretrained import assets_of
from hybridflow.recipe.meshes import reference_is_base
from hybridflow.recipe.resume import check_resume, fixed_settings
from hybridflow.reshard.spec import ModelSpec
from hybridflow.sampling.rollout_log import remove_logs
from hybridflow.sections import to_dict

MESHES = {"actor": "actor.update", "critic": "critic", "cost_critic": "cost_critic", "reference": "reference"}
"""Roles that are saved -> the mesh that holds their weights."""


class ResumePoint(NamedTuple):
    """Where a run begins, as all ranks know it.

    Attributes:
        checkpoint: What it goes on from; None: it is a new one.
        token: Tells this start of the job from others that use the same store.
        fingerprint: Tells the actor's weights from others that the run has had, see ``sampling.rollout_log``.
    """

    checkpoint: Checkpoint | None
    token: str
    fingerprint: str


def find_resume_point(job: Job, *, resume: bool) -> ResumePoint:
    """Find the checkpoint to go on from, and remove what killed writers left.

    The lowest rank looks, and tells the others: of a directory that is just changing each might see something else.

    Collective: all ranks.

    Raises:
        CheckpointError: The checkpoint is damaged, or belongs to another recipe or tokenizer; names what differs. On
            all ranks.
    """
    everyone, run_dir = job.world.coordinator(job.meshes["job"].ranks), Path(job.recipe.run_dir)

    def find() -> list[Any]:
        token = secrets.token_hex(8)
        found = load_latest(run_dir) if resume else None
        if found is not None:
            with reading_state(found):
                check_resume(job.recipe, found.state["recipe"], found.path)
            opened = {role: open_role(found, role) for role in found.roles}
            if "actor" in opened:
                _check_tokenizer(job.tokenizer, found, opened["actor"])
        fingerprint = _fingerprint(job, found, token)
        clear_leftovers(run_dir)
        if not resume:
            remove_logs(run_dir)
        return [None if found is None else found.step, token, fingerprint]

    step, token, fingerprint = everyone.on_lead("where the run begins", find)
    checkpoint = load_latest(run_dir) if step is not None else None
    if checkpoint is not None and checkpoint.step != step:
        raise CheckpointError(
            f"{checkpoint.path}: rank {job.world.rank} finds this as the latest, the lowest rank one of step {step}; "
            "set run_dir to a directory on a file system that all ranks share"
        )
    return ResumePoint(checkpoint, token, fingerprint)


def _fingerprint(job: Job, checkpoint: Checkpoint | None, token: str) -> str:
    """Return a fingerprint of the weights with which a start begins.

    A checkpoint knows its own fingerprint. Before the first one, a run without a warm start begins with the same
    weights each time: those of the recipe and of the files that it names. Everything else that decides the samples is
    included too, since there is no checkpoint to compare the recipe with. Weights without a fingerprint count as new.
    """
    recipe = job.recipe
    if checkpoint is not None:
        with reading_state(checkpoint):
            return str(checkpoint.state.get("rollouts", {}).get("fingerprint", token))
    if recipe.warm_start is not None or job.objects:
        return token
    told: list[Any] = [[key, value] for key, value in fixed_settings(to_dict(recipe)).items()]
    told += [recipe.model.path, recipe.model.init_std, None if recipe.actor.lora is None else recipe.actor.lora.path]
    told += [job.train.sha256, job.train.seed, hashlib.sha256(job.tokenizer.path.read_bytes()).hexdigest()]
    lora = recipe.actor.lora
    for name in (recipe.model.path, None if lora is None else lora.path):
        if name is None:
            continue
        path = Path(name)
        # Too long to be read for this; what replaces a file has another time.
        files = [(str(file), file.stat()) for file in sorted(path.rglob("*") if path.is_dir() else [path])]
        told += [[name, status.st_size, status.st_mtime_ns] for name, status in files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def load(job: Job, roles: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Fill the roles from a checkpoint, each rank with what it holds of them. No collective.

    Raises:
        CheckpointError: It is damaged, or of other models or problems.
    """
    _check_problems(job, checkpoint)
    for name, saved in saved_models(job, roles).items():
        if saved.model is None:
            continue
        # What was one with the base until now, and was never changed, begins as that.
        is_base = name == "reference" and name not in checkpoint.roles and BASE in checkpoint.roles
        role, place = BASE if is_base else name, (saved.spec, saved.mesh, job.world.rank)
        source = open_role(checkpoint, role)
        with naming_others(checkpoint, role):
            if saved.trainable is None:
                with saved.model.at_hand(is_written=True):
                    load_model(source, saved.model.transformer, *place)  # type: ignore[arg-type]  # an Uncut is read and written alike
            else:
                load_training(source, saved.trainable, *place)


class Saved(NamedTuple):
    """A model that a checkpoint holds, on one rank.

    Attributes:
        mesh: Where its weights are.
        spec: Those of its tensors that are saved.
        model: This rank's part; None outside the mesh.
        trainable: Its optimizer; None of a model that is not trained, and outside the mesh.
        is_frozen: Whether it never changes, and is written once.
    """

    mesh: DeviceMesh
    spec: ModelSpec
    model: PlacedModel | None
    trainable: Trainable | None
    is_frozen: bool

    @property
    def lead(self) -> int:
        """Return the rank that writes what the model's ranks write once."""
        return self.mesh.ranks[0]


def saved_models(job: Job, roles: Mapping[str, Any]) -> dict[str, Saved]:
    """Return the models of a checkpoint by name, the same names on every rank.

    Adapters are saved under the actor's name, and the weights below them as ``base``. ``base`` is also the reference if
    that is no model of its own.
    """
    found, lora = {}, job.recipe.actor.lora
    for name, mesh in MESHES.items():
        role = roles.get(name)
        if role is None or (name == "reference" and reference_is_base(job.recipe, job.meshes)):
            continue
        trainable = getattr(role, "trainable", None)
        saved = Saved(job.meshes[mesh], role.spec, role.model, trainable, is_frozen=name == "reference")
        if name == "actor" and lora is not None:
            is_fixed = lora.merge_every == 0
            found[BASE] = saved._replace(spec=base_spec(role.spec), trainable=None, is_frozen=is_fixed)
            saved = saved._replace(spec=factor_spec(role.spec))
        found[name] = saved
    return found


class Checkpoints:
    """The checkpoints of a running job, on one rank.

    Args:
        job: The job.
        roles: Name -> role; those with a model are saved.
        start: From ``begin``.

    Attributes:
        metrics: ``checkpoint/*``, since the trainer last took them.
    """

    def __init__(self, job: Job, roles: Mapping[str, Any], start: ResumePoint) -> None:
        trainer, saved = job.recipe.trainer, start.checkpoint
        self._job, self._models = job, saved_models(job, roles)
        # Read now: a file that cannot be read ends the start, not the first save. Later nobody needs the directory.
        self._assets = {name: _assets(job, name) for name, each in self._models.items() if job.world.rank == each.lead}
        written = {} if saved is None else saved.roles
        frozen = {name: written[name] for name, each in self._models.items() if each.is_frozen and name in written}
        self._written = set(frozen)
        self._saver = Saver(
            Path(job.recipe.run_dir),
            job.world.rank,
            job.world.new_store(f"checkpoints/{start.token}"),
            deadline_s=job.world.deadline_s,
            keep_last=trainer.keep_last,
            keep_every=trainer.keep_every,
            frozen=frozen,
        )
        self.metrics = self._saver.metrics

    def save(self, step: int, state: Mapping[str, Any], best: int | None) -> None:
        """Take what this rank is to write, and begin to write it, once the step before is complete.

        Args:
            step: Training steps done.
            state: What else the run needs to go on; JSON.
            best: Step of the checkpoint that stays as the best, see ``store.complete_step``.

        Raises:
            HybridflowError: What kept the step before from being written.
        """
        begin_s = time.perf_counter()
        self.finish()
        models = {name: each for name, each in self._models.items() if name not in self._written}
        parts = {name: self._part(name) for name, each in models.items() if each.model is not None}
        leads = {name: each.lead for name, each in models.items()}
        # As text, since the trainer goes on changing it.
        train = self._job.train
        begun = {
            "recipe": to_dict(self._job.recipe),
            "problems_sha256": train.sha256,
            "problems_seed": train.seed,
        }
        whole = json.loads(json.dumps({**begun, **state}))
        self._saver.save(Step(number=step, state=whole, best=best, leads=leads, parts=parts))
        for name, each in models.items():
            if each.is_frozen:
                self._written.add(name)
                self._shares.pop(name, None)
        self.metrics["checkpoint/blocked_s"] = time.perf_counter() - begin_s

    def check(self) -> None:
        """Report background errors. Raises HybridflowError."""
        self._saver.check()

    def finish(self) -> None:
        """Return when the last checkpoint is complete; the lowest rank tells of a long wait. Raises HybridflowError."""
        self._saver.finish(lambda line: say(line) if self._job.world.rank == 0 else None)

    @functools.cached_property
    def _shares(self) -> dict[str, Shares]:
        rank = self._job.world.rank
        return {
            name: Shares(each.model.transformer, each.spec, each.mesh, rank, each.trainable)  # type: ignore[arg-type]  # an Uncut is read and written alike
            for name, each in self._models.items()
            if each.model is not None
        }

    def _part(self, name: str) -> RolePart:
        job, shares, saved = self._job, self._shares[name], self._models[name]
        family, assets = self._assets.get(name, (None, {}))
        assert saved.model is not None, "only those that have a part of it write it"
        with saved.model.at_hand():
            copied = tuple(shares.copied())
        return RolePart(
            ranks=saved.mesh.ranks,
            model=job.model_of(name),
            has_value_head=any(tensor.name == VALUE_HEAD for tensor in saved.spec.tensors),
            layout=str(saved.mesh.layout),
            spec=saved.spec,
            shares=copied,
            trained=shares.trained(),
            progress=shares.progress(),
            is_frozen=saved.is_frozen,
            family=family,
            assets=assets,
        )


def _assets(job: Job, name: str) -> tuple[str | None, dict[str, bytes]]:
    family, assets = assets_of(job, name)
    if name == "actor" and job.recipe.actor.lora is not None:
        assets = {**assets, ADAPTER_CONFIG: adapter_config(job, assets)}
    return family, assets


def _check_tokenizer(tokenizer: Tokenizer | None, checkpoint: Checkpoint, actor: ModelDir) -> None:
    """Refuse another tokenizer than the one that the actor has learned; the same one in other bytes passes."""
    if tokenizer is None:
        return
    file, told = tokenizer.path, actor.manifest.notes.get(ASSETS, {})
    first = JSON if file.suffix == ".json" else PIECES
    name = next((each for each in (first, *TOKENIZERS) if each in told), None)
    if name is None or hashlib.sha256(file.read_bytes()).hexdigest() == told[name]:
        return
    actor.assets()
    copy = actor.path / ASSETS / name
    before = open_tokenizer(copy)
    mine, theirs = tokenizer.pieces(), before.pieces()
    differing = sorted(index for index in mine.keys() & theirs.keys() if mine[index] != theirs[index])
    if differing:
        found, expected = f"token {differing[0]}: {mine[differing[0]]!r}", repr(theirs[differing[0]])
    elif tokenizer.eos_id != before.eos_id:
        found, expected = f"end of sequence {tokenizer.eos_id}", str(before.eos_id)
    else:
        return
    raise CheckpointError(
        f"{file}: is another tokenizer than when {checkpoint.path} was written: found {found}, expected {expected}; "
        f"copy it there from {copy}, or start another run_dir"
    )


def _check_problems(job: Job, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of other problems, or of another order: the place in the data is a number."""
    found, expected = job.train.sha256, checkpoint.state.get("problems_sha256")
    if expected not in (found, None):
        raise CheckpointError(
            f"{job.recipe.data.title}: holds other problems than when {checkpoint.path} was written: found sha256 "
            f"{found}, expected {expected}; restore the file, or start another run_dir"
        )
    seed, before = job.train.seed, checkpoint.state.get("problems_seed")
    if before not in (seed, None):
        raise CheckpointError(
            f"{job.recipe.data.title}: is drawn in the order of seed={seed}, and was in that of seed={before} when "
            f"{checkpoint.path} was written; give the DataProvider seed={before}, or start another run_dir"
        )
