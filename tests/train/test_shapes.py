"""Data in the shapes that people have them: what `new` says of each, and the same rows as the package datasets reads."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
import yaml

from gradus.cli import main
from gradus.data.readers import read_rows
from gradus.data.splits import find_split

pytestmark = pytest.mark.usefixtures("here")
NAMES = ("neg", "pos")


def reviews(n=40, labels=NAMES, first=0):
    return [{"text": f"film {first + i} was seen", "label": labels[i % len(labels)]} for i in range(n)]


def put(path, content):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)


def table(path, rows, **how):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding=how.pop("encoding", "utf-8")) as file:
        writer = csv.DictWriter(file, list(rows[0]), **how)
        writer.writeheader()
        writer.writerows(rows)


def lines(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    put(path, gzip.compress(text) if path.endswith(".gz") else text)


def parquet(path, rows):
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(arrow.Table.from_pylist(rows), path)


def texts(root, classes, n=20, name="{}_7.txt"):
    for label in classes:
        for i in range(n):
            put(f"{root}/{label}/{name.format(i)}", f"film {i} was seen")


def hub_clone():
    put("d/README.md", "---\nlicense: mit\n---\n")
    put("d/dataset_infos.json", "{}")
    for split, n in (("test", 10), ("train", 20)):
        for part in range(2):
            parquet(f"d/data/{split}-0000{part}-of-00002.parquet", reviews(n, first=part * n))


def converted():
    put("d/dataset_infos.json", "{}")
    parquet("d/default/train/0000.parquet", reviews())
    parquet("d/default/validation/0000.parquet", reviews(10))


def one_part():
    parquet("d/data/train-00003-of-00010.parquet", reviews())


def crawl():
    for part in range(2):
        lines(f"d/c4-train.0000{part}-of-00002.json.gz", reviews(20, first=20 * part))
    lines("d/c4-validation.00000-of-00001.json.gz", reviews(10))


def competition():
    table("d/train.csv", [{"id": i, "text": row["text"], "target": row["label"]} for i, row in enumerate(reviews())])
    table("d/test.csv", [{"id": i, "text": row["text"]} for i, row in enumerate(reviews())])
    table("d/sample_submission.csv", [{"id": i, "target": "neg"} for i in range(40)])


def hidden():
    table("d/train.csv", reviews(labels=(0, 1)))
    table("d/test.csv", reviews(10, (-1,)))


def capitals():
    table("d/Corona_NLP_Train.csv", reviews(), delimiter=";")
    table("d/Corona_NLP_Valid.csv", reviews(10), delimiter=";")


def books():
    put("d/README.txt", "about these books")
    for i in (1, 2, 10):
        put(f"d/book{i}.txt", f"Chapter {i}. " + "It was a day like all days.\n" * 20)


def one_folder_per_class():
    texts("d/txt_sentoken", NAMES, name="cv{}.txt")


def imdb():
    put("d/README", "about")
    put("d/imdbEr.txt", "0.05\n")
    for split in ("train", "test"):
        put(f"d/{split}/urls_pos.txt", "http://example.org\n")
        texts(f"d/{split}", NAMES)


def newsgroups():
    for split in ("train", "test"):
        texts(f"d/20news-bydate-{split}", ("alt.atheism", "sci.space"), name="4996{}")


def quoted(quoting):
    return lambda: table("d.tsv", [{**row, "text": f'he said "no" {row["text"]}'} for row in reviews()], delimiter="\t", quoting=quoting)


def glue():
    rows = [("sentence", "label"), ('"no" , he said', "0"), ('she said " no', "1")] + [(f'film {i} "', i % 2) for i in range(38)]
    put("d.tsv", "".join(f"{text}\t{label}\n" for text, label in rows))


def indented(rows):
    return lambda: put("d.json", json.dumps(rows, indent=2))


def labels(*of, write=table, path="d.csv"):
    return lambda: write(path, reviews(len(of) * 20, of))


def named_numbers():
    lines("d.jsonl", [{"text": row["text"], "label": 5 - 3 * (i % 2), "label_text": row["label"]} for i, row in enumerate(reviews())])


def empty(column, n):
    return lambda: table("d.csv", [{**row, column: "" if i < n else row[column]} for i, row in enumerate(reviews())])


def in_text(content, encoding):
    return lambda: put("d.csv", f"text,label\n{content},pos\n".encode(encoding))


def photos(folder, names, size=8):
    image = pytest.importorskip("PIL.Image")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        image.effect_noise((size, size), 9 + i).convert("RGB").save(Path(folder) / name)


BREEDS = [{"id": f"a{i}", "breed": ("beagle", "pug")[i % 2]} for i in range(40)]


def beside(name, column, value, folder, rows=BREEDS):
    """Pictures in a folder, and a table of them beside it."""

    def make():
        photos(folder, [f"{row['id']}.png" for row in BREEDS])
        table(name, [{column: value(row["id"]), "breed": row["breed"]} for row in rows])

    return make


def dogs():
    for split, n in (("train", 40), ("test", 5)):
        photos(f"d/{split}", [f"a{i}.png" for i in range(n)])
        table(f"d/{split}.csv", [{"id": f"a{i}", **({"breed": ("beagle", "pug")[i % 2]} if n > 5 else {})} for i in range(n)])
    table("d/sample_submission.csv", [{"id": f"a{i}", "breed": "pug"} for i in range(5)])


def two_labels():
    photos("d", [f"{i}.png" for i in range(40)])
    table("d/metadata.csv", [{"file_name": f"{i}.png", "colour": "rb"[i % 2], "size": i % 4} for i in range(40)])


def parquet_pictures():
    photos("p", [f"{i}.png" for i in range(40)])
    rows = [{"image": {"bytes": Path(f"p/{i}.png").read_bytes(), "path": None}, "label": ("cat", "dog")[i % 2]} for i in range(40)]
    parquet("d/train.parquet", rows)
    parquet("d/test.parquet", [{"image": row["image"]} for row in rows[:5]])


def unlabelled():
    imdb()
    texts("d/train", ["unsup"], 50)


def class_folders():
    for split, n in (("train", 20), ("test", 4)):
        for label in ("cat", "dog"):
            photos(f"d/{split}/{label}", [f"{i}.png" for i in range(n)])
    photos("d/train/unlabeled", ["0.png"])
    table("d/about.csv", [{"file": f"train/cat/{i}.png", "label": "cat"} for i in range(20)])


def odd_card():
    put("d/README.md", "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: [a.csv]\n---\n")
    table("d/train.csv", reviews())


def card(*configs):
    def make():
        files = {"train": "raw/one*.csv", "validation": "raw/two.csv"}
        about = [{"config_name": name, "data_files": [{"split": s, "path": p} for s, p in files.items()]} for name in configs]
        put("d/README.md", f"---\n{yaml.safe_dump({'license': 'mit', 'configs': about})}---\n# About\n")
        for name, n in (("one-a", 20), ("one-b", 20), ("two", 10)):
            table(f"d/raw/{name}.csv", reviews(n))

    return make


def named_in_card():
    names = {"class_label": {"names": {"0": "world", "1": "sci"}}}
    features = [{"name": "text", "dtype": "string"}, {"name": "label", "dtype": names}]
    put("d/README.md", f"---\n{yaml.safe_dump({'dataset_info': {'features': features}})}---\n")
    parquet("d/data/train-00000-of-00001.parquet", reviews(labels=(0, 1)))


def in_one(*fields, indent=None):
    return lambda: put("d.json", json.dumps({"version": 1, "about": ["x"], **dict.fromkeys(fields, reviews())}, indent=indent))


DOGS = "classes    2: beagle 20, pug 20"
PAIR, THREE = "classes    2: neg 20, pos 20", "20, 1 20"
CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
SHARE_GPT = {"id": "a", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}
FALSE = "classes    2: false 20, true 20"

SHAPES = {  # what there is: (how it is made, what --data is, what must be said)
    "a clone of the hub, two parts a split": (hub_clone, "d", "data/train-00000-of-00002.parquet and 1 more: a table", "splits     train 40, valid 20", "classes    2: neg 30, pos 30", "test is evaluated in its place"),
    "the hub's converted parquet": (converted, "d", "splits     train 40, valid 10"),
    "one part of ten": (one_part, "d", "splits     train 36, valid 4", "note       only 1 of 10 parts of d/data/train-00003-of-00010.parquet is there"),
    "packed lines, two parts": (crawl, "d", "c4-train.00000-of-00002.json.gz and 1 more", "splits     train 40, valid 10"),
    "a pointer of Git LFS": (lambda: put("d/data/train-00000-of-00001.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "d", "a pointer of Git LFS, not the file itself. In its folder: git lfs pull"),
    "a competition's": (competition, "d", "valid is a tenth of each class, held out", "d/test.csv: no row has a label, so it is not used as the test split", PAIR),
    "a test split of -1": (hidden, "d", "d/test.csv: no row has a label", "classes    2: 0 20, 1 20", "held out"),
    "names in capitals, semicolons": (capitals, "d", "splits     train 40, valid 10", "classes    2: neg 25, pos 25"),
    "several books": (books, "d", "found      d/book1.txt and 2 more: running text"),
    "two tables that are no parts": (lambda: (table("d/cats.csv", reviews()), table("d/dogs.csv", reviews())), "d", "several files for the train split: cats.csv, dogs.csv. Set data.train=NAME"),
    "two data sets in folders": (lambda: [parquet(f"d/{name}/train-00000-of-00001.parquet", reviews()) for name in ("cola", "sst2")], "d", "cola/train-00000-of-00001.parquet, sst2/train-00000-of-00001.parquet. Set data.train=NAME, or give the folder of one"),
    "tests of two years": (lambda: [table(f"d/{name}.csv", reviews()) for name in ("train", "test_2016", "test_2017")], "d", "several files for the test split: test_2016.csv, test_2017.csv"),
    "two tables that are": (lambda: (table("d/part1.csv", reviews()), table("d/part2.csv", reviews())), "d", "d/part1.csv and 1 more", "classes    2: neg 40, pos 40"),
    "a text a file, a folder a class": (one_folder_per_class, "d", "texts, each in the folder of its class", PAIR, "held out"),
    "the same below train and test": (imdb, "d", "texts, each in the folder of its class", "splits     train 40, valid 40", "test is evaluated in its place"),
    "the same without endings": (newsgroups, "d", "classes    2: alt.atheism 40, sci.space 40"),
    "the same with texts that have no label": (unlabelled, "d", "d/train/unsup: by its name it holds what has no label, so it is left out", "splits     train 40, valid 40", "classes    2: neg 40, pos 40"),
    "a card of one configuration": (card("default"), "d", "d/raw/one-a.csv and 1 more", "splits     train 40, valid 10"),
    "a card of several": (card("en", "de"), "d", "d/README.md: the data set has several configurations: en, de. Give the file or the folder of one (data.path)"),
    "a card that is not plain": (odd_card, "d", "found      d/train.csv: a table", "splits     train 36, valid 4"),
    "folders of classes, one without": (class_folders, "d", "d/train/unlabeled: by its name it holds what has no label", "splits     train 36, valid 4, test 8", "classes    2: cat 20, dog 20"),
    "a table beside pictures": (beside("d/labels.csv", "file", "{}.png".format, "d"), "d", "image      column 'file': it names images", "label      column 'breed'", DOGS, "8 × 8 pixels"),
    "a table beside a folder of pictures": (beside("d/all.csv", "path", "images/{}.png".format, "d/images"), "d", "image      column 'path': it names images", DOGS),
    "names without endings": (beside("d/labels.csv", "id", str, "d/train"), "d", "image      column 'id': it names images", DOGS),
    "pictures that a table does not name": (beside("d/metadata.csv", "file_name", "{}.png".format, "d", BREEDS[:30]), "d", "note: 10 of 40 images are not named in metadata.csv and are left out", "classes    2: beagle 15, pug 15"),
    "pictures of a competition": (dogs, "d", DOGS, "/d (test): no labels (or only -1), so it is not used as the test split"),
    "two tables beside pictures": (lambda: (beside("d/a.csv", "id", str, "d/train")(), beside("d/b.csv", "id", str, "d/train")()), "d", "several tables name the images: a.csv, b.csv. Call the right one metadata.csv, and its column of names file_name"),
    "a table of other pictures": (beside("d/labels.csv", "id", "b{}".format, "d"), "d", "images without a class. Put them into a folder per class: d/cat, say; or write file_name,label into metadata.csv"),
    "one name that is wrong": (beside("d/labels.csv", "id", str, "d", [*BREEDS, {"id": "a40", "breed": "pug"}]), "d", "d/labels.csv, row 41: id a40: no such file"),
    "two columns of labels": (two_labels, "d", "which column is the label, 'colour' (2 values) or 'size' (4 values)?"),
    "two columns of labels, one named": (two_labels, "d --label colour", "label      column 'colour': --label", "classes    2: b 20, r 20"),
    "a test split of pictures alone": (parquet_pictures, "d", "d/test.parquet: no labels (or only -1), so it is not used as the test split", "classes    2: cat 20, dog 20"),
    "rows in one object": (in_one("data"), "d.json", PAIR),
    "rows in one object, indented": (in_one("rows", indent=1), "d.json", PAIR),
    "rows in two fields": (in_one("train", "test", indent=1), "d.json", "d.json: one JSON object (fields: version, about, train, test), of which 2 are lists of rows. Give one list"),
    "columns in one object": (lambda: put("d.json", json.dumps({"text": {"0": "a film", "1": "a book"}, "label": {"0": 1, "1": 0}})), "d.json", "d.json: one JSON object (fields: text, label), of which 0 are lists of rows"),
    "one object": (lambda: put("d.json", json.dumps(reviews(1)[0])), "d.json", "text       column 'text': by its name", "no class has 2 rows"),
    "a list, indented": (indented(reviews()), "d.json", PAIR),
    "a list cut short": (lambda: put("d.json", json.dumps(reviews())[:-9]), "d.json", "d.json: begins as a JSON list, but is not valid JSON"),
    "a list of instructions": (indented([{"instruction": "Name it", "input": "", "output": "blue"}] * 20), "d.json", "chats, by the columns instruction and output", "splits     train 18, valid 2 chats; valid is every tenth chat, held out"),
    "completions": (lambda: lines("d.jsonl", [{"prompt": "One and one is", "completion": " two"}] * 20), "d.jsonl", "chats, by the columns prompt and completion", "splits     train 18, valid 2 chats"),
    "chats": (lambda: lines("d.jsonl", [CHAT] * 20), "d.jsonl", "chats, by the column messages", "splits     train 18, valid 2 chats"),
    "chats of a list": (indented([SHARE_GPT] * 20), "d.json", "chats, by the column conversations", "splits     train 18, valid 2 chats"),
    "codes": (labels("01", "1", "002"), "d.csv", "classes    3: 002 20, 01 20, 1 20"),
    "numbers of other kinds": (labels("1e5", "100000", "+1", "1.0"), "d.csv", "classes    4: +1 20, 1.0 20, 100000 20, 1e5 20"),
    "minus one": (labels("-1", "0", "1"), "d.csv", "classes    3: -1 20, 0 20, 1 20"),
    "words that others take for nothing": (labels("None", "NA", "null"), "d.csv", "classes    3: NA 20, None 20, null 20"),
    "true in a csv": (labels(True, False), "d.csv", FALSE),
    "TRUE in a csv": (labels("TRUE", "FALSE"), "d.csv", FALSE),
    "true in JSON": (labels(True, False, write=lines, path="d.jsonl"), "d.jsonl", FALSE),
    "true in parquet": (labels(True, False, write=parquet, path="d.parquet"), "d.parquet", FALSE),
    "sep=": (lambda: put("d.csv", "sep=;\r\ntext;label\r\n" + "".join(f"film, {i};{NAMES[i % 2]}\r\n" for i in range(40))), "d.csv", PAIR),
    "bars": (lambda: table("d.csv", reviews(), delimiter="|"), "d.csv", PAIR),
    "another mark": (lambda: table("d.csv", reviews(), delimiter="^"), "d.csv", "the first line has no comma, but '^'. Use commas or tabs"),
    "a .tsv, all quoted": (quoted(csv.QUOTE_ALL), "d.tsv", PAIR),
    "a .tsv, quoted where needed": (quoted(csv.QUOTE_MINIMAL), "d.tsv", PAIR),
    "GLUE's quotes": (glue, "d.tsv", "splits     train 36, valid 4", "classes    2: 0 20, 1 20"),
    "Windows-1252": (in_text("caf\u00e9 \u2013 bar", "cp1252"), "d.csv", "iconv -f windows-1252 -t utf-8"),
    "UTF-16": (in_text("film", "utf-16"), "d.csv", "iconv -f utf-16 -t utf-8"),
    "empty texts": (empty("text", 3), "d.csv", "note       3 of the texts are empty, and learned with the label all the same"),
    "empty labels": (empty("label", 3), "d.csv", "d.csv: row 1: label '' is neither a whole number nor a name (3 such rows)"),
    "an evaluation": (lambda: (table("d/train.csv", reviews()), table("d/eval.csv", reviews(10))), "d", "splits     train 40, valid 10", "test is evaluated in its place"),
    "names of classes in a card": (named_in_card, "d", "classes    2: world 20, sci 20"),
    "a first row without a label": (lambda: lines("d.jsonl", [{"text": "a film"}, *reviews()]), "d.jsonl", "d.jsonl: row 1 has no column 'label'"),
    "texts inside objects": (lambda: lines("d.jsonl", [{"data": {"text": "a film"}, "label": NAMES[i % 2]} for i in range(40)]), "d.jsonl", "no column holds text; there are: data, label. Column 'data' holds objects."),
    "texts as lists of words": (lambda: lines("d.jsonl", [{"text": ["a", "film"], "label": NAMES[i % 2]} for i in range(40)]), "d.jsonl", "Column 'text' holds lists."),
    "texts as bytes": (lambda: parquet("d.parquet", [{**row, "text": row["text"].encode()} for row in reviews()]), "d.parquet", "Column 'text' holds bytes."),
    "a space before quotes": (lambda: put("d.csv", "text, label\n" + "".join(f'"film, {i}", "{NAMES[i % 2]}"\n' for i in range(40))), "d.csv", PAIR),
    "a table of Excel under another name": (lambda: put("d.csv", b"PK\3\4\x14\0\xff"), "d.csv", "d.csv: a packed file, such as Excel's. Save it as .csv, or unpack it."),
    "names beside numbers": (named_numbers, "d.jsonl", "label      column 'label_text': the names of the numbers in 'label'", PAIR),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_what_new_says(shape, capsys):
    make, path, *says = SHAPES[shape]
    make()
    code = main(["new", "r.yaml", "--data", *path.split()])
    said = capsys.readouterr()
    both = said.out + said.err
    assert all(words in both for words in says), both
    assert code == (2 if said.err else 0) and Path("r.yaml").exists() == (code == 0), both
    assert said.err.count("\n") == (code == 2)
    assert len(set(said.out.splitlines())) == len(said.out.splitlines()), "each line once"


@pytest.mark.parametrize("shape", [hub_clone, converted, crawl, one_folder_per_class])
def test_the_rows_are_those_of_the_package_datasets(shape, tmp_path):
    datasets = pytest.importorskip("datasets")
    shape()
    how = ("text", {"data_dir": "d", "sample_by": "document"}) if shape is one_folder_per_class else ("./d", {})
    for split, rows in datasets.load_dataset(how[0], cache_dir=tmp_path / "cache", **how[1]).items():
        mine = list(read_rows(find_split("d", {"validation": "valid"}.get(split, split))))
        if shape is one_folder_per_class:  # the package knows no classes here, and puts 10 before 2
            assert sorted(row["text"] for row in mine) == sorted(rows["text"])
            assert [row["label"] for row in mine] == ["neg"] * 20 + ["pos"] * 20
        else:
            assert mine == rows.to_list()


def test_quotes_of_a_tsv_are_read_as_the_writer_meant(tmp_path):
    rows = [{"text": 'he said "no"', "label": "a"}, {"text": "two\nlines", "label": "a\tb"}, {"text": "plain", "label": "it's"}]
    for quoting in (csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC):
        table("q.tsv", rows, delimiter="\t", quoting=quoting)
        assert list(read_rows("q.tsv")) == rows
    glue()
    assert [row["sentence"] for row in read_rows("d.tsv")][:3] == ['"no" , he said', 'she said " no', 'film 0 "']


def test_parts_are_read_in_the_order_of_their_numbers_and_rows_are_named_by_their_file(capsys):
    for i in range(11):
        lines(f"d/train_{i}.jsonl", [{"text": f"part {i}", "label": i % 2 if i < 10 else ""}])
    assert [row["text"] for row in read_rows(find_split("d", "train"))] == [f"part {i}" for i in range(11)]
    assert main(["new", "r.yaml", "--data", "d"]) == 2
    assert "d/train_10.jsonl: row 1: label ''" in capsys.readouterr().err


def test_what_new_finds_train_and_check_find(capsys):
    hub_clone()
    assert main(["new", "r.yaml", "--data", "d"]) == 0
    sections = yaml.safe_load(Path("r.yaml").read_text())
    assert sections["data"] == {"kind": "labelled", "path": "d", "text": "text", "label": "label"}
    from gradus.tasks import open_task
    from gradus.train import resolve

    task = open_task(resolve.load("r.yaml", [])[0])
    assert len(task.splits["train"]) == 40 and task.splits["train"].name.endswith("train-00000-of-00002.parquet and 1 more")
