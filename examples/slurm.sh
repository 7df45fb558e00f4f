#!/bin/sh
# All three steps on 8 nodes of 8 GPUs. One launcher per node starts that node's ranks; the first
# node keeps the meeting place. Submit with: sbatch examples/slurm.sh
#SBATCH --job-name=tandem
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# SIGTERM reaches every launcher two minutes before the time is over, and every rank from there.
#SBATCH --signal=TERM@120
# After a pre-emption the same command continues from the last checkpoint.
#SBATCH --requeue

meeting=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# exec: what is sent to this script reaches srun, which passes it on.
exec srun --kill-on-bad-exit=0 tandem train \
    --num-nodes "$SLURM_JOB_NUM_NODES" --num-gpus 8 --rdzv "$meeting:29500" --max-restarts 2 \
    --actor-model "$ACTOR_MODEL" --data "$DATA" --output-dir "$OUTPUT_DIR" \
    --save-every 20 --actor-zero-stage 3
