"""Tiny models with real random weights, written without torch.

With vLLM's dummy weights, all near zero, an answer hardly depends on the KV cache, and equal answers would prove
nothing.
"""

from __future__ import annotations

import json
import math
import random
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

VOCAB, HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM = 512, 128, 256, 4, 32
FIRST_WORD = 3  # token ids below are <unk>, <s>, </s>
PLAIN_KV_HEADS = (2, 2, 2, 2)
RAGGED_KV_HEADS = (4, 2, 1, 2)  # one number a layer: vLLM then plans the KV cache with UniformTypeKVCacheSpecs

CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

# transformers has no nemotron-nas of its own.
RAGGED_CONFIG_CODE = """\
from types import SimpleNamespace

from transformers import LlamaConfig


class RaggedConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, kv_heads=(), **others):
        self.kv_heads = list(kv_heads)
        super().__init__(**others)

    @property
    def block_configs(self):
        ffn = SimpleNamespace(no_op=False, intermediate_size=self.intermediate_size)
        sizes = [self.num_attention_heads // heads for heads in self.kv_heads]
        attentions = [SimpleNamespace(no_op=False, n_heads_in_group=size) for size in sizes]
        return [SimpleNamespace(attention=attention, ffn=ffn) for attention in attentions]
"""


def make_plain(folder: Path) -> Path:
    """A Llama."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": PLAIN_KV_HEADS[0]}
    return _make(folder, PLAIN_KV_HEADS, config)


def make_ragged(folder: Path) -> Path:
    """A DeciLM (nemotron-nas), whose layers have different numbers of KV heads."""
    config = {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "num_key_value_heads": max(RAGGED_KV_HEADS),
        "kv_heads": RAGGED_KV_HEADS,
        "auto_map": {"AutoConfig": "ragged_config.RaggedConfig"},
    }
    _make(folder, RAGGED_KV_HEADS, config)
    (folder / "ragged_config.py").write_text(RAGGED_CONFIG_CODE)
    return folder


def make_prompts(count: int, length: int) -> list[list[int]]:
    """The same token ids at every call, and no prompt the beginning of another."""
    draw = random.Random(f"{count} prompts of {length}")
    return [[draw.randrange(FIRST_WORD, VOCAB) for _ in range(length)] for _ in range(count)]


def bytes_per_block(kv_heads: tuple[int, ...], block_size: int) -> int:
    """KV bytes of one block over all layers: keys and values in float32."""
    return sum(kv_heads) * 2 * HEAD_DIM * 4 * block_size


def _make(folder: Path, kv_heads: tuple[int, ...], config: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    config = CONFIG | {"num_hidden_layers": len(kv_heads)} | config
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_safetensors(folder / "model.safetensors", _weights(kv_heads))
    _write_tokenizer(folder)
    return folder


def _weights(kv_heads: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], array[float]]]:
    """Name, shape, values. The scales are chosen so that attention is neither flat nor a single peak."""
    draw = random.Random(0).gauss

    def normal(name: str, rows: int, columns: int, scale: float) -> tuple[str, tuple[int, ...], array[float]]:
        deviation = scale / math.sqrt(columns)
        return name, (rows, columns), array("f", (draw(0, deviation) for _ in range(rows * columns)))

    def ones(name: str) -> tuple[str, tuple[int, ...], array[float]]:
        return name, (HIDDEN,), array("f", [1.0]) * HIDDEN

    yield normal("model.embed_tokens.weight", VOCAB, HIDDEN, math.sqrt(HIDDEN))
    for layer, heads in enumerate(kv_heads):
        prefix = f"model.layers.{layer}"
        yield ones(f"{prefix}.input_layernorm.weight")
        yield normal(f"{prefix}.self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN, 2)
        yield normal(f"{prefix}.self_attn.k_proj.weight", heads * HEAD_DIM, HIDDEN, 2)
        yield normal(f"{prefix}.self_attn.v_proj.weight", heads * HEAD_DIM, HIDDEN, 2)
        yield normal(f"{prefix}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, 2)
        yield ones(f"{prefix}.post_attention_layernorm.weight")
        yield normal(f"{prefix}.mlp.gate_proj.weight", INTERMEDIATE, HIDDEN, 1)
        yield normal(f"{prefix}.mlp.up_proj.weight", INTERMEDIATE, HIDDEN, 1)
        yield normal(f"{prefix}.mlp.down_proj.weight", HIDDEN, INTERMEDIATE, 1)
    yield ones("model.norm.weight")
    yield normal("lm_head.weight", VOCAB, HIDDEN, 3)


def _write_safetensors(path: Path, weights: Iterator[tuple[str, tuple[int, ...], array[float]]]) -> None:
    """The format is a length, a JSON header and the raw values."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    values = bytearray()
    for name, shape, numbers in weights:
        begin = len(values)
        values += numbers.tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, len(values))}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


def _write_tokenizer(folder: Path) -> None:
    """One word a token: "w3" to "w511"."""
    special = ["<unk>", "<s>", "</s>"]
    words = special + [f"w{i}" for i in range(FIRST_WORD, VOCAB)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": word, **flags} for i, word in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
