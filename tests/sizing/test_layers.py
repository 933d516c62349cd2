"""What one layer keeps."""

import pytest

from kvroute.sizing.layers import Attention, Latent, State


@pytest.mark.parametrize(
    ("layer", "tokens", "kept"),
    [
        (Attention(8, 128, 128), 5_000, 5_000),
        (Attention(8, 128, 128, window=1_024), 5_000, 1_024),
        (Attention(8, 128, 128, window=1_024), 500, 500),
        (Attention(8, 128, 128, window=1_000, sink=4), 5_000, 1_004),
        (Attention(8, 128, 128, chunk=2_048), 5_000, 2_048),
        (Latent(512, 64), 5_000, 5_000),
        (State(conv_channels=8), 5_000, 0),
    ],
)
def test_tokens_kept(layer, tokens, kept):
    """Full layers keep all, windows and chunks their span, states none."""
    assert layer.tokens_kept(tokens) == kept


def test_keys_and_values_may_differ():
    """A head with 192-number keys and 128-number values keeps 320 numbers a token."""
    assert Attention(4, 192, 128).bytes_per_token(2) == 4 * 320 * 2


def test_what_stops_growing():
    """Windows, chunks and states are bounded; full and latent attention are not."""
    bounded = (Attention(1, 1, 1, window=5), Attention(1, 1, 1, chunk=5), State())
    assert all(layer.is_bounded for layer in bounded)
    assert not any(layer.is_bounded for layer in (Attention(1, 1, 1), Latent(1, 1)))
