"""What `gradus plan` answers to people: what does not fit says what would, a deadline is answered, nothing is silently ignored."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gradus import cli, hardware
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.plan.answer import Answer, Request, _advice, answer, devices, optimal, search, serve
from gradus.plan.figures import figure
from gradus.plan.show import _between, explain
from gradus.text import duration, in_unit, money, rate, size

TINY = ("model.n_layers=2", "model.d_model=256", "model.n_heads=4", "model.d_ff=1024", "model.seq_len=256", "data.max_len=256")


@pytest.fixture(scope="module")
def tiny():
    return answer(Request("gpt2-small", (*TINY, "batch.samples=64", "layout.micro_batch=8"), "A100", 1e9, 1))


def test_every_figure_says_how(tiny):
    for row in tiny.rows:
        how = row.conditions["how"]
        assert how.get("formula") and how.get("inputs") and how.get("source"), row.name
        assert list(explain(tiny.rows, row.name))
    assert tiny.value("energy/step", case="expected") > 0


def test_the_first_lines_answer(tiny):
    said = {line[:10].strip(): line for line in tiny.headline[1:]}
    assert list(said) == ["fits", "how long", "deadline", "how much"]
    assert "met by 1 × A100" in said["deadline"] and "$" in said["how much"] and "CO2" in said["how much"]


@pytest.mark.parametrize(("least", "shard"), [(1, 1), (3, 1), (1, 2)])
def test_replicas_that_come_and_go_are_planned_where_the_fewest_are_left(least, shard):
    """They take as large micro-batches as all did. Also where the batch does not divide among them, and where each splits its weights."""
    small = (*TINY, "model.n_layers=1", "model.d_model=64", "model.d_ff=256", f"layout.shard={shard}", f"layout.micro_batch={8 // shard}")
    elastic = ("batch.samples=32", "layout.elastic=true", f"layout.min_replicas={least}")
    (note,) = (n for n in answer(Request("gpt2-small", (*small, *elastic), f"{4 * shard}xA100", 1e9)).notes if "min_replicas" in n)
    few = answer(Request("gpt2-small", (*small, f"batch.samples={33 if least == 3 else 32}"), f"{least * shard}xA100", 1e9))
    left = "1 replica is" if least == 1 else "3 replicas are"
    assert note == f"where {left} left (layout.min_replicas), device {size(few.value('memory/device'))}, and {4 if least == 1 else 2} × as many micro-batches"


def test_a_missed_deadline_says_how_many():
    made = answer(Request("gpt2-small", (*TINY, "batch.samples=64"), "1xA100", 1e10, 0.01))
    line = next(line for line in made.headline if line.startswith("deadline"))
    assert "NOT met" in line and f"{made.value('budget/devices', case='expected'):,} or more" in line


@pytest.mark.slow
def test_what_does_not_fit_says_what_would():
    keys = ("model.n_layers=1", *TINY[1:], "batch.samples=2048", "layout.micro_batch=2048")
    made = answer(Request("gpt2-small", keys, "T4"))
    assert made.fits is False and made.advice
    settings = [word for word in made.advice[0].split(":")[0].split() if word.startswith("layout.")]
    assert answer(Request("gpt2-small", (*keys, *settings), "T4")).fits is True


@pytest.mark.slow
def test_a_device_without_bf16_is_planned_in_what_it_has():
    made = answer(Request("gpt2-small", (*TINY, "batch.samples=64"), "V100"))
    assert made.recipe.layout.precision == "fp16" and made.value("time/mfu") and any("no bf16" in note for note in made.notes)
    kept = answer(Request("gpt2-small", (*TINY, "batch.samples=64", "layout.precision=bf16"), "V100"))
    assert kept.recipe.layout.precision == "bf16" and kept.value("time/mfu") is None and any("without an MFU" in note for note in kept.notes)


@pytest.mark.slow
def test_another_batch_is_not_another_number_of_tokens():
    one, two = (answer(Request("gpt2-small", (*TINY, f"batch.samples={n}"))).recipe for n in (64, 128))
    assert one.train.steps == pytest.approx(2 * two.train.steps, abs=1)


def test_a_presets_samples_are_as_long_as_its_sequences():
    made = answer(Request("gpt2-small", (*TINY[:4], "model.seq_len=128", "batch.samples=8"))).recipe
    assert made.data.max_len == made.model.seq_len == 128


def test_a_search_prices_the_whole_run():
    words = (*TINY, "model.n_heads=1", "batch.samples=16")  # a head that no axis splits leaves less to trace
    lines, rows, _ = search(Request("gpt2-small", words, "2xA100", 1e9))
    text = "\n".join(lines)
    assert "in total" in text
    paid = next(row for row in search(Request("gpt2-small", words, "2xA100", 1e9, price=100.0))[1] if row.name == "search/money")
    assert paid.conditions["how"]["inputs"]["USD per device-hour"] == pytest.approx(100)
    fastest = next(row for row in rows if row.name == "search/money" and "fastest" in (row.conditions["best"] or ()))
    seconds = next(row.value for row in rows if row.name == "search/step" and row.conditions["rank"] == fastest.conditions["rank"])
    given = fastest.conditions["how"]["inputs"]
    assert fastest.value == pytest.approx(given["USD per device-hour"] * given["devices"] * seconds * given["steps"] / 3600 / given["goodput"])


def test_what_a_device_does_not_hold_is_served_in_no_time():
    lines, rows, _ = serve(Request("llama2-70b", on="A100-40GB"))
    assert lines[1].startswith("NO FIT") and not any(line.startswith("how fast") for line in lines)
    assert "serving/device" in {row.name for row in rows} and not any("time" in row.name or "per_s" in row.name for row in rows)


def test_serving_by_batch_and_length():
    lines, rows, _ = serve(Request("llama2-7b", on="A100-40GB"), batch=8)
    found = {row.name: row.value for row in rows}
    assert found["serving/kv_cache"] == 2 * 32 * 32 * 128 * 2 * 8 * 4096 and found["serving/weights"] == 2 * 6_738_415_616
    assert lines[1].startswith("fits") and any("does not hold" in line for line in lines)
    lines, rows, _ = serve(Request("llama2-7b", on="2xA100-40GB"), batch=8)
    fast = next(line for line in lines if line.startswith("how fast"))
    assert "on each of 2 × A100-40GB" in lines[1] and fast.count("at least") == 2 and "at most" in fast and "about" not in fast
    assert {row.conditions["bound"] for row in rows if row.name.endswith("_time")} == {"lower"}
    with pytest.raises(UserError, match=r"^--on 16xA100-40GB: a node has 8: .* Use --on 8xA100-40GB"):
        serve(Request("llama2-7b", on="16xA100-40GB"))
    with pytest.raises(UserError, match=r"--length=5000: .* Set --length=4096"):
        serve(Request("llama2-7b"), length=5000)
    none, *_ = serve(Request("llama3.1-405b"))
    assert any("no single device holds it" in line for line in none)


ABSENT = "data.path=absent/folder"
SMALL_VIT = ("model.n_layers=1", "model.d_model=64", "model.n_heads=2", "model.d_ff=128", "batch.samples=8", ABSENT)


@pytest.mark.slow
def test_a_vits_plan_needs_neither_data_nor_a_vocabulary():
    made = answer(Request("cifar10-vit-small", (*SMALL_VIT, "train.steps=100", "train.epochs=null"), "A100"))
    assert made.fits and made.value("budget/time", case="expected") and any("could not be opened" in note for note in made.notes)
    epochs = answer(Request("cifar10-vit-small", SMALL_VIT, "A100"))
    assert epochs.value("time/step") and epochs.value("budget/time") is None and any("how long in total" in note for note in epochs.notes)
    with pytest.raises(UserError, match=r"^--price: without its data .* Set train\.steps=N"):
        answer(Request("cifar10-vit-small", SMALL_VIT, "A100", price=2.1))
    unknown = answer(Request("cifar10-vit-small", (*SMALL_VIT, "model.n_classes=null")))
    assert unknown.recipe.model.n_classes == 1000 and any("ImageNet's 1,000" in note for note in unknown.notes)


@pytest.mark.slow
@pytest.mark.parametrize("ask", [devices, serve, search], ids=lambda ask: ask.__name__)
def test_a_vit_without_data_is_asked_other_questions(ask):
    _, rows, notes = ask(Request("cifar10-vit-small", SMALL_VIT, None if ask is devices else "A100"))
    assert rows and any("could not be opened" in note for note in notes)


def test_a_vit_of_hugging_face_is_planned(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 32, "patch_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"], **sizes}))
    made = answer(Request(f"hf:{tmp_path}", ("batch.samples=8", "layout.micro_batch=8"), "A100"))
    assert made.fits and made.value("time/samples_per_s") and made.recipe.tokenizer is None
    assert serve(Request(f"hf:{tmp_path}", on="A100"))[1]


@pytest.mark.slow
def test_what_only_names_data_is_a_mistake_and_told(tmp_path):
    """The data can be opened; a setting cannot be followed: its text says `data` and is an error all the same."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 50)
    request = Request("shakespeare-char-gpt", (f"data.path={text}",))
    assert answer(request).recipe.model.vocab_size  # by the data
    for words, said in [
        (("data.valid=nothing.txt",), r"data\.valid=nothing\.txt: no such file"),
        (("data.valid_fraction=0.999",), "data"),
        (("tokenizer.kind=bpe", "tokenizer.vocab_size=3", "model.vocab_size=500"), r"tokenizer\.vocab_size=3"),
        (("model.vocab_size=5",), "the data has 8 tokens"),
        (("data.x=1",), r"data\.x"),
    ]:
        with pytest.raises(UserError, match=said):
            answer(Request(request.recipe, (*request.overrides, "train.steps=10", "train.epochs=null", *words)))
    absent = Request(request.recipe, (f"data.path={tmp_path / 'absent'}", "model.vocab_size=65", "train.steps=10", "train.epochs=null"))
    assert any("could not be opened" in note for note in answer(absent).notes)
    with pytest.raises(UserError, match=r"the plan needs model\.vocab_size=N"):
        answer(Request(request.recipe, absent.overrides[:1]))


def test_optimal_sizes_are_of_decoders():
    with pytest.raises(UserError, match="not of family vit"):
        optimal(Request("vit-b16"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama2-7b", "--port", "80"], "--port has no effect without --web"),
        (["llama2-7b", "--batch", "4"], "--batch has no effect without --serve"),
        (["llama2-7b", "--serve", "--batch", "0"], "--batch=0: must be at least 1"),
        (["llama2-7b", "--serve", "--search"], "different questions"),
        (["--accuracy", "--json"], "--json has no effect"),
        (["llama2-7b", "--search", "--days", "3", "--on", "H100"], "--days has no effect"),
        (["llama2-7b", "--search", "--on", "H100", "layout.shard=3"], "--search: it chooses layout.shard"),
        (["llama2-7b", "--on", "8x"], "of which device"),
        (["llama2-7b", "--on", "TPU-v4"], "TPUs"),
        (["llama2-7b", "--days", "3"], "of which kind"),
        (["llama2-7b", "--tokens", "nan", "--on", "H100"], "positive"),
    ],
)
def test_mistakes_are_one_line(capsys, words, said):
    assert cli.run(["plan", *words]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and not told.out


def test_optimal_as_rows(capsys):
    assert cli.run(["plan", "gpt2-small", "--optimal", "--json"]) == 0
    assert {json.loads(line)["fit"] for line in capsys.readouterr().out.splitlines()} == {"Hoffmann 2022", "Besiroglu 2024"}


def test_numbers_for_people():
    assert [money(x, "USD") for x in (0, 0.0066, 13.44, 2132, 1.85e6)] == ["$0.00", "$0.0066", "$13.44", "$2,130", "$1.85 million"]
    assert [rate(x) for x in (0.781, 22_706, 4_310_000)] == ["0.781", "22,700", "4.31 million"]
    assert [money(x, "USD") for x in (1.65e9, 2e12)] == ["$1.65 billion", "$2,000 billion"] and duration(4e10) == "1,270 years"
    assert _between("$350 million", "$142 million", "$1.65 billion") == " [$142 million .. $1.65 billion]" and _between("3 h", "2 h", "4 h") == " [2 .. 4]"
    assert in_unit(1230, "J") == "1,230 J" and duration(0.02) == "20 ms" and duration(86_400 * 3) == "3 days"


def test_a_device_of_the_same_vendor_is_offered_before_a_smaller_one_of_another(monkeypatch):
    monkeypatch.setattr("gradus.plan.search.remedy", lambda *given: None)
    for on, least in (("A100", "B200"), ("MI250X", "MI300X")):  # 140 GB, at most 80 % of a device: an H200 holds it with less room
        request = Request("gpt2-small", (), on)
        rows = [figure("memory/device", 140e9, "bytes", high=150e9)]
        made = Answer(recipes.load("copy-task"), hardware.cluster(on), 1, rows, [], False, "", plan=SimpleNamespace(case=None))
        assert _advice(request, made, made.recipe.layout)[0].startswith(f"--on 1x{least}: it fits as it is")
