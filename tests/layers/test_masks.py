"""Packed documents by blocks: the same blocks as PyTorch finds by looking at every score, and the same attention as with a dense mask."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gradus import models
from gradus.layers import attention_mask, capabilities, kernels, masks
from gradus.layers.capabilities import CPU, pretending
from gradus.recipe.schema import GPTConfig, LlamaConfig
from gradus.torch_private import TorchDispatchMode


@pytest.fixture
def blocks(monkeypatch):
    """As on a GPU, but without the compiler: then it runs on a CPU too, where it has no backward pass."""
    monkeypatch.setattr(capabilities, "_compiled", lambda: flex_attention)
    with pretending(dataclasses.replace(CPU, skips_blocks=True)):
        yield


def rows(*rows: tuple[int, ...]) -> torch.Tensor:
    """Documents of these lengths, a row each; what is behind them is padding, of document -1."""
    seq = max(map(sum, rows))
    made = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    return torch.stack([torch.nn.functional.pad(r, (0, seq - len(r)), value=-1) for r in made])


ROWS = {
    "one document": rows((300,)),
    "of whole blocks": rows((128, 256, 128), (512,)),
    "ragged": rows((5, 200, 60, 1, 250), (516,), (130, 3)),
    "short": rows((3, 4), (5, 1)),
}


@pytest.mark.parametrize("window", [None, 1, 128, 130, 300])
@pytest.mark.parametrize("name", ROWS)
def test_blocks_are_those_that_pytorch_finds(name, window, blocks):
    """None is missing, none but padding's is too many, and a whole block is whole."""
    segments = ROWS[name]
    found = attention_mask(segments, None).blocks(window)
    seq = segments.shape[1]
    looks = lambda b, h, q, k: (q >= k) & (q - k < (window or seq)) & (segments[b, q] == segments[b, k])  # noqa: E731
    wanted = create_block_mask(looks, len(segments), None, seq, seq, device="cpu", BLOCK_SIZE=masks.BLOCK)
    assert found.seq_lengths == wanted.seq_lengths
    got, expected = found.to_dense().bool(), wanted.to_dense().bool()
    assert (got | ~expected).all(), "a block is missing"
    padded = (segments == -1).any(1)
    assert (got == expected)[~padded].all(), "a block that holds nothing"
    n = got.shape[-1]
    for b in range(len(segments)):
        for i in range(n):
            for j in found.full_kv_indices[b, 0, i, : found.full_kv_num_blocks[b, 0, i]].tolist():
                q, k = torch.meshgrid(torch.arange(i * 128, (i + 1) * 128), torch.arange(j * 128, (j + 1) * 128), indexing="ij")
                assert looks(b, 0, q, k).all()
    if name == "one document" and window:
        assert torch.equal(masks.one_document(1, seq, segments.device, window).to_dense(), found.to_dense())


def test_nothing_of_the_size_of_the_scores_is_made(blocks):
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in ([out] if isinstance(out, torch.Tensor) else out) if isinstance(t, torch.Tensor))])
            return out

    segments = rows((1000, 3096))
    with Largest():
        attention_mask(segments, None)
    assert largest <= 2 * segments.numel()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_attention_is_that_of_the_dense_mask(name, padded, window, blocks):
    segments = ROWS[name]
    batch, seq = segments.shape
    keep = segments >= 0 if padded else None
    q, k, v = torch.randn(batch, 4, seq, 16), torch.randn(batch, 2, seq, 16), torch.randn(batch, 2, seq, 16)
    documents = attention_mask(segments, keep)
    causal = {"causal": True, "window": window}
    got, _ = kernels.sdpa(q, k, v, mask=documents, **causal)
    with pretending(CPU):
        dense = attention_mask(segments, keep)
        wanted, _ = kernels.sdpa(q, k, v, mask=dense, **causal)
        plain, _ = kernels.sdpa(q, k, v, **causal)
    assert isinstance(documents, masks.Documents) and dense.shape == (batch, 1, seq, seq)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for kernel in (kernels.naive, kernels.chunked()):
        torch.testing.assert_close(kernel(q, k, v, mask=documents, **causal)[0], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kernels.sdpa(q, k, v, **causal)[0], plain, atol=1e-5, rtol=1e-5)
    biased = {"bias": torch.randn(4, seq, seq), **causal}  # which goes by the dense mask
    torch.testing.assert_close(kernels.sdpa(q, k, v, mask=documents, **biased), kernels.sdpa(q, k, v, mask=dense, **biased))


@pytest.mark.parametrize("config", [GPTConfig, LlamaConfig])
def test_models_of_packed_rows(config, blocks):
    model = models.build(config(vocab_size=50, n_layers=2, d_model=32, n_heads=2, d_ff=64, seq_len=256)).eval()
    segments = rows((150, 50), (60, 130))
    ids, positions = torch.randint(50, segments.shape), torch.zeros_like(segments)
    with torch.no_grad():
        got = model(ids, segments=segments, positions=positions)
        with pretending(CPU):
            torch.testing.assert_close(got, model(ids, segments=segments, positions=positions), atol=1e-5, rtol=1e-5)


def test_without_documents_nothing_is_packed(blocks):
    keep = torch.ones(2, 5, dtype=torch.bool)
    assert attention_mask(None, None) is None and attention_mask(None, keep).shape == (2, 1, 1, 5)
