"""Settings of TRL, verl, OpenRLHF, slime and NeMo-RL are answered with ours: in files, options and programs."""

import pytest
import yaml

from hybridflow import cli
from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.other_names import NAMES, find_other_name
from hybridflow.sections import resume_rules
from tests.support.complaints import complains
from tests.support.recipes import SMALLEST

OURS = resume_rules(Recipe)


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    return path


@pytest.mark.parametrize("framework", NAMES)
def test_every_name_of_ours_is_a_key_and_no_name_of_theirs_is(framework):
    for name in NAMES[framework]:
        found = find_other_name(name)
        assert found.framework == framework and found.key in OURS, name
        assert name not in OURS, name


def test_a_name_is_in_one_framework_alone():
    every = [name for names in NAMES.values() for name in names]
    assert len(every) == len(set(every)) > 150


def test_a_bound_that_is_counted_from_another_number_is_told_of():
    assert str(find_other_name("epsilon_high")) == (
        "TRL's epsilon_high is loss.clip_high here (loss.clip_high is added to 1, also for cispo, where TRL's 5.0 is "
        "4.0 here)"
    )


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "learning_rate=3",
            "override 'learning_rate=3': learning_rate: not a key of a recipe; TRL's learning_rate is "
            "actor.optimizer.lr here",
        ),
        ("trainer.learning_rate=3", "trainer.learning_rate: not a key of a recipe; TRL's learning_rate is actor.opt"),
        ("beta=0.1", "TRL's beta is kl.coef here (kl.coef or preference.beta for dpo, ipo and kto)"),
        ("use_tis=true", "slime's use_tis is correction.kind here (correction.kind is truncate for it)"),
        ("num_generations=8", "TRL's num_generations is rollout.group_size here"),
        (
            "epsilon=0.1",
            "is loss.clip_low here (loss.clip_low with loss.clip_high; TRL's epsilon alone sets both)",
        ),
        ("label_smoothing=0.1", "(preference.label_smoothing is conservative DPO's; TRL's default loss ignores it)"),
        ("use_bias_correction_kl=true", "is kl.estimator here (kl.estimator is k3+ for it, k3 without)"),
        (
            "per_device_train_batch_size=8",
            "is trainer.mini_batch_size here (trainer.mini_batch_size counts the samples of one optimizer step on all",
        ),
        ("max_completion_length=64", "is rollout.max_new_tokens here"),
        (
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "verl's actor_rollout_ref.actor.optim.lr is actor.optimizer.lr here",
        ),
        ("+trainer.total_epochs=3", "verl's trainer.total_epochs is trainer.steps here"),
        ("trainer.epochs=3", "trainer.epochs is trainer.steps here (trainer.steps counts steps, not epochs)"),
        ("cluster.nodes=2", "cluster.nodes is cluster.ranks here (cluster.ranks counts the ranks of all nodes"),
        (
            "actor.update={tensor_model_parallel_size: 2}",
            "Megatron's tensor_model_parallel_size is actor.update.tp here",
        ),
        # Names of verl with another section, or none.
        ("save_freq=10", "verl's trainer.save_freq is trainer.save_every here"),
        ("actor.enable_gradient_checkpointing=true", "enable_gradient_checkpointing is actor.recompute here"),
        ("rollout.n=5", "verl's actor_rollout_ref.rollout.n is rollout.group_size here"),
        ("rollout.val_kwargs.n=4", "rollout.val_kwargs.n is trainer.validation_samples here"),
        # A text of ours, and a section of theirs.
        ("algorithm.gamma=1", "algorithm.gamma: not a key of a recipe; verl's algorithm.gamma is advantage.gamma here"),
        ("grpo.num_prompts_per_step=32", "NeMo-RL's grpo.num_prompts_per_step is trainer.global_batch_size here"),
        ("grpo.use_dynamic_sampling=true", "NeMo-RL's grpo.use_dynamic_sampling is algorithm here (algorithm is dapo)"),
        ("grpo.async_grpo.max_trajectory_age_steps=1", "is trainer.max_staleness here (trainer.max_staleness needs ac"),
        ("policy.megatron_cfg.optimizer.lr=1e-6", "NeMo-RL's policy.megatron_cfg.optimizer.lr is actor.optimizer.lr"),
        ("n_samples_per_prompt=8", "OpenRLHF's n_samples_per_prompt is rollout.group_size here"),
        ("trainer.rollout_batch_size=8", "OpenRLHF's rollout_batch_size is trainer.global_batch_size here (trainer.gl"),
        ("trainer.micro_batch_size=8", "trainer.micro_batch_size is trainer.micro_batch_tokens here (trainer.micro_b"),
        ("data.val=a.jsonl", "data.val is data.held_out here"),
        ("cluster.num_nodes=2", "NeMo-RL's cluster.num_nodes is cluster.ranks here"),
        # The key of the section in which it stands.
        ("actor.update={tensor_parallel: 2}", "tensor_parallel is actor.update.tp here"),
        ("actor.rollout.tensor_parallel_size=2", "tensor_parallel_size is actor.rollout.tp here"),
        ("critic.layout.pipeline_model_parallel_size=2", "is critic.layout.pp here"),
        ("critic.optimizer.learning_rate=2", "TRL's learning_rate is critic.optimizer.lr here"),
        ("data_parallel_size=2", "data_parallel_size is actor.update.dp here"),
        ("actor.lora.r=8", "PEFT's r is actor.lora.rank here"),
        # Their last word is one of ours, elsewhere.
        ("rollout.name=vllm", "verl's actor_rollout_ref.rollout.name is rollout.engine.kind here"),
        ("actor.optim.lr=1e-6", "verl's actor_rollout_ref.actor.optim.lr is actor.optimizer.lr here"),
        # A section of theirs, with a key that is in no list.
        ("rollout.multi_turn.enable=true", "verl's actor_rollout_ref.rollout.multi_turn is rollout.environment here"),
        # A word that says something else in another section.
        ("reward.type=function", "reward.type: unknown key; keys of reward: function, "),
        ("algorithm=gae", "algorithm: gae is ppo here; expected one of cispo, "),
        ("algorithm=reinforce", "algorithm: reinforce is reinforce++ here; expected one of cispo, "),
        ("algorithm=orpo", "algorithm: orpo is not there; of its kind are dpo, ipo and kto; expected one of cispo, "),
        # Something else in the place of a section.
        ("actor.update=tp2.pp2", "such as {tp: 2, dp: 8}, found 'tp2.pp2' (text); write {tp: 2, pp: 2}"),
        ("actor.update=pp2.layers3-5", "found 'pp2.layers3-5' (text); write {pp: 2, layers: [3, 5]}"),
        ("kl=0", "found 0 (an integer); give its keys, as in kl.coef=…"),
        ("rollout.engine=vllm", "found 'vllm' (text); give its keys, as in rollout.engine.kind=…"),
    ],
)
def test_their_names_are_answered_with_ours(recipe_file, override, says):
    complains(lambda: load_recipe(recipe_file, [override]), [says], ConfigError)


def test_their_names_in_a_file_are_answered_too(recipe_file):
    for theirs, says in (
        ({"learning_rate": 1e-6}, "learning_rate: not a key of a recipe; TRL's"),
        ({"actor_rollout_ref": {"rollout": {"n": 8}}}, "verl's actor_rollout_ref.rollout.n is rollout.group_size here"),
        ({"policy": {"model_name": "Qwen"}}, "NeMo-RL's policy.model_name is model.path here"),
    ):
        recipe_file.write_text(SMALLEST + yaml.safe_dump(theirs))
        with pytest.raises(ConfigError, match=f"^{recipe_file}: .*{says}"):
            load_recipe(recipe_file)


def test_all_of_their_names_are_answered_at_once(recipe_file):
    recipe_file.write_text(SMALLEST + yaml.safe_dump({"actor_rollout_ref": {"model": {"path": "x"}}}))
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe_file, ["data.train_batch_size=4", "trainer.steps=3", "learning_rate=1e-6"])
    head, *lines = str(error.value).splitlines()
    assert head == "3 keys are not those of a recipe:"
    assert (
        lines[0]
        == f"  {recipe_file}: actor_rollout_ref.model.path: verl's actor_rollout_ref.model.path is model.path here"
    )
    assert [line.split(": ")[0] for line in lines[1:]] == [
        "  override 'data.train_batch_size=4'",
        "  override 'learning_rate=1e-6'",
    ]


def test_a_name_that_others_chose_is_let_alone():
    assert find_other_name("data.kafka.options.max_length") is None
    assert find_other_name("trainer.steps") is None and find_other_name("preference.beta") is None
    assert find_other_name("nothing.of.anybody") is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "3"], "--steps: not an option; write trainer.steps=3"),
        (["--steps=3"], "--steps: not an option; write trainer.steps=3"),
        (["--lr", "1e-5"], "--lr: not an option; write actor.optimizer.lr=1e-5"),
        (["--model", "models/mine"], "--model: not an option; write model=models/mine"),
        (["--learning-rate", "3"], "--learning-rate: not an option; write actor.optimizer.lr=3"),
        (["--num_generations=4"], "--num_generations: not an option; write rollout.group_size=4"),
        (["--trainer.steps", "3"], "--trainer.steps: not an option; write trainer.steps=3"),
        (["--ranks", "8"], "--ranks: not an option; write cluster.ranks=8"),
        (["--output_dir"], "--output_dir: not an option; write run_dir=VALUE"),
        (["--nodes", "2"], "--nodes: not an option here; `hybridflow launch slurm` and `hybridflow plan job` take it"),
        (["--nothing"], "unrecognized arguments: --nothing"),
        (["--config"], "--config: not an option here; give the recipe alone, without an option"),
    ],
)
def test_options_of_others_are_answered_with_keys(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "quickstart", *words])
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quickstart"], "quickstart: not a command; write hybridflow train quickstart"),
        (
            ["evaluate", "runs/a"],
            "evaluate: not a command; `hybridflow train RECIPE model=DIR warm_start=null tr",
        ),
        (["resume"], "resume: not a command; `hybridflow train RECIPE --resume` continues a run"),
        (["export"], "export: not a command; `hybridflow convert runs/NAME DIR --to hf` writes a model"),
        (["trian", "grpo"], "trian: not a command; did you mean train? the commands are train, plan, init"),
        (["launch", "grpo"], "launch grpo: where is missing; write hybridflow launch slurm grpo, or local or mpi"),
    ],
)
def test_a_recipe_in_the_place_of_a_command_is_answered_with_the_command(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tp=2", "--tensor-parallel-size=2", "--pp=2"])
def test_axes_are_answered_with_the_layout(option, capsys):
    for words in (["serve", "--model", "m"], ["convert", "m", "out", "--to", "megatron"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, option])
        says = f"{option.partition('=')[0]}: not an option here; give --layout, such as --layout tp2"
        assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train"], ["plan", "job"], ["plan", "auto"]])
def test_no_command_requires_overrides(words, capsys):
    with pytest.raises(SystemExit):
        cli.main(words)
    assert "required: recipe\n" in capsys.readouterr().err.lower()


@pytest.mark.parametrize("option", ["--account=nlp", "--gpus"])
def test_options_of_sbatch_are_answered_with_their_place(option, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", "slurm", "quickstart", option])
    says = f"{option.partition('=')[0]}: not an option here; options of sbatch go into the site settings"
    assert ended.value.code == 2 and says in capsys.readouterr().err
