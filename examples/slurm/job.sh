#!/bin/bash
# A training job with its data service: sbatch examples/slurm/job.sh
# The scheduler runs beside the trainers; the loaders are CPU jobs that it submits itself.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Trainers get SIGTERM 120 s before the end, and save.
#SBATCH --signal=TERM@120
set -euo pipefail

RANKS_PER_NODE=${RANKS_PER_NODE:-8}
LOADERS=${LOADERS:-4}              # loader jobs
INTERFACE=${INTERFACE:-ib0}        # the network that scheduler, loaders and trainers share
PYTHON=${PYTHON:-python}
EXAMPLE=${EXAMPLE:-examples/slurm}
HEAD=${HEAD:-$(hostname)}          # where the ranks meet: the first node of the job
PORT=${PORT:-29500}
RUN=${RUN:-runs/$SLURM_JOB_ID}     # the same again when the job is requeued

mkdir -p "$RUN"
rm -f "$RUN/scheduler.json"

"$PYTHON" "$EXAMPLE/serve.py" --folder "$RUN" --ranks $((SLURM_NNODES * RANKS_PER_NODE)) \
    --interface "$INTERFACE" --loaders "$LOADERS" ${SERVE_ARGS:-} &
service=$!
# It closes the service, and with it the loader jobs, however this script ends.
trap 'kill "$service" 2>/dev/null && wait "$service" || true' EXIT

until [ -s "$RUN/scheduler.json" ]; do
    kill -0 "$service"             # gives up when the service has failed
    sleep 1
done

# The shell must not wait for srun in the foreground, or it would not hear of its own SIGTERM.
srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$SLURM_JOB_ID" ${RUN_ARGS:-} \
    "$EXAMPLE/train.py" --folder "$RUN" ${TRAIN_ARGS:-} &
wait $!
