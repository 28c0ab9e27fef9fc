"""The losses that never have all logits, beside transformers' own. Needs torch, no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training_probe.engines import tiny
from training_probe.grid import LOSS_CHUNKS
from training_probe.protocol import Unsupported

pytestmark = tiny.needs_engines

torch: Any = pytest.importorskip("torch")
SEQUENCES, LENGTH, HIDDEN, VOCABULARY = 2, 24, 64, tiny.SPEC.vocab_size


def trained_once(loss: str, labels: Any = None, **config: Any) -> tuple[float, dict[str, Any], int]:
    """A pass forward and back in fp32: the loss, the gradients, and the most tokens whose logits are in one tensor."""
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode

    from training_probe.worker.loss import join_head

    most = 0

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (VOCABULARY,) and out.numel() != VOCABULARY * HIDDEN:
                most = max(most, out.numel() // VOCABULARY)
            return out

    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    described = transformers.AutoConfig.for_model(
        **{"model_type": "llama", "vocab_size": VOCABULARY, **shape, **config}
    )
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)
    if loss != "plain":
        join_head(model, tiny.cell("ddp", "Naive", loss=loss))
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
    with Watch():
        value = model(input_ids=tokens, labels=tokens if labels is None else labels).loss
        value.backward()
    return float(value.detach()), {name: each.grad for name, each in model.named_parameters()}, most


@pytest.mark.parametrize("ignored", [0, 5])
def test_loss_and_gradients_are_transformers_own(ignored: int) -> None:
    labels = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
    labels[0, :ignored] = -100
    expected, gradients, whole = trained_once("plain", labels)
    found, ours, most = trained_once("chunked", labels)
    assert found == pytest.approx(expected, rel=1e-6)
    assert gradients.keys() == ours.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-4, atol=1e-7), name
    assert (whole, most) == (SEQUENCES * LENGTH, SEQUENCES * LENGTH // LOSS_CHUNKS)


def test_a_model_that_caps_its_logits_is_refused() -> None:
    with pytest.raises(Unsupported, match="Gemma2ForCausalLM does more to its logits than its head does"):
        trained_once("chunked", model_type="gemma2", head_dim=32, num_key_value_heads=2)
