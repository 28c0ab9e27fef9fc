"""A server's trace taken apart: worlds with known answers, in every form that a trace has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen import trace
from loadgen.breakdown import kernels, steps
from loadgen.breakdown.attribute import Dissected, dissect
from loadgen.breakdown.steps import Steps
from loadgen.breakdown.tables import ATTENTION, FFN, IDLE, UNASSIGNED
from loadgen.trace import TraceError
from tests.loadgen import traces
from tests.loadgen.traces import Truth, Work, decode, event, truth


def found(tmp_path: Path, events: list[dict[str, Any]]) -> Steps:
    return steps.find(trace.read(traces.write(tmp_path / "t.pt.trace.json.gz", events)))


def same(dissected: Dissected, true: Truth) -> None:
    assert dissected.step_ms == pytest.approx(true.step_ms)
    assert {name: ms for name, ms in dissected.kinds.items() if ms > 1e-9} == pytest.approx(true.kinds)
    assert {name: ms for name, ms in dissected.parts.items() if ms > 1e-9} == pytest.approx(true.parts)
    assert sum(dissected.kinds.values()) == pytest.approx(dissected.step_ms)
    assert sum(dissected.parts.values()) == pytest.approx(dissected.step_ms)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("graph", [True, False])
def test_steps_on_a_gpu(tmp_path: Path, graph: bool, tp: int) -> None:
    works = decode(4, tp)
    seen = found(tmp_path, traces.with_device(works, 6, graph=graph))
    assert (len(seen.steps), seen.left_out) == (4, 1)  # the first is the profiler's, the last has no end
    assert seen.form == ("graph" if graph else "eager")
    assert seen.delimited_by == "execute annotations"
    assert seen.steps[0].batch == 8
    dissected = dissect(seen)
    assert dissected.layers == 4
    same(dissected, truth(works))


def test_steps_on_the_cpu(tmp_path: Path) -> None:
    works = [work for work in decode(3) if work.operator != "aten::copy_"]
    works = [work._replace(kind="GEMM") if work.operator == "aten::mm" else work for work in works]
    seen = found(tmp_path, traces.on_host(works, 5))
    assert seen.form == "cpu" and len(seen.steps) == 3
    dissected = dissect(seen)
    assert dissected.layers == 3
    same(dissected, truth(works))


def test_a_trace_without_annotations_is_cut_at_its_graphs(tmp_path: Path) -> None:
    """What precedes the graph cannot be told from what follows the one before it."""
    works = decode(2)
    seen = found(tmp_path, traces.with_device(works, 6, graph=True, annotation=None))
    assert seen.delimited_by == "CUDA graph launches" and seen.steps[0].batch is None
    dissected = dissect(seen)
    true = truth(works)
    assert dissected.step_ms == pytest.approx(true.step_ms)
    assert dissected.kinds[IDLE] == pytest.approx(true.kinds[IDLE])
    assert dissected.parts[ATTENTION] == pytest.approx(true.parts[ATTENTION])
    assert dissected.parts[FFN] == pytest.approx(true.parts[FFN])


def test_norms_written_out_in_operators(tmp_path: Path) -> None:
    """vLLM on the CPU writes its norms out; the operators around rsqrt are one, those of the residual are not."""
    written = [("pow", 3), ("mean", 9), ("add", 2), ("rsqrt", 2), ("mul", 2), ("to", 1), ("mul", 2)]

    def spelled(work: Work) -> list[Work]:
        if work.kind != "RMSNorm":
            return [work]
        rows = [work._replace(operator=f"aten::{name}", us=us) for name, us in written]
        return [*rows, work._replace(operator="aten::to", us=1, kind="Element-Wise")]

    works = [row for work in decode(3)[1:] for row in spelled(work)]
    dissected = dissect(found(tmp_path, traces.on_host(works, 4)))
    assert dissected.layers == 3
    same(dissected, truth(works))


def test_communication_beside_computing_is_hidden(tmp_path: Path) -> None:
    works = decode(2)
    events = traces.with_device(works, 5, graph=True)
    products = [each for each in events if each["name"].startswith("nvjet_tst_192x8")]
    for each in products:  # 60 us: 20 us of the reduction lie in the product, 1 in the gap, and 3 in what follows
        events.append(event("ncclDevKernel_AllReduce", "kernel", each["ts"] + 40, 24, tid=9, correlation=-5))
    dissected = dissect(found(tmp_path, events))
    true = truth(works)
    assert dissected.kinds["AllReduce"] == pytest.approx(2 * 0.001)
    assert dissected.hidden_ms == pytest.approx(2 * 0.023)
    assert dissected.kinds[IDLE] == pytest.approx(true.kinds[IDLE] - 2 * 0.001)
    assert sum(dissected.kinds.values()) == pytest.approx(dissected.step_ms)


def test_what_reaches_into_the_next_step_is_one_run_of_its_kernel(tmp_path: Path) -> None:
    works = decode(2)
    events = traces.with_device(works, 6, graph=True)
    lasts = [each for each in events if each["name"] == works[-1].kernel]
    for each in lasts:  # begins with the step's last kernel, and ends within the next step
        events.append(event("ncclDevKernel_SendRecv", "kernel", each["ts"], 500, tid=9, correlation=-5))
    kernel = next(each for each in dissect(found(tmp_path, events)).kernels if "SendRecv" in each.name)
    assert (kernel.count, kernel.ms) == (1.0, pytest.approx(0.5))


def test_only_the_steady_batch_counts(tmp_path: Path) -> None:
    works = decode(2)
    events = traces.with_device(works, 9, graph=True)
    marks = [each for each in events if each["cat"] == "user_annotation"]
    marks[2]["name"] = "execute_context_1(512)_generation_7(7)"
    marks[5]["name"] = "execute_context_0(0)_generation_7(7)"
    seen = found(tmp_path, events)
    assert (len(seen.steps), seen.left_out) == (5, 3)
    same(dissect(seen), truth(works))


def test_what_has_no_known_name_is_said(tmp_path: Path) -> None:
    works = [
        work._replace(kernel="mystery_9", kind="Unrecognised") if work.kind == "RoPE" else work for work in decode(2)
    ]
    same(dissect(found(tmp_path, traces.with_device(works, 4, graph=True))), truth(works))


def test_an_order_that_is_no_transformer_is_not_assigned(tmp_path: Path) -> None:
    works = [work for work in decode(2) if work.kind != "RMSNorm"]
    dissected = dissect(found(tmp_path, traces.with_device(works, 4, graph=True)))
    assert dissected.layers is None
    assert dissected.parts[UNASSIGNED] == pytest.approx(dissected.step_ms)
    assert dissected.kinds["GEMM"] == pytest.approx(truth(works).kinds["GEMM"])


def test_norms_of_queries_and_keys_do_not_begin_a_block(tmp_path: Path) -> None:
    """Qwen 3 normalizes queries and keys, between the product and attention."""
    works = []
    for work in decode(3):
        if work.kind == "RoPE":
            works.append(Work("triton_red_fused_rms_norm_rotary_3", "", 4, "RMSNorm", ATTENTION))
        works.append(work)
    same(dissect(found(tmp_path, traces.with_device(works, 4, graph=True))), truth(works))


def test_a_rotation_with_half_a_name(tmp_path: Path) -> None:
    """Names of torch.compile end after ten operators: its place tells what such a kernel does."""
    name = "triton_poi_fused__to_copy_add_cat_chunk_index_select_mul_slice_split_2"
    works = [work._replace(kernel=name) if work.kind == "RoPE" else work for work in decode(2)]
    same(dissect(found(tmp_path, traces.with_device(works, 4, graph=True))), truth(works))


@pytest.mark.parametrize(
    "annotation, prefills, batch",
    [
        ("execute_context_0(0)_generation_64(64)", 0, 64),
        ("execute_context_2(1024)_generation_3(3)", 2, 3),
        ("execute_1027_context_2(sq1024sk2048sqsq9sqsk9)_generation_3(sq3sk99sqsq3sqsk99)", 2, 3),
        ("execute_new_1_cached_7", 1, 7),
    ],
)
def test_annotations_of_vllm(annotation: str, prefills: int, batch: int) -> None:
    (mark,) = steps.step_marks([trace.TraceSpan(annotation, "user_annotation", 1, 0.0, 1.0)])
    assert (mark.prefills, mark.batch) == (prefills, batch)


@pytest.mark.parametrize(
    "events, said",
    [
        ([event("aten::mm", "cpu_op", 0, 5)], "neither kernels of a GPU nor steps"),
        ([event("k", "kernel", 5, 5, correlation=1), event("cudaLaunchKernel", "cuda_runtime", 0, 1, correlation=1)],
         "names no steps"),
        (traces.with_device(decode(2), 2, graph=True), "ask for more with --steps"),
    ],
)  # fmt: skip
def test_traces_that_hold_no_steps(tmp_path: Path, events: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        found(tmp_path, events)


KERNELS = {
    "nvjet_tst_128x8_64x12_4x1_v_bz_TNT": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>": "GEMM",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn": "GEMM",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "GEMM",
    "fused_moe_kernel": "GEMM",
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>": "Attention",
    "flash::prepare_varlen_num_blocks_kernel(int, int)": "Other",
    "kernel_unified_attention_3d": "Attention",
    "reduce_segments": "Attention",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>": "Attention",
    "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausal": "Attention",
    "_fwd_kernel_flash_decode_stage1": "Attention",
    "_fwd_kernel_token_att1": "Attention",
    "_fwd_kernel_destindex_copy_kv": "Element-Wise",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>": "Element-Wise",
    "_rotary_kernel": "RoPE",
    "triton_poi_fused_add_cat_index_select_mul_split_sub_unsqueeze_2": "RoPE",
    "triton_poi_fused_mul_silu_slice_1": "Element-Wise",
    "triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_0": "RMSNorm",
    "triton_red_fused_fused_add_rms_norm_2": "RMSNorm",
    "triton_red_fused__to_copy_add_bitwise_and_embedding_ge_lt_masked_fill_mean_mul_3": "RMSNorm",
    "_rms_norm_fwd_fused": "RMSNorm",
    "_fwd_grouped_kernel_stage1": "Attention",
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize32x32x64_stage2_warpsize2x2x1_kernel": "GEMM",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>": "AllReduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<rms_norm>": "AllReduce",
    "ncclDevKernel_AllGather_RING_LL": "AllGather",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": "Other communication",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>": "Element-Wise",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>": "Other",
    "void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::ArgMaxOps<float>>>": "Other",
    "_gumbel_sample_kernel": "Other",
    "_prepare_inputs_kernel": "Other",
    "_apply_write_kernel": "Other",
    "_post_update_kernel": "Other",
    "_temperature_kernel": "Other",
    "something_new": "Unrecognised",
}


@pytest.mark.parametrize("name", KERNELS)
def test_names_of_kernels(name: str) -> None:
    assert kernels.of_kernel(name) == KERNELS[name]
