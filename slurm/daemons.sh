# Sourced by the templates beside it: starts the node daemons of the components named in COMPONENTS and waits for them.
# Sets nothing of Slurm. The launcher's own scripts (python -m launcher plan --sbatch CONFIG) do the same.
#   CONFIG and overrides are the template's arguments; PYTHON and CODE may be set in the environment.
CODE=${CODE:-$SLURM_SUBMIT_DIR}
PYTHON=${PYTHON:-$CODE/.venv/bin/python}
export PYTHONPATH=$CODE${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

run=$("$PYTHON" -P -m launcher.slurm.adopt "$@" "${EXTRA[@]}") || exit 1
attempt=$("$PYTHON" -P -m launcher.slurm.batch start "$run") || exit 1
[ -n "$attempt" ] || exit 0
export VLM_RL_ATTEMPT=$attempt

ends=$(mktemp -u) && mkfifo "$ends" && exec 9<>"$ends" && rm "$ends" || exit 1
trap : TERM USR2
main=${COMPONENTS[-1]}
for index in "${!COMPONENTS[@]}"; do
  name=${COMPONENTS[$index]}
  nodes=VLM_RL_${name^^}_NODES
  count=$(tr , '\n' <<<"${!nodes}" | wc -l)
  if [ -n "${SLURM_HET_SIZE:-}" ]; then place=(--het-group="$index"); else place=(--exact --nodelist="${!nodes}" ${STEP[$index]:-}); fi
  (
    trap : TERM USR2
    export VLM_RL_COMPONENT=$name VLM_RL_HET_GROUP=$index
    srun "${place[@]}" --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --cpus-per-task="${CPUS[$index]}" \
      --kill-on-bad-exit=0 --wait=0 --mpi=none --unbuffered --output="$run/submitit/%j_${name}_%t.out" \
      "$PYTHON" -P -u -m launcher.slurm.task "$run" "$name"
    echo "$name $?" >&9
  ) &
done

left=${#COMPONENTS[@]} status=() deadline=0
while [ "$left" -gt 0 ] && { [ "$deadline" = 0 ] || [ "$SECONDS" -lt "$deadline" ]; }; do
  read -r -t 5 name code <&9 || continue
  left=$((left - 1)) status+=("$name=$code")
  if [ "$name" = "$main" ]; then deadline=$((SECONDS + 30))
  elif [ "$code" = 86 ]; then deadline=$((SECONDS + 10))
  elif [ "$code" != 0 ] && [ "$deadline" = 0 ]; then deadline=$((SECONDS + 240)); fi
done
"$PYTHON" -P -m launcher.slurm.batch finish "$run" "$attempt" "${status[@]}"
code=$?
if [ "$code" = 85 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T | head -n 1)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 120
fi
exit "$code"
