#!/bin/bash
# A job that survives preemption: told 120 s before its end, it saves, exits with 75 and is queued again.
#   sbatch examples/slurm/requeue.sh examples/slurm/train.py
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120

PREEMPTED=75  # heal.exit_codes.ExitCode.PREEMPTED: saved, run me again

# Signals go to the tasks too; this script has to outlive them in order to queue the job again.
trap : TERM USR1

# One task per GPU: heal.cluster.init_process_group reads rank and address from SLURM.
srun --kill-on-bad-exit=0 --wait=0 python -u "$@"
code=$?

if [ "$code" -eq "$PREEMPTED" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
