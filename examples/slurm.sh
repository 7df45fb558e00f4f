#!/bin/sh
# All three stages on 8 nodes of 8 GPUs. One launcher per node starts that node's ranks; the first
# node is the rendezvous. Submit with: sbatch examples/slurm.sh
#SBATCH --job-name=tandem
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# Every launcher gets SIGTERM two minutes before the time limit and passes it on to its ranks.
#SBATCH --signal=TERM@120
# After preemption the same command continues from the last checkpoint.
#SBATCH --requeue

rendezvous=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# exec: signals sent to this script reach srun, which passes them on.
exec srun --kill-on-bad-exit=0 tandem train \
    --num-nodes "$SLURM_JOB_NUM_NODES" --num-gpus 8 --rdzv "$rendezvous:29500" --max-restarts 2 \
    --actor-model "$ACTOR_MODEL" --data "$DATA" --output-dir "$OUTPUT_DIR" \
    --save-every 20 --actor-zero-stage 3
