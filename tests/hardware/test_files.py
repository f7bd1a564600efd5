"""The hardware file: read strictly, found by any sensible name, the user's own over the packaged one."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml
from hardware_parts import measured, write

from gradus import hardware
from gradus.errors import UserError
from gradus.hardware import files
from gradus.plan import roofline
from gradus.plan.roofline import CHIPS

pytestmark = pytest.mark.usefixtures("own_files")


# ---------------------------------------------------------------- figures


# name, fp32, tf32, bf16, fp16, fp8 in TFLOP/s (dense), GB/s of memory, W, GB/s of the link in one direction: as the vendors' sheets have them
PUBLISHED = [
    ("P100", 10.6, None, None, 21.2, None, 732, 300, 80),
    ("V100-32GB", 15.7, None, None, 125, None, 900, 300, 150),
    ("V100-PCIe", 14, None, None, 112, None, 900, 250, 15.75),
    ("T4", 8.1, None, None, 65, None, 320, 70, 15.75),
    ("A10", 31.2, 62.5, 125, 125, None, 600, 150, 31.5),
    ("A10G", 31.5, None, 70, 70, None, 600, 300, 31.5),
    ("L4", 30.3, 60, 121, 121, 242, 300, 72, 31.5),
    ("A40", 37.4, 74.8, 149.7, 149.7, None, 696, 300, 31.5),
    ("L40S", 91.6, 183, 362, 362, 733, 864, 350, 31.5),
    ("A100-40GB", 19.5, 156, 312, 312, None, 1555, 400, 300),
    ("A100-80GB", 19.5, 156, 312, 312, None, 2039, 400, 300),
    ("A100-PCIe-80GB", 19.5, 156, 312, 312, None, 1935, 300, 31.5),
    ("A800", 19.5, 156, 312, 312, None, 2039, 400, 200),
    ("H100-SXM", 67, 494, 989, 989, 1979, 3350, 700, 450),
    ("H100-PCIe", 51, 378, 756, 756, 1513, 2000, 350, 63),
    ("H100-NVL", 60, 418, 835, 835, 1671, 3900, 400, 63),
    ("H800", 67, 494, 989, 989, 1979, 3350, 700, 200),
    ("H20", 44, 74, 148, 148, 296, 4000, 400, 450),
    ("H200", 67, 494, 989, 989, 1979, 4800, 700, 450),
    ("B200", 80, 1125, 2250, 2250, 4500, 7700, 1000, 900),
    ("B300", 80, 1125, 2250, 2250, 4500, 7750, 1100, 900),
    ("GB200", 80, 1250, 2500, 2500, 5000, 8000, 1200, 900),
    ("GB300", 80, 1250, 2500, 2500, 5000, 8000, 1400, 900),
    ("MI250X", 47.9, None, 383, 383, None, 3277, 560, 350),
    ("MI300X", 163.4, 654, 1307, 1307, 2615, 5300, 750, 448),
    ("TPU-v4", None, None, 275, None, None, 1200, 192, 270),
    ("RTX-3090", 35.6, 35.6, 71, 71, None, 936, 350, 31.5),
    ("RTX-4090", 82.6, 82.6, 165, 165, 330, 1008, 450, 31.5),
    ("RTX-5090", 104.8, 104.8, 209.5, 209.5, 419, 1792, 575, 63),
    ("RTX-2080-Ti", 13.4, None, None, 53.8, None, 616, 250, 15.75),
    ("RTX-3060", 12.7, 12.7, 25.5, 25.5, None, 360, 170, 31.5),
    ("A30", 10.3, 82, 165, 165, None, 933, 165, 31.5),
    ("H200-NVL", 60, 418, 835, 835, 1671, 4800, 600, 63),
    ("MI250", 45.3, None, 362.1, 362.1, None, 3277, 560, 300),
    ("MI350X", 144.2, None, 2307, 2307, 4614, 8000, 1000, 535.5),
    ("TPU-v7x", None, None, 2307, None, 4614, 7380, None, 600),
    ("Trainium1", 47.5, 190, 190, 190, 190, 820 * 2**30 / 1e9, None, 192 * 2**30 / 1e9),
    ("Gaudi2", None, None, 432, None, 865, 2460, 600, 262.5),
    ("RTX-4070-Ti-SUPER", 44.1, 44.1, 88.2, 88.2, 176.4, 672, 285, 31.5),
    ("RTX-A6000", 38.7, 77.4, 154.8, 154.8, None, 768, 300, 31.5),
    ("RTX-6000-Ada", 91.1, 182.1, 364.2, 364.2, 728.5, 960, 300, 31.5),
]
# of the vendor's comparison pages: CUDA cores, highest boost clock in MHz, AI TOPS (sparse; of fp8, of the RTX 50 of fp4), GB, highest W; GB/s
LAPTOPS = [
    ("RTX 4050", 2560, 2370, 194, 6, 115, 192), ("RTX 4060", 3072, 2370, 233, 8, 115, 256), ("RTX 4070", 4608, 2175, 321, 8, 115, 256),
    ("RTX 4080", 7424, 2280, 542, 12, 150, 432), ("RTX 4090", 9728, 2040, 686, 16, 150, 576), ("RTX 5070", 4608, 2347, 798, 8, 100, 384),
    ("RTX 5070 Ti", 5888, 2220, 992, 12, 115, 672), ("RTX 5080", 7680, 2287, 1334, 16, 150, 896), ("RTX 5090", 10496, 2160, 1824, 24, 150, 896),
]  # fmt: skip


@pytest.mark.parametrize("row", PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_devices_are_as_published(row):
    name, *peaks, bandwidth, power, link = row
    device = hardware.find(name)
    for numbers, peak in zip(("fp32", "tf32", "bf16", "fp16", "fp8"), peaks):
        assert device.peaks.get(numbers) == (None if peak is None else pytest.approx(peak * 1e12)), numbers
    assert device.bandwidth == pytest.approx(bandwidth * 1e9)
    assert device.power == power
    assert device.link.bandwidth == pytest.approx(link * 1e9)


@pytest.mark.parametrize(("name", "cores", "clock", "tops", "memory", "power", "bandwidth"), LAPTOPS, ids=[row[0] for row in LAPTOPS])
def test_a_laptops_card_is_not_the_desktops(name, cores, clock, tops, memory, power, bandwidth):
    """AI TOPS count sparsity twice, and products of fp8 (twice as fast as of half precision) summed in fp16, twice as fast as in fp32; of fp4 they are
    summed in fp32, four times as fast as those of fp16."""
    for written in (f"NVIDIA GeForce {name} Laptop GPU", f"{name} Laptop", f"{name.lower()} mobile"):
        device = hardware.find(written)
        assert device.name == f"{name.replace(' ', '-')}-Laptop"
    assert hardware.by_driver(f"NVIDIA GeForce {name} Laptop GPU") == device
    assert device.peaks["fp32"] == pytest.approx(2 * cores * clock * 1e6, rel=5e-3)
    assert device.peaks["bf16"] == pytest.approx(tops * 1e12 / (16 if name >= "RTX 50" else 8), rel=5e-3)
    assert device.peaks["tf32"] == pytest.approx(device.peaks["bf16"] / 2, rel=5e-3)
    assert (device.memory, device.power, device.bandwidth, device.node) == (memory * 2**30, power, bandwidth * 1e9, 1)
    assert roofline.parameters(device)[1] == (f"no fitted parameters for {name.replace(' Ti', '').replace(' ', '')}LAPTOP: those of RTX3090 are used, "
                                              "expect errors of 20 % and more; gradus calibrate measures it",)  # fmt: skip
    assert CHIPS["units"][f"{name} Laptop".upper()] == cores / 128


@pytest.mark.parametrize("name", ["Apple M2", "M3 Max", "m4-pro", "M2 Max 96GB", "Apple M1 Ultra GPU", "MacBook Pro", "m5", "mps"])
def test_apples_are_refused_by_name(name):
    with pytest.raises(UserError, match=rf"{name}: Apple's GPUs are not supported: Apple publishes no peak"):
        hardware.cluster(f"2x{name}")


def test_every_figure_has_a_source_and_a_date():
    for device in hardware.devices().values():
        assert len(device.source) > 10 and re.fullmatch(r"\d{4}-\d\d-\d\d", device.date), device.name
        assert device.year and device.memory_type and device.node >= 1, device.name
        assert 0.85 < device.usable <= 1, device.name
        assert set(device.inferred) <= {"peaks", *device.peaks, "bandwidth", "power", "link"}, device.name
        assert all(quotes.source and quotes.date for quotes in files.quotes(device.name)), device.name
    assert all(len(link.source) > 5 for link in hardware.links().values())
    assert all(grid.source and 2019 <= grid.year <= 2026 for grid in hardware.grids().values())
    sources = yaml.safe_load((files.HERE / "devices.yaml").read_text())["sources"]
    assert set(sources) == {name for d in yaml.safe_load((files.HERE / "devices.yaml").read_text())["devices"].values()
                            for name in ([d["source"]] if isinstance(d["source"], str) else d["source"])}  # fmt: skip


def test_peaks_are_dense_and_halve_with_the_width():
    """The usual slips: a sparse figure (twice fp8's rule), a tensor figure where there is none, GB for Gb."""
    for device in hardware.devices().values():
        peaks = device.peaks
        if "fp8" in peaks and device.kind == "gpu":
            assert peaks["fp8"] / peaks["fp16"] == pytest.approx(2, rel=0.02), device.name
        if "bf16" in peaks and "fp16" in peaks:
            assert peaks["bf16"] == peaks["fp16"], device.name
        if device.network:
            assert device.network.bandwidth < 0.6 * device.link.bandwidth, device.name


def test_one_direction_is_half_of_both():
    for link in hardware.links().values():
        assert link.both is None or link.both == pytest.approx(2 * link.bandwidth), link.name
    one_way = {name: hardware.links()[name].bandwidth / 1e9 for name in ("NVLink 5", "InfiniBand NDR", "InfiniBand XDR", "PCIe 5 x16", "Omni-Path 100")}
    assert one_way == pytest.approx({"NVLink 5": 900, "InfiniBand NDR": 50, "InfiniBand XDR": 100, "PCIe 5 x16": 63, "Omni-Path 100": 12.5})
    assert [hardware.links()[f"NVLink {i}"].bandwidth / 1e9 for i in range(1, 7)] == pytest.approx([80, 150, 300, 450, 900, 1800])


def test_memory_is_counted_in_gib():
    assert hardware.find("A100-80GB").memory == 80 * 2**30  # the driver: 81,920 MiB
    assert hardware.find("H100").memory * hardware.find("H100").usable == pytest.approx(79.11 * 2**30)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("A100", "A100-80GB"),
        ("a100-80gb", "A100-80GB"),
        ("A100 40GB", "A100-40GB"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("H100", "H100-SXM"),
        ("h100-sxm", "H100-SXM"),
        ("H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("V100", "V100-32GB"),
        ("Tesla T4", "T4"),
        ("RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080-Ti"),
        ("RTX 3060 12 GB", "RTX-3060"),
        ("A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("TPU v4", "TPU-v4"),
        ("GB200-NVL72", "GB200"),
    ],
)
def test_names_as_people_write_them(name, found):
    assert hardware.find(name).name == found


def test_no_two_devices_share_a_name():
    taken = {}
    for device in hardware.devices().values():
        for name in (device.name, *device.aliases):
            assert taken.setdefault(files.plain(name), device.name) == device.name, name


@pytest.mark.parametrize(("name", "near"), [("A1000", "A100"), ("H10O", "H100"), ("B2000", "B200")])
def test_an_unknown_device_offers_the_nearest_and_calibrate(name, near):
    with pytest.raises(UserError, match=rf"{name}: no such device .* Did you mean {near}.*gradus calibrate"):
        hardware.find(name)


def test_a_partition_or_a_cut_down_card_is_unknown():
    for name in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 3090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"):
        assert hardware.by_driver(name) is None
        with pytest.raises(UserError, match="gradus calibrate"):
            hardware.find(name)


# ---------------------------------------------------------------- clusters


@pytest.mark.parametrize(
    ("text", "n"), [("A100", 1), ("8xA100-80GB", 8), ("8 x A100 80GB", 8), ("1,024xH100", 1024), ("64×B200", 64), ("72xGB200", 72)]
)
def test_clusters(text, n):
    cluster = hardware.cluster(text)
    assert cluster.n == n
    assert cluster.device == hardware.find(text.split("x")[-1].split("×")[-1].strip())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0xA100", "not a whole number"),
        ("1.5xA100", "not a whole number"),
        ("-8xA100", "-8"),
        ("", "not devices"),
        ("8xA1000", "no such device"),
        ("16xA40", "no network between nodes is known"),
        ("this", "Run: gradus calibrate"),
        ("here", "Run: gradus calibrate"),
        ("cpu", "Run: gradus calibrate"),
        ("4xcpu", "Run: gradus calibrate"),
    ],
)
def test_clusters_that_are_none(text, says):
    with pytest.raises(UserError, match=says):
        hardware.cluster(text)


# ---------------------------------------------------------------- the user's file


def test_the_users_file_adds_and_overrides(tmp_path, monkeypatch):
    mine = write(
        tmp_path / "hardware.yaml",
        """
date: 2026-06-01
links: {Garden hose: {bandwidth: 8 Gb/s, latency: 20 us}}
devices:
  Toaster: {peaks: {fp32: 1.5 TFLOP/s}, memory: 4 GB, usable: 3 GB, bandwidth: 50 GB/s, node: 2, link: Garden hose, aliases: [bread], source: its label}
  A100-80GB: {power: 350 W}
""",
    )
    for path in (mine, None):
        if path is None:
            monkeypatch.setenv("GRADUS_HARDWARE", str(mine))
        toaster = hardware.find("BREAD", path)
        assert (toaster.name, toaster.memory, toaster.usable, toaster.bandwidth, toaster.node) == ("Toaster", 4e9, 0.75, 5e10, 2)
        assert (toaster.link.bandwidth, toaster.link.latency, toaster.power, toaster.date) == (1e9, pytest.approx(2e-5), None, "2026-06-01")
        changed = hardware.find("A100", path)
        assert (changed.power, changed.peaks["bf16"], changed.memory) == (350, 312e12, 80 * 2**30)
        assert str(mine) in changed.source and "power" in changed.source, "whose figure it is"
    assert hardware.cluster("2xToaster").n == 2


def test_the_users_memory_is_not_cut_to_what_a_program_gets_of_the_packaged_one(tmp_path):
    packaged = hardware.find("A100", write(tmp_path / "none.yaml", "devices: {}"))
    assert packaged.usable < 1
    assert hardware.find("A100", write(tmp_path / "mine.yaml", "devices: {A100-80GB: {memory: 160 GiB}}")).capacity == 160 * 2**30


def test_the_usual_place(tmp_path):
    folder = tmp_path / "config" / "gradus"
    folder.mkdir(parents=True)
    write(folder / "hardware.yaml", "devices: {Toaster: {peaks: {fp32: 1 TFLOP/s}, memory: 4 GiB, bandwidth: 5 GB/s}}")
    assert hardware.find("toaster").source == ""
    write(folder / "hardware.yaml", "devices: {Kettle: {peaks: {fp32: 1 TFLOP/s}, memory: 4 GiB, bandwidth: 5 GB/s}}")
    assert hardware.find("kettle").node == 8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("device: {}", "device: unknown key. Did you mean devices?"),
        ("devices: [1, 2]", "devices: [1, 2]: expected keys with values"),
        ("devices: {X: 3}", "devices.X: 3: expected keys with values"),
        ("devices: {3090: {}}", "devices.3090: 3090: Input should be a valid string"),
        ("a: [", "not valid YAML"),
        pytest.param("[" * 90_000, "nested deeper than 64 levels", id="deep"),  # PyYAML's parser in C dies of it
        ("- 3", "[3]: expected keys with values"),
        ("devices:\n  X: {}\n  X: {}", "line 3, column 3: not valid YAML: X is given twice. Keep one."),
        (
            "devices: {X: {peaks: {fp32: 1 TFLOP/s}, memory: 1 GB, bandwidth: 1 GB/s, aliases: [Z]}, "
            "Y: {peaks: {fp32: 1 TFLOP/s}, memory: 1 GB, bandwidth: 1 GB/s, aliases: [z]}}",
            "Y.aliases: z is X's alias already",
        ),
        ("devices: {A100-80GB: {memory: 1e300 GB}}", "A100-80GB.memory: '1e300 GB': too large for anything that is built"),
        ("devices: {A100-80GB: {bandwidth: 1e-40 GB/s}}", "A100-80GB.bandwidth: '1e-40 GB/s': too small for anything that is built"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, says):
    file = write(tmp_path / "mine.yaml", text)
    with pytest.raises(UserError) as error:
        hardware.devices(file)
    assert says in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_was_asked_for_must_be_there(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no such hardware file"):
        hardware.find("A100", tmp_path / "none.yaml")
    for kind, ask in (("HARDWARE", lambda: hardware.find("A100")), ("PRICES", lambda: hardware.price("A100")), ("GRID", lambda: hardware.grid("FR"))):
        monkeypatch.setenv(f"GRADUS_{kind}", str(tmp_path / "none.yaml"))
        with pytest.raises(UserError, match=r"none\.yaml: no such"):
            ask()
        monkeypatch.delenv(f"GRADUS_{kind}")


def test_a_measured_device_comes_back_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "new" / "hardware.yaml"
    device = measured("box", aliases=("this", "here", "cpu"))
    assert hardware.add_device(device, file) == file
    back = hardware.find("this", file)
    for field in dataclasses.fields(device):
        old, new = getattr(device, field.name), getattr(back, field.name)
        if field.name in ("peaks", "memory", "bandwidth", "usable"):
            assert new == pytest.approx(old, rel=1e-9), field.name
        elif field.name != "link":
            assert new == old, field.name
    assert back.link == dataclasses.replace(device.link, latency=back.link.latency) and back.link.latency == pytest.approx(2.5e-5)
    monkeypatch.setenv("GRADUS_HARDWARE", str(file))
    assert hardware.cluster("cpu") == hardware.cluster("here") == hardware.Cluster(back, 1)
    assert hardware.cluster("4xcpu").n == 4, "processes on one machine"


def test_the_newest_measurement_is_this_machine(tmp_path):
    file = write(
        tmp_path / "hardware.yaml", "devices: {Toaster: {peaks: {fp32: 1 TFLOP/s}, memory: 4 GB, bandwidth: 50 GB/s, aliases: [bread, This]}}"
    )
    hardware.add_device(measured("old", aliases=("this", "here", "cpu")), file)
    hardware.add_device(measured("card", aliases=("this", "here")), file)
    assert [hardware.find(name, file).name for name in ("this", "here", "cpu", "bread", "old")] == ["card", "card", "old", "Toaster", "old"]
    hardware.add_device(measured("card", aliases=("this", "here")), file)
    assert list(yaml.safe_load(file.read_text())["devices"]) == ["Toaster", "old", "card"]


def test_what_cannot_be_read_back_is_not_written(tmp_path):
    file = tmp_path / "hardware.yaml"
    hardware.add_device(measured("box"), file)
    before = file.read_text()
    with pytest.raises(UserError, match="bandwidth"):
        hardware.add_device(dataclasses.replace(measured("box"), bandwidth=-1.0), file)
    assert file.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["hardware.yaml"]


# ---------------------------------------------------------------- prices and grids


def test_a_price_is_the_range_of_its_quotes():
    price = hardware.price("H100")
    quotes = files.quotes("H100-SXM")
    assert len(quotes) >= 3
    assert (price.low, price.high) == (min(q.low for q in quotes), max(q.high for q in quotes)) == (1.99, 10.08)
    assert price.low < price.expected < price.high
    assert price.currency == "USD" and all(q.date in price.source for q in quotes)
    assert hardware.price("P100") is None, "unknown is absent"


def test_own_prices_replace_the_quotes_and_may_be_in_another_currency(tmp_path, monkeypatch):
    packaged = hardware.price("A100")
    file = write(
        tmp_path / "prices.yaml", "date: 2026-06-01\ncurrency: EUR\nrate: 0.9\nprices: {H100: {low: 1, expected: 1.5, high: 3, source: my contract}}"
    )
    monkeypatch.setenv("GRADUS_PRICES", str(file))
    mine = hardware.price("H100-SXM")
    assert (mine.low, mine.expected, mine.high, mine.currency, mine.date) == (1, 1.5, 3, "EUR", "2026-06-01")
    assert "my contract" in mine.source
    converted = hardware.price("A100")
    assert converted.currency == "EUR" and converted.low == pytest.approx(0.9 * packaged.low) and converted.high == pytest.approx(0.9 * packaged.high)
    write(file, "prices: {A100: [{low: 1, high: 2, source: a}, {low: 3, high: 4, source: b}]}")
    dollars = hardware.price("A100")
    assert (dollars.low, dollars.expected, dollars.high, dollars.currency) == (1, 2.5, 4, "USD")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("currency: EUR", "rate: missing; state what one dollar costs in EUR"),
        ("rat: 3", "rat: unknown key"),
        ("prices: {H100: {low: 3, high: 1}}", "low, expected, high must not decrease"),
        ("prices: {H100: {low: 1}}", "prices.H100.high: missing"),
        ("prices: {H100: {low: 1, high: 2, hgih: 3}}", "prices.H100.hgih: unknown key. Did you mean high"),
        ("prices: {H1000: {low: 1, high: 2}}", "H1000: no such device"),
    ],
)
def test_wrong_prices_are_named(tmp_path, monkeypatch, text, says):
    monkeypatch.setenv("GRADUS_PRICES", str(write(tmp_path / "prices.yaml", text)))
    with pytest.raises(UserError, match=re.escape(says)):
        hardware.price("H100")


def test_grids():
    assert {k: hardware.grid(k).intensity * 3.6e9 for k in ("FR", "france", "SE", "NO", "US", "world")} == pytest.approx(
        {"FR": 56, "france": 56, "SE": 41, "NO": 30, "US": 369, "world": 475}
    )
    assert (hardware.grid("SA").year, hardware.grid("FR").year) == (2022, 2023)
    with pytest.raises(UserError, match=r"not known\. Did you mean Germany"):
        hardware.grid("Germny")
    assert hardware.pue()[:3] == (1.09, 1.14, 1.43)


def test_an_own_grid(tmp_path, monkeypatch):
    packaged = hardware.grid("FR")
    file = write(tmp_path / "grid.yaml", "year: 2026\npue: {low: 1, expected: 1.05, high: 1.1}\ngrids: {roof: {intensity: 20 g/kWh, source: panels}}")
    monkeypatch.setenv("GRADUS_GRID", str(file))
    assert (hardware.grid("roof").intensity, hardware.grid("roof").year) == (pytest.approx(20 / 3.6e9), 2026)
    assert hardware.grid("FR") == packaged
    assert hardware.pue()[:3] == (1, 1.05, 1.1)
    for text, says in (
        ("grids: {roof: {intensity: 20}}", "grids.roof"),
        ("pue: {low: 0.5, expected: 1, high: 1}", "pue.low"),
        ("pue: {low: 2, expected: 1, high: 3}", "must not decrease"),
    ):
        write(file, text)
        with pytest.raises(UserError, match=says):
            hardware.grids()
