"""llama.cpp's own HTTP server out of the Python package xllamacpp, with the flags of `llama-server` that loadgen uses.

A program of its own: it runs in the interpreter that has xllamacpp, where nothing of loadgen need be installed, and
until it is killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--ctx-size", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--kv-unified", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--cache-type-k", choices=("f16", "bf16", "f32", "q8_0"), default="f16")
    parser.add_argument("--cache-type-v", choices=("f16", "bf16", "f32", "q8_0"), default="f16")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--ubatch-size", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--threads-http", type=int, default=-1)
    parser.add_argument("--gpu-layers", type=int)
    parser.add_argument("--split-mode", choices=("none", "layer", "row"))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--cache-prompt", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cache-ram", type=int)
    parser.add_argument("--warmup", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--slots", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--no-webui", action="store_true")
    parser.add_argument("--embedding", action="store_true")
    parser.add_argument("--pooling", choices=("none", "mean", "cls", "last", "rank"))
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = _options(arguments)
    import xllamacpp

    types = {name: getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}") for name in ("f16", "bf16", "f32", "q8_0")}
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {options.alias} if options.alias else set()
    params.hostnames, params.port = [options.host], options.port
    params.n_ctx, params.n_parallel, params.kv_unified = options.ctx_size, options.parallel, options.kv_unified
    params.cache_type_k, params.cache_type_v = types[options.cache_type_k], types[options.cache_type_v]
    params.n_threads_http = options.threads_http
    params.cache_prompt, params.warmup = options.cache_prompt, options.warmup
    params.endpoint_metrics, params.endpoint_slots, params.ui = options.metrics, options.slots, not options.no_webui
    for name, value in (
        ("n_batch", options.batch_size), ("n_ubatch", options.ubatch_size), ("n_gpu_layers", options.gpu_layers),
        ("cache_ram_mib", options.cache_ram),
    ):  # fmt: skip
        if value is not None:
            setattr(params, name, value)
    # its threads wait for each other without sleeping: a core that the client takes from one of them stops all
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) - 1)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if options.seed is not None:
        params.sampling.seed = options.seed
    params.embedding = options.embedding
    if options.pooling is not None:
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{options.pooling.upper()}")
    if options.split_mode is not None:
        params.split_mode = getattr(xllamacpp.llama_split_mode, f"LLAMA_SPLIT_MODE_{options.split_mode.upper()}")
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:  # it has said why
        sys.exit(f"llama-server: {error}")
    print(f"llama.cpp listens on {server.listening_address}", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
