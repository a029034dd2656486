"""The harness that lets a stock SGLang run without its compiled packages."""

from __future__ import annotations

import http.server
import importlib
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="cpu")

if TYPE_CHECKING:
    from torch import Tensor

HARNESS = Path(__file__).parents[3] / "lab" / "stock_sglang"
SITES = HARNESS.parent / "stock_sites"
DEMO_MODEL = HARNESS.parents[1] / "python" / "sglang" / "assets" / "demo_model"


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which finds the harness as SGLang's processes do."""
    path = os.pathsep.join(map(str, (HARNESS, *folders)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_an_absent_package_is_there_to_import_and_not_to_call() -> None:
    done = run(
        "import flashinfer.gemm as gemm\n"
        "from flashinfer.decode import run\n"
        "class Mine(gemm.Base): pass\n"
        "Mine().x = run | None\n"
        "try: run(1)\n"
        "except RuntimeError as error: print(error)\n"
        "import os; print(os.environ['SGLANG_IS_FLASHINFER_AVAILABLE'])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "flashinfer.decode.run: this package is not installed",
        "false",
    ]


def test_what_some_ask_for_and_others_import_is_said_to_be_absent(
    tmp_path: Path,
) -> None:
    code = (
        "import deep_gemm, os\n"
        "print(os.environ.get('SGLANG_ENABLE_JIT_DEEPGEMM'))\n"
        # As in the processes that SGLang spawns.
        "import absent, absent_packages; absent_packages.stand_in(absent.SGLANG)\n"
        "print(os.environ.get('SGLANG_ENABLE_JIT_DEEPGEMM'))"
    )
    assert run(code).stdout.split() == ["false", "false"]
    (tmp_path / "deep_gemm.py").write_text("", encoding="utf-8")
    assert run(code, tmp_path).stdout.split() == ["None", "None"]


def test_packages_of_other_names_are_not_invented() -> None:
    done = run("import nobody_has_this_package")
    assert "ModuleNotFoundError" in done.stderr


def test_sgl_kernel_takes_its_own_norms() -> None:
    done = run(
        "import flashinfer\n"
        "try: import flashinfer.norm as norm\n"
        "except ImportError: print('its own')"
    )
    assert done.stdout == "its own\n", done.stderr


def test_functions_that_are_called_are_ours() -> None:
    """Against rows that are cut by hand, of any number of tokens and ties."""
    done = run(
        "import torch\n"
        "from flashinfer.sampling import top_k_renorm_probs, top_p_renorm_probs\n"
        "from flashinfer.sampling import min_p_sampling_from_probs\n"
        "rng = torch.Generator().manual_seed(0)\n"
        "for rows, width in ((1, 1), (3, 7), (5, 300)):\n"
        "    probs = torch.rand(rows, width, generator=rng).softmax(1)\n"
        "    k = torch.randint(1, width + 3, (rows,), generator=rng)\n"
        "    p = torch.rand(rows, generator=rng)\n"
        "    by_k, by_p = top_k_renorm_probs(probs, k), top_p_renorm_probs(probs, p)\n"
        "    for row in range(rows):\n"
        "        order = sorted(range(width), key=lambda i: -probs[row, i])\n"
        "        total, n = 0.0, 0\n"
        "        while n == 0 or total < p[row] and n < width:\n"
        "            total, n = total + float(probs[row, order[n]]), n + 1\n"
        "        for found, count in ((by_k, int(k[row])), (by_p, n)):\n"
        "            due = torch.zeros(width)\n"
        "            due[order[:count]] = probs[row, order[:count]]\n"
        "            torch.testing.assert_close(found[row], due / due.sum())\n"
        "tied = torch.tensor([[0.4, 0.2, 0.2, 0.2]])\n"
        "assert int((top_k_renorm_probs(tied, 2) > 0).sum()) == 4\n"
        "assert top_p_renorm_probs(tied, 0.4).tolist() == [[1, 0, 0, 0]]\n"
        "print('checked')"
    )
    assert done.stdout == "checked\n", done.stderr


def test_what_is_installed_is_used(tmp_path: Path) -> None:
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("REAL = 1", encoding="utf-8")
    done = run(
        "import flashinfer, os; print(flashinfer.REAL)\n"
        "print(os.environ.get('SGLANG_IS_FLASHINFER_AVAILABLE'))\n"
        "import flashinfer.part",
        tmp_path,
    )
    assert done.stdout.split() == ["1", "None"]
    # A part that it lacks is missing, as without the harness.
    assert "No module named 'flashinfer.part'" in done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"KV_CANARY": "off", "KV_CANARY_METRICS_PORT": "9"},
        {"KV_CANARY": "raise"},
        {"KV_CANARY": "raise", "KV_CANARY_METRICS_PORT": "0"},
    ],
)
def test_counters_are_read_only_where_they_are_served(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SITES)
    for name in ("KV_CANARY", "KV_CANARY_METRICS_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert importlib.import_module("mixed").canary_counters() == {}


def test_counters_of_a_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SITES)

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"# TYPE x counter\nkv_canary_forwards_total 3.0\n")

    with http.server.HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KV_CANARY", "log")
        monkeypatch.setenv("KV_CANARY_METRICS_PORT", str(server.server_port))
        found = importlib.import_module("mixed").canary_counters()
        server.shutdown()
    assert found == {"forwards_total": 3.0}


def test_prompts_of_a_text_are_pieces_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(SITES)
    mixed = importlib.import_module("mixed")
    text = "".join(f"Line {number} of a text.\n" for number in range(400))
    path = tmp_path / "text"
    path.write_text(text)
    draw = mixed._excerpts(str(DEMO_MODEL), path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    rng = random.Random(0)
    for count in (1, 40, 200):
        tokens = draw(rng, count)
        assert len(tokens) == count and tokenizer.decode(tokens) in text
    first, second = (mixed.wave_of_prompts(random.Random(s), draw) for s in (2, 3))
    assert len(first) == 24 and first != second


def test_the_drafts_are_right_about_most_tokens_and_not_all(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    script = HARNESS / "tiny_models.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["eagle", "eagle3", "target"]
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", dtype=torch.float32
    )
    embedding = model.get_input_embeddings().weight
    follows = (model.lm_head.weight @ embedding.T).argmax(dim=0)
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 512, (4, 20), generator=rng)
    tokens = model.generate(
        prompts, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    agrees = follows[tokens[:, 19:-1]] == tokens[:, 20:]
    assert 0.4 < agrees.float().mean() < 0.95
    states = model(tokens, output_hidden_states=True).hidden_states
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    # One state each of three layers, of those that the engine can take.
    assert len(set(layers)) == 3 and max(layers) < len(states) - 2
    drafted = eagle3_drafts(
        tmp_path / "eagle3",
        torch.cat([states[layer + 1] for layer in layers], dim=-1)[:, :-1],
        embedding[tokens[:, 1:]],
    )
    right = drafted[:, 19:-1] == tokens[:, 21:]
    assert abs(right.float().mean() - agrees[:, 1:].float().mean()) < 0.05


def eagle3_drafts(folder: Path, states: Tensor, embedded: Tensor) -> Tensor:
    """Its tokens [B, T], of the target's states of each token and the embedding of the
    next, [B, T, ...]."""
    import torch
    from safetensors.torch import load_file
    from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

    weights = {
        name: value.float()
        for name, value in load_file(folder / "model.safetensors").items()
    }

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"midlayer.{name}_proj.weight"].T

    def heads(name: str, x: Tensor, count: int) -> Tensor:
        flat = linear(f"self_attn.{name}", x)
        return flat.view(*x.shape[:2], count, 64).transpose(1, 2)

    def turned(x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[2]).outer(
            10000.0 ** -(torch.arange(0, 64, 2) / 64)
        )
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (
                first * steps.cos() - second * steps.sin(),
                second * steps.cos() + first * steps.sin(),
            ),
            dim=-1,
        )

    residual = states @ weights["fc.weight"].T
    normed = [rms_norm(x, (256,), eps=1e-5) for x in (embedded, residual)]
    x = torch.cat(normed, dim=-1)
    attended = scaled_dot_product_attention(
        turned(heads("q", x, 4)),
        turned(heads("k", x, 2)),
        heads("v", x, 2),
        is_causal=True,
        enable_gqa=True,
    )
    residual = residual + linear("self_attn.o", attended.transpose(1, 2).flatten(2))
    x = rms_norm(residual, (256,), eps=1e-5)
    x = linear("mlp.down", silu(linear("mlp.gate", x)) * linear("mlp.up", x))
    return ((residual + x) @ weights["lm_head.weight"].T).argmax(dim=-1)
