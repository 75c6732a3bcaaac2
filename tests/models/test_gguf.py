"""GGUF files of models, compared with transformers by llama.cpp itself."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import lora, write_adapter
from gguf_models import CHATML, make
from llama_child import LlamaCpp, install
from transformers import AutoConfig, PreTrainedTokenizerFast

from warmd.jobs.errors import SpecError
from warmd.jobs.models import adapters
from warmd.jobs.models.chat_templates import ChatTemplate
from warmd.jobs.models.gguf import exporting
from warmd.jobs.models.gguf.decoders import Decoder
from warmd.jobs.models.gguf.ollama import modelfile
from warmd.jobs.models.gguf.tensors import stored, type_for
from warmd.jobs.models.gguf.tokenizers import Vocabulary
from warmd.jobs.models.gguf.writing import check_type

TEXTS = (
    "Hello world, it's 12345 o'clock!",
    "  two  spaces\n\nnew lines\t tab ",
    "<|im_start|>user\nWhat is 7*8?<|im_end|>\n<|im_start|>assistant\n",
    "Grüße, 漢字, 🙂 don't DON'T",
    "x=1;y = 22 ;z\r\n\r\n  end",
)
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with its scaling": ("llama", {"rope_parameters": ROPE}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 256}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "rows of 80": ("qwen2", {"hidden_size": 80, "intermediate_size": 176}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}),
}


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """The logits of every position: (tokens, vocabulary)."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def check_greedy(
    model: Any, llama: LlamaCpp, prompt: list[int], *, least: float = 1e-3, n: int = 30
) -> None:
    """Check that llama.cpp takes the most likely tokens, or one less than `least` below it."""
    tokens, compared = list(prompt), 0
    for _ in range(n):
        expected = logits(model, tokens)[-1]
        best = int(expected.argmax())
        got = llama.next(tokens)
        assert got.prompt_tokens == len(tokens)
        for token in got.log_probabilities:
            compared += 1
            assert float(expected[best] - expected[token]) < least
        tokens.append(best)
    assert compared > n / 2


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama.cpp")
    install(folder)
    return folder


@pytest.fixture
def exported(packages: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Exports a folder, and returns what was written and the file."""
    monkeypatch.syspath_prepend(packages)

    def export(folder: Path, kind: str) -> tuple[Any, Path]:
        dest = tmp_path / f"{kind} of {folder.name}"
        dest.mkdir()
        written = exporting.export(folder, dest, kind, name="tiny")
        return written, next(dest.glob("*.gguf"))

    return export


@pytest.mark.nightly(
    part="oracles", catches="a GGUF file of which llama.cpp computes something else"
)
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_continues_as_transformers(
    name: str, packages: Path, exported: Any, tmp_path: Path
):
    # With float16 weights llama.cpp rounds what they are multiplied with to float16, too.
    kind, settings = MODELS[name]
    rules = "llama-bpe" if kind in ("llama", "mistral") else "qwen2"
    model = make(tmp_path / "model", kind, rules, **settings)
    made = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 1000, (n,), generator=made).tolist() for n in (5, 20, 80, 200)]
    for type, least in (("f32", 1e-3), ("f16", 0.03)):
        written, file = exported(tmp_path / "model", type)
        assert any("sliding_window" in note for note in written.notes) == (name == "mistral")
        with LlamaCpp(packages, file) as llama:
            for prompt in prompts:
                check_greedy(model, llama, prompt, least=least)


@pytest.mark.nightly(
    part="oracles", catches="a GGUF file of which llama.cpp computes something else"
)
@pytest.mark.parametrize("rules", ["gpt-2", "llama-bpe", "qwen2", "smollm", "sentencepiece"])
def test_llama_cpp_reads_text_as_the_tokenizer(
    rules: str, packages: Path, exported: Any, tmp_path: Path
):
    model = make(tmp_path / "model", "qwen2", rules)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    _, file = exported(tmp_path / "model", "f32")
    compared = 0
    with LlamaCpp(packages, file) as llama:
        for text in (*TEXTS, Path(__file__).read_text()[:600]):
            tokens = tokenizer(text)["input_ids"]
            got = llama.next(text, top=1000)
            assert got.prompt_tokens == len(tokens)
            expected = logits(model, tokens)[-1].log_softmax(-1)
            differences = [
                abs(found - float(expected[token]))
                for token, found in got.log_probabilities.items()
            ]
            compared += len(differences) > 900
            assert max(differences, default=0.0) < 1e-3  # they depend on every token of the text
        assert compared > len(TEXTS) / 2


@pytest.mark.nightly(
    part="oracles", catches="a GGUF file of which llama.cpp computes something else"
)
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_perplexity_is_that_of_the_stored_weights(
    kind: str, packages: Path, exported: Any, tmp_path: Path
):
    model = make(tmp_path / "model", "llama", "llama-bpe", hidden_size=64)
    _, file = exported(tmp_path / "model", kind)
    import gguf  # type: ignore[import-not-found, unused-ignore]

    for name, weight in model.named_parameters():
        head = "lm_head.weight"
        stored_as = type_for(name, tuple(weight.shape), kind, head)
        raw = gguf.GGMLQuantizationType[stored_as]
        values = gguf.quants.dequantize(gguf.quants.quantize(weight.detach().numpy(), raw), raw)
        weight.data = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    tokens = torch.randint(3, 1000, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    every = logits(model, tokens).log_softmax(-1)
    own = [float(every[place, token]) for place, token in enumerate(tokens[1:])]
    with LlamaCpp(packages, file) as llama:
        theirs = [
            llama.next(tokens[:place], top=1024).log_probabilities.get(tokens[place])
            for place in range(1, len(tokens))
        ]
    pairs = [pair for pair in zip(own, theirs, strict=True) if pair[1] is not None]
    assert len(pairs) > len(tokens) / 2
    own_perplexity, perplexity = (
        math.exp(-float(np.mean(some))) for some in zip(*pairs, strict=True)
    )
    assert perplexity == pytest.approx(own_perplexity, rel=0.01)


@pytest.mark.nightly(
    part="oracles", catches="a GGUF file of which llama.cpp computes something else"
)
@pytest.mark.parametrize("is_rank_stabilized", [False, True])
def test_llama_cpp_applies_an_adapter_as_peft(
    is_rank_stabilized: bool, packages: Path, exported: Any, tmp_path: Path
):
    model = make(tmp_path / "model", "llama", "llama-bpe")
    wanted = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
    config = lora(*wanted, use_rslora=is_rank_stabilized)
    write_adapter(tmp_path / "adapter", tmp_path / "model", config)
    model = adapters.merged(model, tmp_path / "adapter").eval()
    _, base = exported(tmp_path / "model", "f32")
    _, adapter = exported(tmp_path / "adapter", "f32")
    modelfile_text = adapter.with_name("Modelfile").read_text()
    assert modelfile_text.startswith(f"FROM {tmp_path / 'model'}\nADAPTER ./adapter-f32.gguf\n")
    with LlamaCpp(packages, base, adapter) as llama:
        check_greedy(model, llama, list(range(10, 60)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "model", "qwen2", "qwen2")
    return tmp_path / "model"


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"type": "NFC"', '"type": "NFKC"', "normalizer must be absent or NFC"),
        ("\\\\p{N}| ?", "\\\\p{N}{1,2}| ?", "pre_tokenizer must be one of those of gpt-2"),
        ('"ignore_merges": false', '"ignore_merges": true', "model.ignore_merges must be False"),
        ('"type": "BPE"', '"type": "Unigram"', "model.type must be BPE"),
        ('"Ġ": ', '"ĠĠĠĠĠĠĠĠĠ": ', "all 256 bytes"),
    ],
)
def test_a_tokenizer_without_a_name_in_llama_cpp_is_refused(
    folder: Path, old: str, new: str, words: str
):
    changed(folder / "tokenizer.json", old, new)
    with pytest.raises(SpecError, match=re.escape(words)):
        Vocabulary(folder, 1024)


def config(**settings: Any) -> dict[str, Any]:
    found = AutoConfig.for_model(settings.pop("kind", "qwen2")).to_dict()
    return {**found, **settings}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "gpt2"}, "model_type must be one of llama, mistral, qwen2, qwen3, gemma2"),
        ({"hidden_act": "relu"}, "hidden_act must be silu"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type must be one of"),
        ({"kind": "qwen3", "attention_bias": True}, "attention_bias must be False"),
        ({"kind": "gemma2", "query_pre_attn_scalar": 144}, "query_pre_attn_scalar must be"),
        ({"kind": "gemma2", "final_logit_softcapping": None}, "final_logit_softcapping must be"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be absent"),
    ],
)
def test_what_the_graph_of_llama_cpp_lacks_is_refused(settings: dict[str, Any], words: str):
    with pytest.raises(SpecError, match=words):
        Decoder(config(**settings))


def test_weights_that_a_type_cannot_hold_are_refused_by_tensor():
    with pytest.raises(SpecError, match=r"model.norm.weight must be at most 65504 for F16"):
        stored("model.norm.weight", np.array([[1.0, -70_000.0]], np.float32), "F16")
    with pytest.raises(SpecError, match=r"model.norm.weight must be finite"):
        stored("model.norm.weight", np.array([[1.0, np.nan]], np.float32), "BF16")


@pytest.mark.parametrize(
    ("name", "shape", "wanted", "kind"),
    [
        ("blk.0.attn_q.weight", (64, 96), "q4_0", "Q4_0"),
        ("blk.0.attn_q.weight", (96, 80), "q4_0", "F16"),
        ("blk.0.attn_q.bias", (96,), "q8_0", "F32"),
        ("output.weight", (64, 96), "q4_0", "Q8_0"),
        ("output.weight", (64, 96), "bf16", "BF16"),
    ],
)
def test_type_of_a_tensor(name: str, shape: tuple[int, ...], wanted: str, kind: str):
    assert type_for(name, shape, wanted, "output.weight") == kind


def test_an_unknown_type_is_refused():
    with pytest.raises(SpecError, match="gguf: must be one of f32, f16, bf16, q8_0, q4_0"):
        check_type("q4_k_m")


LLAMA3_CHAT = (
    "{% for m in messages %}{% set text = '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim "
    "+ '<|eot|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<sys>Be {{ 'kind' }}.</sys>{% endif %}"


@pytest.mark.parametrize(
    ("source", "go"),
    [
        (
            CHATML,
            "{{ range .Messages }}"
            + "".join(
                f'{{{{ if eq .Role "{role}" }}}}<|im_start|>{role}\n'
                "{{ .Content }}<|im_end|>\n{{ end }}"
                for role in ("system", "user", "assistant")
            )
            + "{{ end }}<|im_start|>assistant\n",
        ),
        (
            LLAMA3_CHAT,
            "{{ range .Messages }}"
            + "".join(
                f'{{{{ if eq .Role "{role}" }}}}<|start|>{role}<|end|>\n\n'
                "{{ .Content }}<|eot|>{{ end }}"
                for role in ("system", "user", "assistant")
            )
            + "{{ end }}<|start|>assistant<|end|>\n\n",
        ),
    ],
)
def test_a_template_that_frames_messages_becomes_one_in_go(source: str, go: str):
    found = modelfile("FROM ./m.gguf", ChatTemplate(source, {"bos_token": "<s>"}), ["</s>"], "<s>")
    assert found == f'FROM ./m.gguf\nTEMPLATE """{go}"""\nPARAMETER stop "</s>"\n'


def test_a_system_prompt_of_the_template_is_kept():
    template = ChatTemplate(DEFAULT_SYSTEM + CHATML, {})
    found = modelfile("FROM ./m.gguf", template, [], None)
    assert 'TEMPLATE """{{ if not .System }}<sys>Be kind.</sys>{{ end }}{{ range' in found


@pytest.mark.parametrize(
    "source",
    [
        CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"),
        CHATML.replace("{% for", "{{ messages | length }}{% for"),
        "{{ raise_exception('no chats') }}",
    ],
)
def test_another_template_is_left_to_ollama(source: str):
    found = modelfile("FROM ./m.gguf", ChatTemplate(source, {}), [], None)
    assert found.splitlines()[1].startswith("# The chat template in the GGUF file is more than")
