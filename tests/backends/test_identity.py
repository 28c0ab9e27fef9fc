"""A server of another kind is refused by name. The answers are those of the real servers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backends
from backends.protocol import Account, ProtocolError, ServerInfo
from tests.backends.transcripts_real import body

VLLM = (
    "/v1/models",
    b'{"object":"list","data":[{"id":"m","object":"model","created":1795000000,"owned_by":"vllm","root":"/models/m",'
    b'"parent":null,"max_model_len":4096,"permission":[{"id":"modelperm-1","object":"model_permission"}]}]}',
)
VLLM_WITH_ADAPTER = (
    "/v1/models",
    b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","parent":null,"max_model_len":4096},'
    b'{"id":"lora","object":"model","owned_by":"vllm","root":"/l","parent":"m","max_model_len":null}]}',
)
LIGHTLLM = (
    "/v1/models",
    b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"lightllm","max_model_len":8192}]}',
)
LIGHTLLM_1_1 = ("/get_model_name", b'{"model_name":"default_model_name"}')
TGI = (
    "/info",
    b'{"model_id":"meta-llama/Llama-2-7b-hf","model_sha":null,"model_pipeline_tag":"text-generation",'
    b'"max_concurrent_requests":128,"max_best_of":2,"max_stop_sequences":4,"max_input_tokens":4095,'
    b'"max_total_tokens":4096,"validation_workers":2,"max_client_batch_size":4,"router":"text-generation-router",'
    b'"version":"3.3.7","sha":"db931fc","docker_label":"sha-db931fc"}',
)
TGI_IN_TEXTS = ("/info", b'{"model_id":"m","max_concurrent_requests":"128","max_total_tokens":"4096","version":"3"}')
TGI_MODELS = (
    "/v1/models",
    b'{"object":"list","data":[{"id":"meta-llama/Llama-2-7b-hf","object":"model","created":0,'
    b'"owned_by":"meta-llama/Llama-2-7b-hf"}]}',
)
SGLANG = ("/v1/models", body("sglang_models"))
SGLANG_INFO = (
    "/get_model_info",
    b'{"model_path":"/opt/m/tiny","tokenizer_path":"/opt/m/tiny","is_generation":true,"preferred_sampling_params":null,'
    b'"weight_version":"default","model_type":"mistral","architectures":["MistralForCausalLM"]}',
)
OTHER = ("/v1/models", b'{"data":[{"id":"m","owned_by":"someone","max_model_len":7}]}')
LLAMACPP = ("/v1/models", body("llamacpp_models"))
ANSWERS = [VLLM, LIGHTLLM, LIGHTLLM_1_1, TGI, TGI_MODELS, SGLANG, LLAMACPP, OTHER]


@pytest.mark.parametrize(
    ("name", "answer", "info"),
    [
        ("vllm", VLLM, ServerInfo(model="m", max_total_tokens=4096, adapters=())),
        ("vllm", VLLM_WITH_ADAPTER, ServerInfo(model="m", max_total_tokens=4096, adapters=("lora",))),
        ("lightllm", LIGHTLLM, ServerInfo(model="m", max_total_tokens=8192)),
        ("lightllm", LIGHTLLM_1_1, ServerInfo(model="default_model_name")),
        ("tgi", TGI, ServerInfo("meta-llama/Llama-2-7b-hf", 4096, "3.3.7", max_requests=128)),
        ("tgi", TGI_IN_TEXTS, ServerInfo("m", version="3")),
        ("tgi", TGI_MODELS, ServerInfo(model="meta-llama/Llama-2-7b-hf")),
        ("llamacpp", LLAMACPP, ServerInfo(model="tiny", max_total_tokens=512, vocab_size=4096)),
        ("openai", VLLM, ServerInfo(model="m", max_total_tokens=4096, adapters=())),
        ("openai", OTHER, ServerInfo(model="m", max_total_tokens=7)),
        ("sglang", SGLANG, ServerInfo(model="m", max_total_tokens=8192, adapters=())),
        ("sglang", SGLANG_INFO, ServerInfo(model="/opt/m/tiny")),
        ("trtllm", OTHER, ServerInfo(model="m", max_total_tokens=7)),
        ("ollama", ("/api/tags", b'{"models":[{"name":"qwen3:8b","size":1}]}'), ServerInfo(model="qwen3:8b")),
        ("ollama", ("/api/tags", b'{"models":[{"name":"a"},{"name":"b"}]}'), ServerInfo(models=("a", "b"))),
        ("openai-chat", LIGHTLLM, ServerInfo(model="m", max_total_tokens=8192)),
        ("openai-chat", TGI_MODELS, ServerInfo(model="tgi")),  # any other name would be an adapter's
    ],
)
def test_read_info(name: str, answer: tuple[str, bytes], info: ServerInfo) -> None:
    assert backends.get(name).read_info(*answer) == info


VLLM_METRICS = (
    "/metrics",
    b"# TYPE vllm:cache_config_info gauge\n"
    b'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="14377",path="a\\"} b"} 1.0\n'
    b'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="14000",path="a\\"} b"} 1.0\n'
    b'vllm:num_requests_running{engine="0"} 0.0\n',
)


@pytest.mark.parametrize(
    ("name", "answer", "account"),
    [
        ("vllm", ("/version", b'{"version":"0.25.1"}'), Account(version="0.25.1")),
        (
            "vllm",
            VLLM_METRICS,
            Account(
                kv_cache_tokens=16 * (14377 + 14000),
                settings={"block_size": "16", "cache_dtype": "auto", "num_gpu_blocks": "14377", "path": 'a\\"} b'},
            ),
        ),
        ("vllm", ("/metrics", b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1'),
         Account(settings={"block_size": "16", "num_gpu_blocks": "None"})),
        ("vllm", ("/metrics", b"up 1\n"), Account()),
        ("vllm", ("/version", b"\xff"), Account()),
        ("tgi", ("/info", b'{"version":"2.0.1","max_batch_total_tokens":20480,"sha":null,"max_best_of":2}'),
         Account("2.0.1", 20480, {"version": "2.0.1", "max_batch_total_tokens": "20480", "max_best_of": "2"})),
        ("tgi", ("/info", b"[1]"), Account()),
        ("openai", ("/version", b'{"version":"1"}'), Account()),
        ("llamacpp", ("/props", body("llamacpp_props")),
         Account(settings={"total_slots": "2", "n_ctx": "512", "model_ftype": "(guessed) F16"})),
        ("llamacpp", ("/props", b'{"build_info":"b6123-abc"}'), Account("b6123-abc")),
        ("llamacpp", ("/props", b"[]"), Account()),
        ("sglang", ("/server_info", b'{"model_path":"/m","tp_size":2,"dp_size":2,"quantization":null,'
                    b'"schedule_policy":"fcfs","disable_radix_cache":true,"max_total_num_tokens":923044,'
                    b'"internal_states":[{}],"version":"0.5.11"}'),
         Account("0.5.11", 2 * 923044, {"tp_size": "2", "dp_size": "2", "schedule_policy": "fcfs",
                                        "disable_radix_cache": "True"})),
        ("sglang", ("/server_info", b"no"), Account()),
    ],
)  # fmt: skip
def test_what_a_server_says_of_how_it_runs(name: str, answer: tuple[str, bytes], account: Account) -> None:
    assert backends.get(name).read_account(*answer) == account


@pytest.mark.parametrize(
    ("name", "path"), [("vllm", "/version"), ("vllm", "/metrics"), ("tgi", "/info"), ("llamacpp", "/props")]
)
@given(st.one_of(st.binary(), st.from_regex(rb'vllm:cache_config_info\{.{0,60}\} 1|\{"version":.{0,20}\}')))
def test_of_a_foreign_account_only_printable_text_is_taken(name: str, path: str, body: bytes) -> None:
    account = backends.get(name).read_account(path, body)
    for text in (account.version or "", *account.settings, *account.settings.values()):
        assert text.isprintable() and len(text) <= 60


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("vllm", TGI, "this is a TGI server, not vLLM; use --backend tgi"),
        ("vllm", TGI_MODELS, "this is a TGI server, not vLLM; use --backend tgi"),
        ("vllm", LIGHTLLM, "this is a LightLLM server, not vLLM; use --backend lightllm"),
        ("vllm", SGLANG, "this is an SGLang server, not vLLM; use --backend sglang"),
        ("sglang", VLLM, "this is a vLLM server, not SGLang; use --backend vllm"),
        ("vllm", LLAMACPP, "this is a llama.cpp server, not vLLM; use --backend llamacpp"),
        ("llamacpp", VLLM, "this is a vLLM server, not llama.cpp; use --backend vllm"),
        ("vllm", LIGHTLLM_1_1, "this is a LightLLM server, not vLLM; use --backend lightllm"),
        ("lightllm", VLLM, "this is a vLLM server, not LightLLM; use --backend vllm"),
        ("tgi", VLLM, "this is a vLLM server, not TGI; use --backend vllm"),
        ("trtllm", VLLM, "this is a vLLM server, not TensorRT-LLM; use --backend vllm"),
        ("lmdeploy", SGLANG, "this is an SGLang server, not LMDeploy; use --backend sglang"),
        ("dynamo", TGI, "this is a TGI server, not Dynamo; use --backend tgi"),
        ("ollama", LLAMACPP, "this is a llama.cpp server, not Ollama; use --backend llamacpp"),
        (
            "ollama",
            OTHER,
            "this is not an Ollama server (/v1/models is answered, /api/tags is not); use --backend openai",
        ),
        (
            "vllm",
            OTHER,
            "this is not a vLLM server (/v1/models names 'someone' as the models' owner); use --backend openai",
        ),
        (
            "vllm",
            ("/v1/models", b'{"data":[{"id":"m"}]}'),
            "this is not a vLLM server (/v1/models names no owner of its models); use --backend openai",
        ),
    ],
)
def test_another_kind_of_server(name: str, answer: tuple[str, bytes], message: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        backends.get(name).read_info(*answer)
    assert str(raised.value) == message


@pytest.mark.parametrize("name", ["lightllm", "llamacpp", "sglang", "tgi", "vllm"])
def test_every_answer_is_taken_by_one_kind_only(name: str) -> None:
    own = {"lightllm": [LIGHTLLM, LIGHTLLM_1_1], "tgi": [TGI, TGI_MODELS], "vllm": [VLLM], "llamacpp": [LLAMACPP],
           "sglang": [SGLANG]}[name]  # fmt: skip
    for answer in ANSWERS:
        if answer not in own:
            with pytest.raises(ProtocolError, match="use --backend"):
                backends.get(name).read_info(*answer)
