#!/bin/sh
# Mixture training against forgetting: the same PPO with ptx coefficients 0, 0.5 and 2.
# usage: examples/real/ptx.sh DATA_FOLDER OUTPUT_FOLDER
set -eu
data=$1 out=$2 here=$(dirname "$0")
common="--config $here/politeness.yaml --actor-model $data/models/stories260K/hf \
  --data $data/prefs/politeness_rasbt.jsonl.gz --sft-data $data/instruct/rasbt_1100.jsonl.gz \
  --ptx-data $data/text/wikitext2_valid.txt.gz --ppo.ptx-batch-size 8 --ppo.steps 40"
tandem train $common --output-dir "$out/base" --steps sft reward
for coef in 0 0.5 2; do
    mkdir -p "$out/ptx-$coef"
    cp -r "$out/base/sft" "$out/base/reward" "$out/ptx-$coef/"
    tandem train $common --output-dir "$out/ptx-$coef" --ptx-coef $coef
done
