#!/bin/sh
# Mixture training against forgetting: the same PPO run with ptx coefficients 0, 0.5 and 2, for each seed.
# usage: examples/real/ptx.sh DATA_FOLDER OUTPUT_FOLDER [SEED ...]
set -eu
data=$1 out=$2 here=$(dirname "$0")
shift 2
for seed in "${@:-1234}"; do
    common="--config $here/politeness.yaml --actor-model $data/models/stories260K/hf \
      --data $data/prefs/politeness_rasbt.jsonl.gz --sft-data $data/instruct/rasbt_1100.jsonl.gz \
      --ptx-data $data/text/wikitext2_valid.txt.gz --ppo.ptx-batch-size 8 --ppo.steps 40 --seed $seed"
    base="$out/seed-$seed/base"
    tandem train $common --output-dir "$base" --stages sft reward
    for coef in 0 0.5 2; do
        mkdir -p "$out/seed-$seed/ptx-$coef"
        cp -r "$base/sft" "$base/reward" "$out/seed-$seed/ptx-$coef/"
        tandem train $common --output-dir "$out/seed-$seed/ptx-$coef" --ptx-coef $coef
    done
done
