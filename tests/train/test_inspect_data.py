"""What data are: which columns of a table, running text, pairs; and what is asked where more than one thing may be meant."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import yaml
from new_parts import pictures, reviews, table

from gradus.cli import main
from gradus.data.readers import read_rows
from gradus.errors import UserError
from gradus.train import inspect_data
from gradus.train.inspect_data import look

pytestmark = pytest.mark.usefixtures("here")


def test_columns_are_chosen_where_one_is_possible_and_can_be_named(tmp_path, capsys):
    rows = [(i, f"the title {i}", f"a much longer text about film {i}", i % 2, i % 3) for i in range(60)]
    path = str(table(tmp_path / "r.csv", rows, ("id", "head", "words", "odd", "kind")))
    assert main(["new", "a.yaml", "--data", path]) == 2
    assert "which column is the text? 'head' and 'words' hold text. Name one" in capsys.readouterr().err
    assert main(["new", "a.yaml", "--data", path, "--text", "words"]) == 2
    assert "which column is the label, 'odd' (2 values) or 'kind' (3 values)?" in capsys.readouterr().err
    assert main(["new", "b.yaml", "--data", path, "--text", "head", "--label", "kind"]) == 0
    assert "classes    3: 0 20, 1 20, 2 20" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "b.yaml").read_text())["data"] | {"path": ""} == {
        "kind": "labelled",
        "path": "",
        "text": "head",
        "label": "kind",
    }
    assert main(["new", "c.yaml", "--data", path, "--label", "kinds"]) == 2
    assert "--label kinds: " in (err := capsys.readouterr().err) and "Did you mean kind?" in err
    same = table(tmp_path / "same.csv", [(text, label, "en") for _, text, label in reviews()], ("words", "kind", "language"))
    assert look([str(same)]).lines[2].startswith("label      column 'kind': the only one"), "a value that all rows have tells no class apart"
    one = table(tmp_path / "one.csv", [(i, text, label) for i, text, label in reviews()], ("id", "words", "kind"))
    said = look([str(one)]).lines
    assert "column 'words': the only one that holds text" in said[1] and said[2].startswith("label      column 'kind': the only one")


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
@pytest.mark.parametrize("below", ["", "train"])
def test_pictures_with_their_labels_in_a_table_beside_them(name, below, tmp_path, capsys):
    folder = pictures(tmp_path / "set") and tmp_path / "d" / below
    folder.mkdir(parents=True)
    files = sorted((tmp_path / "set").glob("*/*.png"))
    rows = [{"file_name": f"{i}.png", "label": file.parent.name} for i, file in enumerate(files)]
    for file, row in zip(files, rows):
        file.rename(folder / row["file_name"])
    if below == "":
        with pytest.raises(UserError, match=r"images without a class.*or write file_name,label into metadata\.csv"):
            look([str(tmp_path / "d")])
    lines = map(json.dumps, rows) if name.endswith("jsonl") else ["file_name,label", *(",".join(row.values()) for row in rows)]
    (folder / name).write_text("\n".join(lines) + "\n")
    assert main(["new", "a.yaml", "--data", str(tmp_path / "d")]) == 0
    assert "classes    3: ant 12, bee 12, cat 12" in capsys.readouterr().out


SCORE = [(f"film {i} is good", i / 7) for i in range(60)]


@pytest.mark.parametrize(
    "header, rows, options, words",
    [
        ("id,question1,question2,is_duplicate", [(i, f"what is {i}?", f"where is {i}?", i % 2) for i in range(60)], [],
         "'question1' and 'question2' hold text. Name one, such as --text question1"),
        ("en,de", [(f"the house {i}", f"das Haus {i}") for i in range(60)], [], "two files, NAME.en and NAME.de"),
        ("text,text2,label", [(f"film {i} is", f"film {i} was", i % 2) for i in range(60)], [], "'text' and 'text2' hold text"),
        ("review,score", SCORE, [], "column 'score' holds 60 different numbers, such as "),
        ("review,score", SCORE, [], "--no-label"),
        ("review,points", SCORE, [], "It is a score, and only classes can be learned"),
        ("review,label", SCORE, ["--label", "label"], "It is a score, and only classes can be learned"),
        ("review,points", [(text, i * 37 % 50) for i, (text, _) in enumerate(SCORE)], [],
         "holds 50 different numbers, such as 37. Is it a score? Only classes can be learned. If each number is a class: --label points"),
        ("text,intent", [(text, f"intent {i % 25}") for i, (text, _) in enumerate(SCORE)], [], "If each is a class: --label intent"),
        ("text,category,rating", [(text, "ab"[i % 2], i % 3) for i, (text, _) in enumerate(SCORE)], [],
         "which column is the label, 'category' (2 values) or 'rating' (3 values)?"),
        ("film 1 was bad !,bad", [r[1:] for r in reviews()], [], "the first row (film 1 was bad !, bad) looks like data"),
        ("0,film 1 was bad !", [r[:2] for r in reviews()], [], "If these are the names: --text COLUMN"),
        ("a film that was very good", [(f"a film that was {i}",) for i in range(60)], [], "Put a row of names above it"),
        ("text,text,label", [("a b", "c d", i % 2) for i in range(60)], [], "names the column 'text' twice"),
        ("text,label", [(text, "good") for text, _ in SCORE], [], "every sample is of one class (good)"),
        ("text,label", [r[1:] for r in reviews()], ["--text", "label", "--label", "label"], "one column cannot be both"),
    ],
)  # fmt: skip
def test_what_is_ambiguous_or_no_class_is_asked_about(tmp_path, capsys, header, rows, options, words):
    table(tmp_path / "r.csv", rows, header.split(","))
    assert main(["new", "x.yaml", "--data", "r.csv", *options]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1, err
    assert not (tmp_path / "x.yaml").exists()


ALPACA = {"instruction": "Name a colour of the sky.", "input": "", "output": "blue"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": "Name a colour.", "response": "blue"}, ("instructions with their answers (columns 'instruction' and 'response')", "Call them prompt and completion")),
        ({"dialog": [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]}, ("chats (column 'dialog')", "in a column messages")),
        ({"prompt": "Two plus two is what?", "chosen": "4", "rejected": "5"}, ("answers that were chosen and rejected",)),
    ],
)  # fmt: skip
def test_data_of_assistants_are_named_and_not_half_read(tmp_path, capsys, row, words):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for _ in range(20)))
    assert main(["new", "a.yaml", "--data", str(tmp_path / "a.jsonl")]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words) and len(error.splitlines()) == 1 and not Path("a.yaml").exists()


def test_with_a_column_of_whole_texts_or_a_named_one_they_can_be_learned(tmp_path):
    rows = [{**ALPACA, "input": str(i), "text": f"Question {i}: name a colour. Answer: blue"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    whole = look([str(tmp_path / "a.jsonl")], None, False)
    assert whole.data["text"] == "text" and "note       it has chats too: --form alpaca learns what the assistant says alone" in whole.lines
    assert look([str(tmp_path / "a.jsonl")], "output", False).data["text"] == "output"


def test_columns_that_a_chats_form_does_not_read_are_said(tmp_path):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    rows = {"messages": {"messages": turns}, "prompt": {"prompt": "hello", "completion": "hi"}, "alpaca": {"instruction": "greet", "output": "hi"}}
    left = {"messages": "system, input", "prompt": "input", "alpaca": None}
    for form, row in rows.items():
        (tmp_path / "a.jsonl").write_text(json.dumps({**row, "system": "be brief", "input": "x"}))
        notes = [line for line in look([str(tmp_path / "a.jsonl")]).lines if "not read" in line]
        assert notes == [f"note       not read: {left[form]} (a column of weights: data.weight=COLUMN)"] * bool(left[form])


def test_several_classes_in_one_cell_are_said(tmp_path):
    said = {}
    for name, labels in (("several", ("a;b", "b;c")), ("one", ("York, UK", "Bonn, DE"))):
        table(tmp_path / f"{name}.csv", [[f"film number {i}", labels[i % 2]] for i in range(20)], ("text", "tags"))
        said[name] = [line for line in look([str(tmp_path / f"{name}.csv")], "text", "tags").lines if line.startswith("note")]
    assert "'a;b' is a class by itself: a text has one class here, not several" in said["several"][0] and not said["one"]


@pytest.mark.parametrize(("languages", "pair"), [(("de", "en"), ("de", "en")), (("de", "en", "fr"), None)])
def test_a_pair_by_its_stem(tmp_path, languages, pair):
    for language in languages:
        (tmp_path / f"short.{language}").write_text("one line\nanother line\n")
    if pair is None:
        with pytest.raises(UserError, match=r"short: in de, en and fr. Name the two files, the language to translate first"):
            look([str(tmp_path / "short")])
        return
    data = look([str(tmp_path / "short")]).data
    assert (data["source"], data["target"], data["train"]) == (*pair, "short")


def test_what_was_asked_about_can_be_answered(tmp_path):
    table(tmp_path / "r.csv", SCORE, ("review", "score"))
    assert look(["r.csv"], label=False).data == {"kind": "text", "path": str(tmp_path / "r.csv"), "text": "review"}
    table(tmp_path / "q.csv", [(i, f"what is {i}?", f"where is {i}?", i % 2) for i in range(60)], ("id", "q1", "q2", "same"))
    assert look(["q.csv"], "q2").data | {"path": ""} == {"kind": "labelled", "path": "", "text": "q2", "label": "same"}
    table(tmp_path / "h.csv", [r[1:] for r in reviews()], ("film 1 was bad !", "bad"))
    assert look(["h.csv"], "film 1 was bad !").data["label"] == "bad"
    table(tmp_path / "i.csv", [(i, f"film {i} is") for i in range(60)], ("number", "words"))
    assert look(["i.csv"]).data["kind"] == "text"  # the number of a row is no score
    table(tmp_path / "d.csv", [(f"2024-01-{i % 9 + 1:02}", f"film {i} is") for i in range(60)], ("when", "words"))
    assert look(["d.csv"]).data["kind"] == "text"  # nor are days classes
    (tmp_path / "b.txt").write_text("a b\n" * 50)
    assert main(["new", "x.yaml", "--data", "r.csv", "--label", "score", "--no-label"]) == 2
    with pytest.raises(UserError, match=r"--no-label: b.txt has no columns \(running text\)"):
        look(["b.txt"], label=False)
    with pytest.raises(UserError, match=r"--label : b.txt has no columns"):
        look(["b.txt"], label="")


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_csv_may_have_semicolons_or_tabs(tmp_path, delimiter):
    lines = [f'"film {i}{delimiter} and, ""more"""{delimiter}{"ab"[i % 2]}' for i in range(30)]
    (tmp_path / "r.csv").write_text("\n".join([f"text{delimiter}label", *lines]))
    found = look(["r.csv"])
    assert found.data["text"] == "text" and "2 values in the first 30 rows" in found.lines[2]
    assert next(read_rows(tmp_path / "r.csv")) == {"text": f'film 0{delimiter} and, "more"', "label": "a"}


def test_of_a_wide_or_large_table_few_rows_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_data, "CHARACTERS", 10_000)
    wide = [f"c{i}" for i in range(300)]
    table(tmp_path / "w.csv", [("a film", "ab"[i % 2], *"x" * 300) for i in range(100)], ("text", "label", *wide))
    found = look(["w.csv"])
    assert found.lines[0].endswith("c16, c17, ... (302 in all)")
    assert "2 values in the first 17 rows" in found.lines[2], "2 characters for each cell with its delimiter"


def test_what_lies_in_a_folder_is_found(tmp_path):
    for name in ("book", "both"):
        (tmp_path / name).mkdir()
    (tmp_path / "book" / "any.txt").write_text("a\n" * 50)
    assert look(["book"]).data == {"kind": "text", "path": str(tmp_path / "book")}
    for language in ("en", "fr"):
        with gzip.open(tmp_path / "both" / f"train.{language}.gz", "wt") as file:
            file.write("a\n")
    assert look(["both"]).data == {"kind": "pairs", "path": str(tmp_path / "both"), "source": "en", "target": "fr"}
    rows = [(f"text {i}", "same", i % 3) for i in range(30)]  # sorted by class, so that the first rows have one
    assert look([str(table(tmp_path / "sorted.csv", rows, ("text", "label", "rating")))]).data["label"] == "label"


def test_a_pair_in_two_folders_is_told_where_to_lie(tmp_path):
    (tmp_path / "x").mkdir()
    for file in ("short.en", "x/short.de"):
        (tmp_path / file).write_text("a\n")
    with pytest.raises(UserError, match=r"must lie in one folder as NAME\.en and NAME\.de"):
        look(["short.en", "x/short.de"])


def test_images_are_found_below_folders_of_one_and_their_names_are_no_texts(tmp_path):
    pictures(tmp_path / "archive" / "animals" / "train")
    assert look([str(tmp_path / "archive")]).data == {"kind": "images", "path": str(tmp_path / "archive" / "animals")}
    path = table(tmp_path / "t.csv", [(f"images/{i}.JPG", "ab"[i % 2]) for i in range(20)], ("path", "label"))
    with pytest.raises(UserError, match=r"t\.csv: column 'path' holds names of image files\. Call the table metadata\.csv"):
        look([str(path)])
