"""The three attention kernels against each other, and against the plain equations."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gradus.layers import KERNELS, chunked, get_kernel, naive, sdpa
from gradus.layers.capabilities import CPU, pretending
from gradus.torch_private import FakeTensorMode, TorchDispatchMode

BATCH, HEADS, SEQ, DIM = 3, 4, 11, 8


def equations(q, k, v, allowed=None, bias=None, scale=None):
    """Vaswani et al. 2017, equation 1, one query at a time, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    full = q.shape[:3] + k.shape[2:3]
    allowed = torch.ones(full, dtype=torch.bool) if allowed is None else allowed.expand(full)
    bias = torch.zeros(full) if bias is None else bias.expand(full)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                see = allowed[b, h, i].nonzero().flatten()
                if len(see):
                    scores = k[b, h // group, see] @ q[b, h, i] * (scale or q.shape[-1] ** -0.5) + bias[b, h, i, see]
                    out[b, h, i] = torch.softmax(scores, 0) @ v[b, h // group, see]
    return out.float()


def tensors(n_kv_heads=HEADS, q_len=SEQ, k_len=SEQ, dtype=torch.float32):
    shapes = (BATCH, HEADS, q_len, DIM), (BATCH, n_kv_heads, k_len, DIM), (BATCH, n_kv_heads, k_len, DIM)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def padding(k_len=SEQ):
    return (torch.arange(k_len) < torch.tensor([k_len, k_len // 2, 0])[:, None])[:, None, None, :]  # the last row sees nothing


def dense():
    mask = torch.rand(BATCH, HEADS, SEQ, SEQ) < 0.6
    mask[1, 2, 3] = False
    return mask


ROUNDING = 128 * torch.finfo(torch.float32).eps  # sums of up to SEQ + DIM terms of size 1, one in the other, against float64
TRIANGLE = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
CASES = {  # name: (keywords made afresh, what the keywords allow)
    "plain": lambda: ({}, None),
    "scale": lambda: ({"scale": 0.3}, None),
    "causal": lambda: ({"causal": True}, TRIANGLE),
    "padding": lambda: ({"mask": padding()}, padding()),
    "padding and causal": lambda: ({"mask": padding(), "causal": True}, padding() & TRIANGLE),
    "dense": lambda: ({"mask": (m := dense())}, m),
    "two dimensions": lambda: ({"mask": (m := torch.rand(SEQ, SEQ) < 0.5)}, m),
    "bias": lambda: ({"bias": torch.randn(1, HEADS, SEQ, SEQ)}, None),
    "bias a key": lambda: ({"bias": torch.randn(BATCH, 1, 1, SEQ), "causal": True}, TRIANGLE),
    "bias and all": lambda: ({"bias": torch.randn(HEADS, SEQ, SEQ), "mask": (m := dense()), "causal": True}, m & TRIANGLE),
}


@functools.cache
def solved(case: str, n_kv_heads: int) -> tuple[dict, list[Tensor], Tensor, Tensor, tuple[Tensor, ...]]:
    """(keywords, inputs, what the equations say, weights of a sum of it, the sum's gradients), for all kernels."""
    torch.manual_seed(0)
    keywords, allowed = CASES[case]()
    q, k, v = tensors(n_kv_heads)
    bias = keywords.get("bias")
    inputs = [q, k, v] if bias is None else [q, k, v, bias.requires_grad_()]
    expected = equations(q, k, v, allowed, bias, keywords.get("scale"))
    probe = torch.randn_like(expected)
    return keywords, inputs, expected.detach(), probe, torch.autograd.grad((expected * probe).sum(), inputs)


@pytest.mark.parametrize("n_kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_follows_the_equations(name, case, n_kv_heads):
    """Values and all gradients, the bias's too, with a chunk that does not divide the length."""
    keywords, inputs, expected, probe, wanted = solved(case, n_kv_heads)
    out, weights = get_kernel(name, chunk=4)(*inputs[:3], **keywords)
    torch.testing.assert_close(out, expected, atol=ROUNDING, rtol=ROUNDING)
    got = torch.autograd.grad((out * probe).sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=4 * ROUNDING, rtol=ROUNDING)
    assert (weights is not None) == (name == "naive")


@pytest.mark.parametrize("name", KERNELS)
def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient(name):
    q, k, v = tensors()
    out, weights = get_kernel(name, chunk=4)(q, k, v, mask=padding(), causal=True)
    assert torch.count_nonzero(out[2]) == 0 and torch.count_nonzero(out[0]) == out[0].numel()
    out.sum().backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all() and torch.count_nonzero(x.grad[2]) == 0
    if weights is not None:
        torch.testing.assert_close(weights.sum(-1), torch.tensor([1.0, 1.0, 0.0])[:, None, None].expand(BATCH, HEADS, SEQ))


@pytest.mark.parametrize("name", KERNELS)
def test_cross_attention_with_other_lengths(name):
    q, k, v = tensors(2, q_len=5, k_len=9)
    out, _ = get_kernel(name, chunk=2)(q, k, v, mask=padding(9))
    torch.testing.assert_close(out, equations(q, k, v, padding(9)), atol=ROUNDING, rtol=ROUNDING)
    with pytest.raises(AssertionError, match="give a mask"):
        get_kernel(name)(q, k, v, causal=True)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    """Masks neither overflow nor leak, and the result is that of fp32 within the format's own rounding."""
    mask, bias = dense(), torch.randn(1, HEADS, SEQ, SEQ, dtype=dtype)
    q, k, v = tensors(2, dtype=dtype)
    out, _ = get_kernel(name, chunk=4)(q, k, v, mask=mask, bias=bias, causal=True)
    assert out.dtype == dtype
    out.float().sum().backward()
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = equations(*wide, mask & TRIANGLE, bias.float())
    expected.sum().backward()
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)
    for x, w in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(x.grad.float(), w.grad, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("name", KERNELS)
def test_autocast(name):
    q, k, v = tensors(2)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = get_kernel(name, chunk=4)(q, k, v, causal=True)
    out.float().sum().backward()
    torch.testing.assert_close(out.float(), equations(q, k, v, TRIANGLE), atol=0.03, rtol=0.03)
    assert q.grad.dtype == torch.float32 and torch.isfinite(q.grad).all()


def test_chunked_passes_gradcheck():
    """Numerical derivatives in float64."""
    q, k, v = (x[:1, :, :5].detach().requires_grad_() for x in tensors(2, dtype=torch.float64))
    bias = torch.randn(1, HEADS, 1, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(1, 1, 5, 5) < 0.8
    assert torch.autograd.gradcheck(lambda *x: chunked(2)(*x[:3], bias=x[3], mask=mask, causal=True)[0], (q, k, v, bias))


def test_chunked_drops_the_same_weights_backwards():
    """With v the identity, out is the dropped weights themselves, so the backward pass can be checked against its formula."""
    q, k, _ = tensors(2)
    v = torch.eye(SEQ).expand(BATCH, 2, SEQ, SEQ).clone().requires_grad_()
    p = 0.3
    torch.manual_seed(5)
    out, _ = chunked(4)(q, k, v, causal=True, dropout=p)
    after = torch.rand(1)
    with torch.no_grad():
        clean = naive(q, k, v, causal=True)[1]
    factor = torch.where(clean > 0, out.detach() / clean.clamp_min(1e-30), 0.0)
    kept = factor > 0
    torch.testing.assert_close(factor[kept], torch.full_like(factor[kept], 1 / (1 - p)))
    share = kept.sum() / TRIANGLE.expand_as(kept).sum()
    assert abs(share - (1 - p)) < 0.05

    probe = torch.randn_like(out)
    before = torch.get_rng_state()
    got = torch.autograd.grad((out * probe).sum(), (q, k, v))
    assert torch.equal(before, torch.get_rng_state()), "the backward pass must not move the generator"
    wanted = torch.autograd.grad(((naive(q, k, v, causal=True)[1] * factor) @ v.repeat_interleave(2, 1) * probe).sum(), (q, k, v))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)

    torch.manual_seed(5)
    again, _ = chunked(4)(q, k, v, causal=True, dropout=p)
    assert torch.equal(again, out) and torch.equal(torch.rand(1), after)
    assert not torch.equal(chunked(4)(q, k, v, causal=True, dropout=p)[0], out)


@pytest.mark.parametrize("name", KERNELS)
def test_dropout_keeps_the_mean(name):
    q, k, v = (torch.randn(1, 1, 4, 4) for _ in range(3))
    kernel = get_kernel(name, chunk=2)
    many = torch.stack([kernel(q, k, v, dropout=0.25)[0] for _ in range(1500)])
    torch.testing.assert_close(many.mean(0), kernel(q, k, v)[0], atol=0.1, rtol=0)
    assert many.std(0).min() > 0.01


@settings(max_examples=40, derandomize=True)
@given(
    batch=st.integers(1, 3), groups=st.integers(1, 3), per_group=st.integers(1, 3), q_len=st.integers(1, 9), k_len=st.integers(1, 9),
    head_dim=st.integers(1, 5), chunk=st.integers(1, 10), causal=st.booleans(), masked=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_gives_one_result(batch, groups, per_group, q_len, k_len, head_dim, chunk, causal, masked, seed):
    torch.manual_seed(seed)
    k_len = q_len if causal else k_len
    wide = {"dtype": torch.float64, "requires_grad": True}
    q = torch.randn(batch, groups * per_group, q_len, head_dim, **wide)
    k, v = (torch.randn(batch, groups, k_len, head_dim, **wide) for _ in range(2))
    mask = torch.rand(batch, 1, q_len, k_len) < 0.7 if masked else None
    probe = torch.randn_like(q)
    results = []
    for name in KERNELS:
        out, _ = get_kernel(name, chunk)(q, k, v, mask=mask, causal=causal)
        assert out.shape == q.shape
        results.append([out, *torch.autograd.grad((out * probe).sum(), (q, k, v))])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


def near(window: int, causal: bool, length: int) -> Tensor:
    back = torch.arange(length)[:, None] - torch.arange(length)
    return (back.abs() < window) & ((back >= 0) | (not causal))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    batch=st.integers(1, 2), groups=st.integers(1, 2), per_group=st.integers(1, 3), length=st.sampled_from([1, 7, 19, 256, 260, 301]),
    window=st.sampled_from([1, 2, 5, 64, 127, 300]), chunk=st.sampled_from([3, 64, 100]), causal=st.booleans(), masked=st.sampled_from(["", "keys", "dense"]),
    biased=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_window_is_a_dense_mask(batch, groups, per_group, length, window, chunk, causal, masked, biased, seed):
    """Values and gradients, in float64, of PyTorch's own attention with that mask. The length is short, or one that bands and chunks do not divide."""
    torch.manual_seed(seed)
    wide = {"dtype": torch.float64, "requires_grad": True}
    q = torch.randn(batch, groups * per_group, length, 4, **wide)
    k, v = (torch.randn(batch, groups, length, 4, **wide) for _ in range(2))
    mask = {"": None, "keys": torch.rand(batch, 1, 1, length) < 0.7, "dense": torch.rand(batch, 1, length, length) < 0.7}[masked]
    bias = torch.randn(1, 1, length, length, **wide) if biased else None
    allowed = near(window, causal, length)[None, None] if mask is None else near(window, causal, length) & mask
    blind = ~allowed.any(-1, keepdim=True)
    added = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~(allowed | blind), float("-inf"))
    many = (x.repeat_interleave(per_group, 1) for x in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, *many, attn_mask=added if bias is None else added + bias).masked_fill(blind, 0)
    inputs, probe = [q, k, v, *([bias] if biased else [])], torch.randn_like(wanted)
    expected = torch.autograd.grad((wanted * probe).sum(), inputs)
    for name in KERNELS:
        out, _ = get_kernel(name, chunk)(q, k, v, mask=mask, bias=bias, causal=causal, window=window)
        torch.testing.assert_close([out, *torch.autograd.grad((out * probe).sum(), inputs)], [wanted, *expected], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_a_window_is_seen_by_dropout_and_by_half_precision(name):
    """What is dropped is of the window alone, forwards and backwards; and a query of another length than the keys asks for a mask."""
    q, k, _ = tensors(2, q_len=300, k_len=300)
    v = torch.eye(300).expand(BATCH, 2, 300, 300)
    torch.manual_seed(1)
    out, _ = get_kernel(name, 64)(q, k, v, causal=True, window=40, dropout=0.25)
    kept, seen = out != 0, near(40, True, 300).expand_as(out)
    assert not kept[~seen].any() and 0.7 < kept[seen].float().mean() < 0.8
    torch.testing.assert_close(out[kept], (naive(q, k, v, causal=True, window=40)[0] / 0.75)[kept], rtol=1e-4, atol=1e-6)
    (dk,) = torch.autograd.grad(out[:, :, 200:].sum(), k)
    assert dk[:, :, :161].count_nonzero() == 0 and dk[:, :, 161:].count_nonzero() > 0
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = get_kernel(name, 64)(q, k, k, causal=True, window=40)
    half.float().sum().backward()
    torch.testing.assert_close(half.float(), naive(q, k, k, causal=True, window=40)[0], atol=0.05, rtol=0.05)
    with pytest.raises(AssertionError, match="a window needs as many queries as keys; give a mask"):
        get_kernel(name)(q[:, :, :9], k, k, window=5)


@pytest.mark.parametrize("name", ["chunked", "sdpa"])
def test_a_window_computes_what_it_holds(name):
    """Backwards it touches no key twice that a window does not hold twice: of PyTorch's kernels and of products all calls get as many keys as a
    band and the window have."""
    asked = []

    class Keys(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "flash_attention" in function.name() or "bmm" in function.name():
                asked.append(max(x.shape[-2] for x in args if isinstance(x, Tensor) and x.dim() > 2))
            return function(*args, **(kwargs or {}))

    q, k, v = (torch.randn(1, heads, 1024, 16, requires_grad=True) for heads in (4, 2, 2))
    with Keys():
        get_kernel(name, 64)(q, k, v, causal=True, window=64)[0].sum().backward()
    assert len(asked) >= 2 * 1024 // 64 and max(asked) <= 128, "64 queries of two heads, or 64 + 63 keys"


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_traceable_without_values(name, mode):
    with mode():
        q, k, v = tensors(2)
        bias = torch.randn(1, HEADS, SEQ, SEQ, requires_grad=True)
        out, _ = get_kernel(name, 4)(q, k, v, mask=torch.ones(BATCH, 1, 1, SEQ, dtype=torch.bool), bias=bias, causal=True, dropout=0.1)
        out.sum().backward()
    assert out.shape == q.shape == q.grad.shape and bias.grad.shape == bias.shape


def peak_bytes(step) -> int:
    """The most that was allocated at any time within a step, above what was there before."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = sorted((e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("keywords", [{}, {"causal": True}, {"causal": True, "dropout": 0.1}, {"mask": True}], ids=str)
@pytest.mark.parametrize("length, share", [(512, 0.5), (1024, 0.25), (2048, 0.125)])
def test_chunked_saves_memory(length, share, keywords):
    """With chunks of 256, at most that share of naive's peak, forward and forward + backward."""
    q, k, v = (torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3))
    if "mask" in keywords:
        keywords = {"mask": (torch.arange(length) < length - 5)[None, None, None]}
    grad = torch.randn_like(q)

    def peaks(kernel):
        forward = peak_bytes(lambda: kernel(q, k, v, **keywords)[0])
        return forward, peak_bytes(lambda: torch.autograd.grad(kernel(q, k, v, **keywords)[0], (q, k, v), grad))

    for ours, theirs in zip(peaks(get_kernel("chunked", 256)), peaks(naive), strict=True):
        assert ours <= share * theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keywords", [{"dropout": 0.2}, {"bias": True}, {"bias": True, "dropout": 0.2, "mask": padding()}], ids=" ".join)
def test_sdpa_is_naive_where_pytorch_has_no_kernel(dtype, keywords):
    q, k, v = tensors(2, dtype=dtype)
    if "bias" in keywords:
        keywords = {**keywords, "bias": torch.randn(1, HEADS, SEQ, SEQ, requires_grad=True)}
    found = []
    for kernel in (sdpa, naive):
        torch.manual_seed(1)
        found.append(kernel(q, k, v, **keywords)[0])
    assert torch.equal(*found) and backends(**keywords) == set()
    evaluating = {k: v.detach() if k == "bias" else v for k, v in keywords.items() if k != "dropout"}
    assert backends(**evaluating) == {"aten::_scaled_dot_product_flash_attention_for_cpu"}


def backends(**keywords) -> set[str]:
    q, k, v = tensors(2)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        sdpa(q, k, v, **keywords)
    return {e.key for e in profiler.key_averages() if "attention" in e.key} - {"aten::scaled_dot_product_attention"}


@pytest.mark.parametrize("keywords", [{}, {"causal": True}, {"mask": padding()}, {"mask": padding(), "causal": True}], ids=" ".join)
def test_sdpa_takes_the_flash_kernel(keywords):
    assert backends(**keywords) == {"aten::_scaled_dot_product_flash_attention_for_cpu"}


@pytest.mark.parametrize("autocast", [False, True])
def test_sdpa_is_naive_where_few_tokens_are_trained_in_half_precision(autocast):
    given, fused = torch.float32 if autocast else torch.bfloat16, []
    counted = dataclasses.replace(CPU, attention=lambda *given, **how: fused.append(1) or CPU.attention(*given, **how))
    for k_len, trained, n in ((256, True, 0), (256, False, 1), (257, True, 1)):
        q, k, v = (x.detach().to(given).requires_grad_(trained) for x in tensors(2, k_len=k_len))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pretending(counted):
            out, expected = (kernel(q, k, v, mask=padding(k_len))[0] for kernel in (sdpa, naive))
            assert len(fused) == n and (n or torch.equal(out, expected))
            assert (out - expected).abs().max() < 0.05
            with torch.no_grad():
                sdpa(q, k, v)
        assert len(fused) == n + 1
        fused.clear()
