"""A state that is not finite reaches the logits of its forward; the incident says which
state it was, and the request ends alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kv_canary.explain import explain
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.hybrid_models import write_hybrid_model

register_cpu_ci(est_time=5, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

# Layer 2 attends.
LAYER, HEAD = 1, 1


def write_model(folder: Path, tensor: str, place: tuple[int, ...]) -> Path:
    model = write_hybrid_model(folder, "Qwen3_5ForCausalLM")
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.{LAYER}.linear_attn.{tensor}"
    tensors[name][place] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["raise", "heal"])
@pytest.mark.parametrize(
    ("tensor", "place", "where", "said"),
    [
        # The decay of a head.
        ("dt_bias", (HEAD,), {"state_layer": LAYER, "state_head": HEAD}, ", head 1,"),
        # A channel of the convolution's inputs.
        ("in_proj_qkv.weight", (0,), {"state_layer": LAYER}, ""),
    ],
)
def test_the_state_is_named(
    tmp_path: Path,
    mode: str,
    overlap: bool,
    tensor: str,
    place: tuple[int, ...],
    where: dict[str, int],
    said: str,
) -> None:
    engine = EngineHarness(
        write_model(tmp_path, tensor, place),
        overlap=overlap,
        max_running_requests=4,
        skip_tokenizer_init=True,
        kv_canary=mode,
    )
    answer = engine.generate(list(range(20)), max_new_tokens=4)
    assert answer.output_ids == []
    assert answer.finish_reason is not None
    assert answer.finish_reason.status_code == 500
    # With overlap, the next step was launched before the first was read. A healing
    # waits for it.
    first = [20, 21] if overlap or torch.cuda.is_available() else [20]
    due = {"raise": [first], "heal": [first, [20]]}[mode]
    incidents = engine.scheduler.own_incidents()
    assert [[v["position"] for v in i["violations"]] for i in incidents] == due
    for incident in incidents:
        for violation in incident["violations"]:
            assert violation["reasons"] == ["logits_not_finite"]
            found = {k: v for k, v in violation.items() if k.startswith("state_")}
            assert found == where
        text = explain(incident)
        assert f"the recurrent state of layer {LAYER}{said} is not finite" in text


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
