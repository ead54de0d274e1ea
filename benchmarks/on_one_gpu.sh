#!/usr/bin/env bash
# Measure on one GPU what stands in benchmarks/results, in parts that can be run one by one.
#
#     bash benchmarks/on_one_gpu.sh OUT                    # lists the parts with their seconds on an H200
#     bash benchmarks/on_one_gpu.sh OUT steps inference    # runs some; REPLEARN_DATA says where the data sets are
#
# Nothing else may run on the GPU meanwhile. A part's files are in OUT when it ends; a part that fails does not stop
# the others, and its log, OUT/PART.txt, says why. Runs that were cut off go on where they were (OUT/work). Stop a part with
# SIGINT from its own timeout, not with pkill -f, which finds this shell too.
set -u

declare -A SECONDS_OF=(
  [tests]=200 [steps]=330 [compiled]=240 [timm]=150 [inference]=300 [narrow]=50 [fused]=30 [short]=40 [stem]=60 [epochs]=300
  [wikitext2]=970 [transfer]=370 [scenes]=330 [trained]=110
)
ORDER="tests steps compiled timm inference narrow fused short stem epochs wikitext2 transfer scenes trained"
FAST="--set precision=bfloat16 --set channels_last=true --set compile=true"
PYTHON=${PYTHON:-python3}

replearn() { "$PYTHON" -m replearn "$@"; }

runs() { # RECIPE ARGUMENTS: compare, and bring back all runs in one file
  local name=$1
  shift
  replearn compare "$name" --out "$WORK/$name" --into "$OUT/$name.jsonl" "$@"
}

tests() { "$PYTHON" -m pytest -q -m cuda tests; }
steps() { replearn bench steps --rounds 10 --inner 6 -o "$OUT/steps_h200.json"; }
compiled() { replearn bench steps resnet32 resnet101 vit_small_16 --backend compiled --rounds 10 --inner 6 -o "$OUT/steps_h200_compiled.json"; }
timm() { "$PYTHON" benchmarks/against_timm.py --models resnet34 vit_small_16 --out "$OUT/against_timm.json"; }
inference() { # a file is written after every row
  local bench="bench inference --device cuda --rounds 30"
  replearn $bench resnet34 vit_small_16 resnet101 --out "$OUT/inference_h200.json" \
    --backend fp32,channels_last,amp,graph,channels_last+graph,amp+graph,channels_last+compile,channels_last+compile+graph
  replearn $bench resnet34 resnet101 --batch-size 64,1 --out "$OUT/inference_h200_fused.json" \
    --backend amp,amp+fuse,channels_last,channels_last+fuse,amp+graph,amp+fuse+graph,amp+compile
}
narrow() { "$PYTHON" benchmarks/narrow_convolutions.py --rounds 4 --out "$OUT/narrow_convolutions.json"; }
fused() { "$PYTHON" benchmarks/fused_norms.py --out "$OUT/fused_norms.json"; }
stem() { "$PYTHON" benchmarks/stem.py --out "$OUT/stem.json"; }
short() { "$PYTHON" benchmarks/short_attention.py --out "$OUT/short_attention.json"; }
epochs() {
  for recipe in t1_resnet32 t1_vit_tiny8; do
    "$PYTHON" benchmarks/epochs.py $recipe --data cifar10 --methods e2e,repl --rounds 5 $FAST --out "$OUT/epochs_$recipe.json"
  done
  "$PYTHON" benchmarks/epochs.py bccd_retinanet --methods e2e,removal,repl,repl-reduced --rounds 3 --out "$OUT/epochs_bccd_retinanet.json"
}
wikitext2() { runs tab_wikitext2 --seeds 0,1,2 --set compile=true; }
transfer() {
  runs transfer_cifar10_pretrain --seeds 0
  (cd "$WORK" && runs transfer_cifar10 --seeds 0,1,2 --equal-time \
    --pretrained transfer_cifar10_pretrain/cifar10/e2e/seed-0/model.safetensors)
}
scenes() {
  runs bccd_retinanet --seeds 0 --epochs 20 --methods e2e,repl,repl-reduced
  runs camvid_deeplabv3 --seeds 0 --epochs 20 --methods e2e,repl,repl-reduced
}
trained() { # what benchmarks/int8.py quantizes, weights included; cat OUT/trained.tar.* | tar -x
  replearn compare t1_resnet32 --data cifar10 --methods e2e,repl --seeds 0 --epochs 30 $FAST --set compile=false --out "$WORK/t1_resnet32"
  replearn compare t1_vit_tiny8 --data cifar10 --methods e2e,repl-first-2 --seeds 0 --epochs 30 $FAST --set compile=false --out "$WORK/t1_vit_tiny8"
  (cd "$WORK" && find t1_resnet32 t1_vit_tiny8 \( -name result.json -o -name model.safetensors \) -print0 | tar -c --null -T - | split -b 15M - "$OUT/trained.tar.")
}

[ $# -ge 1 ] || { sed -n '2,8p' "$0"; exit 2; }
OUT=$(mkdir -p "$1" && cd "$1" && pwd)
shift
if [ $# -eq 0 ]; then
  for part in $ORDER; do printf '%-10s about %4d s\n' "$part" "${SECONDS_OF[$part]}"; done
  exit 0
fi
for part in "$@"; do
  [ -n "${SECONDS_OF[$part]:-}" ] || { echo "there is no part $part; there are: $ORDER" >&2; exit 2; }
done
WORK=${WORK:-$OUT/work}
mkdir -p "$WORK"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
for part in "$@"; do
  began=$(date +%s)
  "$part" >"$OUT/$part.txt" 2>&1
  code=$?
  echo "$part: exit $code after $(($(date +%s) - began)) s"
  tail -n 12 "$OUT/$part.txt"
done
