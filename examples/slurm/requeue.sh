#!/bin/bash
# A job that survives preemption. SLURM signals it 120 s before its end; it saves, exits with 75 and is requeued.
# It is also requeued after 47 to 50 (broken group, hardware, slow save, hang), up to a limit.
#   sbatch examples/slurm/requeue.sh examples/slurm/train.py
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120

# Codes of heal.exit_codes.ExitCode after which a start from the last checkpoint helps.
PREEMPTED=75 DISTRIBUTED=47 HUNG=50
MOST_RESTARTS=20  # after 47 to 50: a job that fails again and again needs a person

# Signals go to the tasks too; this script has to outlive them in order to queue the job again.
trap : TERM USR1

# One task per GPU: heal.cluster.init_process_group reads rank and address from SLURM.
srun --kill-on-bad-exit=0 --wait=0 python -u "$@"
code=$?

failed=$((code >= DISTRIBUTED && code <= HUNG && ${SLURM_RESTART_COUNT:-0} < MOST_RESTARTS))
if [ "$code" -eq "$PREEMPTED" ] || [ "$failed" -eq 1 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
