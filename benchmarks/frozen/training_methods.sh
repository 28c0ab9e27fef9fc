#!/usr/bin/env bash
# Cells of the methods beyond the letters, on one H200 (the last on two): `bash benchmarks/frozen/training_methods.sh
# memory` predicts each, as training_methods.txt has it; with `sweep` instead it runs them, 5 + 10 steps, into runs/.
set -euo pipefail
probe() {
    if [ "$verb" = memory ]; then
        training_probe memory --gpu-memory-gb 139.8 "$@"
    else
        training_probe sweep --warmup-steps 5 --steps 10 --runs 1 --out "runs/methods-$((number += 1))" "$@"
    fi
}
verb=${1:?memory or sweep} number=0
lora=(--model llama-3-8b --engine ddp --method L+F --seq-len 2048 --micro-batch 4 --gpus 1)
probe "${lora[@]}"
probe "${lora[@]}" --lora-rank 8 --lora-targets q_proj v_proj
probe "${lora[@]}" --lora-rank 8 --lora-targets q_proj v_proj --loss chunked
probe "${lora[@]}" --loss liger
probe --model 7b --engine ddp --method QL+F --seq-len 1024 --micro-batch 4 --gpus 1 --no-double-quant
full=(--model 7b --engine ddp --method F --seq-len 2048 --micro-batch 2 --gpus 1)
probe "${full[@]}" --adamw-8bit
probe "${full[@]}" --checkpoint op
probe "${full[@]}" --checkpoint 2
probe "${full[@]}" --loss chunked
probe "${full[@]}" --loss liger
probe "${full[@]}" --fp8
probe "${full[@]}" --fp8 --compile
probe --model qwen3-8b --engine ddp --method F+R --seq-len 2048 --micro-batch 2 --gpus 1
probe --model gemma-2-9b --engine ddp --method R --seq-len 1024 --micro-batch 1 --gpus 1 --adamw-8bit
probe --model llama-3-8b --engine deepspeed --method F+Z2 --seq-len 2048 --micro-batch 1 --gpus 1 --adamw-8bit
probe --model llama-3-8b --engine fsdp2 --method F+Z3 --seq-len 4096 --micro-batch 2 --gpus 2 --tp 2 --checkpoint op
