"""Names of other frameworks' settings, and of ours for the same. No torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError, did_you_mean
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.sections import parse_yaml, resume_rules, shorten

_SAMPLES = "counts samples: prompts × rollout.group_size"
_STEPS = "counts steps, not epochs"
_RECOMPUTE = "is none, selective or full"
_PACKED = "is a budget of tokens; samples are always packed"
_DEVICES = "counts GPUs, where torch sees any, else processes; CUDA_VISIBLE_DEVICES= hides the GPUs"
_TOKENS = "bounds the tokens of one forward pass, not its samples"

NAMES: Mapping[str, Mapping[str, str | tuple[str, str]]] = {
    "TRL": {
        "learning_rate": "actor.optimizer.lr",
        "lr_scheduler_type": "actor.optimizer.schedule",
        "warmup_steps": "actor.optimizer.warmup_steps",
        "weight_decay": "actor.optimizer.weight_decay",
        "label_smoothing": ("preference.label_smoothing", "is conservative DPO's; TRL's default loss ignores it"),
        "desirable_weight": "preference.desirable_weight",
        "undesirable_weight": "preference.undesirable_weight",
        "resume_from_checkpoint": ("run_dir", "is the run that --resume continues"),
        "warmup_ratio": ("actor.optimizer.warmup_steps", "counts steps, not a share"),
        "max_grad_norm": "actor.optimizer.clip_grad",
        "gradient_checkpointing": ("actor.recompute", _RECOMPUTE),
        "adam_beta1": "actor.optimizer.beta1",
        "adam_beta2": "actor.optimizer.beta2",
        "adam_epsilon": "actor.optimizer.eps",
        "beta": ("kl.coef", "or preference.beta for dpo, ipo and kto"),
        "kl_coef": "kl.coef",
        "use_bias_correction_kl": ("kl.estimator", "is k3+ for it, k3 without"),
        "entropy_coef": "loss.entropy_coef",
        "router_aux_loss_coef": "actor.moe.aux_loss",
        "epsilon": ("loss.clip_low", "with loss.clip_high; TRL's epsilon alone sets both"),
        "epsilon_high": ("loss.clip_high", "is added to 1, also for cispo, where TRL's 5.0 is 4.0 here"),
        "cliprange": ("loss.clip_low", "with loss.clip_high"),
        "cliprange_value": "critic.value_clip",
        "lam": "advantage.gae_lambda",
        "loss_type": ("algorithm", "is dr-grpo, cispo or ipo, say; loss.aggregation says how losses are averaged"),
        "importance_sampling_level": ("algorithm", "is gspo for the level sequence"),
        "mask_truncated_completions": "loss.mask_truncated",
        "scale_rewards": ("algorithm", "dr-grpo does not divide by the standard deviation"),
        "num_generations": "rollout.group_size",
        "max_completion_length": "rollout.max_new_tokens",
        "response_length": "rollout.max_new_tokens",
        "max_prompt_length": "data.max_prompt_tokens",
        "max_length": ("model.max_context", "counts prompt and response; rollout.max_new_tokens the response alone"),
        "max_seq_length": "model.max_context",
        "per_device_train_batch_size": (
            "trainer.mini_batch_size",
            "counts the samples of one optimizer step on all ranks; trainer.micro_batch_tokens bounds memory",
        ),
        "gradient_accumulation_steps": ("trainer.mini_batch_size", "counts the samples of one optimizer step"),
        "generation_batch_size": "trainer.global_batch_size",
        "steps_per_generation": ("trainer.global_batch_size", "counts the samples of one rollout"),
        "num_iterations": "loss.epochs",
        "num_ppo_epochs": "loss.epochs",
        "max_steps": "trainer.steps",
        "num_train_epochs": ("trainer.steps", _STEPS),
        "total_episodes": ("trainer.steps", "counts steps, not samples"),
        "save_steps": "trainer.save_every",
        "eval_steps": "trainer.validate_every",
        "save_total_limit": "trainer.keep_last",
        "output_dir": "run_dir",
        "run_name": "name",
        "report_to": "metrics.wandb",
        "bf16": ("model.dtype", "is bf16 or fp32"),
        "fp16": ("model.dtype", "is bf16 or fp32"),
        "torch_dtype": "model.dtype",
        "model_name_or_path": ("model.path", "is a directory on this machine"),
        "reward_model_path": "reward.model.path",
        "reward_funcs": ("reward.function", "is MODULE:FUNCTION"),
        "train_dataset": "data.train",
        "chat_template_kwargs": "data.chat_template_kwargs",
        "dataset_name": ("data.train", "is a file or directory on this machine"),
        "eval_dataset": "data.held_out",
        "delta": "loss.dual_clip",
        "num_mini_batches": ("trainer.mini_batch_size", "is the size of each, in samples"),
        "log_completions": "rollout.archive",
        "packing": ("trainer.micro_batch_tokens", _PACKED),
        "assistant_only_loss": ("data.learned_turns", "is all for it; what others say is never learned"),
        "use_peft": "actor.lora",
        "peft_config": "actor.lora",
        "lora_r": "actor.lora.rank",
        "lora_alpha": "actor.lora.alpha",
        "lora_dropout": "actor.lora.dropout",
        "lora_target_modules": "actor.lora.targets",
        "use_vllm": ("rollout.engine.kind", "is vllm or megatron"),
        "vllm_mode": ("rollout.engine.kind", "vllm is TRL's colocate"),
        "vllm_importance_sampling_correction": "correction.kind",
        "vllm_importance_sampling_mode": ("correction.kind", "with correction.level"),
        "vllm_importance_sampling_clip_max": "correction.high",
        "vllm_importance_sampling_clip_min": "correction.low",
        "vllm_gpu_memory_utilization": "rollout.engine.memory_share",
        "fsdp": ("actor.update", "is {fsdp: 8}, say"),
        "deepspeed": ("actor.update", "is {dp: 8, zero: 3}, say"),
    },
    "verl": {
        "algorithm.adv_estimator": "algorithm",
        "algorithm.gamma": "advantage.gamma",
        "algorithm.lam": "advantage.gae_lambda",
        "algorithm.use_kl_in_reward": ("kl.place", "is reward or loss"),
        "algorithm.kl_penalty": "kl.estimator",
        "algorithm.kl_ctrl.kl_coef": "kl.coef",
        "algorithm.kl_ctrl.target_kl": "kl.target",
        "algorithm.kl_ctrl.horizon": "kl.horizon",
        "data.train_files": "data.train",
        "data.val_files": "data.held_out",
        "data.prompt_key": "data.prompt_field",
        "data.image_key": "data.images_field",
        "data.train_batch_size": ("trainer.global_batch_size", _SAMPLES),
        "data.max_prompt_length": "data.max_prompt_tokens",
        "data.filter_overlong_prompts": ("data.max_prompt_tokens", "leaves longer prompts out"),
        "data.truncation": ("data.max_prompt_tokens", "leaves longer prompts out; none is truncated"),
        "data.tokenizer": "tokenizer.path",
        "data.seed": ("seed", "is that of the whole run"),
        "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
        "data.max_response_length": "rollout.max_new_tokens",
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
        "actor_rollout_ref.model.enable_gradient_checkpointing": ("actor.recompute", _RECOMPUTE),
        "critic.model.enable_gradient_checkpointing": ("critic.recompute", _RECOMPUTE),
        "actor_rollout_ref.model.lora_rank": "actor.lora.rank",
        "actor_rollout_ref.model.lora_alpha": "actor.lora.alpha",
        "actor_rollout_ref.model.target_modules": "actor.lora.targets",
        "actor_rollout_ref.actor.optim.lr": "actor.optimizer.lr",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "actor.optimizer.warmup_steps",
        "actor_rollout_ref.actor.optim.weight_decay": "actor.optimizer.weight_decay",
        "actor_rollout_ref.actor.optim.betas": ("actor.optimizer.beta1", "with actor.optimizer.beta2"),
        "actor_rollout_ref.actor.optim.clip_grad": "actor.optimizer.clip_grad",
        "actor_rollout_ref.actor.grad_clip": "actor.optimizer.clip_grad",
        "actor_rollout_ref.actor.strategy": ("actor.update", "is {fsdp: 8} or {tp: 2, dp: 4}, say"),
        "actor_rollout_ref.actor.ppo_mini_batch_size": ("trainer.mini_batch_size", _SAMPLES),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": ("trainer.micro_batch_tokens", _TOKENS),
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
        "actor_rollout_ref.actor.use_dynamic_bsz": ("trainer.micro_batch_tokens", _PACKED),
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "actor.update.cp",
        "actor_rollout_ref.actor.megatron.context_parallel_size": "actor.update.cp",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": ("trainer.micro_batch_tokens", _TOKENS),
        "actor_rollout_ref.actor.ppo_epochs": "loss.epochs",
        "actor_rollout_ref.actor.policy_loss.loss_mode": ("algorithm", "is gspo or cispo, say; vanilla is all others"),
        "actor_rollout_ref.actor.clip_ratio": ("loss.clip_low", "with loss.clip_high"),
        "actor_rollout_ref.actor.clip_ratio_low": "loss.clip_low",
        "actor_rollout_ref.actor.clip_ratio_high": "loss.clip_high",
        "actor_rollout_ref.actor.clip_ratio_c": "loss.dual_clip",
        "actor_rollout_ref.actor.entropy_coeff": "loss.entropy_coef",
        "actor_rollout_ref.actor.loss_agg_mode": "loss.aggregation",
        "actor_rollout_ref.actor.loss_scale_factor": "loss.norm_tokens",
        "actor_rollout_ref.actor.use_kl_loss": ("kl.place", "is loss or reward"),
        "actor_rollout_ref.actor.kl_loss_coef": "kl.coef",
        "actor_rollout_ref.actor.kl_loss_type": "kl.estimator",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "actor.update.tp",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "actor.update.pp",
        "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": "actor.update.vpp",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size": "actor.update.fsdp",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "actor.offload",
        "actor_rollout_ref.rollout.name": "rollout.engine.kind",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
        "actor_rollout_ref.rollout.val_kwargs.n": "trainer.validation_samples",
        "actor_rollout_ref.rollout.temperature": "rollout.temperature",
        "actor_rollout_ref.rollout.top_k": "rollout.top_k",
        "actor_rollout_ref.rollout.top_p": "rollout.top_p",
        "actor_rollout_ref.rollout.response_length": "rollout.max_new_tokens",
        "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_concurrent",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.cache_memory",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "actor.rollout.tp",
        "actor_rollout_ref.ref.fsdp_config.param_offload": "reference.offload",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "actor.update.ep",
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": "actor.update.etp",
        "actor_rollout_ref.actor.router_replay.mode": "actor.moe.router_replay",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size": "reference.layout.tp",
        "critic.optim.lr": "critic.optimizer.lr",
        "critic.cliprange_value": "critic.value_clip",
        "reward_model.model.path": "reward.model.path",
        "algorithm.filter_groups": ("algorithm", "dapo filters groups, up to dynamic_sampling.max_tries"),
        "algorithm.filter_groups.enable": ("algorithm", "dapo filters groups, up to dynamic_sampling.max_tries"),
        "algorithm.norm_adv_by_std_in_grpo": ("algorithm", "dr-grpo does not divide by the standard deviation"),
        "algorithm.rollout_correction": "correction.kind",
        "algorithm.rollout_is": "correction.kind",
        "algorithm.rollout_correction.rollout_is": ("correction.level", "is token or sequence"),
        "algorithm.rollout_correction.rollout_is_threshold": ("correction.high", "with correction.low for icepop"),
        "algorithm.rollout_correction.rollout_rs": ("correction.reject", "with correction.reject_level"),
        "algorithm.rollout_correction.rollout_rs_threshold": (
            "correction.reject_high",
            "bounds the estimate; for k1 the ratio of trainer to sampler, verl's of sampler to trainer",
        ),
        "algorithm.kl_ctrl.type": ("kl.target", "makes the coefficient adaptive"),
        "reward_model.overlong_buffer.len": "shaping.overlong_buffer",
        "reward_model.overlong_buffer.penalty_factor": "shaping.overlong_factor",
        "reward_model.reward_manager": ("reward.function", "is MODULE:FUNCTION"),
        "trainer.rollout_data_dir": ("rollout.archive", "keeps every sample with the run"),
        "trainer.val_before_train": ("data.held_out", "is validated before and after training"),
        "data.multiturn.enable": ("data.learned_turns", "is all for it"),
        "data.multiturn.messages_key": "data.messages_field",
        "data.messages_key": "data.messages_field",
        "reward_model.ground_truth": ("data.answer_field", "is reward_model.ground_truth for files of verl"),
        "actor_rollout_ref.rollout.multi_turn": "rollout.environment",
        "reward.custom_reward_function.path": ("reward.function", "is MODULE:FUNCTION"),
        "reward.custom_reward_function.name": ("reward.function", "is MODULE:FUNCTION"),
        "reward.reward_model.model_path": "reward.model.path",
        "trainer.resume_mode": ("run_dir", "is the run that --resume continues"),
        "custom_reward_function.path": ("reward.function", "is MODULE:FUNCTION"),
        "custom_reward_function.name": ("reward.function", "is MODULE:FUNCTION"),
        "trainer.total_training_steps": "trainer.steps",
        "trainer.total_epochs": ("trainer.steps", _STEPS),
        "trainer.save_freq": "trainer.save_every",
        "trainer.test_freq": "trainer.validate_every",
        "trainer.critic_warmup": "critic.warmup_steps",
        "trainer.max_actor_ckpt_to_keep": "trainer.keep_last",
        "trainer.n_gpus_per_node": (
            "cluster.ranks",
            "counts the GPUs of all nodes; cluster.ranks_per_node those of one",
        ),
        "trainer.nnodes": ("cluster.ranks", "counts the ranks of all nodes"),
        "trainer.project_name": "namespace",
        "trainer.experiment_name": "name",
        "trainer.default_local_dir": "run_dir",
        "trainer.logger": ("metrics", "has a section for each exporter, such as metrics.wandb"),
    },
    "NeMo-RL": {
        "policy.model_name": "model.path",
        "policy.tokenizer.name": "tokenizer.path",
        "policy.precision": "model.dtype",
        "policy.max_total_sequence_length": "model.max_context",
        "policy.train_global_batch_size": "trainer.mini_batch_size",
        "policy.train_micro_batch_size": ("trainer.micro_batch_tokens", _TOKENS),
        "policy.max_grad_norm": "actor.optimizer.clip_grad",
        "policy.tokenizer.chat_template_kwargs": "data.chat_template_kwargs",
        "policy.sequence_packing.enabled": ("trainer.micro_batch_tokens", _PACKED),
        "policy.dynamic_batching.enabled": ("trainer.micro_batch_tokens", _PACKED),
        "data.max_input_seq_length": "data.max_prompt_tokens",
        "policy.optimizer.kwargs.lr": "actor.optimizer.lr",
        "policy.optimizer.kwargs.weight_decay": "actor.optimizer.weight_decay",
        "policy.megatron_cfg.optimizer.lr": "actor.optimizer.lr",
        "policy.megatron_cfg.optimizer.min_lr": "actor.optimizer.min_lr",
        "policy.megatron_cfg.optimizer.weight_decay": "actor.optimizer.weight_decay",
        "policy.megatron_cfg.scheduler.lr_warmup_iters": "actor.optimizer.warmup_steps",
        "policy.megatron_cfg.scheduler.lr_decay_style": "actor.optimizer.schedule",
        "policy.megatron_cfg.tensor_model_parallel_size": "actor.update.tp",
        "policy.megatron_cfg.pipeline_model_parallel_size": "actor.update.pp",
        "policy.megatron_cfg.activation_checkpointing": ("actor.recompute", _RECOMPUTE),
        "policy.dtensor_cfg.activation_checkpointing": ("actor.recompute", _RECOMPUTE),
        "policy.megatron_cfg.expert_model_parallel_size": "actor.update.ep",
        "policy.megatron_cfg.expert_tensor_parallel_size": "actor.update.etp",
        "policy.megatron_cfg.moe_router_bias_update_rate": "actor.moe.bias_update_rate",
        "policy.dtensor_cfg.tensor_parallel_size": "actor.update.tp",
        "policy.generation.backend": "rollout.engine.kind",
        "policy.generation.colocated.enabled": ("actor.rollout_ranks", "names ranks that generate and do not learn"),
        "policy.generation.max_new_tokens": "rollout.max_new_tokens",
        "policy.generation.temperature": "rollout.temperature",
        "policy.generation.top_k": "rollout.top_k",
        "policy.generation.top_p": "rollout.top_p",
        "policy.generation.stop_strings": "rollout.stop",
        "policy.generation.vllm_cfg.tensor_parallel_size": "actor.rollout.tp",
        "policy.generation.vllm_cfg.gpu_memory_utilization": "rollout.engine.memory_share",
        "grpo.num_prompts_per_step": ("trainer.global_batch_size", _SAMPLES),
        "grpo.num_generations_per_prompt": "rollout.group_size",
        "grpo.max_num_steps": "trainer.steps",
        "grpo.max_num_epochs": ("trainer.steps", _STEPS),
        "grpo.max_rollout_turns": "rollout.environment.max_turns",
        "grpo.val_period": "trainer.validate_every",
        "grpo.max_val_samples": "trainer.num_validation",
        "grpo.overlong_filtering": "loss.mask_truncated",
        "grpo.use_leave_one_out_baseline": ("algorithm", "is rloo, without a standard deviation as divisor"),
        "grpo.normalize_rewards": ("algorithm", "is dr-grpo in the place of grpo, for false"),
        "grpo.use_dynamic_sampling": ("algorithm", "is dapo"),
        "grpo.dynamic_sampling_max_gen_batches": "dynamic_sampling.max_tries",
        "grpo.reward_shaping.overlong_buffer_length": "shaping.overlong_buffer",
        "grpo.reward_shaping.overlong_buffer_penalty": "shaping.overlong_factor",
        "grpo.async_grpo.enabled": ("trainer.max_staleness", "is above 0, beside actor.rollout_ranks"),
        "grpo.async_grpo.max_trajectory_age_steps": ("trainer.max_staleness", "needs actor.rollout_ranks"),
        "grpo.seed": "seed",
        "sft.max_num_steps": "trainer.steps",
        "sft.val_period": "trainer.validate_every",
        "dpo.max_num_steps": "trainer.steps",
        "dpo.val_period": "trainer.validate_every",
        "dpo.reference_policy_kl_penalty": "preference.beta",
        "loss_fn.reference_policy_kl_penalty": "kl.coef",
        "loss_fn.reference_policy_kl_type": "kl.estimator",
        "loss_fn.ratio_clip_min": "loss.clip_low",
        "loss_fn.ratio_clip_max": "loss.clip_high",
        "loss_fn.ratio_clip_c": "loss.dual_clip",
        "loss_fn.token_level_loss": "loss.aggregation",
        "loss_fn.use_importance_sampling_correction": "correction.kind",
        "loss_fn.truncated_importance_sampling_ratio": "correction.high",
        "loss_fn.sequence_level_importance_ratios": ("algorithm", "is gspo"),
        "checkpointing.checkpoint_dir": "run_dir",
        "checkpointing.save_period": "trainer.save_every",
        "checkpointing.keep_top_k": ("trainer.keep_last", "keeps the newest; trainer.keep_best keeps the best one too"),
        "cluster.gpus_per_node": "cluster.ranks_per_node",
        "cluster.num_nodes": ("cluster.ranks", "counts the ranks of all nodes"),
        "logger.log_dir": "run_dir",
        "logger.wandb.project": "metrics.wandb.project",
    },
    "OpenRLHF": {
        "rollout_batch_size": ("trainer.global_batch_size", _SAMPLES),
        "train_batch_size": ("trainer.mini_batch_size", "counts samples, as there"),
        "micro_train_batch_size": ("trainer.micro_batch_tokens", _TOKENS),
        "micro_rollout_batch_size": ("trainer.micro_batch_tokens", _TOKENS),
        "n_samples_per_prompt": "rollout.group_size",
        "generate_max_len": "rollout.max_new_tokens",
        "prompt_max_len": "data.max_prompt_tokens",
        "max_len": ("model.max_context", "counts prompt and response"),
        "prompt_data": "data.train",
        "input_key": "data.prompt_field",
        "label_key": "data.answer_field",
        "apply_chat_template": ("data.prompt_as_message", "is for text; messages always go through the template"),
        "pretrain": ("model.path", "is a directory on this machine"),
        "critic_pretrain": ("critic.model.path", "is a directory on this machine"),
        "reward_pretrain": ("reward.model.path", "is a directory on this machine"),
        "remote_rm_url": ("reward.service.urls", "is a list; a file of a function is reward.function"),
        "actor_learning_rate": "actor.optimizer.lr",
        "critic_learning_rate": "critic.optimizer.lr",
        "lr_warmup_ratio": ("actor.optimizer.warmup_steps", "counts steps, not a share"),
        "l2": "actor.optimizer.weight_decay",
        "max_norm": "actor.optimizer.clip_grad",
        "adam_offload": "actor.offload",
        "zero_stage": ("actor.update", "is {dp: 8, zero: 3}, say"),
        "ring_attn_size": "actor.update.cp",
        "vllm_tensor_parallel_size": "actor.rollout.tp",
        "advantage_estimator": "algorithm",
        "init_kl_coef": "kl.coef",
        "kl_target": "kl.target",
        "eps_clip": ("loss.clip_low", "with loss.clip_high"),
        "eps_clip_low_high": ("loss.clip_low", "with loss.clip_high"),
        "entropy_loss_coef": "loss.entropy_coef",
        "aux_loss_coef": "actor.moe.aux_loss",
        "overlong_buffer_len": "shaping.overlong_buffer",
        "overlong_penalty_factor": "shaping.overlong_factor",
        "dynamic_filtering": ("algorithm", "dapo filters groups, up to dynamic_sampling.max_tries"),
        "agent_func_path": ("rollout.environment.name", "is MODULE:CLASS"),
        "async_train": ("trainer.max_staleness", "is the number of steps that samples may be old"),
        "lr_scheduler": "actor.optimizer.schedule",
        "lambd": "advantage.gae_lambda",
        "max_epochs": "loss.epochs",
        "num_episodes": ("trainer.steps", _STEPS),
        "multiturn": ("data.learned_turns", "is all for it"),
        "packing_samples": ("trainer.micro_batch_tokens", _PACKED),
        "freezing_actor_steps": "critic.warmup_steps",
        "max_ckpt_num": "trainer.keep_last",
        "ckpt_path": ("run_dir", "holds the checkpoints"),
        "save_path": ("run_dir", "holds the checkpoints, which `hybridflow convert` writes as transformers reads them"),
        "load_checkpoint": ("run_dir", "is the run that --resume continues"),
        "use_wandb": ("metrics.wandb", "is {project: NAME}"),
        "wandb_run_name": "name",
    },
    "slime": {
        "num_rollout": "trainer.steps",
        "num_epoch": ("trainer.steps", _STEPS),
        "num_steps_per_rollout": ("trainer.mini_batch_size", "counts the samples of one optimizer step"),
        "max_tokens_per_gpu": ("trainer.micro_batch_tokens", "counts the tokens of all ranks of cp"),
        "use_dynamic_batch_size": ("trainer.micro_batch_tokens", _PACKED),
        "hf_checkpoint": ("model.path", "is a directory on this machine"),
        "ref_load": ("model.path", "is the reference, too: the policy as it begins"),
        "load": ("run_dir", "is the run that --resume continues"),
        "save": ("run_dir", "holds the checkpoints"),
        "save_interval": "trainer.save_every",
        "eval_interval": "trainer.validate_every",
        "eval_prompt_data": ("data.held_out", "is one file, without a name"),
        "n_samples_per_eval_prompt": ("trainer.validation_samples", "come in addition to the greedy response"),
        "apply_chat_template_kwargs": "data.chat_template_kwargs",
        "multimodal_keys": ("data.images_field", "is the name of the field"),
        "rollout_max_response_len": "rollout.max_new_tokens",
        "rollout_max_prompt_len": "data.max_prompt_tokens",
        "rollout_max_context_len": "model.max_context",
        "rollout_temperature": "rollout.temperature",
        "rollout_top_p": "rollout.top_p",
        "rollout_top_k": ("rollout.top_k", "is 0 for all tokens"),
        "rollout_stop": "rollout.stop",
        "rollout_num_gpus_per_engine": ("actor.rollout", "is a layout, {tp: 2, dp: 4}, say"),
        "rollout_num_gpus": ("actor.rollout_ranks", "is a list of ranks"),
        "sglang_mem_fraction_static": ("rollout.cache_memory", "is a share of what is free when generating begins"),
        "actor_num_nodes": ("cluster.ranks", "counts the ranks of all nodes"),
        "actor_num_gpus_per_node": ("cluster.ranks", "counts the ranks of all nodes"),
        "disable_grpo_std_normalization": ("algorithm", "is dr-grpo for it"),
        "calculate_per_token_loss": ("loss.aggregation", "is token-mean for it"),
        "dynamic_sampling_filter_path": ("algorithm", "dapo filters groups, up to dynamic_sampling.max_tries"),
        "eps_clip_high": "loss.clip_high",
        "eps_clip_c": "loss.dual_clip",
        "value_clip": "critic.value_clip",
        "use_tis": ("correction.kind", "is truncate for it"),
        "tis_clip": "correction.high",
        "use_rollout_routing_replay": ("actor.moe.router_replay", "is replay for it"),
        "partial_rollout": "rollout.partial_rollouts",
        "num_critic_only_steps": "critic.warmup_steps",
        "rm_type": ("reward.function", "is maths or MODULE:FUNCTION, say"),
        "custom_rm_path": ("reward.function", "is MODULE:FUNCTION"),
        "rm_url": ("reward.service.urls", "is a list"),
        "custom_generate_function_path": ("rollout.environment.name", "is MODULE:CLASS"),
        "opd_teacher_load": ("teacher.model.path", "with algorithm=distill"),
        "wandb_project": ("metrics.wandb", "is {project: NAME}"),
    },
    "prime-rl": {
        "rollouts_per_example": "rollout.group_size",
        "max_async_level": ("trainer.max_staleness", "is the number of steps that samples may be old"),
        "seq_len": "model.max_context",
    },
    "PEFT": {"r": "actor.lora.rank"},
    "": {
        "micro_batch_size": ("trainer.micro_batch_tokens", _TOKENS),
        "trainer.micro_batch_size": ("trainer.micro_batch_tokens", _TOKENS),
        "data.val": "data.held_out",
        "rollout.backend": ("rollout.engine.kind", "is megatron or vllm, say"),
        "trainer.resume": ("run_dir", "is the run that --resume continues"),
        "batch_size": ("trainer.mini_batch_size", "is of an update, trainer.global_batch_size of a step"),
        "device": ("cluster.ranks", _DEVICES),
        "trainer.device": ("cluster.ranks", _DEVICES),
        "resume": ("run_dir", "is the run that --resume continues"),
        "epochs": ("trainer.steps", _STEPS),
        "num_epochs": ("trainer.steps", f"{_STEPS}; loss.epochs counts passes over each batch"),
        "trainer.epochs": ("trainer.steps", _STEPS),
        "cluster.nodes": ("cluster.ranks", "counts the ranks of all nodes; cluster.ranks_per_node those of one"),
    },
    "Megatron": {
        "tensor_model_parallel_size": "actor.update.tp",
        "pipeline_model_parallel_size": "actor.update.pp",
        "expert_model_parallel_size": "actor.update.ep",
        "expert_tensor_parallel_size": "actor.update.etp",
        "recompute_granularity": ("actor.recompute", _RECOMPUTE),
        "lr_decay_style": "actor.optimizer.schedule",
        "lr_warmup_iters": "actor.optimizer.warmup_steps",
        "moe_aux_loss_coeff": "actor.moe.aux_loss",
        "moe_z_loss_coeff": "actor.moe.z_loss",
        "moe_router_bias_update_rate": "actor.moe.bias_update_rate",
        "moe_token_dispatcher_type": "actor.moe.dispatcher",
        "moe_enable_routing_replay": "actor.moe.router_replay",
        "moe_router_topk": "model.experts_per_token",
        "moe_router_score_function": "model.router_score",
        "moe_router_enable_expert_bias": "model.router_bias",
        "moe_shared_expert_intermediate_size": "model.shared_ffn_hidden_size",
        "moe_shared_expert_gate": "model.shared_expert_gate",
    },
}
"""Framework -> its name -> our key, and what the key says if that differs. Under no framework: names of several."""

_IN_ANY_SECTION = ("TRL", "Megatron", "OpenRLHF", "slime", "prime-rl", "PEFT")
"""Frameworks whose settings have no sections, so that their names may turn up in any of ours."""


_AXIS = re.compile(r"(tensor|pipeline|data|context|expert)(_model)?_parallel(ism)?(_size|_degree)?")
"""An axis of a layout as vLLM, torchtitan and others call it; ours begins with the same letter."""

_ALGORITHMS_ELSEWHERE = {
    "gae": "ppo",
    "group_norm": "grpo",
    "dr_grpo": "dr-grpo",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++-baseline",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}
"""Names of algorithms in verl and OpenRLHF, and ours."""

_NOT_THERE = ("orpo", "cpo", "simpo", "online-dpo")

_MOST_PARTS = 8
"""Of a section of theirs that is looked for in a key."""


class OtherName(NamedTuple):
    """A setting of another framework.

    Attributes:
        framework: The framework.
        name: The setting there.
        key: Our key.
        remark: What our key says, if that differs.
    """

    framework: str
    name: str
    key: str
    remark: str

    def __str__(self) -> str:
        remark = f" ({self.key} {self.remark})" if self.remark else ""
        whose = f"{self.framework}'s " if self.framework else ""
        return f"{whose}{self.name} is {self.key} here{remark}"


def find_other_name(key: str) -> OtherName | None:
    """Return the setting of another framework that a dotted key names; None for any other key.

    Args:
        key: As a person wrote it, also with the ``+`` of Hydra. A name of a framework without sections is found behind
            any section of ours.
    """
    key = key.lstrip("+")
    for framework, names in NAMES.items():
        if key in names:
            return _found(framework, key)
    if _is_ours(key):
        return None
    section, _, last = key.rpartition(".")
    flat = next((name for name in _IN_ANY_SECTION if last in NAMES[name]), None)
    if flat is not None:
        return _within(section, _found(flat, last))
    axis = _AXIS.fullmatch(last)
    if axis is not None:
        return _within(section, OtherName("", last, f"actor.update.{axis[1][0]}p", ""))
    return _of_verl(key, section, last)


def algorithm_hint(name: str) -> str:
    """Return what to say in the middle of a message of an algorithm that is not there; may be empty."""
    if name in _NOT_THERE:
        return f"{name} is not there; of its kind are dpo, ipo and kto; "
    ours = _ALGORITHMS_ELSEWHERE.get(name)
    return did_you_mean(name, ALGORITHMS) if ours is None else f"{name} is {ours} here; "


def _within(section: str, found: OtherName) -> OtherName:
    """Return the name with the key of the section in which a person wrote it, if that has such a key."""
    own = f"{section}.{found.key.rpartition('.')[2]}"
    return found._replace(key=own) if own in _keys() else found


def _of_verl(key: str, section: str, last: str) -> OtherName | None:
    """Return the name of verl that a key with other sections, or none, ends like."""
    top = key.partition(".")[0]
    ends = sorted(
        (name for name in NAMES["verl"] if name.rpartition(".")[2] == last),
        key=lambda name: (_found("verl", name).key.partition(".")[0] != top, len(name)),
    )
    alike = [name for name in ends if f".{name}".endswith(f".{key}")]
    if alike and (section or not _ends_a_key(last)):
        return _found("verl", alike[0])
    if not ends or _ends_a_key(last):
        return None
    found = _found("verl", ends[0])
    # A short word, such as "type", says nothing without its section.
    return found if not section or "_" in last or found.key.partition(".")[0] == top else None


def _ends_a_key(name: str) -> bool:
    return any(each.rpartition(".")[2] == name for each in _keys())


_FIRST = ("cluster.", "trainer.", "actor.", "rollout.")
"""Where a key lies that several sections have and that a person gave without its section."""


def key_of_option(option: str) -> str | None:
    """Return the key of a recipe that a person gave as an option: ``--steps``, ``--learning-rate=3``.

    None where no key has such a name.
    """
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    found = find_other_name(name)
    if name in _keys() or found is not None:
        return name if found is None else found.key
    keys = [key for key in resume_rules(Recipe) if key.rpartition(".")[2] == name]
    return min(keys, key=lambda key: not key.startswith(_FIRST), default=None)


def _found(framework: str, name: str) -> OtherName:
    ours = NAMES[framework][name]
    key, remark = (ours, "") if isinstance(ours, str) else ours
    return OtherName(framework, name, key, remark)


@functools.cache
def _keys() -> frozenset[str]:
    return frozenset(resume_rules(Recipe))


def _is_ours(key: str) -> bool:
    """Return whether a recipe has the key, or a mapping or list that may hold it."""
    parts = key.split(".")
    prefixes = [".".join(parts[:count]) for count in range(1, len(parts))]
    return key in _keys() or any(each in _keys() and not _has_keys(each) for each in prefixes)


def _has_keys(section: str) -> bool:
    return any(key.startswith(f"{section}.") for key in _keys())


def refuse_other_names(values: Mapping[Any, Any], overrides: Sequence[str], source: str) -> None:
    """Refuse names of other frameworks' settings, before a closest key of ours is looked for.

    Args:
        values: The nested mapping of a recipe.
        overrides: ``"dotted.key=value"`` each.
        source: What messages call the mapping.

    Raises:
        ConfigError: Some are there; names our key for each.
    """
    given = [(where, key) for each in overrides for where, key in _keys_of_override(each)]
    found = {}
    for where, key in (*((source, key) for key in _dotted(values, "")), *given):
        name = find_other_name(key)
        if name is not None:
            found[key] = where, name
    # Of a section that is told of, and a key in it, the key says more.
    told = [
        (where, key, name)
        for key, (where, name) in found.items()
        if not any(each.startswith(f"{key}.") for each in found)
    ]
    if len(told) == 1:
        ((where, key, name),) = told
        raise ConfigError(f"{where}: {key}: not a key of a recipe; {name}")
    if told:
        lines = (f"\n  {where}: {key}: {name}" for where, key, name in told)
        raise ConfigError(f"{len(told)} keys are not those of a recipe:{''.join(lines)}")


def _keys_of_override(override: str) -> Iterator[tuple[str, str]]:
    """Yield what messages call an override, with its key and the keys of the section that it gives."""
    key, _, text = override.partition("=")
    where = f"override {shorten(override)!r}"
    yield where, key
    # A section of theirs within is told of too, where the whole is nobody's.
    parts = key.split(".")[:-1][:_MOST_PARTS]
    yield from ((where, ".".join(parts[:count])) for count in range(len(parts), 0, -1))
    section = parse_yaml(text, where) if text.lstrip().startswith("{") else None
    if isinstance(section, Mapping):
        yield from ((where, inner) for inner in _dotted(section, f"{key}."))


def _dotted(values: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
