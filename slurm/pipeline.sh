#!/bin/bash
# From a model of Hugging Face to a trained one, as five jobs, each of which begins when the one before it is done:
#   slurm/pipeline.sh RECIPE MODEL OUT [key=value ...]
#   convert    MODEL               → OUT/start        in hybridflow's format
#   SFT        OUT/start           → OUT/sft          the recipe's warm_start
#   RL         the end of OUT/sft  → OUT/rl           the recipe's steps
#   export     the end of OUT/rl   → OUT/model        in the format of Hugging Face
#   evaluate   OUT/model           → OUT/evaluation   accuracy on data.held_out, in summary.json
# The recipe's section `model` has beside `path` what says nothing else than MODEL: best max_context and dtype alone.
# A job that fails ends those after it. Modules and containers are set in train.sbatch and convert.sbatch.
# Run again, the runs go on where they were, and what leads to an OUT/start or OUT/model that is there is left out. For more
# steps of RL, move OUT/model and OUT/evaluation away first.
set -euo pipefail
# ---- edit for your site -------------------------------------------------------------------------------------------
options=()                                        # of every job: (--account=ACCOUNT --partition=PARTITION)
convert=(--ntasks=1)
train=(--nodes=1 --ntasks-per-node=4)             # a task for each of the recipe's ranks
steps=40                                          # of RL
# -------------------------------------------------------------------------------------------------------------------
if [ $# -lt 3 ]; then
    echo "usage: slurm/pipeline.sh RECIPE MODEL OUT [key=value ...]" >&2
    exit 2
fi
slurm=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=$1 model=$2 out=$3
shift 3
if [ -e "$out/evaluation" ] && [ ! -e "$out/model" ]; then
    echo "pipeline.sh: $out/evaluation has the weights of a model that was in $out/model before, and would be resumed; move it away" >&2
    exit 2
fi
mkdir -p "$out"

# Submit a job that waits for the last one: submit NAME [option of sbatch ...] SCRIPT [argument ...]
last=
submit() {
    local name=$1
    shift
    last=$(sbatch --parsable --job-name="$name" ${last:+--dependency=afterok:$last --kill-on-invalid-dep=yes} \
        "${options[@]}" "$@")
    last=${last%;*} # of several clusters sbatch adds the name
    echo "$name: job $last"
}

if [ -e "$out/model" ]; then
    echo "$out/model is there, and is evaluated"
else
    if [ -e "$out/start" ]; then
        echo "$out/start is there, and is trained"
    else
        submit convert "${convert[@]}" "$slurm/convert.sbatch" "$model" "$out/start" --to megatron
    fi
    submit sft "${train[@]}" "$slurm/train.sbatch" "$recipe" "$@" "run_dir=$out/sft" "model.path=$out/start" \
        trainer.steps=0
    submit rl "${train[@]}" "$slurm/train.sbatch" "$recipe" "$@" "run_dir=$out/rl" \
        "model.path=$out/sft/checkpoints/step_000000/actor" warm_start=null "trainer.steps=$steps"
    submit export "${convert[@]}" "$slurm/convert.sbatch" "$out/rl" "$out/model" --to hf
fi
submit evaluate "${train[@]}" "$slurm/train.sbatch" "$recipe" "$@" "run_dir=$out/evaluation" \
    "model.path=$out/model" warm_start=null trainer.steps=0
