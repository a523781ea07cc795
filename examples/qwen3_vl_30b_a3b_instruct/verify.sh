#!/usr/bin/env bash
# The verification record of the machine at hand: one card, two cards (FSDP, TP), a resumed run and transformers' own training,
# 100 steps each, held against each other.
#
#   examples/qwen3_vl_30b_a3b_instruct/verify.sh [OUT_DIR] [--section.key=value ...]
#
# OUT_DIR (default outputs/verify; absent or empty) takes the runs, a log of every stage, the reports and record.md. Exit code 0:
# every comparison is within its tolerance and the tests pass. Further arguments go to every run.
#
# Weights: a tiny model with the real vocabulary, written here, or WEIGHTS=DIR in the Hugging Face layout. One card and
# transformers take the whole model, 16 bytes a parameter, so the published one wants fewer layers:
#
#   WEIGHTS=/data/Qwen3-VL-30B-A3B-Instruct .../verify.sh OUT_DIR --model.num_hidden_layers=4
#
# Samples are short (32 tokens, 16 of them an image's, 2 samples a step), so that two idle CPU cores are done in some ten minutes.
# Where other programs share the cores, OMP_NUM_THREADS=1 keeps torch's threads from waiting for each other.
set -euo pipefail

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; }
out=outputs/verify
if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
if [[ $# -gt 0 && $1 != --* ]]; then out=$1; shift; fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
weights=${WEIGHTS:+$(cd "$WEIGHTS" && pwd)}
cd "$(dirname "$0")/../.."
if [[ -n $(ls -A "$out") ]]; then echo "error: $out is not empty: name another directory, or remove it" >&2; exit 2; fi
python -c 'import hyper_parallel, pytest, transformers' || { echo "error: pip install -e '.[dev]', then try again" >&2; exit 2; }

templates=examples/qwen3_vl_30b_a3b_instruct
environment=(env HYPER_PARALLEL_PLATFORM=torch ASCEND_VISIBLE_DEVICES=0,1 TORCH_DEVICE_BACKEND_AUTOLOAD=0)
launch=("${environment[@]}" python -m hyper_parallel.trainer.launch)
settings=(--data.max_seq_len=32 --data.vl_grid_h=8 --data.vl_grid_w=8 --train.global_batch_size=2 --train.max_steps=100)
fp32=(--train.mixed_precision.enabled=false)
one_card=(--train.accelerator.dp_shard=1)
unsaved=(--train.checkpoint.save_steps=0)

trap 'tail -n 15 "$log" >&2; echo "error: see $log" >&2' ERR

stage() {  # NAME COMMAND...: show the command and run it, its output in OUT_DIR/NAME.log; the exit code is the command's
    local name=$1 begin=$SECONDS status=0
    log=$out/$name.log
    shift
    { printf '\n# %s\n' "$name"; printf '%q ' "$@" | sed 's/\\,/,/g; s/ $//'; echo; } | tee -a "$out/commands.txt"
    "$@" >"$log" 2>&1 || status=$?
    echo "$name $((SECONDS - begin))" >>"$out/seconds.txt"
    echo "# exit code $status after $((SECONDS - begin)) s"
    return $status
}

compare() {  # NAME ALIGN_ARGUMENT...: a miss, exit code 1, is left to the record; anything else ends the script
    local name=$1
    shift
    stage "$name" python -m hyper_parallel.trainer.align "$@" --report "$out/$name" || [[ $? == 1 ]] || return
    sed '/^$/d' "$log"
}

log=$out/environment.md
"${environment[@]}" python - >"$log" <<'PYTHON'
import os, platform
import tensordict, torch, transformers
from hyper_parallel.platform import detect

device = detect()
kind = getattr(torch, device.device_type)
if device.device_type == "cpu":
    models = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    names = models[0] if models else platform.machine()
else:
    names = ", ".join(
        f"{kind.get_device_name(i)} ({kind.get_device_properties(i).total_memory / 2**30:.0f} GiB)" for i in range(kind.device_count())
    )
memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
rows = {
    "system": platform.platform(),
    "python": platform.python_version(),
    "torch": torch.__version__,
    "tensordict": tensordict.__version__,
    "transformers": transformers.__version__,
    "device": f"{device.device_type}: {names}",
    "backend": device.backend,
    "cores": os.cpu_count(),
    "host memory": f"{memory:.0f} GiB",
}
rows |= {name: os.environ[name] for name in ("HYPER_PARALLEL_PLATFORM", "ASCEND_VISIBLE_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD")}
print("| environment | |\n|---|---|")
print("\n".join(f"| {name} | {value} |" for name, value in rows.items()))
PYTHON
cat "$log"

if [[ -z $weights ]]; then
    weights=$out/tiny
    stage weights python -m hyper_parallel.models.qwen3_vl_moe.make_tiny "$weights"
    # Random weights hardly move at the templates' 1e-5. In bfloat16 they keep it: at a faster rate, what 8 bits round away leads
    # any two orders of summation on different paths within a few steps.
    fp32+=(--train.optimizer.lr=1e-3 --train.optimizer.lr_min=1e-4)
fi
settings+=(--model.weights_path="$weights" "$@")

# The template as it is, in bfloat16, on two cards and on one.
stage fsdp_bf16 "${launch[@]}" --config $templates/train.yaml "${settings[@]}" "${unsaved[@]}" \
    --train.checkpoint.output_dir="$out/runs/fsdp_bf16"
stage one_bf16 "${launch[@]}" --config $templates/train.yaml "${settings[@]}" "${unsaved[@]}" "${one_card[@]}" \
    --train.checkpoint.output_dir="$out/runs/one_bf16"
# The same in float32, where only the order of sums is left to differ.
stage one "${launch[@]}" --config $templates/train.yaml "${settings[@]}" "${fp32[@]}" "${unsaved[@]}" "${one_card[@]}" \
    --train.checkpoint.output_dir="$out/runs/one"
stage fsdp "${launch[@]}" --config $templates/train.yaml "${settings[@]}" "${fp32[@]}" --train.checkpoint.save_steps=50 \
    --train.checkpoint.output_dir="$out/runs/fsdp"
stage tp "${launch[@]}" --config $templates/train_tp.yaml "${settings[@]}" "${fp32[@]}" "${unsaved[@]}" \
    --train.checkpoint.output_dir="$out/runs/tp"
stage resumed "${launch[@]}" --config $templates/train.yaml "${settings[@]}" "${fp32[@]}" "${unsaved[@]}" \
    --train.checkpoint.load_path="$out/runs/fsdp/step_50" --train.checkpoint.output_dir="$out/runs/resumed"
stage reference "${environment[@]}" python benchmarks/reference_run.py --config $templates/train.yaml "${settings[@]}" "${fp32[@]}" \
    --output="$out/runs/reference"

compare bf16 "$out/runs/one_bf16" "$out/runs/fsdp_bf16" --steps 1-100 --tolerance 5e-3
compare topologies "$out/runs/one" "$out/runs/fsdp" "$out/runs/tp" --steps 1-100 --tolerance 1e-6
compare resume "$out/runs/fsdp" "$out/runs/resumed" --steps 51-100 --tolerance 0
compare transformers "$out/runs/reference" "$out/runs/one" --steps 1-100 --tolerance 1e-5

failed=0
stage tests "${environment[@]}" python -m pytest tests/torch/qwen3_vl_moe/test_qwen3_vl_moe_vl_trainer.py || failed=1

# bf16 and topologies are held to the limit in the mean, resume and transformers in every step.
python - "$out" bf16:mean topologies:mean resume:every transformers:every >"$out/record.md" <<'PYTHON' || failed=1
import json, sys
from pathlib import Path

def show(number, form):
    return "not finite" if number is None else format(number, form)


out, missed = Path(sys.argv[1]), False
print("# Verification record\n\n" + (out / "environment.md").read_text())
print("| run | against | steps | mean loss | mean diff | largest diff | limit | verdict | step time | tokens/s | peak memory |")
print("|---|---|---|---|---|---|---|---|---|---|---|")
for name, held in (argument.split(":") for argument in sys.argv[2:]):
    report = json.loads((out / name / "report.json").read_text())
    steps, limit, (baseline, *others) = report["steps"], report["tolerance"], report["scenarios"]
    for run in report["scenarios"]:
        compared = ["–", "–", "–", "–", "–"]
        if run in others:
            difference = run["mean_difference" if held == "mean" else "largest_difference"]
            within = difference is not None and difference <= limit
            missed |= not within
            largest = f"{show(run['largest_difference'], '.1e')} at step {run['largest_at']}"
            verdict = "pass" if within else "**MISS**"
            compared = [baseline["label"], show(run["mean_difference"], ".1e"), largest, f"{held} {limit:g}", verdict]
        against, *results = compared
        row = [run["label"], against, f"{steps[0]}-{steps[-1]}", show(run["mean_loss"], ".6f"), *results]
        row += [f"{run['step_time']:.3f} s", f"{run['tokens_per_second']:.0f}", f"{run['peak_memory'] / 2**20:.0f} MiB"]
        print(f"| {' | '.join(row)} |")
tests = (out / "tests.log").read_text().splitlines()[-1]
seconds = ", ".join((out / "seconds.txt").read_text().splitlines())
print(f"\nTests: {tests}\n\nSeconds: {seconds}\n\n```bash{(out / 'commands.txt').read_text()}```")
sys.exit(missed)
PYTHON
echo
cat "$out/record.md"
printf '\nrecord: %s\nreports: %s\n' "$out/record.md" "$(ls "$out"/*/report.html | tr '\n' ' ')"
if [[ $failed == 1 ]]; then echo "FAILED: see MISS above, or $out/tests.log" >&2; fi
exit $failed
