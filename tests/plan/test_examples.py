"""Worked examples of published documents, against what the plan says: docs/plan-figures.md has the figures, docs/errata.md where the documents err."""

from __future__ import annotations

import math

import pytest

from gradus import hardware, models
from gradus.plan.answer import Request, answer, serve
from gradus.plan.budget import HOUR, energy_and_carbon
from gradus.plan.case import Case
from gradus.plan.collectives import ring_factor
from gradus.plan.counts import flops
from gradus.plan.hf import recipe_for
from gradus.plan.serving import serving, usage_of
from gradus.recipe.presets import config_of
from gradus.recipe.schema import GPTConfig
from gradus.text import DAY

GB = 1e9


pytestmark = pytest.mark.usefixtures("own_files")


def test_gpt3_needs_760_or_1013():
    """300e9 tokens in 30 days at 160 TFLOP/s each: 6 N D, or 8 N D as that rate was reached with the forward pass done again."""
    recipe = recipe_for("gpt3-175b")
    recipe = recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"checkpointing": "full"})})
    found = {row.name: row for row in flops(Case.of(recipe, target="cuda"))}
    tokens = recipe.batch.samples * 2048
    for name, factor, counted, devices in (("flops/model", 6, 6.1, 760), ("flops/hardware", 8, 7.6, 1013)):
        assert found[name].value / tokens == pytest.approx(counted * 175e9, rel=0.02), "attention adds; a block's last product is not done again"
        assert math.ceil(factor * 175e9 * 300e9 / (160e12 * 30 * DAY)) == devices


def test_a_layer_has_12_d2_and_13_d():
    config = config_of("gpt2").model_copy(update={"n_layers": 3})
    one, two = (models.count(config.model_copy(update={"n_layers": n}))["total"] for n in (1, 2))
    d = config.d_model
    assert two - one == 12 * d * d + 13 * d
    assert pytest.approx(5.4e-5, rel=0.01) == 8 * 12_288 / (12 * 12_288**2 + 13 * 12_288), "what 12 d² + 5 d leaves out"


def test_gpt3s_states_are_2800_gb():
    """16 bytes a parameter: weights and two moments in fp32, 4 bytes of weights and gradients beside them."""
    made = answer(Request("gpt2-small", ("model.n_layers=2", "batch.samples=8", "layout.micro_batch=1"), "A100"))
    states = sum(made.value(f"memory/{name}") for name in ("weights", "gradients", "optimizer"))
    assert states / made.value("parameters/total") == pytest.approx(16, rel=1e-3)
    assert 16 * 175e9 / GB == 2800


def test_llama2_serving_and_its_device():
    """The rule of thumb knows neither batch nor length: of 8 sequences of 4,096 tokens it says half of what they take."""
    config = config_of("llama2-7b")
    assert usage_of(config, 1, 1).own * 2 == 512 * 1024  # in bf16
    for bits, needed in ((32, 32.3), (16, 16.2)):  # 33.6 and 16.8 from 7e9 parameters
        rule = next(row for row in serving(config, bits=bits) if row.name == "serving/rule")
        assert rule.value / GB == pytest.approx(needed, abs=0.05)
    for batch, needed, memory, holds in ((1, 15.6, 16, True), (8, 30.7, 32, False), (32, 82.2, 80, False)):
        found = {row.name: row for row in serving(config, batch=batch)}
        assert found["serving/total"].value / GB == pytest.approx(needed, abs=0.05)
        assert found["serving/rule"].conditions["holds"] is holds
        assert hardware.find(found["serving/device"].value).memory == memory * 2**30
    text, *_ = serve(Request("llama2-7b", on="A100-40GB"), batch=8)
    assert text[1].startswith("fits") and serve(Request("llama2-7b", on="A10G"), batch=8)[0][1].startswith("NO FIT")


def test_the_copy_task_at_65_w():
    """14 minutes, PUE 1.1, 0.385 kg/kWh: 65 W was read while the card waited; its limit of 300 W is the other end."""
    joules, kg = energy_and_carbon(14 / 60, 65, 1.1, 0.385)
    assert joules / HOUR == pytest.approx(16.683, abs=1e-3) and kg / 1000 == pytest.approx(6.42e-6, rel=1e-3)
    most, most_kg = energy_and_carbon(14 / 60, 300, 1.1, 0.385)
    assert most / HOUR == pytest.approx(77) and most_kg == pytest.approx(0.029645)


@pytest.mark.parametrize(
    ("link", "payload", "ring", "advertised"),
    [("NVLink 5", 0.38889, 0.68056, 0.19444), ("InfiniBand NDR", 7.0, 12.25, None), ("PCIe 5 x16", 5.5556, 9.7222, 2.7778)],
)
def test_350_gb_of_gradients(link, payload, ring, advertised):
    """Once in one direction, and as an all-reduce of eight; by the advertised figure of both directions, half of the first."""
    one = hardware.links()[link]
    assert 350 * GB / one.bandwidth == pytest.approx(payload, rel=1e-4)
    assert ring_factor("all_reduce", 8) * 350 * GB / one.bandwidth == pytest.approx(ring, rel=1e-4)
    assert (one.both and 350 * GB / one.both) == (advertised and pytest.approx(advertised, rel=1e-4))
    assert ring_factor("all_reduce", 2) == 1 and ring_factor("all_reduce", 1024) == pytest.approx(2, rel=2e-3)


def test_sizes_of_attention_activations_and_cache():
    heads, mib = 48, 2**20  # 4 samples of 12 heads, fp32
    assert [heads * n * n * 4 / mib for n in (512, 1024, 2048)] == [48, 192, 768]
    assert [heads * 256 * n * 4 / mib for n in (512, 1024, 2048)] == [24, 48, 96]
    assert pytest.approx(1.208, abs=1e-3) == 2 * 32 * 512 * 768 * 12 * 4 / GB, "two tensors a layer, where 9 GB were printed"
    as_bert = GPTConfig(vocab_size=30_522, n_layers=12, d_model=768, n_heads=12, seq_len=1024)
    assert 1000 * usage_of(as_bert, 1, 1).own * 2 / 1e6 == pytest.approx(36.864)
    assert 1000 * 1001 / 2 / 1000 == 500.5, "the most that a cache can save in 1,000 tokens"


def test_a_vit_of_1_84e9_fits_one_card():
    n = models.count(config_of("vit-G14"))["total"]
    state = 12 * n  # weights, gradients, momentum in fp32
    assert state / GB == pytest.approx(22.1, abs=0.1)
    assert state < 0.3 * hardware.find("A100-80GB").memory
