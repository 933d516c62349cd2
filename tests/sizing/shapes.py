"""Small shapes that the sizing tests vary."""

from kvroute.sizing.layers import State
from kvroute.sizing.model import model_of

BASE = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32_000,
}
MAMBA2 = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}


def windows(**fields):
    """Read the window of each layer of a small model with these fields."""
    return [cache.window for cache in model_of({**BASE, **fields}).caches]


def kinds(**fields):
    """Read what each layer of a small model keeps: A(ttention), S(tate) or nothing."""
    return "".join(
        "".join("S" if isinstance(cache, State) else "A" for cache in layer) or "-"
        for layer in model_of({**BASE, **fields}).layers
    )
