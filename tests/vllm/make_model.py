"""A tiny model folder for `vllm serve --load-format dummy`: a real tokenizer and chat template, no weights.

    python tests/vllm/make_model.py FOLDER

The tokenizer is a byte-level BPE, trained on the standard library's own sources: it needs no download and is the same
for a given Python. The chat template is ChatML with tools. Runs wherever `tokenizers` is installed.
Tests make a hybrid model and LoRA adapters of it.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import sysconfig
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 6144  # tokens
CONTEXT = 32_768  # tokens
WINDOW = 64  # tokens that the hybrid model's windowed layer sees
LORA_RANK = 8
CORPUS_CHARS = 4_000_000  # enough for stable merges, and trained in two seconds
END_OF_TEXT, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + system + '\\n\\nYou may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nA call is JSON between <tool_call> and </tool_call>:\\n' }}
{{- '<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- elif system %}
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response>' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def corpus() -> Iterator[str]:
    """Yield text that every Python installation carries."""
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield (text := path.read_text(encoding="utf-8", errors="ignore"))
        if (total := total + len(text)) > CORPUS_CHARS:
            return


def train_tokenizer() -> Tokenizer:
    """Train the byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def settings_of(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Return the JSON files of the folder, by name, other than the tokenizer itself."""
    pad, end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)
    return {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": [end, pad], "pad_token_id": pad},
        "config.json": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "eos_token_id": end,
            "pad_token_id": pad,
        },
    }


def write_model(folder: Path) -> Path:
    """Write the whole folder and return it; a folder that is complete is left as it is."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        for name, settings in settings_of(tokenizer).items():
            write_json(folder / name, settings)
    return folder


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_hybrid(folder: Path, model: Path) -> Path:
    """Write a model with the shape of Gemma 3 and the tokenizer of `model`: of two layers, one sees only a window."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head = config["hidden_size"] // config["num_attention_heads"]
    del config["hidden_act"]
    config |= {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "sliding_window": WINDOW,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 10000.0,
        "bos_token_id": config["pad_token_id"],
    }
    write_json(folder / "config.json", config)
    return folder


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write a LoRA adapter of random weights for `model` as peft stores it, in a safetensors file."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, rng = config["hidden_size"], random.Random(seed)
    widths = {"q_proj": hidden, "v_proj": hidden // config["num_attention_heads"] * config["num_key_value_heads"]}
    header: dict[str, Any] = {}
    data = array("f")
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            for part, shape in (("A", [LORA_RANK, hidden]), ("B", [width, LORA_RANK])):
                start = 4 * len(data)
                data.extend(rng.gauss(0, 1) for _ in range(math.prod(shape)))
                at = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"
                header[at] = {"dtype": "F32", "shape": shape, "data_offsets": [start, 4 * len(data)]}
    folder.mkdir(parents=True)
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data.tobytes())
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(widths),
        "base_model_name_or_path": "",
    }
    write_json(folder / "adapter_config.json", settings)
    return folder


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1])) if len(sys.argv) == 2 else __doc__)
